"""The places where prompts may be cut: the pieces up to such a place do not depend on the prompt's length."""

import json

import pytest

from granite4_neuron.runtime.prompt_cuts import (
    ANYWHERE,
    Anywhere,
    Multiples,
    Pieces,
    as_json,
    from_json,
    pieces,
)

BUCKETS = [(128, 512), (128, 512, 2048), (16, 64), (7,), (64, 100), (3, 50, 51, 52)]
ALL = [ANYWHERE, Anywhere(False), Multiples(128), *map(Pieces, BUCKETS)]


@pytest.mark.parametrize("buckets", BUCKETS, ids=str)
def test_pieces_before_and_after_a_place_are_those_of_the_whole_prompt(buckets):
    cuts = Pieces(buckets)
    for length in range(1, 2 * buckets[-1] + 200):
        whole, place = pieces(length, buckets), 0
        for number, piece in enumerate(whole[:-1], start=1):
            place += piece
            assert cuts.last(place, length) == place
            assert pieces(place, buckets) == whole[:number] and pieces(length - place, buckets) == whole[number:]


@pytest.mark.parametrize("cuts", ALL, ids=str)
def test_the_last_place(cuts):
    for length in (1, 100, 128, 640, 700, 2500):
        places = sorted({cuts.last(most, length) for most in range(length + 1)})
        assert places[0] == 0 and places[-1] == length == cuts.last(length + 1, length)
        for most in range(0, length + 1, 7):
            assert cuts.last(most, length) == max(place for place in places if place <= most)


def test_longer_prompts_may_lack_a_place_of_shorter_ones():
    cuts = Pieces((128, 512))
    assert [cuts.last(640, length) for length in (640, 641, 1100)] == [640, 512, 512]
    assert Multiples(128).last(700, 1100) == 640 and Multiples(128).last(700, 700) == 700


@pytest.mark.parametrize("cuts", ALL, ids=str)
def test_a_shared_place_is_one_of_all_longer_prompts(cuts):
    for place in (*range(1, 300), 512, 640, 2048, 2500):
        longer = range(place + 1, place + 4500 if place % 64 == 0 else place + 150)
        assert cuts.is_shared(place) == all(cuts.last(place, length) == place for length in longer)


def test_places_are_written_to_a_file_and_read_back():
    for cuts in ALL:
        assert from_json(json.loads(json.dumps(as_json(cuts)))) == cuts
    for wrong in (None, [], ["multiples", 0], ["pieces"], ["pieces", 1.5], ["pieces", True], ["anywhere", 1], ["x", 1]):
        with pytest.raises(ValueError):
            from_json(wrong)
