"""Decode of few sequences by joined operators, with their definitions on the CPU, has the plain operators' logits."""

import pytest
import torch

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cuda.forms import TokenLayer
from granite4_neuron.devices.cuda.operators import GPU, GPU_BATCH_INVARIANT
from granite4_neuron.devices.cuda.token_operators import InvariantOperators, ManyRowsOperators, TokenOperators
from granite4_neuron.devices.graphs.runtime import graph_inputs
from granite4_neuron.devices.torch.step_functions import GraphKey, call_inline, run_step, state_tensors
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import FORMATS
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import HybridState, MambaState
from test.support.checkpoints import CASES, NEMOTRON_CASES, NEMOTRON_EXPERTS
from test.support.quantizing import quantize_model
from test.support.stepping import random_tokens

pytestmark = pytest.mark.versions


@pytest.fixture
def taken(monkeypatch):
    """Return a list that gets each layer that the joined operators compute."""
    layers = []

    def note(name):
        half = getattr(TokenLayer, name)

        def noted(layer, *arguments):
            layers.append(layer)
            return half(layer, *arguments)

        monkeypatch.setattr(TokenLayer, name, noted)

    note("_mamba")
    note("_verified_mamba")
    note("_attention")
    note("_ungated_feed_forward")
    return layers


def decode(model, operators, tokens, state_dtype=torch.float32):
    """Return the logits of each sequence's last token, and the state; an idle step comes before it."""
    model = model.bind(operators) if operators else model
    batch, length = tokens.shape
    state = HybridState.allocate(model.config, batch, 64, model.dtype, has_null_slot=False, state_dtype=state_dtype)
    for tensor in state.tensors():
        tensor.zero_()

    def step(ids, start, length):
        positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape)
        return model(ids, step_of(positions, torch.full((batch,), length), None, state), state)

    step(tokens[:, :-1], 0, length - 1)
    views = [state.slot_views(slot) for slot in range(1, batch + 1)]
    before = [{name: view.clone() for name, view in each.items()} for each in views]
    step(tokens[:, :1], length - 1, 0)
    torch.testing.assert_close(views, before, rtol=0, atol=0, equal_nan=True)
    return step(tokens[:, -1:], length - 1, 1), views


def mean_error(views, exact):
    pairs = [(view[name], right[name]) for view, right in zip(views, exact, strict=True) for name in right]
    return torch.cat([(ours.double() - right.double()).abs().flatten() for ours, right in pairs]).mean()


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", (*CASES, *NEMOTRON_CASES), ids=lambda case: case.name)
def test_logits_and_state(case, batch, dtype, taken):
    model = random_model(case.config(), dtype=dtype, max_A=case.max_A)
    tokens = random_tokens(model.config.vocab_size, batch, 20)
    (expected, states), (logits, ours) = (decode(model, operators, tokens) for operators in (None, GPU))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, states, rtol=tolerance, atol=tolerance)
    else:  # two roundings, neither of which may be further from float32 than the other
        _, exact = decode(model.float(), None, tokens)
        assert mean_error(ours, exact) <= 1.1 * mean_error(states, exact)
    # Two steps. Layers with biases in projections use the plain operators.
    plain = {"projection_bias": {"mamba", "attention"}, "nemotron_dense": {"mamba"}}.get(case.name, set())
    assert len(taken) == 2 * sum(kind not in plain for kind in model.config.layer_types)


@pytest.mark.parametrize(
    "case",
    [CASES[0], *NEMOTRON_EXPERTS, *(case for case in CASES if case.name in ("rope", "dense", "two_groups"))],
    ids=lambda case: case.name,
)
def test_verification(case):
    """Rows have all tokens, some tokens or none. Then a part of the tokens is accepted."""
    model = random_model(case.config(), max_A=case.max_A)
    tokens = random_tokens(model.config.vocab_size, 3, 14)
    lengths, accepted = torch.tensor([4, 3, 0]), torch.tensor([4, 1, 0])
    positions = torch.arange(10, 14).expand(3, 4)
    outcomes = []
    for each in (model, model.bind(GPU)):
        state = HybridState.allocate(model.config, 3, 64, model.dtype, has_null_slot=False)
        before = torch.arange(10).expand(3, 10)
        model(tokens[:, :10], step_of(before, torch.full((3,), 10), None, state), state)
        recurrent = [
            tensor.clone() for layer in state.layers if isinstance(layer, MambaState) for tensor in vars(layer).values()
        ]
        step = step_of(positions, lengths, None, state, verifies=True)
        hidden_states, kept = each.hidden_states(tokens[:, 10:], step, state)
        logits = each.head(hidden_states)
        now = [tensor for layer in state.layers if isinstance(layer, MambaState) for tensor in vars(layer).values()]
        assert all(map(torch.equal, recurrent, now))
        each.advance(kept, step_of(positions, accepted, None, state), state)
        outcomes.append([logits[0], logits[1, :3], *now])
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", (CASES[0], *NEMOTRON_EXPERTS), ids=lambda case: case.name)
def test_all_layers_of_a_verification_use_the_joined_operators(case, taken):
    """The step is run as in graphs, which share some constants between layers."""
    model = random_model(case.config()).bind(GPU)
    state = HybridState.allocate(model.config, 2, 64, model.dtype, has_null_slot=False)
    for tensor in state.tensors():
        tensor.zero_()
    inputs = graph_inputs([Row(1, 9, [5] * 3), Row(2, 0, [])], 4)
    key = GraphKey(64, in_order=True, all_logits=True, verifies=True)
    run_step(call_inline, model, key, [inputs], state_tensors(state))
    assert len(taken) == len(model.config.layer_types)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("case", (CASES[0], *NEMOTRON_EXPERTS), ids=lambda case: case.name)
def test_quantized_weights(case, format, taken):
    """Plain torch computes with the numbers that they stand for."""
    model = random_model(case.config(), max_A=case.max_A)
    quantize_model(model, format)
    tokens = random_tokens(model.config.vocab_size, 2, 20)
    (expected, states), (logits, ours) = (decode(model, operators, tokens) for operators in (None, GPU))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, states, rtol=1e-5, atol=1e-5)
    assert len(taken) == 2 * len(model.config.layer_types)


def test_weights_of_one_kernel_have_one_format():
    model = random_model(CASES[0].config())
    attention = next(layer for layer in model.model.stack.layers if not layer.is_mamba)
    key = attention.self_attn.k_proj
    key.set_compact_weight(FORMATS["int8"].quantize(key.weight.detach()))
    assert "in several formats" in TokenLayer.why_not(attention)
    experts = next(layer for layer in model.model.stack.layers if layer.is_mamba)
    assert TokenLayer.why_not(experts) is None
    first = experts.block_sparse_moe.input_linear
    first.set_compact_weight(FORMATS["int4"].quantize(first.weight.detach()))
    assert "in several formats" in TokenLayer.why_not(experts)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["moe", "dense"])
@pytest.mark.parametrize(
    ("batch", "operators", "format", "taken"),
    [
        (32, GPU, None, TokenOperators),
        (33, GPU, None, ManyRowsOperators),
        (33, GPU, "int8", None),
        (33, GPU_BATCH_INVARIANT, None, InvariantOperators),
    ],
    ids=["few", "many", "many, quantized", "batch-invariant"],
)
def test_operators_by_sequences(batch, operators, format, taken, case, state_dtype, monkeypatch):
    """Token operators have mixers of a rounded state in any case: others would copy the state."""
    model = random_model(next(each for each in CASES if each.name == case).config())
    if format is not None:
        quantize_model(model, format)
    chosen, choose = [], TokenLayer._operators_of

    def noted(layer, step, state):
        found = choose(layer, step, state)
        if step.is_decode and isinstance(state, MambaState):
            chosen.append(None if found is None else type(found))
        return found

    monkeypatch.setattr(TokenLayer, "_operators_of", noted)
    tokens = random_tokens(model.config.vocab_size, batch, 2)
    (expected, states), (logits, ours) = (decode(model, each, tokens, state_dtype) for each in (None, operators))
    taken = TokenOperators if taken is None and state_dtype != torch.float32 else taken
    assert set(chosen) == {taken}
    is_exact = state_dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 if is_exact else 1e-2)
    torch.testing.assert_close(ours, states, rtol=1e-5 if is_exact else 2.0**-7, atol=1e-5 if is_exact else 1e-3)


REASONS = {
    "projection_bias": [
        "the token kernels of Mamba layers are not used: they take no biases of projections.",
        "the token kernels of attention layers are not used: they take no biases of projections.",
    ],
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_without_token_kernels_have_a_reason(case):
    assert sorted(random_model(case.config()).bind(GPU).fallbacks) == sorted(REASONS.get(case.name, []))


def test_a_part_of_a_model_has_a_reason():
    part = model_of(CASES[0].config(), Parallel(0, 2)).bind(GPU)
    assert {"a part of 2" in sentence for sentence in part.fallbacks} == {True}
