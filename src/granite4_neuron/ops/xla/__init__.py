"""The operators as compiled graphs want them: shapes that depend on no value, nothing that a compiler handles badly.

What has no form of its own here is the plain definition.
"""

from dataclasses import replace

from granite4_neuron.ops.operators import Operators
from granite4_neuron.ops.xla.attention import cached_attention, write_cache_as
from granite4_neuron.ops.xla.mamba import CHUNKED, QUADRATIC, SINGLE_TOKEN
from granite4_neuron.ops.xla.moe import expert_path, fused_experts
from granite4_neuron.ops.xla.topk import topk_softmax

XLA = Operators(
    topk_softmax=topk_softmax,
    fused_experts=fused_experts,
    cached_attention=cached_attention,
    mamba_prefill=CHUNKED,
    mamba_quadratic=QUADRATIC,
)
# For compilers that make one loop of several element-wise operations, and do not update operands of products in place.
LOOPS = replace(XLA, mamba_decode=SINGLE_TOKEN)

__all__ = ["LOOPS", "XLA", "expert_path", "fused_experts", "topk_softmax", "write_cache_as"]
