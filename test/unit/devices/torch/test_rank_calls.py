"""Messages between the ranks of a split model."""

import multiprocessing

import pytest
import torch

from granite4_neuron.devices.torch.rank_calls import Call, Refusal, from_bytes, result_or_refusal, to_bytes
from granite4_neuron.devices.torch.ranks import _make_call
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Verification
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Snapshot
from test.support.checkpoints import small_config


def new_state():
    return HybridState.allocate(small_config(), 1, 8, torch.float32, "cpu")


class Rank:
    """The runtime of a rank."""

    dtype, fingerprint = torch.bfloat16, Fingerprint.parse("b")

    def __init__(self):
        self.stepped = []

    def allocate(self, num_sequences):
        if num_sequences > 3:
            raise UserError("no room.")
        return new_state()

    def step(self, state):
        self.stepped.append(state)


def test_states_and_verifications_are_those_of_the_rank_that_is_called():
    ours, theirs = new_state(), new_state()
    rows = [Row(1, 0, [3, 4])]
    verifications = [Verification(rows, torch.zeros(1), ()) for _ in range(2)]
    call = Call("commit", [ours, verifications[0], [1], rows], 7, [2, 5], False)
    message = to_bytes(call, {2: ours, 5: verifications[0]})
    found = from_bytes(message, {2: theirs, 5: verifications[1]}, None)
    assert found.arguments[0] is theirs and found.arguments[1] is verifications[1]
    assert (found.name, found.arguments[2:], *found[2:]) == ("commit", [[1], rows], 7, [2, 5], False)


def test_a_snapshot_gets_the_fingerprint_of_its_rank():
    """The ranks' weights are not the same."""
    tensors = {"layers.0.ssm_state": torch.randn(2, 3), "layers.1.key": torch.randn(4).bfloat16()}
    sent = Snapshot(2, 6, tensors, torch.bfloat16, Fingerprint.parse("a"))
    [[got]] = from_bytes(to_bytes([[sent]], {}), {}, Rank)
    assert (got.start, got.length, got.dtype, got.fingerprint) == (2, 6, torch.bfloat16, Rank.fingerprint)
    assert got.tensors.keys() == tensors.keys()
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in tensors.items())


def test_a_state_of_another_runtime_is_refused():
    with pytest.raises(KeyError, match="this HybridState does not belong to this runtime"):
        to_bytes([new_state()], {2: new_state()})


def test_a_refusal_is_an_answer_and_other_errors_are_not():
    def failing(error):
        raise error

    assert result_or_refusal(failing, [UserError("no room.")]) == Refusal("no room.")
    assert from_bytes(to_bytes(Refusal("no room."), {}), {}, None) == Refusal("no room.")
    with pytest.raises(RuntimeError):
        result_or_refusal(failing, [RuntimeError()])


def test_a_rank_frees_states_that_rank_0_no_longer_holds():
    ours, theirs = multiprocessing.Pipe()
    rank, numbered, states = Rank(), {}, [new_state(), new_state()]

    def call(number, alive, answers, name, *arguments):
        message = to_bytes(Call(name, arguments, number, alive, answers), dict(enumerate(states)))
        _make_call(theirs, rank, message, numbered)
        return from_bytes(ours.recv_bytes(), {}, None) if ours.poll() else "no answer"

    assert call(0, [], True, "allocate", 1) is None and call(1, [0], True, "allocate", 2) is None
    first, second = numbered[0], numbered[1]
    assert call(2, [0, 1], False, "step", states[1]) == "no answer" and rank.stepped == [second]
    assert call(3, [0], True, "allocate", 4) == Refusal("no room.") and numbered == {0: first}
