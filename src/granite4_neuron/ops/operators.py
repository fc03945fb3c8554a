"""The functions that layers are made of, as one exchangeable set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from granite4_neuron.ops.attention import cached_attention, write_cache
from granite4_neuron.ops.head import logits
from granite4_neuron.ops.moe import fused_experts, mlp, silu_and_mul, topk_softmax
from granite4_neuron.ops.norm import residual_add, rms_norm, rms_norm_gated
from granite4_neuron.ops.quantization import linear

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operators:
    """One implementation of each operator. All have the arguments and results of the plain definition, the default.

    mamba_block, feed_forward_block: half a decoder layer each, see `ops.cpu`; None for its parts one after the other.
    """

    linear: Operator = linear
    rms_norm: Operator = rms_norm
    rms_norm_gated: Operator = rms_norm_gated
    residual_add: Operator = residual_add
    silu_and_mul: Operator = silu_and_mul
    mlp: Operator = mlp
    topk_softmax: Callable[..., tuple[torch.Tensor, torch.Tensor]] = topk_softmax
    fused_experts: Operator = fused_experts
    write_cache: Callable[..., None] = write_cache
    cached_attention: Operator = cached_attention
    logits: Operator = logits
    mamba_block: Callable[..., Operator] | None = None
    feed_forward_block: Callable[..., Operator] | None = None


TORCH = Operators()
