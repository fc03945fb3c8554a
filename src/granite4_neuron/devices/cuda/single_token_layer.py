"""The operators of `token_layer` that decode of one sequence needs, for one row only, which makes them faster.

They add up in another order than the operators for any number of rows.
"""

from granite4_neuron.devices.cuda.token_experts import activate_experts_of_one as activate_experts
from granite4_neuron.devices.cuda.token_feed_forward import add_feed_forward_of_one as add_feed_forward
from granite4_neuron.devices.cuda.token_mixer import advance_mixer
from granite4_neuron.devices.cuda.token_mixer import mixer_inputs_of_one as mixer_inputs
from granite4_neuron.devices.cuda.token_mlp import activate_of_one as activate
from granite4_neuron.devices.cuda.token_projections import add_product_of_one as add_product
from granite4_neuron.devices.cuda.token_projections import project_heads_of_one as project_heads
from granite4_neuron.devices.cuda.token_router import route_of_one as route

__all__ = [
    "activate",
    "activate_experts",
    "add_feed_forward",
    "add_product",
    "advance_mixer",
    "mixer_inputs",
    "project_heads",
    "route",
]
