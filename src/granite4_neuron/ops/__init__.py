"""The mathematics, as functions of tensors, in plain torch; `nki` says some of it again as kernels for NeuronCores.

Products with the experts' weights are in the weights' dtype, all else in float32.
"""

from granite4_neuron.ops.attention import cached_attention, write_cache
from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.ops.mamba_chunk_scan import mamba_chunk_scan_combined
from granite4_neuron.ops.mamba_kernels import DECODE_KERNELS, PREFILL_SCANS, MambaKernels
from granite4_neuron.ops.moe import fused_experts, topk_softmax
from granite4_neuron.ops.norm import rms_norm, rms_norm_gated
from granite4_neuron.ops.rope import apply_rotary, rotary_tables
from granite4_neuron.ops.selective_state_update import selective_state_update

__all__ = [
    "DECODE_KERNELS",
    "PREFILL_SCANS",
    "MambaKernels",
    "apply_rotary",
    "cached_attention",
    "causal_conv1d",
    "fused_experts",
    "mamba_chunk_scan_combined",
    "rms_norm",
    "rms_norm_gated",
    "rotary_tables",
    "selective_state_update",
    "topk_softmax",
    "write_cache",
]
