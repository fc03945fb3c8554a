"""A request while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import NamedTuple

import torch

from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.drafting.backoff import DraftBackoff
from granite4_neuron.engine.logprobs import TokenLogprob, certain_logprob, reported
from granite4_neuron.engine.prefix.interface import FoundPrefix, salted
from granite4_neuron.engine.request import Output, PromptReport, Request
from granite4_neuron.engine.sampling import Question, RequestFault, Sampler, choose
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.ops import sampling
from granite4_neuron.ops.sampling import Chosen, Logprobs
from granite4_neuron.runtime.interface import FROM_DEVICE, MOST_STOPS, Decoded, Row
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, PromptCuts


class LogitsOnDevice(NamedTuple):
    """The logits of a row of `Runtime.decode`, which stay on the device until they are read."""

    decoded: Decoded
    row: int

    def read(self) -> torch.Tensor:
        """Copy them to the host: [vocab_size]."""
        return self.decoded.logits([self.row])[0]


@dataclass(eq=False)
class RunningSequence:
    """A request and its progress.

    request: with the checkpoint's defaults.
    limit: the most tokens, prompt and new ones.
    adapter: the one that the request names, or none.
    prompt_cuts: of the runtime.
    form: how tokens are chosen, see `Sampler`.
    is_chosen_by_device: whether the device takes all options of `Row.draw`.
    slot: 0 until it has one. started: when it got the slot, by the engine's clock.
    tokens: prompt and new ones.
    stored: how many of the tokens the state has seen.
    cuts: lengths at which the prompt is cut and a prefix cache keeps a snapshot.
    has_begun: whether the prefix cache has been searched, or tokens have run.
    prefix: the cached prefix that was found for it, if any.
    cached_tokens: how many tokens came from it.
    length_at: how many tokens the prefix cache had of it, after how many of its changes; see `PrefixReuse.num_left`.
    backoff: decides when to draft, or to run a drawn token before the host knows it.
    logits: [vocab_size], after the last stored token, perhaps still on the device; None before the first step.
    forced: the outputs of forced tokens, which count with the step that runs them.
    is_due: whether a prefix cache will keep a snapshot before the next step.
    prompt_logprobs: of the prompt tokens run so far, except the first, if requested.
    """

    id: int
    request: Request
    limit: int
    text: TextStream
    adapter: AppliedAdapter
    prompt_cuts: PromptCuts = ANYWHERE
    form: ModuleType = sampling
    is_chosen_by_device: bool = False
    sampler: Sampler = field(init=False)
    slot: int = 0
    started: float = 0.0
    tokens: list[int] = field(init=False)
    stored: int = 0
    cuts: set[int] = field(init=False)
    has_begun: bool = False
    prefix: FoundPrefix | None = None
    cached_tokens: int = 0
    length_at: tuple[int, int] = (0, -1)
    logits: torch.Tensor | LogitsOnDevice | None = None
    forced: list[Output] = field(default_factory=list)
    is_due: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    backoff: DraftBackoff = field(default_factory=DraftBackoff)
    _keys: list[int] = field(default_factory=list)
    _cut: int = 0  # the end of the tokens that run now, in this step or in several

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.request, len(self.request.tokens), self.form)
        self.tokens = list(self.request.tokens)
        self.cuts = {self.adapter.start} - {0}  # a row has one adapter, or none
        self.cut_at(self.request.snapshots_at or ())
        # No cache has the logits of a prompt's tokens.
        self.has_begun = self.request.prompt_logprobs is not None

    def start(self, slot: int, now: float) -> None:
        """Give it a slot, at this time of the engine's clock.

        Raises:
            RequestFault: its constraint fails.
        """
        self.sampler.start()
        self.slot, self.started = slot, now

    @property
    def keys(self) -> Sequence[int]:
        """The tokens as keys of a prefix cache."""
        if not self.adapter.number and self.request.cache_salt is None:
            return self.tokens
        known = len(self._keys)
        new = self.adapter.keys(self.tokens[known:], known)
        self._keys += new if known else salted(new, self.request.cache_salt)
        return self._keys

    @property
    def is_prompt(self) -> bool:
        """Whether some tokens of the prompt have not run yet."""
        return self.stored < len(self.request.tokens)

    @property
    def reports_prompt(self) -> bool:
        """Whether the next step's logits are for log-probabilities of the prompt."""
        return self.is_prompt and self.request.prompt_logprobs is not None

    @property
    def takes_chosen(self) -> bool:
        """Whether a device can choose the next token, and nothing else of the logits is needed."""
        return self.takes_likeliest or self.takes_drawn

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the likeliest, without a report."""
        return self.sampler.takes_likeliest and not self.sampler.reports

    @property
    def takes_drawn(self) -> bool:
        """Whether a device can choose the next token by `Row.draw`."""
        if not self.is_chosen_by_device:
            return self.sampler.is_drawn
        return self.sampler.is_for_device and not self.takes_likeliest

    def is_as_prompt(self, length: int) -> bool:
        """Return whether its state after `length` tokens is the same as after a prompt of these tokens. If numbers
        depend on cuts, generated tokens leave another state; so may a step with the logits of all tokens.
        """
        is_own = length <= len(self.request.tokens) and self.request.prompt_logprobs is None
        return is_own or self.prompt_cuts.keeps_answers

    def is_cut_point(self, length: int) -> bool:
        """Return whether its prompt may be cut at a length; see `runtime.prompt_cuts`."""
        return self.prompt_cuts.last(length, len(self.request.tokens)) == length

    def cut_at(self, lengths: Iterable[int]) -> None:
        """Cut its prompt, and let a prefix cache keep a snapshot, at the last cut points up to these lengths."""
        self.cuts |= {self.prompt_cuts.last(length, len(self.request.tokens)) for length in lengths} - {0}

    def next_cut(self, chunk: int) -> int:
        """Return where the tokens to run next end: at one of `cuts` or at the end, or before that at a multiple of
        `chunk` if more than a chunk is left. The value stays the same until these tokens have run, in one step or in
        pieces.
        """
        if self._cut <= self.stored:
            self._cut = self._cut_after(self.stored, chunk)
        return self._cut

    def long_cut(self, chunk: int) -> int:
        """Return the next multiple of `chunk`, if the tokens to run next do not end before it; otherwise 0."""
        cut = (self.stored // chunk + 1) * chunk
        return cut if cut <= self._end_after(self.stored) else 0

    def next_kept(self, interval: int | None, chunk: int) -> int:
        """Return the next cut of the prompt at which a prefix cache will keep a snapshot."""
        length = self.next_cut(chunk)
        while not self._is_kept_at(length, interval):
            length = self._cut_after(length, chunk)
        return length

    def next_row(self, stop: int, drafts: Sequence[int] = (), is_kept: bool = False) -> Row:
        """Return the tokens to run next, up to `stop`, followed by drafts; for `is_kept` see `Row`."""
        tokens = [*self.tokens[self.stored : stop], *drafts]
        adapter = self.adapter.at(self.stored)
        return Row(self.slot, self.stored, tokens, adapter, is_prompt=self.is_prompt, sequence=self.id, is_kept=is_kept)

    def with_draw(self, row: Row, vocab_size: int) -> Row:
        """Return a `next_row` of decode with the description of how a device chooses the token after it, if it may. It
        has none either if the request's own code fails: the host will meet that again.
        """
        if not self.takes_drawn:
            return row
        with suppress(RequestFault):
            choice = self.sampler.draw(self.tokens, 0, vocab_size)
            row = replace(row, draw=choice, counts=self.sampler.counts(self.tokens, row.start))
        return row

    def following_row(self, vocab_size: int) -> Row:
        """Return the row that runs the token that the device chooses in `next_row` without drafts, as `with_draw`."""
        length, stops = len(self.tokens), tuple(self.request.stop_token_ids or ())[:MOST_STOPS]
        choice = counts = None
        if self.takes_drawn:
            choice, counts = self.sampler.draw(self.tokens, 1, vocab_size), self.sampler.counts(self.tokens, length)
        adapter = self.adapter.at(length)
        return Row(self.slot, length, [FROM_DEVICE], adapter, stops, choice, counts, sequence=self.id)

    @property
    def has_ended(self) -> bool:
        """Whether the sequence ends with a forced token, which does not run."""
        return bool(self.forced) and self.forced[-1].finish_reason is not None

    def last_row(self, drafts: Sequence[int]) -> Row:
        """Return all tokens that have not run, followed by drafts."""
        return self.next_row(len(self.tokens) - self.has_ended, drafts)

    @property
    def num_unrun(self) -> int:
        """The number of tokens that have not run. The token after the last of them is not known yet."""
        return len(self.tokens) - self.stored

    def most_forced(self, longest: int, interval: int | None) -> int:
        """Return the most forced tokens to take, so that the next row has at most `longest` tokens and none beyond a
        snapshot; see `most_drafts`.
        """
        return 0 if self.has_ended else max(0, min(longest - self.num_unrun, self._tokens_to_snapshot(interval)))

    def most_drafts(self, most: int, interval: int | None) -> int:
        """Return how many drafts to request: `most`, but none in a pause, and none beyond the limit or a snapshot.

        Args:
            interval: a prefix cache keeps snapshots at its multiples; None for no such snapshots.
        """
        if self.has_ended or not self.backoff.allows(len(self.tokens)):
            return 0
        return max(0, min(most, self.limit - len(self.tokens) - 1, self._tokens_to_snapshot(interval)))

    def is_kept(self, interval: int | None, more: int = 0) -> bool:
        """Return whether a prefix cache keeps a snapshot when the state has seen `more` more tokens than now."""
        return self._is_kept_at(self.stored + more, interval)

    def take_forced(self, count: int) -> None:
        """Add `count` forced tokens, up to one that ends the sequence."""
        for _ in range(count):
            self.forced.append(self.append(self.sampler.take_forced()))
            if self.has_ended:
                return

    def give_forced(self) -> list[Output]:
        """Return the outputs of the forced tokens that the present step runs."""
        forced, self.forced = self.forced, []
        return forced

    def record_prompt_logprobs(self, row: Row, logits: torch.Tensor) -> None:
        """Record the prompt's log-probabilities, if the request asks for them, from logits [tokens, vocab_size] after
        each token of a row.
        """
        if self.request.prompt_logprobs is None:
            return
        following = self.request.tokens[row.start + 1 : row.start + len(row.tokens) + 1]
        reports = self.form.token_logprobs(logits[: len(following)], following, self.request.prompt_logprobs)
        self.prompt_logprobs += map(reported, following, reports)

    def ask(self, logits: Sequence[torch.Tensor], drafts: Sequence[int] = ()) -> list[Question | Chosen | UserError]:
        """Return how the next token is chosen, and the tokens after drafts if that is known before it. An error is what
        `choose` is to report.

        Args:
            logits, drafts: as for `choose`.
        """
        count = 1 if self.sampler.needs_each_token else len(logits)
        try:
            return [self.sampler.ask(logits[number], self.tokens, drafts[:number]) for number in range(count)]
        except UserError as error:  # the logits are not finite, or the request's own code failed
            return [error]

    def choose(
        self,
        logits: Sequence[torch.Tensor],
        drafts: Sequence[int] = (),
        answers: Sequence[Chosen | UserError] = (),
    ) -> list[Output]:
        """Choose the next token, and further tokens while each equals its draft.

        Each token is chosen exactly as without drafts: from the logits after the same tokens, with the random numbers
        of its place.

        Args:
            logits: [vocab_size], after the last token and after each draft.
            answers: to what `ask` returned.
        """
        outputs: list[Output] = []
        for number, token_logits in enumerate(logits):
            outputs.append(self.take(answers[number] if number < len(answers) else self._answer(token_logits)))
            if drafts[number : number + 1] != [outputs[-1].token] or outputs[-1].finish_reason is not None:
                break
        return outputs

    def take(self, answer: Chosen | UserError) -> Output:
        """Add a token that was chosen, by the host or the device, or end with an error."""
        try:
            if isinstance(answer, UserError):
                raise answer
            token = self.sampler.answer(answer)
        except UserError as error:
            is_requests_fault = isinstance(error, RequestFault)
            return Output(self.id, None, self.text.finish(), "error", str(error), is_requests_fault)
        return self.append(token, answer.logprobs)

    def _answer(self, logits: torch.Tensor) -> Chosen | UserError:
        """Choose the next token; return the error that `take` is to report if that fails."""
        try:
            [answer] = choose([self.sampler.ask(logits, self.tokens)], self.form)
        except UserError as error:
            return error
        return answer

    def append(self, token: int, report: Logprobs | None = None) -> Output:
        """Add a token with its report: None if none is needed, and for a token that is the only one allowed."""
        prompt = logprob = None
        if len(self.tokens) == len(self.request.tokens):
            prompt = PromptReport(self.cached_tokens, self.prompt_logprobs, self.started, self.sampler.seed)
        if report is not None:
            logprob = reported(token, report)
        elif self.request.logprobs is not None:
            logprob = certain_logprob(token, self.request.logprobs)
        self.tokens.append(token)
        text, reason = "", None
        if token in (self.request.stop_token_ids or ()):
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
        return Output(self.id, token, text, reason, logprob=logprob, prompt=prompt, stop_string=self.text.stop_string)

    def _tokens_to_snapshot(self, interval: int | None) -> int:
        """Return how many more tokens the next row may have before a prefix cache keeps a snapshot."""
        return self.limit if interval is None else interval - self.stored % interval - self.num_unrun

    def _cut_after(self, length: int, chunk: int) -> int:
        end = self._end_after(length)
        return end if end - length <= chunk else (length // chunk + 1) * chunk

    def _end_after(self, length: int) -> int:
        return min((len(self.tokens), *(cut for cut in self.cuts if cut > length)))

    def _is_kept_at(self, length: int, interval: int | None) -> bool:
        if not self.is_as_prompt(length):  # first: it is asked for every token of an answer
            return False
        is_multiple = interval is not None and length % interval == 0
        return is_multiple or length == len(self.request.tokens) or length in self.cuts
