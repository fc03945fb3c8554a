"""The requirements of recurrent state on batching, speculation and prefix caching, each with a fault that breaks it.

R1 to R17 number a list of faults that were found in other systems. Three of them have no counterpart here:

* R4, a table of destinations by row and token, and R12, a window widened by the drafts: a verification writes no state,
  it keeps inputs; a row has one slot, and a window has the d_conv - 1 columns that the weights say.
  (TestNoCounterpart.)
* R14, a block that holds two block ends in one step: there are no blocks. A snapshot is taken where somebody asks for
  it, between two steps, and of the exact number of tokens that were committed.
"""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu import runtime as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.step import NullSlotStep, step_of
from granite4_neuron.ops import mamba_operators
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState, MambaState
from test.support.checkpoints import DENSE, small_config
from test.support.verification import (
    LONGEST,
    Round,
    Stand,
    changed,
    copies,
    number_of,
    poison_behind,
    streams,
    verified_error,
)

pytestmark = pytest.mark.versions

TOLERANCE = 1e-5
SEEN = 1e-2  # every planted fault has a larger effect
SEQUENCES = 3


@pytest.fixture(scope="module")
def model():
    return random_model(small_config(**DENSE, layer_types=("mamba", "attention", "mamba")))


@pytest.fixture
def runtime(model):
    """Return a runtime of plain torch, in which faults can be planted."""
    return CPURuntime(model, GenerationConfig(), cpu_kernels="torch")


@pytest.fixture(scope="module")
def tokens(model):
    return streams(model.config.vocab_size, SEQUENCES)


@pytest.fixture(scope="module")
def uncut(model, tokens):
    runtime = CPURuntime(model, GenerationConfig(), cpu_kernels="torch")
    rows = [Row(slot, 0, tokens[slot - 1]) for slot in range(1, SEQUENCES + 1)]
    return runtime.step(runtime.allocate(SEQUENCES, LONGEST), rows, all_logits=True)


@pytest.fixture
def stand(runtime, tokens, uncut):
    return Stand(runtime, tokens, uncut)


def verified(stand: Stand, *rounds: Round, prefixes=(20, 1, 2)) -> float:
    return verified_error(stand.runtime, stand.uncut, prefixes, rounds)


PARTIAL = Round((5, 4, 5), (2, 3, 1))


# R1, R15: the convolution's window.


def short_steps(stand: Stand) -> float:
    """Run steps of fewer tokens than the window has, one and two at a time."""
    state, done = stand.begin(1, 2, 3), [1, 2, 3]
    errors = []
    for count in (1, 2, 1, 1, 2):
        rows = [stand.row(slot, done[slot - 1], done[slot - 1] + count) for slot in (1, 2, 3)]
        errors.append(stand.error(state, *rows))
        done = [length + count for length in done]
    return max(errors)


def plant_convolution(patch, window: Callable) -> None:
    """Replace the new window by `window(x, old, new, lengths)`."""
    original = mamba_operators.causal_conv1d

    def convolve(x, conv_state, weight, bias, lengths):
        old = conv_state.clone()
        y, new = original(x, conv_state, weight, bias, lengths)
        return y, window(x, old, new, lengths)

    for name in ("CHUNKED", "SINGLE_TOKEN"):
        patch.setattr(mamba_operators, name, dataclasses.replace(getattr(mamba_operators, name), convolve=convolve))


def tokens_enter_twice(stand, patch):
    def window(x, old, new, lengths):
        again = torch.cat([new, x.transpose(1, 2)], dim=-1)
        return torch.stack([row[:, n : n + new.shape[-1]] for row, n in zip(again, lengths.tolist(), strict=True)])

    rebind(stand, patch, window)


def window_shifted_over_itself(stand, patch):
    """Leave the window as an in-place copy from the newest to the oldest would."""

    def window(x, old, new, lengths):
        return new[..., -1:].expand_as(new)

    rebind(stand, patch, window)


def rebind(stand, patch, window):
    """Bind the runtime's model to operators with that window."""
    plant_convolution(patch, window)
    kernels = dict(mamba_prefill=mamba_operators.CHUNKED, mamba_decode=mamba_operators.SINGLE_TOKEN)
    stand.runtime.model = stand.runtime.model.bind(dataclasses.replace(stand.runtime.model.operators, **kernels))


# R2, R17: rows without tokens.


def idle_rows(stand: Stand) -> float:
    """Run a row beside two idle ones. One's slot belongs to another sequence, and the other's slot holds NaN."""
    state = stand.begin(20, 20)
    before = copies(state)
    ids = torch.tensor([stand.tokens[0][20:23], [5] * 3, [6] * 3])
    positions = torch.tensor([[20], [20], [7]]) + torch.arange(3)
    with torch.inference_mode():
        step = step_of(positions, torch.tensor([3, 0, 0]), torch.tensor([1, 2, 3]), state)
        logits = stand.runtime.model(ids, step, state)
    if not torch.isfinite(logits).all() or changed(before, state, 2, 3, NULL_SLOT):
        return math.inf
    return number_of(logits[0] - stand.uncut[0][22])


def idle_rows_write(stand, patch):
    def write(step, state, rows):
        state.index_copy_(0, step.slots.where(step.lengths > 0, in_order(step)), rows)

    patch.setattr(NullSlotStep, "_write", write)


def idle_rows_read_their_slot(stand, patch):
    def read(step, state):
        return state.index_select(0, step.read_slots.where(step.lengths > 0, in_order(step)))

    patch.setattr(NullSlotStep, "read", read)


def in_order(step):
    return torch.arange(len(step.slots)) + 1


# R3, R5, R7, R8, R13: the tokens that a verification reads, and the part of it that is kept.


def partial_acceptance(stand: Stand) -> float:
    return verified(stand, PARTIAL, Round((3, 3, 3), (3, 0, 2)))


def everything_is_committed(stand, patch):
    patch.setattr(cpu, "accepted_rows", lambda rows, accepted: rows)


def nothing_is_committed(stand, patch):
    patch.setattr(CPURuntime, "commit", lambda *arguments: None)


def tokens_start_from_the_committed_state(stand, patch):
    """Verify each token of a row as if it were the row's first one."""
    original = CPURuntime.verify

    def verify(self, state, rows):
        whole = original(self, state, rows)
        logits = whole.logits.clone()
        for i, row in enumerate(rows):
            for t, token in enumerate(row.tokens):
                logits[i, t] = original(self, state, [Row(row.slot, row.start, [token])]).logits[0, 0]
        original(self, state, rows)
        return dataclasses.replace(whole, logits=logits)

    patch.setattr(CPURuntime, "verify", verify)


def written_elsewhere_than_read(stand, patch):
    """Commit each row to the slot of the next."""
    original = cpu.accepted_rows

    def accepted_rows(rows, accepted):
        kept = original(rows, accepted)
        return [dataclasses.replace(row, slot=other.slot) for row, other in zip(kept, kept[1:] + kept[:1], strict=True)]

    patch.setattr(cpu, "accepted_rows", accepted_rows)


def window_of_all_tokens(stand, patch):
    """Keep the SSM state of the accepted tokens and the window of all tokens."""
    original = HybridForCausalLM.advance

    def advance(self, kept_inputs, step, state):
        all_tokens = torch.full_like(step.lengths, step.positions.shape[1])
        original(self, kept_inputs, step_of(step.positions, all_tokens, step.slots, state), state)
        windows = [layer.conv_state.clone() for layer in state.layers if isinstance(layer, MambaState)]
        for old, new in zip(advance.before, state.tensors(), strict=True):
            new.copy_(old)
        original(self, kept_inputs, step, state)
        for layer in state.layers:
            if isinstance(layer, MambaState):
                layer.conv_state.copy_(windows.pop(0))

    def commit(self, state, *arguments, original=CPURuntime.commit):
        advance.before = copies(state)
        original(self, state, *arguments)

    patch.setattr(HybridForCausalLM, "advance", advance)
    patch.setattr(CPURuntime, "commit", commit)


def accepted_counts_of_another_row(stand, patch):
    original = cpu.accepted_rows
    patch.setattr(cpu, "accepted_rows", lambda rows, accepted: original(rows, [accepted[-1]] * len(accepted)))


# R9, R11: state that is copied to another slot and goes on there.


def copied(stand: Stand) -> float:
    state = stand.begin(20, 30)
    stand.runtime.copy(state, 1, 3, 20)
    copy = stand.error(state, stand.row(3, 20, 25, number=1), number=1)
    return max(copy, stand.error(state, stand.row(1, 20, 30)))


def one_kind_of_state_is_copied(stand, patch):
    def copy(self, source, destination, length):
        for layer in self.layers:
            for field, tensor in vars(layer).items():
                if field != "conv_state":
                    tensor[destination] = tensor[source]

    patch.setattr(HybridState, "copy", copy)


def state_is_moved(stand, patch):
    original = HybridState.copy

    def copy(self, source, destination, length):
        original(self, source, destination, length)
        for tensor in self.tensors():
            tensor[source] = 0.0

    patch.setattr(HybridState, "copy", copy)


# R10: a snapshot at an exact number of tokens, inside the tokens that were verified.


def snapshot_within_accepted_tokens(stand: Stand) -> float:
    """Take a snapshot of 22 tokens where 24 are accepted. The sequence goes on, and another starts from it."""
    state = stand.begin(20)
    verification = stand.runtime.verify(state, [stand.row(1, 20, 25)])
    stand.runtime.commit(state, verification, [2])
    snapshot = stand.runtime.snapshot(state, 1, 22)
    rest = stand.error(state, stand.row(1, 22, 24))
    stand.runtime.restore(state, [snapshot], 2)
    poison_behind(state, [24, 22])
    return max(rest, stand.error(state, stand.row(2, 22, 40, number=1), number=1))


def snapshot_of_more_tokens_than_it_says(stand, patch):
    original = CPURuntime.commit
    patch.setattr(CPURuntime, "commit", lambda self, state, verification, _: original(self, state, verification, [4]))


# R16: slots that are used again, rows in another order.


def used_again(stand: Stand) -> float:
    state = stand.begin(20, 30, 10)
    errors = [stand.error(state, stand.row(2, 0, 5, number=1), number=1)]
    errors.append(stand.error(state, stand.row(3, 10, 12), stand.row(1, 20, 23)))
    errors.append(stand.error(state, stand.row(1, 23, 24), stand.row(3, 12, 13)))
    stand.runtime.verify(state, [stand.row(1, 24, 28)])  # cancelled before anything is committed
    errors.append(stand.error(state, stand.row(1, 0, 9, number=2), number=2))
    return max(errors)


def leftovers_are_read(stand, patch):
    patch.setattr(NullSlotStep, "_read_slots", lambda step: step.slots)


def state_goes_with_the_row(stand, patch):
    """Read the state by the row's place in the batch, not by its slot."""

    def read_slots(step):
        return in_order(step).where(step.positions[:, 0] > 0, NULL_SLOT)

    patch.setattr(NullSlotStep, "_read_slots", read_slots)


REQUIREMENTS = {
    "R1 a token enters the window once": (short_steps, tokens_enter_twice),
    "R2 padding rows touch nothing": (idle_rows, idle_rows_write),
    "R3 the state after each verified token": (partial_acceptance, everything_is_committed),
    "R3 commit does something": (partial_acceptance, nothing_is_committed),
    "R5 each token goes on from the one before": (partial_acceptance, tokens_start_from_the_committed_state),
    "R7 written where the next step reads": (partial_acceptance, written_elsewhere_than_read),
    "R8 the counts are those that were accepted": (partial_acceptance, accepted_counts_of_another_row),
    "R9 every state moves": (copied, one_kind_of_state_is_copied),
    "R10 a snapshot is of its exact tokens": (snapshot_within_accepted_tokens, snapshot_of_more_tokens_than_it_says),
    "R11 the source does not change": (copied, state_is_moved),
    "R13 the window is that of the accepted tokens": (partial_acceptance, window_of_all_tokens),
    "R15 a shifted window is not overwritten": (short_steps, window_shifted_over_itself),
    "R16 a new sequence starts from zeros": (used_again, leftovers_are_read),
    "R16 state moves with the slot": (used_again, state_goes_with_the_row),
    "R17 idle rows stay finite": (idle_rows, idle_rows_read_their_slot),
}
SCENARIOS = list(dict.fromkeys(scenario for scenario, _ in REQUIREMENTS.values()))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_holds(scenario, kernels, model, tokens, uncut):
    runtime = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels)
    assert scenario(Stand(runtime, tokens, uncut)) <= TOLERANCE


@pytest.mark.parametrize("scenario, fault", REQUIREMENTS.values(), ids=REQUIREMENTS.keys())
def test_the_fault_is_detected(scenario, fault, stand, monkeypatch):
    fault(stand, monkeypatch)
    assert scenario(stand) >= SEEN


class TestNoCounterpart:
    def test_a_verification_needs_no_room_in_the_state(self, runtime, stand):
        """R4 and R12: state is as wide as the weights say, and a verification writes none of it."""
        state = stand.begin(20)
        shapes = [tensor.shape for tensor in state.tensors()]
        verification = runtime.verify(state, [stand.row(1, 20, 28)])
        width = runtime.config.mamba_d_conv - 1
        assert all(layer.conv_state.shape[-1] == width for layer in state.layers if isinstance(layer, MambaState))
        assert [tensor.shape for tensor in state.tensors()] == shapes
        heads, channels = runtime.config.mamba_n_heads, runtime.config.rank_dimensions().mamba_conv_dim
        assert [inputs.shape for inputs in verification.kept_inputs] == [(1, 8, channels + heads)] * 2
