"""Verify and commit on the CPU: whatever is accepted, a sequence goes on as if it had run in one piece."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Runtime, require
from granite4_neuron.state.hybrid_state import MambaState
from test.support.checkpoints import DENSE, nemotron_config, small_config
from test.support.verification import LONGEST, Round, poison, streams, verified_error

pytestmark = pytest.mark.versions

SEQUENCES = 4
MODELS = {
    "moe": dict(layer_types=("mamba", "attention", "mamba")),
    "dense": dict(**DENSE, layer_types=("mamba", "attention")),
    "two groups, window of 2": dict(**DENSE, layer_types=("mamba", "mamba"), mamba_n_groups=2, mamba_d_conv=2),
    "attention only": dict(**DENSE, layer_types=("attention", "attention")),
}
CONFIGS = {
    **{name: small_config(**changes) for name, changes in MODELS.items()},
    "nemotron": nemotron_config(layer_types=("mamba", "moe", "attention", "mlp", "mamba")),
    "nemotron, latent": nemotron_config(layer_types=("mamba", "moe", "attention"), moe_latent_size=40),
}


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return random_model(request.param)


@pytest.fixture(scope="module", params=["torch", "fused"])
def runtime(request, model):
    return CPURuntime(model, GenerationConfig(), cpu_kernels=request.param)


@pytest.fixture(scope="module")
def uncut(model):
    runtime = CPURuntime(model, GenerationConfig(), cpu_kernels="torch")
    rows = [Row(i + 1, 0, tokens) for i, tokens in enumerate(streams(model.config.vocab_size, SEQUENCES))]
    return runtime.step(runtime.allocate(SEQUENCES, LONGEST), rows, all_logits=True)


@pytest.mark.parametrize("accepted", range(6))
def test_any_number_of_accepted_tokens(runtime, uncut, accepted):
    """Rows are ragged; their sequences have begun or not, and some are shorter than the convolution window."""
    counts = (5, 3, 5, 1)
    rounds = [Round(counts, [min(accepted, count) for count in counts])] * 2
    assert verified_error(runtime, uncut, (0, 1, 2, 40), rounds) <= 1e-5


rounds = st.lists(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=SEQUENCES, max_size=SEQUENCES).map(
        lambda pairs: Round([count for count, _ in pairs], [min(pair) for pair in pairs])
    ),
    max_size=5,
)


@pytest.mark.slow_cases
@settings(max_examples=25, deadline=None)
@given(prefixes=st.lists(st.integers(0, 70), min_size=SEQUENCES, max_size=SEQUENCES), rounds=rounds)
def test_rounds_of_verification(runtime, uncut, prefixes, rounds):
    assert verified_error(runtime, uncut, prefixes, rounds) <= 1e-5


def bits(state):
    return [tensor.clone().view(torch.uint8) for layer in state.layers if isinstance(layer, MambaState)
            for tensor in vars(layer).values()]  # fmt: skip


def test_a_verification_changes_no_recurrent_state(runtime):
    tokens = streams(runtime.config.vocab_size, SEQUENCES)
    state = runtime.allocate(SEQUENCES, LONGEST)
    poison(state)
    runtime.step(state, [Row(slot, 0, tokens[slot - 1][:20]) for slot in (1, 3)])
    before = bits(state)
    rows = [Row(1, 20, tokens[0][20:24]), Row(2, 0, tokens[1][:2]), Row(3, 20, tokens[2][20:21])]
    verification = runtime.verify(state, rows)
    assert all(map(torch.equal, before, bits(state)))
    runtime.commit(state, verification, [0, 0, 0])
    assert all(map(torch.equal, before, bits(state)))
    with pytest.raises(ValueError, match="3 tokens are accepted of a row of 2"):
        runtime.commit(state, verification, [4, 3, 1])
    assert all(map(torch.equal, before, bits(state)))


def test_rows_that_cannot_be_verified(runtime):
    state = runtime.allocate(2, LONGEST)
    with pytest.raises(ValueError, match="65 tokens of a row are to be verified; at most 64 can"):
        runtime.verify(state, [Row(1, 0, [1] * 65)])


def test_the_runtime_has_all_of_the_interface(runtime):
    members = {name for name in (*Runtime.__annotations__, *vars(Runtime)) if not name.startswith("_")}
    assert members <= set(dir(runtime))
    assert set(runtime.cannot) == ({"decode"} if runtime.model.is_fused else {"decode", "adapters"})
    require(runtime, "verify")
    with pytest.raises(UserError, match="brings the logits of all steps to the host"):
        runtime.decode(runtime.allocate(1, 10), [Row(1, 3, [5])])


def test_a_verification_without_a_commit_leaves_nothing(runtime, uncut):
    """Its slot may go to another sequence, and its own sequence may go on."""
    tokens = streams(runtime.config.vocab_size, SEQUENCES)
    state = runtime.allocate(2, LONGEST)
    poison(state)
    runtime.step(state, [Row(1, 0, tokens[0][:20])])
    runtime.verify(state, [Row(1, 20, [7] * 5)])
    for start, stop, slot, number in ((20, 40, 1, 0), (0, 30, 1, 2)):
        logits = runtime.step(state, [Row(slot, start, tokens[number][start:stop])])
        assert (logits[0] - uncut[number][stop - 1]).abs().max() <= 1e-5
