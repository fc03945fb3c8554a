"""The runtime of PyTorch devices with the Triton kernels of a GPU, which are interpreted: with TRITON_INTERPRET=1 only.

On a GPU test_torch_device.py makes this check, and more.
"""

import os

import pytest
import torch

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.ops.gpu import GPU, token_layer
from granite4_neuron.ops.gpu.attention import attend_token
from granite4_neuron.ops.gpu.causal_conv1d import convolve_tokens
from granite4_neuron.ops.gpu.flash_attention import attend_tokens
from granite4_neuron.ops.gpu.fused_moe import multiply_by_experts
from granite4_neuron.ops.gpu.norms import normalize
from granite4_neuron.ops.gpu.operator import LAUNCHES
from granite4_neuron.ops.gpu.products import multiply_tokens
from granite4_neuron.ops.gpu.ssd_chunk_scan import scan_chunks
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
    """Let graphs on a CPU have the operators of a GPU with their kernels; return the operators that ran."""
    ran = set()

    def noted(operator, launch):
        def run(*arguments, **options):
            ran.add(operator)
            return launch(*arguments, **options)

        return run

    for operator, launch in LAUNCHES.items():
        operator.register_kernel("cpu")(noted(operator, launch))
    monkeypatch.setattr(torch_device, "LOOPS", GPU)
    return ran


@pytest.mark.parametrize("sequences", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_logits(sequences, kernels):
    """Prompts, and then decode of all and of one of them; memory that was never written is NaN."""
    cpu, ours = LAYER.runtimes(lambda: random_model(small_config(**FEW_LAYERS)))
    steps = [[(1, 20)], [(1, 1)]] if sequences == 1 else STEPS[:3]
    expected_logits = run_steps(cpu, steps, sequences, 200)
    with unwritten_memory_is_nan():
        our_logits = run_steps(ours, steps, sequences, 200, LAYER.poison)
    for expected, logits in zip(expected_logits, our_logits, strict=True):
        assert (logits - expected).abs().max() <= LAYER.tolerance
    mixers = {token_layer.mixer_inputs, token_layer.advance_mixer, token_layer.project_heads, attend_token}
    experts = {token_layer.route, token_layer.activate_experts, token_layer.add_feed_forward}
    prompts = {multiply_tokens, normalize, convolve_tokens, scan_chunks, attend_tokens, multiply_by_experts}
    assert mixers | experts | prompts | {token_layer.add_product} <= kernels
