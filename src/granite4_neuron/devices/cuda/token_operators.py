"""The operators that fuse the products of a decoder layer's tokens with their neighbours, for a few tokens.

With few tokens a step's time is proportional to the number of kernels. These operators launch fewer kernels than a
compiler would make for a layer. `devices.cuda.forms` uses them for decode, and for verification, which has a row per
token.
"""

import sys

from granite4_neuron.devices.cuda import (
    token_experts,
    token_feed_forward,
    token_many,
    token_mixer,
    token_mlp,
    token_projections,
    token_router,
    token_verify,
)
from granite4_neuron.ops.operators import FunctionSet


class TokenOperators(FunctionSet):
    """Those for any number of rows: a row's bits do not depend on this number, nor on its place among the rows."""

    MOST_SEQUENCES = token_many.FEWEST_ROWS - 1

    mixer_inputs = token_mixer.mixer_inputs
    advance_mixer = token_mixer.advance_mixer
    project_heads = token_projections.project_heads
    add_product = token_projections.add_product
    activate = token_mlp.activate
    route = token_router.route
    activate_experts = token_experts.activate_experts
    add_feed_forward = token_feed_forward.add_feed_forward

    # For verification.
    project = token_verify.project
    convolve_verified = token_verify.convolve_verified
    scan_verified = token_verify.scan_verified
    advance_verified = token_verify.advance_verified


class InvariantOperators(TokenOperators):
    """Those for any number of sequences too, so that it does not change a row's bits."""

    MOST_SEQUENCES = sys.maxsize


class ManyRowsOperators(TokenOperators):
    """Those for more sequences than `TokenOperators.MOST_SEQUENCES`, which add up in another order; not for quantized
    weights.
    """

    mixer_inputs = token_many.mixer_inputs
    project_heads = token_many.project_heads
    add_product = token_many.add_product
    activate = token_many.activate
    add_product_and_mlp = token_many.add_product_and_mlp


class OneRowOperators(TokenOperators):
    """Those for one row, where there are faster ones, which add up in another order: for decode of one sequence."""

    mixer_inputs = token_mixer.mixer_inputs_of_one
    project_heads = token_projections.project_heads_of_one
    add_product = token_projections.add_product_of_one
    activate = token_mlp.activate_of_one
    route = token_router.route_of_one
    activate_experts = token_experts.activate_experts_of_one
    add_feed_forward = token_feed_forward.add_feed_forward_of_one
