"""The runtime of PyTorch devices with the Triton kernels of a GPU, which are interpreted: with TRITON_INTERPRET=1 only.

On a GPU test_torch_device.py makes this check, and more.
"""

import os

import pytest
import torch
from torch.library import CustomOpDef

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.ops.gpu import GPU, functions, token_feed_forward, token_layer, token_mixer
from granite4_neuron.runtime import torch_device
from test.integration.test_torch_device import LAYER
from test.support.checkpoints import small_config
from test.support.graph_contract import FEW_LAYERS, STEPS, run_steps
from test.support.unwritten import unwritten_memory_is_nan

pytestmark = pytest.mark.versions

if torch.cuda.is_available() or "TRITON_INTERPRET" not in os.environ:
    pytest.skip("for Triton's interpreter, where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def kernels(monkeypatch):
    """Let graphs on a CPU have the operators of a GPU with their kernels; return the names of those that ran."""
    names = set()

    def noted(name, definition):
        def run(*arguments, **options):
            names.add(name)
            return functions.kernel_of(definition)(*arguments, **options)

        return run

    definitions = vars(functions) | vars(token_mixer) | vars(token_feed_forward)
    for name, operator in (vars(functions) | vars(token_layer)).items():
        if isinstance(operator, CustomOpDef):
            operator.register_kernel("cpu")(noted(name, definitions[name.lstrip("_")]))
    monkeypatch.setattr(torch_device, "LOOPS", GPU)
    return names


@pytest.mark.parametrize("sequences", [1, 5])
def test_logits(sequences, kernels):
    """Prompts, and then decode of all and of one of them; memory that was never written is NaN."""
    cpu, ours = LAYER.runtimes(lambda: random_model(small_config(**FEW_LAYERS)))
    steps = [[(1, 20)], [(1, 1)]] if sequences == 1 else STEPS[:3]
    expected_logits = run_steps(cpu, steps, sequences, 200)
    with unwritten_memory_is_nan():
        our_logits = run_steps(ours, steps, sequences, 200, LAYER.poison)
    for expected, logits in zip(expected_logits, our_logits, strict=True):
        assert (logits - expected).abs().max() <= LAYER.tolerance
    mixers = {"mixer_inputs", "advance_mixer", "project_heads", "_attend_token", "add_product"}
    assert mixers | {"route", "activate_experts", "add_feed_forward"} <= kernels
