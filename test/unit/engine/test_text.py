"""Text that comes piece by piece equals the text of all tokens."""

import random

import pytest

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.engine.text import SearchedTexts, TextStream, possible_start

WORD = "日本"  # of three bytes each


@pytest.fixture(scope="module")
def tokenizer():
    folder = bundled_checkpoint()
    return open_checkpoint(folder).load_tokenizer()


@pytest.fixture(scope="module")
def ids(tokenizer):
    """Return a function that turns bytes into the tokens of single bytes."""
    named = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's mapping: the other bytes follow after 255
    others = [byte for byte in range(256) if byte not in named]
    character = {byte: chr(byte) for byte in named} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return lambda data: tokenizer.convert_tokens_to_ids([character[byte] for byte in data])


def text_of(tokenizer, tokens, prompt=(), stop=()):
    stream = TextStream(tokenizer, stop, prompt)
    text = ""
    for token in tokens:
        text += stream.add(token)
        if stream.stopped:
            break
    return text + stream.finish()


@pytest.mark.parametrize(
    "data",
    [
        "abc é 日本 🎉".encode(),
        WORD.encode()[:-1],
        WORD.encode()[:-2],
        WORD.encode()[1:],
        b"\xa9",
        b"\x82\xac",
        b"ab\xff\xff\xff",
        b"ab\xff\xffcd",
        b"\xe2\x82a",
        "🎉".encode()[:3],
        b"\x80" * 9 + "é".encode(),
        b"a" + b"\xe2\x82" * 7 + b"\xac",
        b"\xff" * 5 + "🎉".encode() * 2 + b"\xf0\x9f\x8e" * 3,
        "\N{REPLACEMENT CHARACTER}".encode(),
    ],
    ids=repr,
)
def test_all_pieces_are_the_whole(tokenizer, ids, data):
    tokens = ids(data)
    assert text_of(tokenizer, tokens) == tokenizer.decode(tokens) == data.decode(errors="replace")


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_prompt_that_ends_in_the_middle_of_a_character(tokenizer, ids, cut):
    """The stream returns the whole character that the prompt began, and no earlier character again."""
    tokens = ids(("ab" + WORD + "cd").encode())
    whole = 2 + cut // 3 * 3
    expected = ("ab" + WORD + "cd").encode()[whole:].decode()
    assert text_of(tokenizer, tokens[2 + cut :], prompt=tokens[: 2 + cut]) == expected


def test_what_is_no_character_is_not_read_again(tokenizer, ids):
    """The decoder gets back, with each token, those that have given no text."""
    draw, special, unknown = random.Random(0), tokenizer.all_special_ids[0], 10**6
    broken = [draw.choice([*ids(b"\x80\xbf\xc3\xe2\xf0\xff"), special, unknown]) for _ in range(500)]
    for tokens in (ids(b"\xe2\x82" * 250), [special] * 500, [unknown] * 500, broken):
        stream, text = TextStream(tokenizer, ()), ""
        for token in tokens:
            text += stream.add(token)
            assert len(stream._undecoded) <= 5
        assert text + stream.finish() == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_prompt_that_ends_with_a_replacement_character(tokenizer):
    prompt = tokenizer.encode("a\N{REPLACEMENT CHARACTER}", add_special_tokens=False)
    assert text_of(tokenizer, tokenizer.encode("bc", add_special_tokens=False), prompt) == "bc"
    assert text_of(tokenizer, [], prompt) == ""


def test_a_prompt_without_new_tokens(tokenizer, ids):
    assert text_of(tokenizer, [], prompt=ids(WORD.encode()[:4])) == ""


def test_a_stop_string_across_characters(tokenizer, ids):
    assert text_of(tokenizer, ids("a日本c".encode()), stop=("本",)) == "a日"


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_prompt_that_ends_within_a_character_of_four_bytes(tokenizer, ids, cut):
    tokens = ids("ab🎉cd".encode())
    assert text_of(tokenizer, tokens[2 + cut :], prompt=tokens[: 2 + cut]) == "🎉cd"


@pytest.mark.parametrize("stop", [("cd", "bcd"), ("bcd", "cd")], ids=repr)
def test_the_stop_string_that_begins_first(tokenizer, stop):
    """If one token completes two stop strings, the one that begins first wins, whatever their order in the list."""
    assert text_of(tokenizer, tokenizer.encode("abcd", add_special_tokens=False), stop=stop) == "a"
    stream = TextStream(tokenizer, [text + "!" for text in stop] + list(stop))
    for token in tokenizer.encode("abcd", add_special_tokens=False):
        stream.add(token)
    assert stream.stop_string == "bcd"


def test_a_stop_string_that_may_not_stop_can_begin_a_longer_one(texting):
    tokenizer = texting[1]
    stream = TextStream(tokenizer, ["b", "bcd"])
    tokens = tokenizer.encode("abcd", add_special_tokens=False)
    assert len(tokens) == 4
    text = stream.add(tokens[0]) + stream.add(tokens[1], may_stop=False) + stream.add(tokens[2])
    assert not stream.stopped and text == "a", "bcd may still come"
    assert text + stream.add(tokens[3]) == "a" and stream.stopped


def test_searched_texts_are_those_that_a_search_finds():
    draw = random.Random(0)
    for _ in range(300):
        texts = ["".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 5))]
        searched, place, past = SearchedTexts(texts), 0, ""
        for character in draw.choices("abc", k=30):
            place, past = searched.next_place(place, character), past + character
            assert searched.begun[place] == possible_start(past, texts)
            ends = [text for text in texts if past.endswith(text)]
            number = searched.found[place]
            assert (None if number is None else texts[number]) == max(ends, key=len, default=None)


def test_a_long_stop_string_costs_a_step_for_each_character():
    class Counted(SearchedTexts):
        steps = 0

        def next_place(self, place, character):
            class Places(list):
                def __getitem__(places, index):
                    Counted.steps += 1
                    return list.__getitem__(places, index)

            if not isinstance(self._shorter, Places):
                self._shorter = Places(self._shorter)
            return super().next_place(place, character)

    searched, place = Counted(["a" * 5000 + "b", "a" * 4000 + "c"]), 0
    Counted.steps = 0
    for character in ("a" * 4999 + "d") * 3:
        place = searched.next_place(place, character)
    assert Counted.steps <= 15_000
