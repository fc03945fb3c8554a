"""Requests, outputs and running sequences of the engine."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.backoff import DraftBackoff
from granite4_neuron.engine.logprobs import TokenLogprob, token_logprobs
from granite4_neuron.engine.prefix_cache import Prefix
from granite4_neuron.engine.sampling import Sampler
from granite4_neuron.engine.sampling_params import Option, SamplingParams, are_whole, is_list, is_whole, option
from granite4_neuron.engine.slot_prefix_cache import KeptSlot
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row


def _are_tokens(value: object) -> bool:
    return value.ndim == 1 if isinstance(value, (torch.Tensor, np.ndarray)) else is_list(value)


def _to_tokens(value: Sequence[int] | torch.Tensor | np.ndarray) -> tuple[int, ...]:
    return tuple(value if is_list(value) else value.tolist())


@dataclass(frozen=True)
class Request(SamplingParams):
    """A sequence to continue, with its sampling options as keyword arguments. It keeps copies of the lists it is given.

    tokens: the prompt; a list, or a tensor with one axis.
    max_tokens: new tokens at most.
    snapshots_at: lengths of prefixes that other prompts will share, such as a system message. The prompt is cut there,
        and an engine with a prefix cache keeps a snapshot. None for none.
    skip_special_tokens: whether special tokens are no part of the text.
    adapter: the name of an adapter of the runtime; None for the model without.

    Stop strings need an engine with a tokenizer.

    Raises:
        UserError: a field is not what it must be.
    """

    tokens: Sequence[int] | torch.Tensor | np.ndarray = field(
        metadata={"option": Option(_are_tokens, "a list of token ids, or a tensor of them with one axis", _to_tokens)}
    )
    max_tokens: int = option(lambda value: is_whole(value) and value >= 1, "a whole number of at least 1", default=256)
    snapshots_at: Collection[int] | None = option(are_whole, "a list or a set of whole numbers", convert=frozenset)
    skip_special_tokens: bool = option(lambda value: isinstance(value, bool), "true or false", default=True)
    adapter: str | None = option(lambda value: isinstance(value, str), "the name of an adapter")

    def check(self, vocab_size: int, which: str = "the prompt") -> None:
        """Check what depends on the vocabulary and on the prompt; messages call the prompt `which`.

        Raises:
            UserError: an empty prompt, a token outside the vocabulary, a snapshot outside the prompt, or more
                log-probabilities than tokens; or `min_tokens` is above `max_tokens`.
        """
        check_tokens(self.tokens, vocab_size, which)
        if any(not 0 < length <= len(self.tokens) for length in self.snapshots_at):
            raise UserError(
                f"snapshots are asked for at {sorted(self.snapshots_at)} tokens; the prompt has {len(self.tokens)}."
            )
        if self.logit_bias:
            check_tokens(list(self.logit_bias), vocab_size, "logit_bias")
        if (self.min_tokens or 0) > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}, and must be at most max_tokens, {self.max_tokens}.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise UserError(f"{name} is {getattr(self, name)}, and must be from 0 to {vocab_size}.")


@dataclass(frozen=True)
class PromptReport:
    """Facts about a prompt once all of it has been run.

    cached_tokens: how many of its tokens the prefix cache had.
    logprobs: of all its tokens except the first, if the request asks for them.
    """

    cached_tokens: int
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Output:
    """One new token of one sequence, or the error that ended it.

    id: of the sequence, from `Engine.add`.
    token: its id; None with an error.
    text: the next piece of the sequence's text; may be empty while a character or a stop string is incomplete.
    finish_reason: "stop" (stop token or stop string), "length" or "error" in the sequence's last output, else None.
    error: what went wrong, in one sentence.
    is_requests_fault: whether the request's options caused the error, not the model.
    logprob: of the token, if the request asks for it.
    prompt: in the sequence's first output.
    """

    id: int
    token: int | None
    text: str
    finish_reason: str | None = None
    error: str | None = None
    is_requests_fault: bool = False
    logprob: TokenLogprob | None = None
    prompt: PromptReport | None = None


@dataclass
class GenerationStats:
    """Totals over all sequences of an engine; grows while it runs. Times in seconds."""

    prompt_tokens: int = 0  # that were run
    cached_tokens: int = 0  # of prompts, that the prefix cache had
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0  # generated ones but the first of each sequence, which prefill gives
    decode_seconds: float = 0.0
    decode_rows: int = 0  # one for each sequence of each step of decode; without speculation as many as tokens
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those

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


@dataclass
class RunningSequence:
    """A request and its progress.

    request: with the checkpoint's defaults.
    limit: the most tokens, prompt and new ones.
    adapter: that the request names, or none.
    slot: 0 until it has one.
    tokens: prompt and new ones.
    stored: how many of them the state has seen.
    cuts: lengths at which the prompt is cut and a prefix cache keeps a snapshot.
    has_begun: whether the prefix cache has been asked, or tokens have been run.
    prefix: the cached prefix that it started from, if any.
    backoff: when to draft for it.
    logits: [vocab_size], after the last stored token; None before the first step.
    is_due: whether a prefix cache is to keep a snapshot before the next step.
    prompt_logprobs: of the prompt tokens run so far, except the first, if the request asks for them.
    """

    id: int
    request: Request
    limit: int
    text: TextStream
    adapter: AppliedAdapter
    sampler: Sampler = field(init=False)
    slot: int = 0
    tokens: list[int] = field(init=False)
    stored: int = 0
    cuts: set[int] = field(init=False)
    has_begun: bool = False
    prefix: Prefix | KeptSlot | None = None
    logits: torch.Tensor | None = None
    is_due: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    backoff: DraftBackoff = field(default_factory=DraftBackoff)
    _keys: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.request, len(self.request.tokens))
        self.tokens = list(self.request.tokens)
        # A step is with an adapter or without.
        self.cuts = {*self.request.snapshots_at, self.adapter.start} - {0}
        # The logits of a prompt's tokens are not kept anywhere.
        self.has_begun = self.request.prompt_logprobs is not None

    @property
    def keys(self) -> Sequence[int]:
        """The tokens as a prefix cache knows them."""
        if not self.adapter.number:
            return self.tokens
        known = len(self._keys)
        self._keys += self.adapter.keys(self.tokens[known:], known)
        return self._keys

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of the prompt have still to be run."""
        return self.stored < len(self.request.tokens)

    def next_cut(self, chunk: int, is_exact_at_any_cut: bool) -> int:
        """Return where the tokens to run next end: at a requested snapshot, after the last token, or before that at a
        multiple of `chunk`.

        Where numbers depend on the cuts, these depend only on the request; but a prefix cache may add cuts where
        sequences diverge. Elsewhere no step ends at a multiple if it has room for what comes after.
        """
        asked = (length for length in self.cuts if length > self.stored)
        end = min((len(self.tokens), *asked))
        if is_exact_at_any_cut and end - self.stored <= chunk:
            return end
        return min(end, (self.stored // chunk + 1) * chunk)

    def next_row(self, stop: int, drafts: Sequence[int] = ()) -> Row:
        """Return the tokens to run next, up to `stop`, followed by drafts."""
        return Row(self.slot, self.stored, [*self.tokens[self.stored : stop], *drafts], self.adapter.at(self.stored))

    def is_kept(self, interval: int | None) -> bool:
        """Return whether a prefix cache keeps a snapshot at the current length of a running sequence."""
        is_multiple = interval is not None and self.stored % interval == 0
        return is_multiple or self.stored == len(self.request.tokens) or self.stored in self.cuts

    def record_prompt_logprobs(self, row: Row, logits: torch.Tensor) -> None:
        """Record the prompt's log-probabilities from logits [tokens, vocab_size] after each token of a row."""
        following = self.request.tokens[row.start + 1 : row.start + len(row.tokens) + 1]
        self.prompt_logprobs += token_logprobs(logits[: len(following)], following, self.request.prompt_logprobs)

    def append(self, token: int, logits: torch.Tensor) -> Output:
        """Add a token that was chosen from logits [vocab_size], from `Sampler.mask`."""
        prompt = logprob = None
        if len(self.tokens) == len(self.request.tokens):
            prompt = PromptReport(0 if self.prefix is None else self.prefix.length, self.prompt_logprobs)
        if self.request.logprobs is not None:
            [logprob] = token_logprobs(logits[None], [token], self.request.logprobs)
        self.tokens.append(token)
        text, reason = "", None
        if token in self.request.stop_token_ids:
            reason = "stop"
        else:
            new_tokens = len(self.tokens) - len(self.request.tokens)
            text = self.text.add(token, may_stop=new_tokens > (self.request.min_tokens or 0))
            if self.text.stopped:
                reason = "stop"
            elif len(self.tokens) == self.limit:
                reason = "length"
        if reason is not None:
            text += self.text.finish()
        return Output(self.id, token, text, reason, logprob=logprob, prompt=prompt)


def check_count(name: str, value: object, least: int) -> None:
    """Check that an option is a whole number of at least `least`.

    Raises:
        UserError: it is not.
    """
    if not is_whole(value) or value < least:
        raise UserError(f"{name} is {reprlib.repr(value)}, and must be a whole number of at least {least}.")


def check_has(name: str, value: object, *attributes: str) -> None:
    """Check that an optional argument has what it is used for; None is left out.

    Raises:
        UserError: it lacks one of the attributes.
    """
    missing = [each for each in attributes if value is not None and not hasattr(value, each)]
    if missing:
        raise UserError(f"{name} is of type {type(value).__name__}, which has no {' and no '.join(missing)}.")


def check_text(text: str, which: str) -> None:
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
        raise UserError(f"{which} is of type {type(tokens).__name__}; give a text or a list of token ids.")
    if not tokens:
        raise UserError(f"{which} is empty; give at least one token of text.")
    for token in tokens:
        if not is_whole(token):
            raise UserError(f"{which} has {reprlib.repr(token)} among its token ids, which must be whole numbers.")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise UserError(f"{which} has a token id outside the vocabulary, which is 0 to {vocab_size - 1}.")
