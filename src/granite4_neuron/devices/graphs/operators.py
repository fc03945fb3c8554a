"""The operators for compiled graphs, in plain torch: no shape depends on a value, and every operation compiles well.

All are tensor functions that any compiler lowers; there are no kernels here. If an operator has no form here, the set
has its plain definition. `devices.cuda` starts from this set and replaces the operators that have Triton kernels.
"""

from dataclasses import replace
from functools import partial

from granite4_neuron.devices.graphs import input_first
from granite4_neuron.devices.graphs.attention import cached_attention, write_cache_as
from granite4_neuron.devices.graphs.mamba import CHUNKED, QUADRATIC, SINGLE_TOKEN
from granite4_neuron.devices.graphs.moe import MOST_GATHERED, expert_path, fused_experts
from granite4_neuron.devices.graphs.topk import drawn, topk_sigmoid, topk_softmax
from granite4_neuron.ops.operators import Operators

XLA = Operators(
    topk_softmax=topk_softmax,
    topk_sigmoid=topk_sigmoid,
    fused_experts=partial(fused_experts, most_gathered=MOST_GATHERED),
    cached_attention=cached_attention,
    mamba_prefill=CHUNKED,
    mamba_quadratic=QUADRATIC,
)
# For compilers that fuse element-wise operations into one loop, and do not update operands of products in place.
LOOPS = replace(XLA, mamba_decode=SINGLE_TOKEN, fused_experts=fused_experts)
# For a compiler that multiplies matrices as they are stored.
INPUT_FIRST = replace(
    LOOPS,
    linear=input_first.linear,
    mlp=input_first.mlp,
    router_logits=input_first.router_logits,
    logits=input_first.logits,
    fused_experts=partial(input_first.fused_experts, most_gathered=MOST_GATHERED),
    draw=drawn,
    input_first_experts=True,
    input_first=True,
)

__all__ = [
    "INPUT_FIRST",
    "LOOPS",
    "XLA",
    "expert_path",
    "fused_experts",
    "topk_sigmoid",
    "topk_softmax",
    "write_cache_as",
]
