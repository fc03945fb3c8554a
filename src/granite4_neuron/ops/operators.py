"""The functions that layers are made of, as one exchangeable set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from granite4_neuron.ops.attention import cached_attention, write_cache
from granite4_neuron.ops.head import logits
from granite4_neuron.ops.mamba_kernels import CHUNKED, SINGLE_TOKEN, MambaKernels
from granite4_neuron.ops.moe import fused_experts, mlp, silu_and_mul, topk_softmax
from granite4_neuron.ops.norm import residual_add, rms_norm, rms_norm_gated
from granite4_neuron.ops.quantization import linear

Operator = Callable[..., torch.Tensor]
# One module's parameters by name, and not their values: a parameter that is replaced later is found there too.
Weights = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class MambaWeights:
    """Where the weights of a layer's first half are, with a Mamba-2 layer in it.

    norm, gated_norm: "weight".
    in_proj, out_proj: "weight", "bias" and "weight_scale", see `ops.linear`.
    conv1d: "weight", [conv_dim, 1, d_conv], and "bias".
    mixer: "dt_bias", "A_log" and "D".
    """

    norm: Weights
    in_proj: Weights
    conv1d: Weights
    mixer: Weights
    gated_norm: Weights
    out_proj: Weights

    def now(self) -> list[torch.Tensor | None]:
        """The weights of this moment, in the order of the fields."""
        in_proj, conv1d, mixer, out_proj = self.in_proj, self.conv1d, self.mixer, self.out_proj
        return [
            self.norm["weight"],
            in_proj["weight"],
            in_proj["bias"],
            in_proj["weight_scale"],
            conv1d["weight"],
            conv1d["bias"],
            mixer["dt_bias"],
            mixer["A_log"],
            mixer["D"],
            self.gated_norm["weight"],
            out_proj["weight"],
            out_proj["bias"],
            out_proj["weight_scale"],
        ]

    def mixer_now(self) -> list[torch.Tensor | None]:
        """Those of conv1d and mixer."""
        conv1d, mixer = self.conv1d, self.mixer
        return [conv1d["weight"], conv1d["bias"], mixer["dt_bias"], mixer["A_log"], mixer["D"]]


@dataclass(frozen=True)
class FeedForwardWeights:
    """Where the weights of a layer's second half are. Without experts the last three are None.

    norm, router: "weight".
    mlp_input, mlp_output, experts_input, experts_output: "weight" and "weight_scale", see `ops.mlp` and
        `ops.fused_experts`.
    """

    norm: Weights
    mlp_input: Weights
    mlp_output: Weights
    router: Weights | None = None
    experts_input: Weights | None = None
    experts_output: Weights | None = None

    def now(self) -> list[torch.Tensor | None]:
        """The weights of this moment, in the order of the fields."""
        first, second = self.mlp_input, self.mlp_output
        weights = [
            self.norm["weight"],
            first["weight"],
            first["weight_scale"],
            second["weight"],
            second["weight_scale"],
        ]
        if self.router is None:
            return weights
        first, second = self.experts_input, self.experts_output
        weights += [
            self.router["weight"],
            first["weight"],
            first["weight_scale"],
            second["weight"],
            second["weight_scale"],
        ]
        return weights


@dataclass(frozen=True)
class Operators:
    """One implementation of each operator. All have the arguments and results of the plain definition, the default.

    Who makes a set for a runtime is `select_operators`; the model computes with it after `model.bind`.

    mamba_prefill, mamba_decode: for steps of several tokens, and of one. Both have the state in one layout.
    mamba_block, feed_forward_block: half a decoder layer each as one call, see `ops.cpu.blocks`; None for its parts one
        after the other.
    refusals: a sentence for each faster way that is not taken: which it is, and why.
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
    mamba_prefill: MambaKernels = CHUNKED
    mamba_decode: MambaKernels = SINGLE_TOKEN
    mamba_block: Callable[..., Operator] | None = None
    feed_forward_block: Callable[..., Operator] | None = None
    refusals: tuple[str, ...] = ()


TORCH = Operators()
