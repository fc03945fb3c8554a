"""Which prompts are cut before their ends."""

import pytest

from granite4_neuron.engine.prefix.end_cuts import EndCuts
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, Multiples, Pieces


@pytest.mark.parametrize(
    ("cuts", "places"),
    [
        (Multiples(8), {30: {24}, 33: {32}, 16: set(), 7: set()}),
        (Pieces((4, 16)), {30: {16}, 16: set(), 15: set()}),
        (ANYWHERE, {30: set(), 7: set()}),
    ],
    ids=str,
)
def test_places(cuts, places):
    """There is none where longer prompts may continue from the end, nor in a prompt without a cut point."""
    assert {length: EndCuts(cuts).of(length, 0, ()) for length in places} == places


@pytest.mark.parametrize(
    ("length", "shared", "ends", "is_of_use"),
    [
        (50, 30, (30,), True),  # it goes on from an earlier prompt's end
        (50, 30, (30, 16), True),
        (50, 26, (0, 30), True),  # it leaves the earlier prompt after the place of its cut
        (30, 26, (30,), True),
        (50, 23, (0, 30), False),  # and before it
        (50, 32, (32,), False),  # where the earlier end is a cut point itself
        (30, 30, (30,), False),  # the same prompt again
        (50, 0, (0,), False),
        (50, 5, (7,), False),  # the earlier prompt had no place
    ],
)
def test_it_stops_until_a_prompt_shares(length, shared, ends, is_of_use):
    end_cuts = EndCuts(Multiples(8))
    assert [end_cuts.of(30, 0, (0,)) for _ in range(10)] == 8 * [{24}] + 2 * [set()]
    end_cuts.of(length, shared, ends)
    assert end_cuts.of(30, 0, (0,)) == ({24} if is_of_use else set())
