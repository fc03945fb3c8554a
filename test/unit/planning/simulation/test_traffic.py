"""Files of traffic: common tokens of prompts, and refusals."""

import json

import pytest

from granite4_neuron.engine.prefix.cache import common_length
from granite4_neuron.errors import UserError
from granite4_neuron.planning.simulation.lengths import Lengths
from granite4_neuron.planning.simulation.traffic import at_rate, poisson, read_traffic

REQUEST = {"arrival": 0, "prompt_tokens": 10, "answer_tokens": 4}
MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [5, 6, 7]}


@pytest.fixture
def read(tmp_path):
    def read(*records):
        file = tmp_path / "traffic.jsonl"
        file.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
        return read_traffic(file)

    return read


def shared(one, other):
    return common_length(one.tokens(), other.tokens())


def test_common_tokens_of_prompts(read):
    prefix = dict(prefix="system", prefix_tokens=6)
    first, second, other, single, again = read(
        REQUEST | prefix | dict(conversation="a"),
        # 10 tokens, an answer of 4, and 6 new ones
        REQUEST | prefix | dict(conversation="a", arrival=3, prompt_tokens=20),
        REQUEST | prefix | dict(conversation=7, arrival=4),
        REQUEST | dict(arrival=5),
        # no longer than the conversation so far: it begins again, with the prefix
        REQUEST | prefix | dict(conversation="a", arrival=6, prompt_tokens=24),
    )
    assert [len(each.tokens()) for each in (first, second, other, again)] == [10, 20, 10, 24]
    assert second.tokens()[:14] == [*first.tokens(), 0, 0, 0, 0] and second.tokens()[14] != 0
    assert [shared(first, second), shared(first, other), shared(first, single), shared(second, again)] == [10, 6, 0, 6]
    assert first.conversation == second.conversation != other.conversation and single.conversation is None


def test_order_and_rate(read):
    late, early = REQUEST | dict(arrival=8.5), REQUEST | dict(arrival=2, prompt_tokens=3)
    arrivals = read(late, "", early)
    assert [(each.time, each.prompt) for each in arrivals] == [(2, 3), (8.5, 10)]
    assert [each.time for each in at_rate(arrivals, 2)] == [1, 4.25]


def test_mooncakes_format(read):
    # Hashes stand for blocks of 512 tokens; the last block is shorter.
    one, other = read(MOONCAKE, MOONCAKE | dict(timestamp=2000, input_length=1100, hash_ids=[5, 6, 9]))
    assert (one.time, one.prompt, one.answer, len(one.tokens())) == (1.5, 1030, 7, 1030)
    assert shared(one, other) == 1024


def test_poisson_arrivals_at_a_rate():
    arrivals = poisson(2.0, Lengths.parse("uniform:5:30"), Lengths.parse("8"), 2000, prefix_tokens=12)
    assert arrivals == poisson(2.0, Lengths.parse("uniform:5:30"), Lengths.parse("8"), 2000, prefix_tokens=12)
    assert arrivals[-1].time == pytest.approx(1000, rel=0.1) and {each.answer for each in arrivals} == {8}
    assert {each.prompt for each in arrivals} == set(range(13, 31))  # at least a token of its own
    assert {shared(arrivals[0], each) for each in arrivals[1:50]} == {12}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        (dict(arrival=1), "line 2 has no prompt_tokens; a request has arrival, prompt_tokens, answer_tokens"),
        (REQUEST | dict(arrival=-1), "arrival is -1, and must be a number of at least 0"),
        (REQUEST | dict(arrival=10**400), ", and must be a number of at least 0"),
        (REQUEST | dict(prompt_tokens=0), "prompt_tokens is 0, and must be a whole number from 1 to"),
        (REQUEST | dict(answer_tokens=True), "answer_tokens is True, and must be a whole number"),
        (REQUEST | dict(prefix="x"), "prefix and prefix_tokens belong together"),
        (REQUEST | dict(prefix="x", prefix_tokens=11), "prefix_tokens are 11, more than prompt_tokens"),
        (REQUEST | dict(conversation=[]), "conversation is [], and must be a string or a whole number"),
        (REQUEST | dict(user="x"), "has user; a request has arrival"),
        (MOONCAKE | dict(hash_ids=[5]), "a prompt of 1,030 tokens has 3 blocks of 512, and hash_ids has 1"),
    ],
)
def test_refusals(read, line, message):
    with pytest.raises(UserError) as refusal:
        read(REQUEST, line)
    assert message in str(refusal.value)


def test_a_file_without_requests(read):
    with pytest.raises(UserError, match="has no requests"):
        read("")
