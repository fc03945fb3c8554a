"""RMS norms of tokens: plain, gated, and of the residual stream after a sum. A program normalises one token, so its
bits do not depend on other tokens.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops import norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int = 1) -> torch.Tensor:
    """Compute `ops.rms_norm`."""
    return normalize(x.flatten(0, -2), None, weight, eps, n_groups).view(x.shape)


def rms_norm_gated(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int) -> torch.Tensor:
    """Compute `ops.rms_norm_gated`."""
    return normalize(x.flatten(0, -2), z.flatten(0, -2), weight, eps, n_groups).view(x.shape)


@operator()
def normalize(x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float, n_groups: int) -> torch.Tensor:
    """Compute `ops.rms_norm_gated` of [tokens, channels], or `ops.rms_norm` without z."""
    if z is None:
        return norm.rms_norm(x, weight, eps, n_groups)
    return norm.rms_norm_gated(x, z, weight, eps, n_groups)


@normalize.register_fake
def _(x, z, weight, eps, n_groups):
    return weight.new_empty(x.shape)


def _launch_normalize(
    x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float, n_groups: int
) -> torch.Tensor:
    y = weight.new_empty(x.shape)
    tokens, channels = x.shape
    width = channels // n_groups
    block = triton.next_power_of_2(width)
    _normalize_kernel[tokens, n_groups](
        x,
        z,
        weight,
        y,
        x.stride(0),
        0 if z is None else z.stride(0),
        eps,
        CHANNELS=channels,
        WIDTH=width,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )
    return y


register_launch(normalize, _launch_normalize)


@triton.jit
def _normalize_kernel(
    x, z, weight, y, stride_x, stride_z, eps, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise one group of a token's channels.

    Grid: (tokens, CHANNELS / WIDTH).

    Args:
        x, z: [tokens, CHANNELS], with their strides; z may be None.
        weight: [CHANNELS].
        y: [tokens, CHANNELS] in weight's dtype.
    """
    token, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offs < WIDTH
    offs += tl.program_id(1) * WIDTH
    values = tl.load(x + token * stride_x + offs, mask, 0.0).to(tl.float32)
    weights = tl.load(weight + offs, mask, 0.0).to(tl.float32)
    if z is not None:
        gate = tl.load(z + token * stride_z + offs, mask, 0.0).to(tl.float32)
        values = values * (gate * tl.sigmoid(gate))
    rstd = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    tl.store(y + token * CHANNELS + offs, (values * rstd * weights).to(y.dtype.element_ty), mask)


@operator()
def add_and_normalize(
    x: torch.Tensor, y: torch.Tensor, alpha: float, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `ops.residual_add` of x, [tokens, channels] in float32, and y, and `ops.rms_norm` of it."""
    total = norm.residual_add(x, y, alpha)
    return total, norm.rms_norm(total, weight, eps)


@add_and_normalize.register_fake
def _(x, y, alpha, weight, eps):
    return x.new_empty(x.shape), weight.new_empty(x.shape)


def _launch_add_and_normalize(
    x: torch.Tensor, y: torch.Tensor, alpha: float, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total, normed = x.new_empty(x.shape), weight.new_empty(x.shape)
    tokens, channels = x.shape
    block = triton.next_power_of_2(channels)
    _add_and_normalize_kernel[tokens,](
        x,
        y,
        weight,
        total,
        normed,
        x.stride(0),
        y.stride(0),
        alpha,
        eps,
        CHANNELS=channels,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )
    return total, normed


register_launch(add_and_normalize, _launch_add_and_normalize)


@triton.jit
def _add_and_normalize_kernel(
    x, y, weight, total, normed, stride_x, stride_y, alpha, eps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add alpha * y to x for one token, and normalise the sum.

    Grid: (tokens,).

    Args:
        x: [tokens, CHANNELS] in float32. y: [tokens, CHANNELS]; both with their strides.
        weight: [CHANNELS].
        total: [tokens, CHANNELS] in float32.
        normed: [tokens, CHANNELS] in weight's dtype.
    """
    token, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = offs < CHANNELS
    values = tl.load(x + token * stride_x + offs, mask, 0.0)
    added = tl.load(y + token * stride_y + offs, mask, 0.0).to(tl.float32)
    weights = tl.load(weight + offs, mask, 0.0).to(tl.float32)
    values += alpha * added
    tl.store(total + token * CHANNELS + offs, values, mask)
    rstd = tl.rsqrt(tl.sum(values * values, 0) / CHANNELS + eps)
    tl.store(normed + token * CHANNELS + offs, (values * rstd * weights).to(normed.dtype.element_ty), mask)
