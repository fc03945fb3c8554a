"""Where a prompt is cut, and at which of the cuts a prefix cache keeps a snapshot."""

import pytest

from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.request import Request
from granite4_neuron.engine.sequence import RunningSequence

CHUNK = 512


def sequence_of(length, stored, snapshots_at=None):
    request = Request([1] * length, snapshots_at=snapshots_at)
    sequence = RunningSequence(0, request, length + 1, None, AppliedAdapter.of(None, request.tokens, {}))
    sequence.stored = stored
    return sequence


@pytest.mark.parametrize(
    ("stored", "interval", "is_exact", "cuts"),
    [
        (0, 512, False, [512, 1024, 1500]),
        (0, 512, True, [512, 1024, 1500]),
        (600, 512, False, [1024, 1500]),
        (600, 512, True, [1024, 1500]),
        (1000, 512, False, [1024, 1500]),
        (1000, 512, True, [1500]),  # what is left fits into one step
        (600, 1024, True, [1024, 1500]),
        (0, 1024, True, [512, 1024, 1500]),
        (0, None, True, [512, 1024, 1500]),
    ],
)
def test_a_snapshot_is_foretold_where_it_will_be_kept(stored, interval, is_exact, cuts):
    sequence = sequence_of(1500, stored)
    foretold = sequence.next_kept(interval, CHUNK, is_exact)
    reached, kept = [], []
    while sequence.is_prompt:
        sequence.stored = sequence.next_cut(CHUNK, is_exact)
        reached.append(sequence.stored)
        if sequence.is_kept(interval):
            kept.append(sequence.stored)
    assert reached == cuts
    assert kept[0] == foretold


def test_requested_snapshots_are_cuts():
    sequence = sequence_of(1500, 600, snapshots_at=[100, 700])
    assert sequence.next_cut(CHUNK, True) == 700
    assert sequence.next_kept(None, CHUNK, True) == 700
