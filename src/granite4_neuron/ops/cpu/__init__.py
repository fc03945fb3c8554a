"""Fused kernels for this machine's processor, compiled at first use; each stands for one plain definition in ops.

They take over where fusing pays and leave the rest to the plain definition. Arithmetic is float32 inside.
"""

from __future__ import annotations

import functools

import torch

from granite4_neuron.ops import moe
from granite4_neuron.ops.cpu.build import load_kernels
from granite4_neuron.ops.operators import TORCH, Operators

CPU_KERNELS = ("fused", "torch")
# Rows up to which reading the weights takes longer than the arithmetic.
_FEW_ROWS = 8


def operators(kernels: str = "fused") -> Operators:
    """The operators of the CPU runtime.

    Args:
        kernels: "fused", which falls back to plain torch, with a line on standard error, where the kernels cannot be
            compiled; or "torch".

    Raises:
        ValueError: there are no such kernels.
    """
    if kernels not in CPU_KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {', '.join(CPU_KERNELS)}.")
    if kernels == "torch" or not load_kernels():
        return TORCH
    return Operators(
        linear=linear,
        rms_norm=rms_norm,
        rms_norm_gated=rms_norm_gated,
        residual_add=residual_add,
        silu_and_mul=silu_and_mul,
        mlp=mlp,
        fused_experts=fused_experts,
        write_cache=write_cache,
        cached_attention=cached_attention,
        mamba2=mamba2,
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`; few rows at the speed at which the weights can be read."""
    return _kernel("linear")(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int = 1) -> torch.Tensor:
    """`ops.rms_norm`, for x in float32 or in weight's dtype."""
    return _kernel("rms_norm")(x, None, weight, eps, n_groups)


def rms_norm_gated(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int) -> torch.Tensor:
    """`ops.rms_norm_gated`, for x in float32 or in weight's dtype, and z in weight's."""
    return _kernel("rms_norm")(x, z, weight, eps, n_groups)


def residual_add(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """`ops.residual_add`."""
    return _kernel("residual_add")(x, y, alpha)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`ops.silu_and_mul`, rounded once."""
    return _kernel("silu_and_mul")(x.contiguous())


def mlp(x: torch.Tensor, input_weight: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """`ops.mlp`, of `linear` and `silu_and_mul`."""
    return _kernel("mlp")(x, input_weight, output_weight)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """`ops.fused_experts`; for few tokens each chosen expert's weights are read once, and nobody else's."""
    kernel = moe.fused_experts if len(hidden_states) > _FEW_ROWS else _kernel("fused_experts")
    return kernel(hidden_states, w1, w2, topk_weights, topk_ids)


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    """`ops.write_cache`, but that padded tokens are written nowhere."""
    _kernel("write_cache")(cache, values.contiguous(), positions, lengths, slots)


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    kv_length: int,
    block_size: int | None = None,
) -> torch.Tensor:
    """`ops.cached_attention`, but that it visits what a row sees, whatever kv_length, in blocks of its own size."""
    kernel = _kernel("decode_attention" if query.shape[1] == 1 else "prefill_attention")
    return kernel(query.contiguous(), key_cache, value_cache, positions, lengths, slots, scale)


def mamba_mixer(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    read_slots: torch.Tensor,
    slots: torch.Tensor,
    n_groups: int,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """What a Mamba-2 layer does between in_proj and the gated norm: `causal_conv1d`, then with dt = clamp(softplus(dt +
    dt_bias)) and A = -exp(A_log) `selective_state_update`, or for several tokens `mamba_chunk_scan_combined`.

    Padding is not looked at, and rows of length 0 change no state.

    Args:
        projected: [batch, tokens, conv_dim + num_heads]: x, B, C and dt as in_proj gives them.
        conv_weight: [conv_dim, 1, d_conv]; conv_bias: [conv_dim] or None.
        dt_bias, A_log, D: [num_heads].
        conv_state: [slots, conv_dim, d_conv - 1], advanced in place.
        ssm_state: [slots, num_heads, head_dim, d_state], float32, advanced in place.
        lengths: [batch], real tokens of each row.
        read_slots, slots: [batch], where each row's state is read, and where it is written.
        n_groups: of B and C.
        dt_min, dt_max: the clamp.

    Returns:
        [batch, tokens, num_heads * head_dim] in float32; 0 for padding.
    """
    weights = (conv_weight, conv_bias, dt_bias, A_log, D)
    where = (lengths, read_slots, slots)
    return _kernel("mamba_mixer")(projected, *weights, conv_state, ssm_state, *where, n_groups, dt_min, dt_max)


def mamba2(
    hidden_states: torch.Tensor,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    read_slots: torch.Tensor,
    slots: torch.Tensor,
    n_groups: int,
    dt_min: float,
    dt_max: float,
    eps: float,
) -> torch.Tensor:
    """A Mamba-2 layer: out_proj(rms_norm_gated(mamba_mixer(x, B, C, dt), z)) with (z, x, B, C, dt) = in_proj.

    Args:
        hidden_states: [batch, tokens, hidden_size].
        in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias: of the projections, as `linear` takes them.
        norm_weight, eps: of the gated norm.
        The others: see `mamba_mixer`.

    Returns:
        As hidden_states.
    """
    return _kernel("mamba2")(
        hidden_states,
        in_proj_weight,
        in_proj_bias,
        conv_weight,
        conv_bias,
        dt_bias,
        A_log,
        D,
        norm_weight,
        out_proj_weight,
        out_proj_bias,
        conv_state,
        ssm_state,
        lengths,
        read_slots,
        slots,
        n_groups,
        dt_min,
        dt_max,
        eps,
    )


@functools.cache
def _kernel(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.granite4_neuron, name).default
