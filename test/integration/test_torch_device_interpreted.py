"""The runtime of PyTorch devices with a GPU's Triton kernels, interpreted. It needs TRITON_INTERPRET=1.

On a GPU test_torch_device.py checks this and more.
"""

import math
import os
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cuda.attention import attend_tokens
from granite4_neuron.devices.cuda.flash_attention import attend_prompt
from granite4_neuron.devices.cuda.fused_moe import multiply_by_experts
from granite4_neuron.devices.cuda.head import score_tokens
from granite4_neuron.devices.cuda.norms import add_and_normalize, normalize
from granite4_neuron.devices.cuda.operator import LAUNCHES
from granite4_neuron.devices.cuda.operators import GPU, GPU_BATCH_INVARIANT
from granite4_neuron.devices.cuda.products import multiply_tokens
from granite4_neuron.devices.cuda.prompt_mixer import convolve_prompt, scan_prompt
from granite4_neuron.devices.cuda.sampling import choose_tokens
from granite4_neuron.devices.cuda.token_operators import OneRowOperators, TokenOperators
from granite4_neuron.devices.torch import runtime as torch_device
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.model.parameters import EMBEDDING, HEAD
from granite4_neuron.runtime.interface import Row
from test.integration.test_torch_device import LAYER, as_captured, shapes_of_prompts
from test.support.checkpoints import nemotron_config, small_config
from test.support.engines import ENGINE_MODELS, engine_model
from test.support.graph_contract import BUCKETS, FEW_LAYERS, STEPS, check_tokens_by_all_options, run_steps
from test.support.quantizing import GPU_FORMATS, quantize_model
from test.support.stepping import random_tokens
from test.support.unwritten import unwritten_memory_is_nan
from test.unit.devices.cuda.test_token_kernels import products_of_bfloat16

pytestmark = pytest.mark.versions
__all__ = ["products_of_bfloat16"]  # a fixture

if torch.cuda.is_available() or "TRITON_INTERPRET" not in os.environ:
    pytest.skip("for Triton's interpreter, where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def kernels(monkeypatch):
    """Give graphs on a CPU the operators and kernels of a GPU; return the set of operators that ran."""
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


# Slot, start and number of tokens.
PROMPTS = (4, 0, 10), (1, 16, 40), (2, 32, 9)
CONFIGS = {
    "granite": lambda: small_config(**FEW_LAYERS),
    "nemotron": lambda: nemotron_config(time_step_limit=(0.0, math.inf)),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("sequences", [1, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_logits(family, sequences, kernels):
    """Prompts run, then decode of all sequences and of one. Memory that was never written is NaN."""
    cpu, ours = LAYER.runtimes(lambda: random_model(CONFIGS[family]()))
    steps = [[(1, 20)], [(1, 1)]] if sequences == 1 else STEPS[:3]
    expected_logits = run_steps(cpu, steps, sequences, 200)
    with unwritten_memory_is_nan():
        our_logits = run_steps(ours, steps, sequences, 200, LAYER.poison)
    for expected, logits in zip(expected_logits, our_logits, strict=True):
        assert (logits - expected).abs().max() <= LAYER.tolerance
    operators = OneRowOperators if sequences == 1 else TokenOperators
    mixers = {operators.mixer_inputs, operators.advance_mixer, operators.project_heads, attend_tokens}
    experts = {operators.route}
    if family == "granite":
        experts |= {operators.activate_experts, operators.add_feed_forward, add_and_normalize}
    prompts = {multiply_tokens, normalize, convolve_prompt, scan_prompt, attend_prompt, multiply_by_experts}
    assert mixers | experts | prompts | {operators.add_product, score_tokens} <= kernels


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("format", GPU_FORMATS)
@pytest.mark.parametrize("sequences", [1, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_quantized_weights(format, sequences, family, kernels, monkeypatch):
    """Logits are those of a model whose weights are the numbers that the quantized ones stand for. The first layer is
    not quantized, and has graphs of its own.
    """
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], formats=DEVICES["cuda"].formats))
    config = CONFIGS[family]()
    quantized, dense = random_model(config), random_model(replace(config, tie_word_embeddings=False))
    dense.load_state_dict(quantized.state_dict())
    for name in quantize_model(quantized, format, keep=[0]):
        weight = quantized.get_submodule(name.removesuffix(".weight")).weight.dequantize(torch.float32)
        for same in {name, HEAD} if name == EMBEDDING else {name}:
            set_parameter(dense, same, weight)
    steps = [[(1, 20)], [(1, 1)]] if sequences == 1 else STEPS[:3]
    expected, ours = (run_steps(LAYER.make(model, BUCKETS), steps, sequences, 200) for model in (dense, quantized))
    for mine, other in zip(ours, expected, strict=True):
        assert (mine - other).abs().max() <= LAYER.tolerance


@pytest.mark.exhaustive
def test_tokens_by_all_options(kernels, monkeypatch):
    """Of all options, and no logits come to the host."""
    model = engine_model(layer_types=FEW_LAYERS["layer_types"])
    check_tokens_by_all_options(TorchRuntime(model, GenerationConfig(), [16], compiler="eager"), monkeypatch)
    assert choose_tokens in kernels


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verified_tokens_have_the_bits_of_decode(family, dtype, kernels, monkeypatch):
    """Logits and the state after accepted tokens are those of decode, for states of three, two and one sequences."""
    monkeypatch.setattr(torch_device, "LOOPS", GPU_BATCH_INVARIANT)
    model = random_model(CONFIGS[family](), dtype=dtype)
    runtime = TorchRuntime(model, GenerationConfig(), [128], compiler="eager")
    starts, tokens, accepted = (40, 9, 70), [[5, 6, 7], [8, 9, 10], [11, 12, 13]], 2

    def begun(slots):
        state = runtime.allocate(slots, 100)
        for slot in range(1, slots + 1):
            generator = torch.Generator().manual_seed(slot)
            for view in state.slot_views(slot).values():
                view.copy_(0.3 * torch.randn(view.shape, generator=generator))
        return state

    def recurrent(state, slot):
        return [view.clone() for name, view in state.slot_views(slot).items() if name.endswith("_state")]

    state, decoded = begun(3), []
    for number in range(3):
        rows = [Row(slot + 1, starts[slot] + number, [tokens[slot][number]]) for slot in range(3)]
        decoded.append(runtime.step(state, rows).clone())
        if number + 1 == accepted:
            expected = [recurrent(state, slot) for slot in (1, 2)]
    for slots in (1, 2):
        state = begun(slots)
        kernels.clear()
        verification = runtime.verify(state, [Row(slot + 1, starts[slot], tokens[slot]) for slot in range(slots)])
        assert TokenOperators.route in kernels
        assert torch.equal(verification.logits, torch.stack(decoded, 1)[:slots])
        runtime.commit(state, verification, [accepted] * slots)
        for slot in range(slots):
            assert all(map(torch.equal, recurrent(state, slot + 1), expected[slot]))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("granite", torch.bfloat16),
        pytest.param("granite", torch.float32, marks=pytest.mark.exhaustive),
        pytest.param("nemotron", torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_that_share_graphs_have_the_bits_of_one_alone(family, dtype, kernels, monkeypatch):
    """Logits, states and snapshots, of prompts that begin and that go on, in one piece and in two. Slots without a
    prompt keep theirs.
    """
    as_captured(monkeypatch)
    model = ENGINE_MODELS[family](dtype=dtype)
    tokens = random_tokens(model.config.vocab_size, 50).tolist()
    # In a graph of 16 tokens slots 4 and 2, in one of 32 slot 1, then its last 8.
    rows = [Row(slot, start, tokens[slot : slot + count]) for slot, start, count in PROMPTS]

    def begun(prompts_together):
        runtime = TorchRuntime(model, GenerationConfig(), [16, 32], compiler="eager", prefill_by_view=False)
        runtime._captures, runtime.rows_per_step = prompts_together > 1, prompts_together
        state = runtime.allocate(4, 60)
        for slot in range(1, 5):
            generator = torch.Generator().manual_seed(slot)
            for view in state.slot_views(slot).values():
                view.copy_(0.3 * torch.randn(view.shape, generator=generator))
        return runtime, state

    def held(runtime, state):
        lengths = {row.slot: row.start + len(row.tokens) for row in rows}
        return [
            tensor.clone()
            for slot in range(1, 5)
            for tensor in runtime.snapshot(state, slot, lengths.get(slot, 60)).tensors.values()
        ]

    runtime, state = begun(1)
    expected = torch.cat([runtime.step(state, [row]) for row in rows])
    expected_state = held(runtime, state)
    runtime, state = begun(4)
    shapes = shapes_of_prompts(monkeypatch, runtime)
    assert torch.equal(runtime.step(state, rows), expected)
    assert shapes == [(2, 16), (1, 32), (1, 16)]
    assert all(map(torch.equal, held(runtime, state), expected_state))
    assert {scan_prompt, convolve_prompt, attend_prompt, multiply_tokens, score_tokens} <= kernels
