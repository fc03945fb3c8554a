"""The cuts of a prompt, and those at which a prefix cache keeps a snapshot."""

from dataclasses import replace

import pytest

from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.request import Request
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.text import TextStream
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, Multiples

CHUNK = 512


def sequence_of(length, stored, snapshots_at=None, cuts=ANYWHERE):
    request = Request([1] * length, snapshots_at=snapshots_at)
    sequence = RunningSequence(0, request, length + 1, None, AppliedAdapter.of(None, request.tokens, {}), cuts)
    sequence.stored = stored
    return sequence


@pytest.mark.parametrize(
    ("stored", "interval", "cuts"),
    [
        (0, 512, [512, 1024, 1500]),
        (600, 512, [1024, 1500]),
        (1000, 512, [1500]),  # the rest fits into one step
        (600, 1024, [1024, 1500]),
        (0, 1024, [512, 1024, 1500]),
        (0, None, [512, 1024, 1500]),
    ],
)
def test_the_next_snapshot_is_predicted(stored, interval, cuts):
    sequence = sequence_of(1500, stored)
    foretold = sequence.next_kept(interval, CHUNK)
    reached, kept = [], []
    while sequence.is_prompt:
        sequence.stored = sequence.next_cut(CHUNK)
        reached.append(sequence.stored)
        if sequence.is_kept(interval):
            kept.append(sequence.stored)
    assert reached == cuts
    assert kept[0] == foretold


def test_each_piece_of_a_prompt_is_one():
    """Also the last one, of one token."""
    sequence = sequence_of(CHUNK + 1, CHUNK)
    row = sequence.next_row(sequence.next_cut(CHUNK))
    assert row.tokens == [1] and row.is_prompt


def test_requested_snapshots_are_cuts():
    sequence = sequence_of(1500, 600, snapshots_at=[100, 700])
    assert sequence.next_cut(CHUNK) == 700
    assert sequence.next_kept(None, CHUNK) == 700


def test_with_fixed_places_cuts_are_there_and_answers_are_not_kept():
    sequence = sequence_of(1500, 0, snapshots_at=[100, 700], cuts=Multiples(128))
    assert sequence.cuts == {640}  # there is no place up to 100
    assert sequence.is_kept(512, 512) and sequence.is_kept(None, 1500)
    assert not sequence.is_kept(512, 1536)
    sequence.request = replace(sequence.request, prompt_logprobs=0)
    assert not sequence.is_kept(512, 512)
    assert sequence_of(1500, 0).is_kept(512, 1536)


@pytest.mark.parametrize(("stored", "drafts"), [(0, 15), (10, 5), (14, 1), (15, 0), (16, 15), (31, 0)])
def test_drafts_end_at_the_next_snapshot(stored, drafts):
    """The step runs the last chosen token too."""
    sequence = sequence_of(stored + 1, stored)
    sequence.limit = 1000
    assert sequence.most_drafts(99, 16) == drafts and sequence.stored + 1 + drafts <= stored // 16 * 16 + 16
    assert sequence.most_drafts(99, None) == 99 and sequence.most_drafts(2, 16) == min(2, drafts)
    assert sequence.most_forced(100, 16) == drafts and sequence.most_forced(3, 16) == min(2, drafts)


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_stop_string_completed_within_min_tokens_is_text(texting, min_tokens, ends):
    _, tokenizer = texting
    first, second = tokenizer.encode("ab", add_special_tokens=False)
    request = Request([1], 9, stop=["b"], min_tokens=min_tokens)
    text = TextStream(tokenizer, request.stop)
    sequence = RunningSequence(0, request, 10, text, AppliedAdapter.of(None, request.tokens, {}))
    outputs = [sequence.append(token) for token in (first, second)]
    assert outputs[1].finish_reason == ("stop" if ends else None)
    assert [output.stop_string for output in outputs] == [None, "b" if ends else None]
    assert "".join(output.text for output in outputs) == ("a" if ends else "ab")
