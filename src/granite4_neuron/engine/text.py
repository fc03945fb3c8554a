"""From tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class TextStream:
    """The text of one growing sequence. Text is given out once it is certain: whole characters, and no part of a
    possible stop string.

    Args:
        tokenizer: a fast tokenizer, or None for no text at all.
        stop: strings that end the text; the text ends before the first of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, stop: Sequence[str]):
        self._tokenizer = tokenizer and tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that became certain; sets `stopped` when a stop string is complete."""
        if self._tokenizer is None:
            return ""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        ends = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            self._held = self._held[: min(ends)]
            return self.finish()
        return self._give_out(len(self._held) - self._possible_start())

    def finish(self) -> str:
        """What was held back, when no token follows."""
        return self._give_out(len(self._held))

    def _give_out(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        lengths = (
            length
            for text in self._stop
            for length in range(1, min(len(text), len(self._held) + 1))
            if self._held.endswith(text[:length])
        )
        return max(lengths, default=0)
