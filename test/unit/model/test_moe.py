"""The experts of a bound model in each form that graphs have for decoded tokens."""

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import published_config
from granite4_neuron.config.choices import EXPERTS_DECODE
from granite4_neuron.devices.cuda.operators import GPU
from granite4_neuron.devices.graphs.operators import INPUT_FIRST, LOOPS, XLA
from granite4_neuron.devices.selection import default_experts_decode, select_operators
from granite4_neuron.ops import TORCH
from test.support.checkpoints import DENSE, small_config

CONFIG = small_config(layer_types=("attention",), hidden_size=128, mamba_n_heads=16, num_local_experts=40)
CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [1, 8, 130])
@pytest.mark.parametrize("form", EXPERTS_DECODE)
def test_each_form_is_the_definition(form, tokens):
    """This holds also for more tokens than the kernel takes; they use the weights in the kernel's layout."""
    model = random_model(CONFIG)
    bound = model.bind(select_operators(LOOPS, CONFIG, experts_decode=form), CPU)
    x = torch.randn(tokens, CONFIG.hidden_size)
    expected, output = (each.model.layers[0].block_sparse_moe(x) for each in (model.bind(TORCH), bound))
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()
    shapes = {tuple(weight.shape) for name, weight in bound.named_parameters() if "input_linear" in name}
    assert ((40, 128, 2 * CONFIG.intermediate_size) in shapes) == (form == "kernel")
    weights = [weight for name, weight in bound.named_parameters() if "block_sparse_moe" in name]
    assert all(weight.is_contiguous() for weight in weights)


def test_the_default_on_neuron():
    """One or two tokens fetch what they choose, if that moves less than all experts."""
    for base in (LOOPS, XLA, INPUT_FIRST, GPU):
        assert select_operators(base, CONFIG).fused_experts is base.fused_experts
    h_small = published_config("h-small")
    many = replace(h_small, num_experts_per_tok=30)
    sizes = [(h_small, 1), (h_small, 2), (h_small, 3), (many, 1)]
    forms = [default_experts_decode("torch", config, 4, tokens) for config, tokens in sizes]
    assert forms == ["gather", "gather", "all", "all"] and default_experts_decode("nki", h_small, 4, 1) == "kernel"
    for base in (XLA, INPUT_FIRST):
        bound = random_model(CONFIG).bind(select_operators(base, CONFIG), CPU)
        experts = bound.model.layers[0].block_sparse_moe
        assert [_fetches(experts, tokens) for tokens in (1, 2, 3)] == [True, True, False]


def _fetches(experts, tokens):
    """Return whether the step's graph fetches weights by index."""
    traced = make_fx(experts)(torch.randn(tokens, CONFIG.hidden_size))
    return any(node.target == torch.ops.aten.index_select.default for node in traced.graph.nodes)


def test_refusals():
    with pytest.raises(UserError, match="experts_decode is 'fast'; it must be one of kernel, all, gather"):
        select_operators(LOOPS, CONFIG, experts_decode="fast")
    with pytest.raises(UserError, match="hidden size 64"):
        select_operators(LOOPS, small_config(), experts_decode="kernel")
    dense = small_config(**DENSE)
    assert select_operators(LOOPS, dense, experts_decode="kernel") is LOOPS
