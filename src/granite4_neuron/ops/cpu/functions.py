"""The fused kernels as functions, each with the arguments and results of a plain definition in ops unless it says
otherwise.

Arithmetic is float32 inside. Matrices of weights are packed, see `weights.pack`. What a row of a batch gives is the
same bit by bit whatever other rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.ops import quantization
from granite4_neuron.ops.cpu.build import kernel
from granite4_neuron.ops.cpu.weights import PackedWeight
from granite4_neuron.ops.stochastic_rounding import Rounding


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.linear`; a quantized weight is never rounded again."""
    return kernel("linear")(x, weight.packed, bias)


def embedding(ids: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """`ops.embedding`, also of the head's packed matrix."""
    return weight.rows(ids) if isinstance(weight, PackedWeight) else quantization.embedding(ids, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int = 1) -> torch.Tensor:
    """`ops.rms_norm`, for x in float32 or in weight's dtype."""
    return kernel("rms_norm")(x, None, weight, eps, n_groups)


def rms_norm_gated(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int) -> torch.Tensor:
    """`ops.rms_norm_gated`, for x in float32 or in weight's dtype, and z in weight's."""
    return kernel("rms_norm")(x, z, weight, eps, n_groups)


def residual_add(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """`ops.residual_add`."""
    return kernel("residual_add")(x, y, alpha)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`ops.silu_and_mul`, rounded once."""
    return kernel("silu_and_mul")(x.contiguous())


def mlp(x: torch.Tensor, input_weight: PackedWeight, output_weight: PackedWeight) -> torch.Tensor:
    """`ops.mlp`, of `linear` and `silu_and_mul`."""
    return kernel("mlp")(x, input_weight.packed, output_weight.packed)


def router_logits(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`ops.router_logits`, of products in x's dtype that are added in float32."""
    return kernel("logits")(x, weight.packed, 1.0)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: PackedWeight,
    w2: PackedWeight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """`ops.fused_experts`; each chosen expert's weights are read, and nobody else's."""
    return kernel("fused_experts")(hidden_states, w1.packed, w2.packed, topk_weights, topk_ids)


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    """`ops.write_cache`, but that padded tokens are written nowhere."""
    kernel("write_cache")(cache, values.contiguous(), positions, lengths, slots)


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    kv_length: int,
    *,
    block_size: int | None = None,
) -> torch.Tensor:
    """`ops.cached_attention`, but that it visits what a row sees, whatever kv_length, in blocks of its own size."""
    return kernel("cached_attention")(query.contiguous(), key_cache, value_cache, positions, lengths, slots, scale)


def logits(x: torch.Tensor, weight: PackedWeight, scaling: float) -> torch.Tensor:
    """`ops.logits`, never rounded to the weights' dtype."""
    return kernel("logits")(x, weight.packed, scaling)


def mamba_mixer(
    projected: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    rows: Sequence[torch.Tensor],
    sizes: tuple[int, int, int],
    time_step_limit: tuple[float, float],
    rounding: Rounding = Rounding(),  # noqa: B008 (a tuple, never changed)
) -> torch.Tensor:
    """What a Mamba-2 layer does between in_proj and the gated norm: `causal_conv1d`, then with dt = clamp(softplus(dt +
    dt_bias)) and A = -exp(A_log) `selective_state_step`, or for several tokens `mamba_chunk_scan_combined`.

    Padding is not looked at, and rows of length 0 change no state.

    Args:
        projected: [batch, tokens, conv_dim + num_heads]: x, B, C and dt as in_proj gives them.
        weights: conv_weight, [conv_dim, 1, d_conv]; conv_bias, [conv_dim] or None; dt_bias, A_log and D, [num_heads];
            all in projected's dtype.
        conv_state: [slots, conv_dim, d_conv - 1] in projected's dtype, advanced in place.
        ssm_state: [slots, num_heads, head_dim, d_state], advanced in place; in float32, or in float16 or bfloat16 with
            `stochastic_round` after every token.
        rows: lengths, read_slots, write_slots and starts, each [batch]: a row's real tokens; where its state is read,
            and where it is written, -1 for nowhere, in steps of several tokens; its first token's position.
        sizes: n_groups, of B and C; chunk_size and heads_per_task, see `LaunchParameters`.
        time_step_limit: of the clamp.
        rounding: of an ssm_state that is not float32.

    Returns:
        [batch, tokens, num_heads * head_dim] in float32; 0 for padding.
    """
    return kernel("mamba_mixer")(projected, weights, conv_state, ssm_state, rows, sizes, time_step_limit, rounding)


def paged_mamba_mixer(
    projected: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    rows: Sequence[torch.Tensor],
    sizes: tuple[int, int, int],
    time_step_limit: tuple[float, float],
) -> torch.Tensor:
    """`mamba_mixer` for a few tokens of each sequence, over states in the pages of a paged cache:
    `causal_conv1d_update`, then `selective_state_update`, of `granite4_neuron.vllm.operators`.

    Args:
        projected: [tokens, conv_dim + num_heads]: x, B, C and dt as in_proj gives them, sequence after sequence.
        weights: as for `mamba_mixer`; dt_bias, A_log and D in any dtype.
        conv_state: [pages, conv_dim, columns], at any strides, in projected's dtype. Updated in place.
        ssm_state: [pages, num_heads, head_dim, d_state], float32; a page is contiguous. Updated in place.
        rows: starts, [sequences + 1], where each sequence begins in projected; pages, [sequences, n], of which the
            first is the sequence's, and is -1 or 0 for padding; and where the step is speculative accepted,
            [sequences], how many tokens of the sequence's last step count, 1 or more. Then the state before the first
            token is in page accepted - 1 of the row, the one behind token t goes to page t, and the first page holds
            n - 1 more columns of inputs. All int32.
        sizes, time_step_limit: as for `mamba_mixer`; chunk_size has no effect.

    Returns:
        [tokens, num_heads * head_dim] in float32; 0 for padding.
    """
    return kernel("paged_mamba_mixer")(projected, weights, conv_state, ssm_state, rows, sizes, time_step_limit)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: Sequence[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """`cached_attention` over keys and values in the pages of a paged cache, to which the new ones are written first.

    Args:
        query: [tokens, num_heads * head_dim], sequence after sequence.
        key, value: [tokens, kv_heads * head_dim].
        key_pages, value_pages: [pages, kv_heads, page_size, head_dim], at any strides but the last, in query's dtype.
            Updated in place.
        rows: starts, [sequences + 1], where each sequence begins in query, and where the last one ends and padding
            begins; lengths, [sequences], of each sequence with its new tokens; pages, [sequences, n], of which number i
            holds the sequence's positions from i * page_size on. All int32.
        scale: multiplies the scores.

    Returns:
        [tokens, num_heads * head_dim] in query's dtype; 0 for padding.
    """
    return kernel("paged_attention")(query, key, value, key_pages, value_pages, rows, scale)
