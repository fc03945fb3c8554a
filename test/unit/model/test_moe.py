"""The experts of a bound model in each form that graphs have for decoded tokens."""

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config.choices import EXPERTS_DECODE
from granite4_neuron.devices.cuda.operators import GPU
from granite4_neuron.devices.graphs.operators import LOOPS, XLA
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


def test_the_default_on_neuron_is_no_gather():
    assert (default_experts_decode("torch"), default_experts_decode("nki")) == ("all", "kernel")
    gathers = [select_operators(base, CONFIG).fused_experts is base.fused_experts for base in (LOOPS, XLA, GPU)]
    assert all(gathers)  # other devices keep their own form


def test_refusals():
    with pytest.raises(UserError, match="experts_decode is 'fast'; it must be one of kernel, all, gather"):
        select_operators(LOOPS, CONFIG, experts_decode="fast")
    with pytest.raises(UserError, match="hidden size 64"):
        select_operators(LOOPS, small_config(), experts_decode="kernel")
    dense = small_config(**DENSE)
    assert select_operators(LOOPS, dense, experts_decode="kernel") is LOOPS
