"""The sequence that a text continues is found without its id."""

import numpy as np

from granite4_neuron.vllm.cpu.draft_model import Sequences


def text(*tokens):
    return np.array(tokens, dtype=np.int32)


def test_texts_keep_their_ids_in_any_order():
    sequences = Sequences(4, forget=None)
    one, two = sequences.identify([text(1, 2), text(3)])
    assert one != two
    assert sequences.identify([text(3, 4), text(1, 2, 5)]) == [two, one]


def test_equal_texts_are_two_sequences():
    sequences = Sequences(4, forget=None)
    ids = sequences.identify([text(1), text(1)])
    assert len(set(ids)) == 2
    assert set(sequences.identify([text(1, 2), text(1, 3)])) == set(ids)


def test_another_text_is_another_sequence_and_the_oldest_is_forgotten():
    forgotten = []
    sequences = Sequences(2, forgotten.append)
    one, two = sequences.identify([text(1), text(2)])
    assert sequences.identify([text(2, 2)]) == [two]
    (three,) = sequences.identify([text(9, 9)])
    assert three not in (one, two) and forgotten == [one]


def test_a_text_continues_the_sequence_with_the_longest_common_beginning():
    sequences = Sequences(4, forget=None)
    short, long = sequences.identify([text(1), text(1, 2)])
    assert sequences.identify([text(1, 2, 3)]) == [long]
    assert sequences.identify([text(1, 7)]) == [short]
