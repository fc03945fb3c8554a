"""A token's logits have the same bits whatever else is in a step: in any slot, with any neighbours, and in a
verification of several tokens.

These tests need a GPU, because Triton's interpreter computes other bits. test/unit/devices/cuda checks single kernels
in the interpreter.
"""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import published_config
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import small_config
from test.support.quantizing import GPU_FORMATS, quantize_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here, whose bits are compared")
LAYERS = {
    "h-350m": ("mamba", "attention", "mamba") * 2,
    "h-tiny": ("mamba", "attention", "mamba") * 2,
    "nemotron-3-nano-4b": ("mamba", "mlp", "attention") * 2,
    "nemotron-3-nano-30b-a3b": ("mamba", "moe", "attention") * 2,
}
TOKENS, MAX_LENGTH, LONG = 6, 3000, 1500  # LONG is beyond the shortest bucket of the cache


@pytest.fixture(
    scope="module",
    params=[
        *((name, dtype, torch.float32, None) for name in LAYERS for dtype in (torch.bfloat16, torch.float32)),
        ("h-350m", torch.bfloat16, torch.bfloat16, None),
        *(("h-tiny", torch.bfloat16, torch.float32, format) for format in GPU_FORMATS),
    ],
    ids=str,
)
def runtime(request):
    name, dtype, state_dtype, format = request.param
    config = dataclasses.replace(published_config(name), num_hidden_layers=6, layer_types=LAYERS[name])
    model = random_model(config, dtype=dtype)
    if format is not None:
        quantize_model(model, format)
    options = dict(device="cuda", batch_invariant=True, state_dtype=state_dtype)
    return TorchRuntime(model, GenerationConfig(), **options)


@pytest.fixture(scope="module")
def expected(runtime):
    """Return the logits of each of 80 sequences' tokens, and its recurrent state after them."""
    return decoded(runtime, 80, range(80))


def start_of(sequence):
    return 300 + 7 * sequence


def token_of(runtime, sequence, number):
    return (1000 * sequence + 17 * number + 3) % runtime.config.vocab_size


def begin(state, slot, sequence):
    """Fill a slot with random numbers in place of a prompt."""
    generator = torch.Generator("cuda").manual_seed(sequence)
    for view in state.slot_views(slot).values():
        view.copy_(0.3 * torch.randn(view.shape, generator=generator, device="cuda"))


def recurrent(state, slot):
    return {name: view.cpu() for name, view in state.slot_views(slot).items() if name.endswith("_state")}


def decoded(runtime, slots, sequences, long_slot=None):
    """Decode sequences in the first slots of a state, the one in long_slot far behind the others."""
    state = runtime.allocate(slots, MAX_LENGTH)
    places = list(enumerate(sequences, 1))
    for slot, sequence in places:
        begin(state, slot, sequence)
    logits = []
    for number in range(TOKENS):
        starts = {slot: LONG if slot == long_slot else start_of(sequence) for slot, sequence in places}
        rows = [Row(slot, starts[slot] + number, [token_of(runtime, sequence, number)]) for slot, sequence in places]
        logits.append(runtime.step(state, rows).clone())
    by_row = torch.stack(logits, 1)
    return {sequence: (by_row[slot - 1], recurrent(state, slot)) for slot, sequence in places if slot != long_slot}


def assert_same(outcomes, expected):
    for sequence, (logits, states) in outcomes.items():
        assert torch.equal(logits, expected[sequence][0])
        assert all(torch.equal(states[name], value) for name, value in expected[sequence][1].items())


@needs_gpu
class TestBits:
    @pytest.mark.parametrize("slots", [1, 2, 8, 32])
    def test_the_number_of_slots_changes_no_bits(self, slots, runtime, expected):
        assert_same(decoded(runtime, slots, range(slots)), expected)

    @pytest.mark.parametrize("slots", [8, 32, 80])
    def test_idle_slots_change_no_bits(self, slots, runtime, expected):
        assert_same(decoded(runtime, slots, [5]), expected)

    def test_other_slots_give_the_same_bits(self, runtime, expected):
        assert_same(decoded(runtime, 8, range(9, 1, -1)[:8]), expected)

    def test_a_neighbour_in_a_longer_cache_changes_no_bits(self, runtime, expected):
        assert_same(decoded(runtime, 8, range(8), long_slot=8), expected)

    @pytest.mark.parametrize("slots", [1, 8])
    @pytest.mark.parametrize("accepted", [(4, 2), (1, 3, 2)], ids=str)
    def test_verified_tokens_have_the_same_bits(self, accepted, slots, runtime, expected):
        state = runtime.allocate(slots, MAX_LENGTH)
        for slot in range(1, slots + 1):
            begin(state, slot, slot - 1)
        logits, done = [], 0
        for count in accepted:
            numbers = range(done, min(done + 4, TOKENS))
            rows = [
                Row(slot + 1, start_of(slot) + done, [token_of(runtime, slot, number) for number in numbers])
                for slot in range(slots)
            ]
            verification = runtime.verify(state, rows)
            logits.append(verification.logits[:, :count].clone())
            runtime.commit(state, verification, [count] * slots)
            done += count
        by_row = torch.cat(logits, 1)
        assert_same({slot: (by_row[slot], recurrent(state, slot + 1)) for slot in range(slots)}, expected)


def test_other_devices_refuse_it():
    with pytest.raises(UserError, match="batch_invariant is for a GPU"):
        TorchRuntime(random_model(small_config()), GenerationConfig(), batch_invariant=True)


@needs_gpu
def test_a_model_that_has_no_such_kernels_is_refused():
    model = random_model(small_config(mamba_proj_bias=True))
    with pytest.raises(UserError, match=r"batch_invariant is not for this model: .* take no biases of projections"):
        TorchRuntime(model, GenerationConfig(), device="cuda", batch_invariant=True)
