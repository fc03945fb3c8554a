"""The one place where texts become tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from granite4_neuron.errors import UserError
from granite4_neuron.system.sandbox.limited_process import NoProcess


def encode(tokenizer: PreTrainedTokenizerFast, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a text, which may spell out control tokens; raise UserError if the tokenizer fails."""
    with _failures():
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def encode_beside_others(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Sequence[int]:
    """Return the tokens of a text by a tokenizer of the tokenizers library, while other threads run.

    Raises:
        UserError: the tokenizer fails.
    """
    with _failures():
        # A batch, because `encode` blocks all other threads.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


@contextmanager
def _failures() -> Iterator[None]:
    """Turn a panic of the library into an error; it panics if a regular expression exceeds its limit of steps, or no
    thread can be started.
    """
    try:
        yield
    except BaseException as error:  # a panic is not an Exception, and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        if "ThreadPoolBuildError" in str(error):
            raise NoProcess from None
        raise UserError(f"the tokenizer fails at this text ({error}).") from None
