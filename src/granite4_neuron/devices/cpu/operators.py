"""Fused kernels for this machine's processor, compiled at first use; each replaces plain definitions in ops."""

from __future__ import annotations

from dataclasses import replace

from granite4_neuron.config.choices import CPU_KERNELS
from granite4_neuron.devices.cpu import layers
from granite4_neuron.devices.cpu.build import load_kernels
from granite4_neuron.devices.cpu.forms import FusedLayers
from granite4_neuron.devices.cpu.functions import (
    cached_attention,
    embedding,
    fused_experts,
    linear,
    logits,
    mlp,
    paged_attention,
    residual_add,
    rms_norm,
    rms_norm_gated,
    router_logits,
    silu_and_mul,
    write_cache,
)
from granite4_neuron.devices.cpu.weights import PackedWeight, pack, quantize
from granite4_neuron.errors import check_choice
from granite4_neuron.ops.operators import TORCH, Operators

__all__ = [
    "PackedWeight",
    "cached_attention",
    "choose_operators",
    "embedding",
    "fused_experts",
    "has_fused_kernels",
    "layers",
    "linear",
    "logits",
    "mlp",
    "pack",
    "paged_attention",
    "quantize",
    "residual_add",
    "rms_norm",
    "rms_norm_gated",
    "router_logits",
    "silu_and_mul",
    "write_cache",
]


def choose_operators(cpu_kernels: str = "fused") -> Operators:
    """Return the operators of the CPU runtime.

    Args:
        cpu_kernels: "fused", which falls back to plain torch, with a line on standard error, where the kernels cannot
            be compiled; or "torch".

    Raises:
        UserError: there are no such kernels.
    """
    check_choice("cpu_kernels", cpu_kernels, CPU_KERNELS)
    if cpu_kernels == "torch":
        return TORCH
    reason = load_kernels()
    if reason is not None:
        return replace(TORCH, fallbacks=(f"the fused kernels are not used: {reason}.",))
    return Operators(
        linear=linear,
        rms_norm=rms_norm,
        rms_norm_gated=rms_norm_gated,
        residual_add=residual_add,
        silu_and_mul=silu_and_mul,
        mlp=mlp,
        router_logits=router_logits,
        fused_experts=fused_experts,
        write_cache=write_cache,
        cached_attention=cached_attention,
        embedding=embedding,
        logits=logits,
        fused_layers=layers.LayerMakers(),
        stack_form=FusedLayers,
        quantize=quantize,
        pack=pack,
    )


def has_fused_kernels() -> bool:
    """Return whether this machine can compile the kernels."""
    return load_kernels() is None
