"""The mathematics, as functions of tensors, in plain torch.

They define what the kernels of the devices compute. `Operators` is one set of implementations, of which these are the
defaults.

Products with the experts' weights are in the weights' dtype, everything else in float32.
"""

from granite4_neuron.ops.attention import cached_attention, write_cache
from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.ops.formats import FORMATS
from granite4_neuron.ops.head import logits
from granite4_neuron.ops.launch_parameters import LaunchParameters
from granite4_neuron.ops.mamba_chunk_scan import mamba_chunk_scan_combined
from granite4_neuron.ops.mamba_operators import FusedMixer, MambaOperators, MixerConstants
from granite4_neuron.ops.moe import (
    activate,
    fused_experts,
    mlp,
    relu2,
    router_logits,
    silu_and_mul,
    topk_sigmoid,
    topk_softmax,
)
from granite4_neuron.ops.norm import residual_add, rms_norm, rms_norm_gated
from granite4_neuron.ops.operators import TORCH, Operators
from granite4_neuron.ops.quantization import embedding, linear
from granite4_neuron.ops.rope import apply_rotary, rotary_tables
from granite4_neuron.ops.selective_state_step import selective_state_step
from granite4_neuron.ops.stochastic_rounding import Rounding, stochastic_round
from granite4_neuron.ops.weight import (
    CompactWeight,
    Format,
    QuantizedWeight,
    Weight,
    as_tensor,
    format_of,
    is_quantized,
)

__all__ = [
    "FORMATS",
    "TORCH",
    "CompactWeight",
    "Format",
    "FusedMixer",
    "LaunchParameters",
    "MambaOperators",
    "MixerConstants",
    "Operators",
    "QuantizedWeight",
    "Rounding",
    "Weight",
    "activate",
    "apply_rotary",
    "as_tensor",
    "cached_attention",
    "causal_conv1d",
    "embedding",
    "format_of",
    "fused_experts",
    "is_quantized",
    "linear",
    "logits",
    "mamba_chunk_scan_combined",
    "mlp",
    "relu2",
    "residual_add",
    "rms_norm",
    "rms_norm_gated",
    "rotary_tables",
    "router_logits",
    "selective_state_step",
    "silu_and_mul",
    "stochastic_round",
    "topk_sigmoid",
    "topk_softmax",
    "write_cache",
]
