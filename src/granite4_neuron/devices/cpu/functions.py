"""The fused kernels as functions, each with the arguments and results of a plain definition in ops unless it says
otherwise.

Arithmetic is float32 inside. Matrices of weights are packed, see `weights.pack`. A row's results are the same bit by
bit, whatever other rows the batch has.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cpu.build import kernel
from granite4_neuron.devices.cpu.weights import PackedWeight
from granite4_neuron.ops import quantization


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `ops.linear`; a quantized weight is never rounded again."""
    return kernel("linear")(x, weight.packed, bias)


def embedding(ids: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Compute `ops.embedding`; the table may be the head's packed matrix."""
    return weight.rows(ids) if isinstance(weight, PackedWeight) else quantization.embedding(ids, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int = 1) -> torch.Tensor:
    """Compute `ops.rms_norm`, for x in float32 or in weight's dtype."""
    return kernel("rms_norm")(x, None, weight, eps, n_groups)


def rms_norm_gated(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int) -> torch.Tensor:
    """Compute `ops.rms_norm_gated`, for x in float32 or in weight's dtype, and z in weight's."""
    return kernel("rms_norm")(x, z, weight, eps, n_groups)


def residual_add(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """Compute `ops.residual_add`."""
    return kernel("residual_add")(x, y, alpha)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute `ops.silu_and_mul`, rounded once."""
    return kernel("silu_and_mul")(x.contiguous())


def mlp(x: torch.Tensor, input_weight: PackedWeight, output_weight: PackedWeight) -> torch.Tensor:
    """Compute `ops.mlp` with `linear`; the activation is rounded once."""
    return kernel("mlp")(x, input_weight.packed, output_weight.packed)


def router_logits(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Compute `ops.router_logits`; products are in x's dtype and added in float32."""
    return kernel("logits")(x, weight.packed, 1.0)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: PackedWeight,
    w2: PackedWeight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.fused_experts`; only the weights of chosen experts are read."""
    return kernel("fused_experts")(hidden_states, w1.packed, w2.packed, topk_weights, topk_ids)


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    """Do the same as `ops.write_cache`, but do not write padded tokens."""
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
    """Compute `ops.cached_attention`, but ignore kv_length: visit the entries that each row sees, in blocks of another
    size.
    """
    return kernel("cached_attention")(query.contiguous(), key_cache, value_cache, positions, lengths, slots, scale)


def logits(x: torch.Tensor, weight: PackedWeight, scaling: float) -> torch.Tensor:
    """Compute `ops.logits`, never rounded to the weights' dtype."""
    return kernel("logits")(x, weight.packed, scaling)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    *,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute `cached_attention` over the pages of a paged cache, to which new keys and values are written first.

    Args:
        query: [tokens, num_heads * head_dim], sequence after sequence.
        key, value: [tokens, kv_heads * head_dim].
        key_pages, value_pages: [pages, kv_heads, page_size, head_dim], at any strides but the last, in query's dtype.
            Updated in place.
        starts: [sequences + 1], int32, where each sequence begins in query, then where the last one ends and padding
            begins.
        lengths: [sequences], int32, each sequence's length including its new tokens.
        pages: [sequences, n], int32; page i of a sequence holds its positions from i * page_size on.
        scale: multiplies the scores.

    Returns:
        [tokens, num_heads * head_dim] in query's dtype; 0 for padding.
    """
    return kernel("paged_attention")(query, key, value, key_pages, value_pages, starts, lengths, pages, scale)
