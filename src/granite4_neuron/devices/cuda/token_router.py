"""The router of a layer with experts, with the norm before it, for one token per sequence."""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.gemv import load_vector, rms_norm
from granite4_neuron.devices.cuda.launch import NUM_WARPS_SMALL, gdc_launch_dependents, gdc_wait, launch_options
from granite4_neuron.devices.cuda.operator import operator, register_launches
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import gemv, load_tile
from granite4_neuron.ops import moe, norm

# Elements of the router's weight that a program reads.
_ROUTER_BLOCK_SIZE = 8192


@operator()
def route(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise, and compute `ops.router_logits`.

    Args:
        x: [batch, columns], float32.
        weight: [num_experts, columns].

    Returns:
        (normalised x in norm_weight's dtype, logits [batch, num_experts] in float32).
    """
    normed = norm.rms_norm(x, norm_weight, eps)
    return normed, moe.router_logits(normed, weight)


@route.register_fake
def _(x, norm_weight, weight, eps):
    return norm_weight.new_empty(x.shape), x.new_empty(len(x), len(weight))


def _launch_route(
    one_row: bool, x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_experts, columns), batch = weight.shape, len(x)
    normed, logits = norm_weight.new_empty(x.shape), x.new_empty(batch, num_experts)
    arguments = x, norm_weight, weight, normed, logits, eps
    block_k = triton.next_power_of_2(columns)
    options = launch_options(x, NUM_WARPS_SMALL)
    if one_row:
        # There are few rows, so each has a program of its own, to take as little time as possible.
        _route_of_one_kernel[num_experts,](*arguments, K=columns, BLOCK_K=block_k, **options)
    else:
        block_e = max(1, min(_ROUTER_BLOCK_SIZE // block_k, triton.next_power_of_2(num_experts)))
        _route_kernel[triton.cdiv(num_experts, block_e), batch](
            *arguments, NUM_EXPERTS=num_experts, K=columns, BLOCK_E=block_e, BLOCK_K=block_k, **options
        )
    return normed, logits


route_of_one = register_launches(route, _launch_route)


@triton.jit
def _route_of_one_kernel(
    x, norm_weight, weight, normed, logits, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, USE_GDC: tl.constexpr
):
    """Compute one expert's logit of one sequence; the first program also stores the normalised vector.

    Grid: (num_experts,).

    Args:
        x: [K] in float32, before its norm.
        norm_weight: [K].
        weight: [num_experts, K].
        normed: [K] in norm_weight's dtype.
        logits: [num_experts] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    offs_k = tl.arange(0, BLOCK_K)
    pid_e = tl.program_id(0)
    row = load_vector(weight + pid_e * K, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    gdc_wait(USE_GDC)
    values = rms_norm(load_vector(x, offs_k, K), norm_weights, eps, K)
    tl.store(logits + pid_e + tl.arange(0, 1), gemv((row,), (values,), USE_GDC))
    if pid_e == 0:
        tl.store(normed + offs_k[None], values.to(normed.dtype.element_ty), (offs_k < K)[None])


@triton.jit
def _route_kernel(
    x,
    norm_weight,
    weight,
    normed,
    logits,
    eps,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Compute BLOCK_E experts' logits of one sequence; the sequence's first program also stores its normalised vector.

    Grid: (cdiv(NUM_EXPERTS, BLOCK_E), batch).

    Args:
        x: [batch, K] in float32, before its norm.
        norm_weight: [K].
        weight: [NUM_EXPERTS, K].
        normed: [batch, K] in norm_weight's dtype.
        logits: [batch, NUM_EXPERTS] in float32.
    """
    gdc_launch_dependents(USE_GDC)
    pid_m, offs_k = tl.program_id(1), tl.arange(0, BLOCK_K)
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tile = load_tile((weight,), offs_e, NUM_EXPERTS, offs_k, K)
    norm_weights = load_vector(norm_weight, offs_k, K)
    gdc_wait(USE_GDC)
    values = rms_norm(load_vector(x + pid_m * K, offs_k, K), norm_weights, eps, K)
    tl.store(logits + pid_m * NUM_EXPERTS + offs_e, gemv(tile, (values,), USE_GDC), offs_e < NUM_EXPERTS)
    if tl.program_id(0) == 0:
        ptrs = normed + pid_m * K + offs_k[None]
        tl.store(ptrs, values.to(normed.dtype.element_ty), (offs_k < K)[None])
