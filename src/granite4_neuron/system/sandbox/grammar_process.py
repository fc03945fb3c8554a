"""Compiles grammars in a separate process, with limits on its time and memory.

A grammar may come from a stranger. llguidance has limits, but a short grammar, such as the multiples of a large number,
still takes minutes, or so much memory that Rust ends the whole process.

This module imports little, and no torch, so its process starts in a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance

from granite4_neuron.system.sandbox.limited_process import LimitedProcess, ProcessEnded, Stop

_SECONDS = 2
_MEMORY_BYTES = 2**29
# A grammar that overflows this stack ends the process. Afterwards grammars are used in threads with eight times as much
# stack, or in the caller's thread, which has twice as much by default.
_STACK_BYTES = 2**20
# A state takes 1 to 2 kB; llguidance's default limit is four times as large. A row has items for each member that an
# object may have, and 500 members reach the default limit of 2,000. A verbose error of a large grammar takes a second.
_LIMITS = llguidance.LLParserLimits(max_lexer_states=2**16, max_items_in_row=2**14, verbose_errors=False)
_END = 256  # the id after those of the bytes


class GrammarFailed(Exception):
    """The grammar cannot be used; the message says why."""


class GrammarProcess(LimitedProcess):
    """Converts grammars to llguidance's format, and compiles each as a trial. Several threads may share one.

    Args:
        special_tokens: the vocabulary's, to which a grammar may refer.
    """

    def __init__(self, special_tokens: Sequence[str]) -> None:
        super().__init__("grammar_process", _SECONDS, _MEMORY_BYTES, _STACK_BYTES)
        self._special_tokens = list(special_tokens)

    def convert(self, kind: str, text: str, stop: Stop | None = None) -> str:
        """Return a grammar in llguidance's format that `new_matcher` compiles within the limits.

        Args:
            kind: as in `llguidance.grammar_from`.
            stop: ends the compilation from another thread.

        Raises:
            GrammarFailed: it is not a grammar, allows no text, is nested too deep, or takes more than 2 seconds or
                512 MiB.
            Stopped: `stop` was set.
        """
        try:
            answer = self.ask({"kind": kind, "text": text, "special_tokens": self._special_tokens}, stop)
        except ProcessEnded as error:
            raise GrammarFailed(str(error)) from None
        if "error" in answer:
            raise GrammarFailed(answer["error"])
        return answer["grammar"]


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Compile a grammar, and compute the mask of the first token, to fill caches that its copies share.

    Raises:
        GrammarFailed: it does not compile.
    """
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarFailed(error_of(matcher))
    return matcher


def check_next_step(matcher: llguidance.LLMatcher) -> None:
    """Take a first token, because some limits hold only from then on.

    Raises:
        GrammarFailed: the matcher exceeds one.
    """
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    first = (mask & -mask).bit_length() - 1
    if first >= 0 and not matcher.is_stopped():
        matcher.consume_token(first)
    if matcher.is_error():
        raise GrammarFailed(error_of(matcher))


def error_of(matcher: llguidance.LLMatcher) -> str:
    """Return a matcher's error in one line."""
    return matcher.get_error().strip().partition("\n")[0]


def answer(question: dict[str, Any]) -> dict[str, str]:
    """Answer a `GrammarProcess`, in its process."""
    try:
        grammar = llguidance.grammar_from(question["kind"], question["text"])
        matcher = new_matcher(byte_tokenizer(tuple(question["special_tokens"])), grammar)
        check_next_step(matcher)
    except (ValueError, GrammarFailed) as error:
        return {"error": str(error)}
    return {"grammar": grammar}


@cache
def byte_tokenizer(special_tokens: tuple[str, ...]) -> llguidance.LLTokenizer:
    """Return a tokenizer that is quick to make, for trying grammars."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special_tokens)), slices=[])


class _Bytes:
    """A vocabulary that spells every text: a token for each byte, an end, and special tokens."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self.eos_token_id = _END
        self.bos_token_id = None
        self.special_token_ids = [*range(_END, _END + 1 + len(special_tokens))]
        self.tokens = [*(bytes([byte]) for byte in range(_END)), b"", *(token.encode() for token in special_tokens)]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
