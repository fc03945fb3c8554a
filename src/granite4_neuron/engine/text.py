"""Turns tokens into text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class TextStream:
    """The text of one growing sequence. It returns text once it is certain: whole characters, and no part of a possible
    stop string.

    All pieces together equal the tokenizer's text of all tokens; trailing bytes that are not a whole character become
    U+FFFD. A character that begins in the prompt and ends in the first tokens is returned whole.

    Args:
        tokenizer: a fast tokenizer, or None for no text.
        stop: strings that end the text; the text ends before the first of them.
        prompt: the tokens before the text.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None,
        stop: Sequence[str],
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._tokenizer: Tokenizer | None = None if tokenizer is None else tokenizer.backend_tokenizer
        self._skips_special = skip_special_tokens
        self._textless: Set[str] = _special_tokens(self._tokenizer) if skip_special_tokens else frozenset()
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._searched = _searched(tuple(stop))
        self._place = 0  # in what is searched
        self._held = ""
        self._undecoded: list[int] = []  # tokens that the decoder keeps until they make whole characters
        self.stop_string: str | None = None  # the one that ended the text
        for token in self._incomplete_end(prompt):
            self._text_of(token)
        self._of_prompt = len(self._undecoded)

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def add(self, token: int, may_stop: bool = True) -> str:
        """Add a token; return the text that is now certain, and set `stop_string` when one is complete.

        Without `may_stop`, a stop string that the token completes counts as text.
        """
        before, new = len(self._held), self._text_of(token)
        self._held += new
        found = []
        for end, character in enumerate(new, start=before + 1):
            self._place = self._searched.next_place(self._place, character)
            if (number := self._searched.found[self._place]) is not None:
                found.append((end - len(self._searched.texts[number]), number))
        if found and may_stop:
            first, number = min(found)
            self.stop_string, self._held = self._searched.texts[number], self._held[:first]
            return self.finish()
        return self._give_out(len(self._held) - self._searched.begun[self._place])

    def finish(self) -> str:
        """Return the text that was held back. Call it when no token follows."""
        if self._tokenizer is not None and len(self._undecoded) > self._of_prompt:
            self._held += self._decoded(self._undecoded)
        self._undecoded = []
        return self._give_out(len(self._held))

    def _text_of(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        spelled = self._tokenizer.id_to_token(token)
        if spelled is None or spelled in self._textless:
            return ""
        self._undecoded.append(token)
        text = self._decoder.step(self._tokenizer, token)
        if text is None:
            return self._broken_text() if len(self._undecoded) > _LONGEST_CHARACTER else ""
        self._undecoded, self._of_prompt = [], 0
        return text

    def _broken_text(self) -> str:
        """Return what is certain of a text that is no whole character yet, though it has the tokens of one. The decoder
        would keep these tokens, and read them again with each new one.
        """
        whole = self._decoded(self._undecoded)
        for number in range(1, _LONGEST_CHARACTER):
            certain, last = self._undecoded[:-number], self._undecoded[-number:]
            if (text := self._decoded(certain)) + self._decoded(last) == whole:
                self._decoder = DecodeStream(ids=last, skip_special_tokens=self._skips_special)
                self._undecoded, self._of_prompt = last, 0
                return text
        return ""

    def _decoded(self, tokens: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(list(tokens), skip_special_tokens=self._skips_special)

    def _incomplete_end(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the last tokens of a prompt that ends in the middle of a character; otherwise none."""
        if self._tokenizer is None:
            return ()
        for length in range(1, _LONGEST_CHARACTER):
            end = [int(token) for token in prompt[-length:]]
            text = self._tokenizer.decode(end, skip_special_tokens=True)
            before = self._tokenizer.decode([int(token) for token in prompt[-length - 8 : -length]])
            if not text.endswith(_REPLACEMENT):
                return ()
            if text == _REPLACEMENT and not before.endswith(_REPLACEMENT):
                is_whole = self._tokenizer.encode(text, add_special_tokens=False).ids == end
                return () if is_whole else end
        return ()

    def _give_out(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class SearchedTexts:
    """Texts that are searched in a growing text, in steps that grow with its length alone, however many and long they
    are: the automaton of Aho and Corasick. A place in it is the longest beginning of one of the texts with which the
    growing text ends; place 0 is none.

    begun: by place, the length of the longest such beginning that is not a whole text.
    found: by place, which text, by number, ends there; the longest of several, and None for none.
    """

    def __init__(self, texts: Sequence[str]):
        self.texts = texts
        self.found: list[int | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        lengths = [0]
        for number, text in enumerate(texts):
            place = 0
            for length, character in enumerate(text, start=1):
                if character not in self._next[place]:
                    self._next[place][character] = len(lengths)
                    self._next.append({})
                    self.found.append(None)
                    lengths.append(length)
                place = self._next[place][character]
            if self.found[place] is None:
                self.found[place] = number
        self._shorter = [0] * len(lengths)  # by place, the place of the next shorter beginning
        self.begun = [0] * len(lengths)
        places = [0]
        for place in places:  # by length
            shorter = self._shorter[place]
            self.begun[place] = lengths[place] if self._next[place] else self.begun[shorter]
            if self.found[place] is None:
                self.found[place] = self.found[shorter]
            for character, longer in self._next[place].items():
                places.append(longer)
                self._shorter[longer] = self.next_place(shorter, character) if place else 0

    def next_place(self, place: int, character: str) -> int:
        """Return the place after one more character."""
        while place and character not in self._next[place]:
            place = self._shorter[place]
        return self._next[place].get(character, 0)


@lru_cache(maxsize=1)
def _special_tokens(tokenizer: Tokenizer | None) -> Set[str]:
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return {token.content for token in added.values() if token.special}


@lru_cache(maxsize=4)  # the choices of a request have the same
def _searched(texts: tuple[str, ...]) -> SearchedTexts:
    return SearchedTexts(texts)


def possible_start(text: str, searched: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that begins, and does not end, one of the searched texts."""
    lengths = (
        length
        for each in searched
        for length in range(1, min(len(each), len(text) + 1))
        if text.endswith(each[:length])
    )
    return max(lengths, default=0)
