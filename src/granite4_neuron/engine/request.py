"""What goes into the engine, and what comes out."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron.engine.logprobs import TokenLogprob, token_logprobs
from granite4_neuron.engine.prefix_cache import Prefix
from granite4_neuron.engine.sampling import Sampler, additions, is_whole
from granite4_neuron.engine.slot_prefix_cache import KeptSlot
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row
from granite4_neuron.speculation.backoff import DraftBackoff

MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Request:
    """A sequence to continue.

    tokens: the prompt.
    max_tokens: new tokens at most.
    sampling: see `Sampler`; None for the checkpoint's generation_config.json.
    seed: of the sequence's random numbers; None for different ones each time.
    stop_token_ids: tokens that end the sequence.
    stop: strings that end it and are not part of its text. They need an engine with a tokenizer.
    snapshots_at: lengths of prefixes that other prompts will share, such as a system message. The prompt is cut there,
        and an engine with a prefix cache keeps a snapshot.
    logit_bias: added to the logits of tokens, -100 to 100.
    frequency_penalty, presence_penalty: subtracted from a token's logit for each time that it was generated, and once
        if it was generated at all; -2 to 2.
    logprobs: report the log-probability of each new token and of this many top tokens; None for no report.
    prompt_logprobs: the same for the prompt's tokens. The whole prompt is then run, whatever a prefix cache has.
    """

    tokens: Sequence[int]
    max_tokens: int = 256
    sampling: GenerationConfig | None = None
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    snapshots_at: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def check(self, vocab_size: int) -> None:
        """See whether it can be run; the engine adds what depends on its size.

        Raises:
            UserError: an empty prompt, a token outside the vocabulary, or an option outside its range.
        """
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}, and must be at least 1.")
        if "" in self.stop:
            raise UserError("a stop string is empty; it would end every text at once.")
        check_tokens(self.tokens, vocab_size, "the prompt")
        if any(not 0 < length <= len(self.tokens) for length in self.snapshots_at):
            raise UserError(
                f"snapshots are asked for at {sorted(self.snapshots_at)} tokens; the prompt has {len(self.tokens)}."
            )
        if self.logit_bias:
            check_tokens(list(self.logit_bias), vocab_size, "logit_bias")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and not (is_whole(number) and 0 <= number <= min(MOST_TOP_LOGPROBS, vocab_size)):
                raise UserError(f"{name} is {reprlib.repr(number)}, and must be from 0 to {MOST_TOP_LOGPROBS}.")


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
        """How many tokens a sequence gains in a step."""
        return self.decode_tokens / self.decode_rows if self.decode_rows else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass
class RunningSequence:
    """A request and how far it has come.

    limit: its tokens, prompt and new ones, at most.
    slot: 0 until it has one.
    tokens: prompt and new ones.
    stored: how many of them the state has seen.
    cuts: lengths of the prompt at which it is cut, and which a prefix cache keeps.
    has_begun: whether the prefix cache has been asked, or tokens have been run.
    prefix: what the cache had of it, if anything.
    backoff: whether it pays to draft for it.
    logits: [vocab_size], those after the last token that was stored; None before the first step.
    prompt_logprobs: of the prompt's tokens that have been run, but the first, where the request asks for them.
    """

    id: int
    request: Request
    limit: int
    sampler: Sampler
    text: TextStream
    slot: int = 0
    tokens: list[int] = field(init=False)
    stored: int = 0
    cuts: set[int] = field(init=False)
    has_begun: bool = False
    prefix: Prefix | KeptSlot | None = None
    logits: torch.Tensor | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    backoff: DraftBackoff = field(default_factory=DraftBackoff)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.cuts = set(self.request.snapshots_at)
        # The logits of a prompt's tokens are not kept anywhere.
        self.has_begun = self.request.prompt_logprobs is not None

    @classmethod
    def of(
        cls,
        id: int,
        request: Request,
        defaults: GenerationConfig,
        tokenizer: PreTrainedTokenizerFast | None,
        limit: int,
    ) -> RunningSequence:
        added = additions(request.logit_bias, request.frequency_penalty, request.presence_penalty, len(request.tokens))
        sampler = Sampler(defaults if request.sampling is None else request.sampling, request.seed, added)
        return cls(id, request, limit, sampler, TextStream(tokenizer, request.stop, request.tokens))

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of the prompt have still to be run."""
        return self.stored < len(self.request.tokens)

    def next_cut(self, chunk: int) -> int:
        """Where the tokens to run next end: at a multiple of `chunk`, where a snapshot is asked for, or with them all.

        Where a prompt is cut depends on the request only, so that what is computed does so too; unless a prefix cache
        adds cuts where sequences part.
        """
        asked = (length for length in self.cuts if length > self.stored)
        return min(len(self.tokens), (self.stored // chunk + 1) * chunk, *asked)

    def next_row(self, stop: int, drafts: Sequence[int] = ()) -> Row:
        """The tokens to run next, up to `stop`, and drafts behind them."""
        return Row(self.slot, self.stored, [*self.tokens[self.stored : stop], *drafts])

    def is_kept(self, interval: int | None) -> bool:
        """Whether a prefix cache keeps what has been stored by now, while the sequence goes on."""
        is_multiple = interval is not None and self.stored % interval == 0
        return is_multiple or self.stored == len(self.request.tokens) or self.stored in self.cuts

    def note_prompt(self, row: Row, logits: torch.Tensor) -> None:
        """Take in what logits [tokens, vocab_size], after each of a row's tokens, say of the prompt's next ones."""
        following = self.request.tokens[row.start + 1 : row.start + len(row.tokens) + 1]
        self.prompt_logprobs += token_logprobs(logits[: len(following)], following, self.request.prompt_logprobs)

    def append(self, token: int, logits: torch.Tensor) -> Output:
        """Add a token that was chosen by logits [vocab_size]."""
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
            text = self.text.add(token)
            if self.text.stopped:
                reason = "stop"
            elif len(self.tokens) == self.limit:
                reason = "length"
        if reason is not None:
            text += self.text.finish()
        return Output(self.id, token, text, reason, logprob=logprob, prompt=prompt)


def check_text(text: str, which: str) -> None:
    """See whether a text, which messages call `which`, is one.

    Raises:
        UserError: it is not a text, or came from bytes in another encoding, which Python keeps as lone surrogates.
    """
    if not isinstance(text, str):
        raise UserError(f"{which} is of type {type(text).__name__}, and must be text.")
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise UserError(f"{which} is not text in UTF-8.")


def check_tokens(tokens: Sequence[int], vocab_size: int, which: str) -> None:
    """See whether they can be a prompt, which messages call `which`.

    Raises:
        UserError: there are none, or one is outside the vocabulary.
    """
    if not tokens:
        raise UserError(f"{which} is empty; give at least one token of text.")
    for token in tokens:
        if not is_whole(token):
            raise UserError(f"{which} has {reprlib.repr(token)} among its token ids, which must be whole numbers.")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise UserError(f"{which} has a token id outside the vocabulary, which is 0 to {vocab_size - 1}.")
