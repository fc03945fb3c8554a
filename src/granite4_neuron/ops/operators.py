"""The functions that layers are made of, as one exchangeable set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from granite4_neuron.ops.attention import cached_attention, write_cache
from granite4_neuron.ops.moe import fused_experts, mlp, silu_and_mul
from granite4_neuron.ops.norm import residual_add, rms_norm, rms_norm_gated

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operators:
    """One implementation of each operator. All have the arguments and results of the plain definition, the default.

    mamba2: a whole Mamba-2 layer, see `ops.cpu.mamba2`; None for its parts one after the other, with convolution and
        scan as the layer's `MambaKernels` have them.
    """

    linear: Operator = F.linear
    rms_norm: Operator = rms_norm
    rms_norm_gated: Operator = rms_norm_gated
    residual_add: Operator = residual_add
    silu_and_mul: Operator = silu_and_mul
    mlp: Operator = mlp
    fused_experts: Operator = fused_experts
    write_cache: Callable[..., None] = write_cache
    cached_attention: Operator = cached_attention
    mamba2: Operator | None = None


TORCH = Operators()
