"""Requests and outputs of the engine."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from granite4_neuron.engine.logprobs import TokenLogprob
from granite4_neuron.engine.sampling_params import Option, SamplingParams, are_whole, is_list, is_whole, option
from granite4_neuron.errors import UserError


def _are_tokens(value: object) -> bool:
    return value.ndim == 1 if isinstance(value, (torch.Tensor, np.ndarray)) else is_list(value)


def _to_tokens(value: Sequence[int] | torch.Tensor | np.ndarray) -> tuple[int, ...]:
    return tuple(value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value)


@dataclass(frozen=True)
class Request(SamplingParams):
    """A sequence to continue, with its sampling options as keyword arguments. It copies the lists that it gets.

    tokens: the prompt: a list, or a tensor or array with one axis.
    max_tokens: the most new tokens.
    snapshots_at: lengths of prefixes that other prompts will share, such as a system message. The prompt is cut there,
        or at the last cut point before that (`Runtime.prompt_cuts`), and an engine with a prefix cache keeps a
        snapshot. None for none.
    skip_special_tokens: whether special tokens are left out of the text.
    adapter: the name of an adapter of the runtime; None for the model without.
    priority: of the sequences that wait for a slot, those with a lower number start first.
    cache_salt: a text that divides a prefix cache: only sequences with the same one share states. None for none.

    Stop strings need an engine with a tokenizer.

    Raises:
        UserError: a field is invalid.
    """

    tokens: Sequence[int] = field(
        metadata={"option": Option(_are_tokens, "a list of token ids, or a tensor of them with one axis", _to_tokens)}
    )
    max_tokens: int = option(lambda value: is_whole(value) and value >= 1, "a whole number of at least 1", default=256)
    snapshots_at: Collection[int] | None = option(are_whole, "a list or a set of whole numbers", convert=frozenset)
    skip_special_tokens: bool = option(lambda value: isinstance(value, bool), "true or false", default=True)
    adapter: str | None = option(lambda value: isinstance(value, str), "the name of an adapter")
    priority: int = option(is_whole, "a whole number", default=0)
    cache_salt: str | None = option(lambda value: isinstance(value, str) and value != "", "a string that is not empty")

    def check(self, vocab_size: int, which: str = "the prompt") -> None:
        """Check what depends on the vocabulary and on the prompt; messages call the prompt `which`.

        Raises:
            UserError: an empty prompt, a token outside the vocabulary, a snapshot outside the prompt, or more
                log-probabilities than tokens; or `min_tokens` is above `max_tokens`.
        """
        check_tokens(self.tokens, vocab_size, which)
        snapshots_at = sorted(self.snapshots_at or ())
        if any(not 0 < length <= len(self.tokens) for length in snapshots_at):
            raise UserError(f"snapshots are asked for at {snapshots_at} tokens; the prompt has {len(self.tokens)}.")
        named = {
            "logit_bias": list(self.logit_bias or ()),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "bad_words_ids": list(itertools.chain.from_iterable(self.bad_words_ids or ())),
            "suppress_tokens": list(self.suppress_tokens or ()),
            "begin_suppress_tokens": list(self.begin_suppress_tokens or ()),
        }
        for name, tokens in named.items():
            if tokens:
                check_tokens(tokens, vocab_size, name)
        if (self.min_tokens or 0) > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}, and must be at most max_tokens, {self.max_tokens}.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise UserError(f"{name} is {getattr(self, name)}, and must be from 0 to {vocab_size}.")


@dataclass(frozen=True)
class PromptReport:
    """Facts about a prompt after all of it has run.

    cached_tokens: how many of its tokens the prefix cache had.
    started: when the sequence got a slot, in seconds of the engine's clock, which is `time.perf_counter` by default.
    logprobs: of all its tokens except the first, if the request asks for them.
    seed: of the sequence's random numbers: the request's, or the one that it got. None if it is greedy.
    """

    cached_tokens: int
    logprobs: Sequence[TokenLogprob] = ()
    started: float = field(default=0.0, compare=False)
    seed: int | None = field(default=None, compare=False)


class Output(NamedTuple):
    """One new token of one sequence, or the error that ended it.

    id: of the sequence, from `Engine.add`.
    token: its id; None with an error.
    text: the next piece of the sequence's text; may be empty while a character or a stop string is incomplete.
    finish_reason: "stop" (stop token or stop string), "length" or "error" in the sequence's last output, else None.
    error: what went wrong, in one sentence.
    is_requests_fault: whether the request's options caused the error, not the model.
    logprob: of the token, if the request asks for it.
    prompt: in the sequence's first output.
    stop_string: the one that ended the text, if one did.
    """

    id: int
    token: int | None
    text: str
    finish_reason: str | None = None
    error: str | None = None
    is_requests_fault: bool = False
    logprob: TokenLogprob | None = None
    prompt: PromptReport | None = None
    stop_string: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the text ends here although the model did not end it."""
        return self.finish_reason == "length" or self.stop_string is not None


@dataclass
class GenerationStats:
    """Totals over all sequences of an engine; grows while it runs. Times in seconds."""

    prompt_tokens: int = 0  # those that were run
    cached_tokens: int = 0  # tokens of prompts that the prefix cache had
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0  # generated tokens except the first of each sequence, which comes from prefill
    decode_seconds: float = 0.0
    decode_rows: int = 0  # one for each sequence in each step of decode; without speculation as many as decode_tokens
    drafts: int = 0  # rows of a step that had drafted tokens
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decode_tokens_per_row(self) -> float:
        """The mean number of tokens that a sequence gains in a step."""
        return self.decode_tokens / self.decode_rows if self.decode_rows else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


def check_count(name: str, value: object, least: int) -> None:
    """Check that an option is a whole number of at least `least`; raise UserError if not."""
    if not is_whole(value) or value < least:
        raise UserError(f"{name} is {reprlib.repr(value)}, and must be a whole number of at least {least}.")


def check_has(name: str, value: object, *attributes: str) -> None:
    """Check that an optional argument has the attributes that are used; None passes.

    Raises:
        UserError: it lacks one of the attributes.
    """
    missing = [each for each in attributes if value is not None and not hasattr(value, each)]
    if missing:
        raise UserError(f"{name} is of type {type(value).__name__}, which has no {' and no '.join(missing)}.")


def check_text(text: object, which: str) -> None:
    """Check that a text is valid; messages call it `which`.

    Raises:
        UserError: it is not a text, or has lone surrogates, which Python makes of bytes in another encoding.
    """
    if not isinstance(text, str):
        raise UserError(f"{which} is of type {type(text).__name__}, and must be text.")
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise UserError(f"{which} is not text in UTF-8.")


def check_tokens(tokens: Sequence[int], vocab_size: int, which: str) -> None:
    """Check that tokens can be a prompt; messages call it `which`.

    Raises:
        UserError: they are not a list, there are none, or one is outside the vocabulary.
    """
    if not is_list(tokens):
        raise UserError(f"{which} is of type {type(tokens).__name__}; give a string or a list of token ids.")
    if not tokens:
        raise UserError(f"{which} is empty; give at least one token of text.")
    for token in tokens:
        if not is_whole(token):
            raise UserError(f"{which} has {reprlib.repr(token)} among its token ids, which must be whole numbers.")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise UserError(f"{which} has a token id outside the vocabulary, which is 0 to {vocab_size - 1}.")
