"""The operators of `ops.gpu.token_mixer` and `ops.gpu.token_feed_forward`, as nodes of a graph."""

from __future__ import annotations

import torch

from granite4_neuron.ops.gpu import token_feed_forward, token_mixer
from granite4_neuron.ops.gpu.functions import kernel

# With so many these take less time than what a compiler makes of `ops.gpu.functions`; more were not measured.
MOST_SEQUENCES = 32

mixer_inputs = kernel(token_mixer.mixer_inputs, mutates=("conv_state",))
advance_mixer = kernel(token_mixer.advance_mixer, mutates=("ssm_state",))
project_heads = kernel(token_mixer.project_heads)
add_product = kernel(token_mixer.add_product)
activate = kernel(token_feed_forward.activate)
route = kernel(token_feed_forward.route)
activate_experts = kernel(token_feed_forward.activate_experts)
add_feed_forward = kernel(token_feed_forward.add_feed_forward)


@mixer_inputs.register_fake
def _(x, norm_weight, weight, *others, **constants):
    return x.new_empty(len(x), len(weight))


@advance_mixer.register_fake
def _(inputs, dt_bias, A_log, D, ssm_state, *others):
    return inputs.new_empty(len(inputs), ssm_state.shape[1] * ssm_state.shape[2])


@project_heads.register_fake
def _(x, norm_weight, query, key, value, eps):
    return query.new_empty(len(x), len(query) + len(key) + len(value))


@add_product.register_fake
def _(residual, *others):
    return torch.empty_like(residual)


@activate.register_fake
def _(x, norm_weight, weight, eps):
    return weight.new_empty(len(x), len(weight) // 2)


@route.register_fake
def _(x, norm_weight, weight, eps):
    return norm_weight.new_empty(x.shape), x.new_empty(len(x), len(weight))


@activate_experts.register_fake
def _(normed, weight, w1, router_logits, lengths, top_k):
    tokens = len(normed)
    return normed.new_empty(tokens, len(weight) // 2), normed.new_empty(tokens * top_k, w1.shape[1] // 2)


@add_feed_forward.register_fake
def _(residual, *others):
    return torch.empty_like(residual)
