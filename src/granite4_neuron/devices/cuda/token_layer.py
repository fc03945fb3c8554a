"""The operators that fuse the products of a decoder layer's tokens with their neighbours, for a few tokens.

With few tokens a step's time is proportional to the number of kernels. These operators launch fewer kernels than a
compiler would make for a layer. `devices.cuda.forms` uses them for decode, and for verification, which has a row per
token.

A row's bits do not depend on the number of rows, nor on its place among them. `single_token_layer` has faster operators
for one row, which add up in another order.
"""

from granite4_neuron.devices.cuda.token_experts import activate_experts
from granite4_neuron.devices.cuda.token_feed_forward import add_feed_forward
from granite4_neuron.devices.cuda.token_mixer import advance_mixer, mixer_inputs
from granite4_neuron.devices.cuda.token_mlp import activate
from granite4_neuron.devices.cuda.token_projections import add_product, project_heads
from granite4_neuron.devices.cuda.token_router import route
from granite4_neuron.devices.cuda.token_verify import advance_verified, convolve_verified, project, scan_verified

# Up to this many sequences these operators are faster than a compiler's kernels for a layer; more were not measured.
MOST_SEQUENCES = 32

__all__ = [
    "MOST_SEQUENCES",
    "activate",
    "activate_experts",
    "add_feed_forward",
    "add_product",
    "advance_mixer",
    "advance_verified",
    "convolve_verified",
    "mixer_inputs",
    "project",
    "project_heads",
    "route",
    "scan_verified",
]
