"""Fused kernels for this machine's processor, compiled at first use; each stands for one plain definition in ops.

They take over where fusing pays and leave the rest to the plain definition. Arithmetic is float32 inside.
"""

from __future__ import annotations

import functools

import torch

from granite4_neuron.choices import CPU_KERNELS
from granite4_neuron.ops import moe
from granite4_neuron.ops.cpu.build import load_kernels
from granite4_neuron.ops.operators import TORCH, Operator, Operators


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
        logits=logits,
        mamba_block=mamba_block,
        feed_forward_block=feed_forward_block,
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`ops.linear`; few rows at the speed at which the weights can be read, and quantized ones never rounded again."""
    return _kernel("linear")(x, weight, bias, scale)


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


def mlp(
    x: torch.Tensor,
    input_weight: torch.Tensor,
    output_weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.mlp`, of `linear` and `silu_and_mul`."""
    return _kernel("mlp")(x, input_weight, output_weight, input_scale, output_scale)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.fused_experts`; for few tokens each chosen expert's weights are read once, and nobody else's."""
    arguments = (hidden_states, w1, w2, topk_weights, topk_ids)
    if _is_few(hidden_states):
        return _kernel("fused_experts")(*arguments, w1_scale, w2_scale)
    if w1_scale is not None:
        return moe.experts_one_by_one(*arguments, w1_scale, w2_scale, mlp)
    return moe.fused_experts(*arguments)


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


def logits(x: torch.Tensor, weight: torch.Tensor, scaling: float, scale: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.logits`, of few tokens never rounded to the weights' dtype."""
    return _kernel("logits")(x, weight, scaling, scale)


def mamba_constants(
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Mamba-2 layer's small weights as `mamba_mixer` takes them: (conv_taps, conv_bias, dt_bias, A, D) in float32.

    Args:
        conv_weight: [conv_dim, 1, d_conv]; conv_bias: [conv_dim] or None.
        dt_bias, A_log, D: [num_heads].
    """
    conv_taps = conv_weight.squeeze(1).T.float().contiguous()
    return conv_taps, None if conv_bias is None else conv_bias.float(), dt_bias.float(), -A_log.float().exp(), D.float()


def mamba_mixer(
    projected: torch.Tensor,
    conv_taps: torch.Tensor,
    conv_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    lengths: torch.Tensor,
    read_slots: torch.Tensor,
    slots: torch.Tensor,
    n_groups: int,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
    heads_per_task: int,
) -> torch.Tensor:
    """What a Mamba-2 layer does between in_proj and the gated norm: `causal_conv1d`, then with dt = clamp(softplus(dt +
    dt_bias)) `selective_state_update`, or for several tokens `mamba_chunk_scan_combined`.

    Padding is not looked at, and rows of length 0 change no state.

    Args:
        projected: [batch, tokens, conv_dim + num_heads]: x, B, C and dt as in_proj gives them.
        conv_taps: [d_conv, conv_dim], oldest first; conv_bias: [conv_dim] or None; dt_bias, A, D: [num_heads]; all in
            float32, from `mamba_constants`.
        conv_state: [slots, conv_dim, d_conv - 1], advanced in place.
        ssm_state: [slots, num_heads, head_dim, d_state], float32, advanced in place.
        lengths: [batch], real tokens of each row.
        read_slots, slots: [batch], where each row's state is read, and where it is written.
        n_groups: of B and C.
        dt_min, dt_max: the clamp.
        chunk_size, heads_per_task: see `LaunchParameters`.

    Returns:
        [batch, tokens, num_heads * head_dim] in float32; 0 for padding.
    """
    constants = (conv_taps, conv_bias, dt_bias, A, D)
    where = (lengths, read_slots, slots)
    settings = (n_groups, dt_min, dt_max, chunk_size, heads_per_task)
    return _kernel("mamba_mixer")(projected, *constants, conv_state, ssm_state, *where, *settings)


def mamba_block(
    norm_weight: torch.Tensor,
    in_proj: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    constants: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor],
    gated_norm_weight: torch.Tensor,
    out_proj: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    n_groups: int,
    time_step_limit: tuple[float, float],
    eps: float,
    residual_multiplier: float,
) -> Operator:
    """The half of a decoder layer that has a Mamba-2 layer, with its weights: hidden_states + residual_multiplier *
    out_proj(rms_norm_gated(mamba_mixer(x, B, C, dt), z)) with (z, x, B, C, dt) = in_proj(rms_norm(hidden_states)).

    Args:
        in_proj, out_proj: weight, bias and scale, see `linear`.
        constants: conv_weight, conv_bias, dt_bias, A_log and D, as `mamba_constants` takes them.
        eps: of both norms.

    Returns:
        A function of hidden_states [batch, tokens, hidden_size] in float32, and of `mamba_mixer`'s conv_state,
        ssm_state, lengths, read_slots, slots, chunk_size and heads_per_task. What it returns is like hidden_states.
    """
    weights = (norm_weight, *in_proj, *mamba_constants(*constants), gated_norm_weight, *out_proj)
    sizes = (n_groups, *time_step_limit, eps, residual_multiplier)
    return functools.partial(_kernel("mamba_block"), *weights, *sizes)


def feed_forward_block(
    norm_weight: torch.Tensor,
    mlp_weights: tuple[torch.Tensor | None, ...],
    router: tuple[torch.Tensor, int] | None,
    expert_weights: tuple[torch.Tensor | None, ...] | None,
    eps: float,
    residual_multiplier: float,
) -> Operator:
    """The half of a decoder layer that has its MLPs, with their weights: hidden_states + residual_multiplier *
    (mlp(x) + fused_experts(x)) with x = rms_norm(hidden_states).

    Args:
        mlp_weights: input_weight, output_weight, input_scale and output_scale, see `ops.mlp`.
        router: its weight, [num_experts, hidden_size], and top_k; None without experts.
        expert_weights: w1, w2, w1_scale and w2_scale, see `ops.fused_experts`; None without experts.
        eps: of the norm.

    Returns:
        A function of hidden_states, [batch, tokens, hidden_size] in float32, to the same.
    """
    weights = (norm_weight, *mlp_weights, *(router or (None, 0)), *(expert_weights or (None,) * 4))
    run = functools.partial(_kernel("feed_forward_block"), *weights, eps, residual_multiplier)
    if router is None:
        return run
    router_weight, top_k = router
    w1, w2, *scales = expert_weights

    def run_any(hidden_states: torch.Tensor) -> torch.Tensor:
        if _is_few(hidden_states):
            return run(hidden_states)
        x = rms_norm(hidden_states, norm_weight, eps)
        output = residual_add(hidden_states, mlp(x, *mlp_weights), residual_multiplier)
        tokens = x.flatten(0, -2)
        chosen = moe.topk_softmax(moe.router_logits(tokens, router_weight), top_k)
        mixed = fused_experts(tokens, w1, w2, *chosen, *scales)
        return residual_add(output, mixed.view(x.shape), residual_multiplier)

    return run_any


def _is_few(x: torch.Tensor) -> bool:
    """Whether reading the weights takes longer than the arithmetic with so many rows [..., channels]."""
    return x.numel() <= _few_rows() * x.shape[-1]


@functools.cache
def _few_rows() -> int:
    return torch.ops.granite4_neuron.few_rows()


@functools.cache
def _kernel(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.granite4_neuron, name).default
