"""Prompts from an iterator, in any number."""

import itertools
import pickle

import pytest

from granite4_neuron import GeneratedText, UserError, chat, generate
from granite4_neuron.engine import PrefixCache
from granite4_neuron.generation.texts import LOOK_AHEAD

SAMPLED = dict(max_tokens=3, ignore_eos=True, temperature=1.0, seed=3)


class Silent:
    """A drafter that proposes nothing and records which sequences have not ended."""

    def __init__(self):
        self.live = set()

    def propose(self, requests):
        self.live |= {request.id for request in requests}
        return [[] for _ in requests]

    def end(self, id):
        self.live.discard(id)


def test_texts_equal_those_of_a_list(texting):
    """Texts come in order, each with its own seed. Some prompts are too long for the first engine, and some fail."""
    prompts = [f"Number {number} " * (1 + 20 * (number == 100)) for number in range(150)]
    prompts[7], prompts[70], prompts[140] = "", "x" * 700, None
    expected = generate(*texting, [prompt or "" for prompt in prompts], **SAMPLED)
    texts = list(generate(*texting, iter(prompts), **SAMPLED))
    assert texts == expected
    assert [index for index, text in enumerate(texts) if text.error] == [7, 70, 140]
    assert texts[70].error == expected[70].error and texts[140].error.startswith("prompt 141 is of type NoneType")
    assert {text.finish_reason for text in texts} == {"length", "error"}


def test_prompts_are_read_ahead_up_to_a_limit(texting):
    read = itertools.count()
    texts = generate(*texting, ([1 + next(read) % 200] for _ in itertools.count()), max_tokens=1, ignore_eos=True)
    for given, _ in zip(range(300), texts, strict=False):
        ahead = read.__reduce__()[1][0] - given
        assert 0 < ahead <= LOOK_AHEAD
    texts.close()


def test_closing_the_iterator_ends_all_sequences(texting):
    """Shared prefixes are computed once until then."""
    cache = PrefixCache(texting[0], 2**24, None)
    shared = "A beginning that all of them share, long enough for a snapshot, and then "
    prompts = [shared + "x" * 510, *(shared + each for each in "abcdefgh")]  # the first soon has no more room
    options, drafter = dict(max_tokens=200, ignore_eos=True), Silent()
    texts = generate(*texting, iter(prompts), prefix_cache=cache, drafter=drafter, **options)
    first = next(texts)
    assert cache.stats.hit_tokens and cache.stats.in_use and drafter.live
    texts.close()
    assert cache.stats.in_use == 0 and not drafter.live
    assert first == generate(*texting, prompts[0], **options)


def test_conversations(texting):
    questions = ["What?", [dict(role="user", content="Why?")]]
    assert list(chat(*texting, iter(questions), **SAMPLED)) == chat(*texting, questions, **SAMPLED)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(temperature=-1), "temperature"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(min_tokens=9, max_tokens=3), "min_tokens is 9"),
        (dict(adapter="none"), "none"),
        (dict(adapter=["a"]), "prompts of an iterator share one adapter"),
        (dict(progress=print), "progress is for prompts whose number is known"),
        (dict(prefix_cache=5), "prefix_cache is of type int"),
    ],
)
def test_options_are_checked_at_once(texting, options, message):
    with pytest.raises(UserError, match=message):
        generate(*texting, iter("a"), **options)


def test_a_text_keeps_its_finish_reason_when_pickled():
    text = pickle.loads(pickle.dumps(GeneratedText("a", "error", "no.")))
    assert (text, text.finish_reason, text.error) == ("a", "error", "no.")
