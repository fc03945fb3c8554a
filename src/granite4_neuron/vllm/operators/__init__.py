"""Operators with the signatures and in-place rules of vLLM 0.33, for CPU tensors. They do not need vLLM.

They are a public API, for other programs and for vLLM's CPU backend; nothing else in this package calls them. The model
uses simpler operators, see `granite4_neuron.ops`.
"""

from granite4_neuron.vllm.operators.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from granite4_neuron.vllm.operators.mamba_chunk_scan import mamba_chunk_scan_combined_varlen
from granite4_neuron.vllm.operators.selective_scan import selective_scan_fn
from granite4_neuron.vllm.operators.selective_state_update import selective_state_update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_chunk_scan_combined_varlen",
    "selective_scan_fn",
    "selective_state_update",
]
