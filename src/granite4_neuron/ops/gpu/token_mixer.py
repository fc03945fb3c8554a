"""A layer's mixer for a token of each sequence: each product with what precedes and what follows it.

A graph of such tokens takes as long as its number of kernels says, where they are few. So the kernels are few: a norm
of one sequence is computed by every program of the product behind it, a residual is added by the product before it.
They are kernels in Triton, `ops.gpu.token_mixer_kernels`, on a GPU; weights are not quantized, and have one dtype.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops import norm
from granite4_neuron.ops.gpu import functions


def mixer_inputs(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    """Normalise and project, then convolve what the recurrence reads, and update conv_state in place.

    Args:
        x: [batch, columns], float32.
        norm_weight: [columns].
        weight: [d_inner + channels + num_heads, columns].
        conv_weight, conv_bias, conv_state, lengths: as `ops.causal_conv1d` takes them.

    Returns:
        The gate, the convolution's outputs and dt before its bias: [batch, d_inner + channels + num_heads] in float32.
    """
    projected = F.linear(norm.rms_norm(x, norm_weight, eps), weight)
    channels = conv_state.shape[1]
    gate, xBC, dt = projected.split([len(weight) - channels - num_heads, channels, num_heads], 1)
    convolved = functions.convolve_token(xBC[:, None], conv_state, conv_weight, conv_bias, lengths)[:, 0]
    return torch.cat([gate.float(), convolved, dt.float()], 1)


def advance_mixer(
    inputs: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    lowest_dt: float,
    highest_dt: float,
) -> torch.Tensor:
    """Compute `ops.selective_state_step` and the gate, and update ssm_state in place.

    Args:
        inputs: from `mixer_inputs`.
        dt_bias, A_log, D: [num_heads].
        ssm_state: [batch, num_heads, head_dim, d_state], float32.
        lengths: [batch]; where it is 0 the state stays, and the result is unspecified.

    Returns:
        y * silu(gate), [batch, num_heads * head_dim] in float32.
    """
    num_heads, head_dim, d_state = ssm_state.shape[1:]
    d_inner = num_heads * head_dim
    group_width = (inputs.shape[1] - 2 * d_inner - num_heads) // 2
    gate, x, B, C, dt = inputs.split([d_inner, d_inner, group_width, group_width, num_heads], 1)
    dt = F.softplus(dt + dt_bias.float()).clamp(lowest_dt, highest_dt).masked_fill((lengths == 0)[:, None], 0.0)
    B, C = (values.unflatten(1, (-1, d_state)) for values in (B, C))
    log_decay = dt * -torch.exp(A_log.float())
    y = functions.advance_token(x.unflatten(1, (num_heads, head_dim)), dt, log_decay, B, C, D, ssm_state)
    return y.flatten(1) * F.silu(gate)


def project_heads(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Normalise x, [batch, columns] in float32, and project with three matrices [rows, columns]: [batch, all rows]."""
    return F.linear(norm.rms_norm(x, norm_weight, eps), torch.cat([query, key, value]))


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    """Compute residual + alpha * (weight x), where x is normalised before if it has a norm.

    Args:
        residual: [batch, rows], float32.
        x: [batch, columns]; in float32 with a norm, else in weight's dtype.
    """
    if norm_weight is not None:
        x = norm.rms_norm(x, norm_weight, eps)
    return norm.residual_add(residual, F.linear(x, weight), alpha)
