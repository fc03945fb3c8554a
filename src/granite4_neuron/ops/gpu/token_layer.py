"""The operators that fuse the products of a decoder layer's token with their neighbours, for few sequences.

With few sequences a step's time is proportional to the number of kernels, and these are fewer than a compiler
makes of a layer. `model.token_layer` computes a layer with them.
"""

from granite4_neuron.ops.gpu.token_experts import activate_experts, add_feed_forward, route
from granite4_neuron.ops.gpu.token_mixer import advance_mixer, mixer_inputs
from granite4_neuron.ops.gpu.token_mlp import activate
from granite4_neuron.ops.gpu.token_projections import add_product, project_heads

# Up to this many sequences these take less time than a compiler's kernels for a layer; more were not measured.
MOST_SEQUENCES = 32

__all__ = [
    "MOST_SEQUENCES",
    "activate",
    "activate_experts",
    "add_feed_forward",
    "add_product",
    "advance_mixer",
    "mixer_inputs",
    "project_heads",
    "route",
]
