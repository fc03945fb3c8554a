"""A norm of another kind: fused layers, which compute RMS norms, refuse it, and the model runs without them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cuda.operators import GPU
from granite4_neuron.model.binding import Module
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import TORCH
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import small_config
from test.support.stepping import random_tokens


class MeanNorm(Module):
    """A norm that subtracts the mean."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states):
        return F.layer_norm(hidden_states, self.weight.shape).to(self.weight.dtype) * self.weight


@pytest.fixture
def model(monkeypatch):
    for module in ("decoder_layer", "modeling_granite_moe_hybrid"):
        monkeypatch.setattr(f"granite4_neuron.model.{module}.norm_of", MeanNorm)
    return random_model(small_config())


def logits(model, operators):
    """Return the logits of a prompt and of a decoded token, and the reasons why faster layers are not used."""
    bound = model.bind(operators)
    tokens = random_tokens(model.config.vocab_size, 9, seed=1)[None]
    state = HybridState.allocate(model.config, 1, 16, model.dtype, kernel_layout=bound.kernel_layout)
    found = []
    with torch.inference_mode():
        for start, ids in ((0, tokens[:, :8]), (8, tokens[:, 8:])):
            positions = torch.arange(start, start + ids.shape[1])[None]
            step = step_of(positions, torch.tensor([ids.shape[1]]), torch.tensor([1]), state)
            found.append(bound(ids, step, state))
    return torch.cat(found), bound.fallbacks


@pytest.mark.parametrize(
    "what, operators",
    [
        pytest.param(
            "the fused decoder layers are",
            cpu.choose_operators,
            marks=pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler"),
        ),
        ("the token kernels of Mamba layers are", lambda: GPU),
    ],
)
def test_fused_layers_refuse_it(model, what, operators):
    expected, reasons = logits(model, TORCH)
    assert reasons == ()
    found, reasons = logits(model, operators())
    assert f"{what} not used: they compute RMS norms, and the model has a MeanNorm." in reasons
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
