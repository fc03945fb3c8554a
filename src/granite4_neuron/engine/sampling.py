"""Sampling: the choice of the next token."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from granite4_neuron.engine.constraint import BitConstraint, Constraint
from granite4_neuron.engine.sampling_params import SamplingParams, is_list, is_whole
from granite4_neuron.engine.token_counts import TokenCounts
from granite4_neuron.engine.token_rules import TokenRules, bits_of
from granite4_neuron.errors import UserError, described
from granite4_neuron.ops import sampling as definition
from granite4_neuron.ops.sampling import ALL_MASKED, NONE_LEFT, Choice, Chosen, Penalties

NOT_FINITE = "no token can be chosen: the model's logits are not finite."
_NOTHING_LEFT = (
    "no token can be chosen: the request's options (a grammar or another constraint, allowed_token_ids, bad_words, "
    "min_tokens, logits_processors) together allow none."
)
_ALL_FORBIDDEN = "no token can be chosen: the request's constraint allows none."
_CONSTRAINT = "the request's constraint"
_FLOAT32 = torch.finfo(torch.float32)


class RequestFault(UserError):
    """A request's own code failed, such as a logits processor or its constraint. The message names the code."""


class NoTokenLeft(RequestFault):
    """A request's own options leave no token to choose, although the model's logits are finite."""


@contextmanager
def _blamed_on(what: str) -> Iterator[None]:
    """Run a request's own code in a block.

    Raises:
        RequestFault: the code raised something; the message names the code.
    """
    try:
        yield
    except RequestFault:
        raise
    except Exception as error:  # it is foreign code
        raise RequestFault(f"{what} failed ({described(error)}).") from error


class Question(NamedTuple):
    """A token that `ops.sampling.choose` can choose: logits [vocab_size], and how.

    processed: scores [vocab_size] that a request's processors have made of them, in place of which they are chosen
        from; with the choice that is left then.
    """

    logits: torch.Tensor
    choice: Choice
    processed: tuple[torch.Tensor, Choice] | None = None


class Sampler:
    """Chooses the next token of one sequence, greedily or by sampling, among those that its `TokenRules` allow.

    `ops.sampling` says how. A request's own processors run after its biases, penalties and rules, and before the
    temperature, as in transformers' generate.

    Args:
        params: the options, with the checkpoint's defaults.
        prompt_length: how many of the sequence's tokens are the prompt's.
        form: `ops.sampling`, or a device's form of it.

    Attributes:
        seed: of the random numbers; None for a greedy sequence.
    """

    def __init__(self, params: SamplingParams, prompt_length: int, form: ModuleType = definition):
        self.form = form
        self._rules = TokenRules(params, prompt_length)
        self._processors = [_RequestsProcessor(each) for each in params.logits_processors or ()]
        self._constraint = params.constraint  # the request's, until `start`
        self._forced: list[int] = []  # the tokens that the constraint forces, as far as they are known
        self._is_greedy = params.temperature == 0
        self.seed = None if self._is_greedy else params.with_seed().seed
        self._choice = _choice_of(params, self.seed)
        repetition = _normal(1 if params.repetition_penalty is None else params.repetition_penalty)
        self._penalties = float(params.frequency_penalty or 0), float(params.presence_penalty or 0), repetition
        # Only a repetition penalty applies to the prompt.
        begin = 0 if repetition != 1 else prompt_length
        self._counts = TokenCounts(begin, prompt_length) if self._penalties != (0, 0, 1) else None
        self._for_device = self._choice
        if self._counts is not None:  # `Row.counts` tells them
            no_counts = torch.empty(0, dtype=torch.int64), torch.empty(0)
            self._for_device = replace(self._choice, penalties=Penalties(*no_counts, *self._penalties))

    def start(self) -> None:
        """Fork the request's constraint, before the first token. A fork may hold a process; a sequence that waits has
        none.

        Raises:
            RequestFault: the constraint fails.
        """
        self._constraint = _fork(self._constraint)

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token is always the one with the model's highest logit, or the first of equal ones."""
        return self._is_greedy and self._is_free

    @property
    def is_drawn(self) -> bool:
        """Whether the token is drawn with temperature, top_k, top_p and min_p alone, and not reported."""
        return not self._is_greedy and self._choice.typical_p == 1 and self._is_free and not self.reports

    @property
    def is_for_device(self) -> bool:
        """Whether `Row.draw` can say how the token is chosen."""
        return self._choice.typical_p == 1 and not self._processors

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are reported."""
        return self._choice.num_logprobs is not None

    @cached_property
    def _is_free(self) -> bool:
        """Whether all tokens may come next, and no option changes logits."""
        changes = self._choice.biases is not None or self._counts is not None or bool(self._processors)
        return self._constraint is None and not (self._rules.forbid_any or changes)

    @property
    def needs_each_token(self) -> bool:
        """Whether how a token is chosen depends on the ones before it in ways that only their choice shows."""
        return self._constraint is not None or bool(self._processors)

    @property
    def may_be_ahead(self) -> bool:
        """Whether `draw` knows how a token is chosen when the one before it is not known yet."""
        return not (self.needs_each_token or self._rules.depend_on_tokens)

    def draw(self, tokens: Sequence[int], ahead: int, vocab_size: int) -> Choice:
        """Return how a device is to choose a token, as `Row.draw` says it, if it `is_drawn` or `is_for_device`.

        Args:
            tokens: the sequence so far, prompt included.
            ahead: how many further tokens are before the one to choose; at most 1, and 0 unless it `may_be_ahead`.

        Raises:
            NoTokenLeft: the constraint forbids all tokens.
            RequestFault: the constraint fails.
        """
        if self._constraint is None and not self._rules.forbid_any:
            return self._for_device
        bits = None if self._constraint is None else self._mask(vocab_size)
        allowed = self._rules.bits(bits, tokens, ahead, vocab_size)
        if bits is not None or allowed is not self._for_device.allowed:
            mask = None if bits is None else torch.from_numpy(bits)
            self._for_device = replace(self._for_device, mask=mask, allowed=allowed)
        return self._for_device

    def counts(self, tokens: Sequence[int], length: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]] | None:
        """Return `Row.counts` for the first `length` tokens of the sequence."""
        return None if self._counts is None else partial(self._counts.of, tokens, length=length)

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """Choose the token to append from the model's logits [vocab_size], and advance the constraint by it. See `ask`
        and `answer`.
        """
        return self.answer(*choose([self.ask(logits, tokens)], self.form))

    def ask(self, logits: torch.Tensor, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Question | Chosen:
        """Return how the token that follows is chosen, or that token if the logits decide nothing.

        Args:
            logits: [vocab_size], float32, the model's.
            tokens: the sequence so far, prompt included.
            drafts: further tokens after them.

        Raises:
            NoTokenLeft: the constraint forbids all tokens.
            RequestFault: a logits processor or the constraint fails.
            UserError: the logits are not finite.
        """
        if self.takes_likeliest:
            return Question(logits, self._choice)
        vocab_size, place = len(logits), len(tokens) + len(drafts)
        counts = None if self._counts is None else self._counts.of(tokens, drafts)
        penalties = None if counts is None else Penalties(*counts, *self._penalties)
        choice = replace(self._choice, place=place, penalties=penalties)
        if self._constraint is None and not self._rules.forbid_any and not self._processors:
            return Question(logits, choice)
        history = [*tokens, *drafts] if drafts else tokens
        bits = None if self._constraint is None else self._mask(vocab_size)
        only = None if bits is None else _only_one(bits)
        if only is not None and not self._processors:
            if not self._rules.allows(only, history):
                raise NoTokenLeft(_NOTHING_LEFT)
            return Chosen(only)
        forbidden = self._rules.forbidden(bits, history, vocab_size)
        choice = replace(
            choice,
            mask=None if bits is None else torch.from_numpy(bits),
            allowed=self._rules.allowed_bits(vocab_size),
            forbidden=torch.tensor(forbidden) if forbidden else None,
        )
        if not self._processors:
            return Question(logits, choice)
        return self._processed(logits, choice, history, is_only=only is not None)

    def _mask(self, vocab_size: int) -> np.ndarray:
        """Return bits of the tokens that the constraint allows, see `bits_of`.

        Raises: see `ask`.
        """
        assert self._constraint is not None
        with _blamed_on(_CONSTRAINT):
            if isinstance(self._constraint, BitConstraint):
                bits = self._constraint.bits(vocab_size)
            else:
                zeros = torch.zeros(vocab_size)
                bits = bits_of(_checked(self._constraint.mask(zeros.clone()), zeros).numpy() > -math.inf)
        if not bits.any():
            raise NoTokenLeft(_ALL_FORBIDDEN)
        return bits

    def _processed(self, logits: torch.Tensor, choice: Choice, tokens: Sequence[int], is_only: bool) -> Question:
        """Run the request's processors on scores; what is left of the choice comes after them."""
        if is_only:  # the logits decide nothing
            logits = torch.zeros_like(logits)
        else:
            _check_finite(logits)
        masked = definition.masked(logits, choice)
        scores = definition.scores(masked, choice)
        is_allowed = scores > -math.inf
        input_ids = torch.tensor([tokens])
        for processor in self._processors:
            scores = processor(input_ids, scores[None])[0]
        scores = torch.where(is_allowed, scores, -math.inf)
        if not are_finite(scores):
            raise NoTokenLeft(_NOTHING_LEFT)
        rest = replace(choice, mask=None, allowed=None, biases=None, penalties=None, forbidden=None, num_logprobs=None)
        return Question(masked, choice, (scores, rest))

    def answer(self, chosen: Chosen) -> int:
        """Return a token that was chosen, and advance the constraint by it.

        Raises:
            NoTokenLeft: the request's options allow no token.
            RequestFault: the constraint fails.
            UserError: the logits are not finite.
        """
        if chosen.token < 0:
            if chosen.token == NONE_LEFT:
                raise NoTokenLeft(_NOTHING_LEFT)
            raise NoTokenLeft(_ALL_FORBIDDEN) if chosen.token == ALL_MASKED else UserError(NOT_FINITE)
        self._advance(chosen.token)
        return chosen.token

    def allowed(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts before the first one that the constraint forbids.

        Raises:
            RequestFault: the constraint fails.
        """
        if self._constraint is None:
            return drafts
        with _blamed_on(_CONSTRAINT):
            count = self._constraint.count_allowed(drafts)
            if not is_whole(count) or not 0 <= count <= len(drafts):
                raise UserError(f"of {len(drafts)} tokens it allows {reprlib.repr(count)}")
            return drafts[:count]

    def forced(self, tokens: Sequence[int], most: int, vocab_size: int) -> Sequence[int]:
        """Return at most `most` tokens that will be chosen next whatever the logits, because the constraint allows no
        others, and the other rules allow these. Processors see the scores of every token, so with them there are none.

        Args:
            tokens: the sequence so far, prompt included.

        Raises:
            RequestFault: the constraint fails.
        """
        if self._constraint is None or self._processors or most < 1:
            return ()
        if not self._forced:
            with _blamed_on(_CONSTRAINT):
                found = self._constraint.forced(most)
                are_tokens = is_list(found) and all(is_whole(token) and 0 <= token < vocab_size for token in found)
                if not are_tokens or len(found) > most:
                    raise UserError(f"the tokens that it forces are {reprlib.repr(found)}")
            for token in found:
                if not self._rules.allows(token, [*tokens, *self._forced]):
                    break
                self._forced.append(token)
        return self._forced[:most]

    def take_forced(self) -> int:
        """Return the first of the `forced` tokens and advance as `answer` does."""
        token = self._forced[0]
        self._advance(token)
        return token

    def _advance(self, token: int) -> None:
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        if self._constraint is not None:
            with _blamed_on(_CONSTRAINT):
                self._constraint.accept(token)

    def fork(self) -> Sampler:
        """Return a copy that chooses the same tokens and does not advance the constraint of this one.

        Raises:
            RequestFault: the constraint fails.
        """
        forked = copy.copy(self)
        forked._constraint = _fork(self._constraint)
        forked._forced = list(self._forced)
        forked._counts = copy.deepcopy(self._counts)
        return forked


def choose(questions: Sequence[Question | Chosen], form: ModuleType) -> list[Chosen]:
    """Choose the tokens of questions, of any sequences, in one call of a form of `ops.sampling`."""
    asked = [each for each in questions if isinstance(each, Question)]
    pairs = [each.processed or (each.logits, each.choice) for each in asked]
    found = iter(form.choose([logits for logits, _ in pairs], [choice for _, choice in pairs]))
    return [each if isinstance(each, Chosen) else _reported(each, next(found), form) for each in questions]


def _reported(question: Question, chosen: Chosen, form: ModuleType) -> Chosen:
    """Add the report of a token that was chosen from processed scores."""
    num_logprobs = question.choice.num_logprobs
    if question.processed is None or num_logprobs is None or chosen.token < 0:
        return chosen
    [report] = form.token_logprobs(question.logits[None], [chosen.token], num_logprobs)
    return Chosen(chosen.token, report)


def _only_one(bits: np.ndarray) -> int | None:
    """Return the token whose bit is the only one set, if there is one."""
    [places] = bits.nonzero()
    byte = int(bits[places[0]])
    is_only = len(places) == 1 and byte.bit_count() == 1
    return int(places[0]) * 8 + byte.bit_length() - 1 if is_only else None


class _RequestsProcessor:
    """A logits processor that a request brings."""

    def __init__(self, processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self._processor = processor
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        self._name = f"the request's logits processor {name}"

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the processor's scores; raise RequestFault if the processor fails."""
        with _blamed_on(self._name):
            result = _checked(self._processor(input_ids, scores), scores)
            highest = float(result[0, _argmax(result[0])])
            if math.isnan(highest) or highest == math.inf:
                raise UserError("it returned NaN" if math.isnan(highest) else "it returned infinity")
            return result


def _fork(constraint: Constraint | None) -> Constraint | None:
    if constraint is None:
        return None
    with _blamed_on(_CONSTRAINT):
        forked = constraint.fork()
        if not all(hasattr(forked, name) for name in ("fork", "mask", "accept", "count_allowed", "forced")):
            raise UserError(f"its fork is {reprlib.repr(forked)}, and must be a constraint")
        return forked


def _checked(result: object, scores: torch.Tensor) -> torch.Tensor:
    """Check and return the scores that a processor or a constraint returned.

    Raises:
        UserError: it cannot be the scores of the same tokens.
    """
    if not isinstance(result, torch.Tensor):
        raise UserError(f"it returned {reprlib.repr(result)}, and must return a tensor")
    if any(getattr(result, name) != getattr(scores, name) for name in ("shape", "dtype", "device", "layout")):
        found, right = (f"{list(each.shape)} of {each.dtype} on {each.device}" for each in (result, scores))
        kind = "" if result.layout == scores.layout else f", {result.layout},"
        raise UserError(f"it returned a tensor {found}{kind} and must return one {right}")
    return result.detach()


def are_finite(logits: torch.Tensor) -> bool:
    """Return whether a token can be chosen from logits [vocab_size]: the highest is finite, and none is NaN."""
    return math.isfinite(logits[_argmax(logits)])


def _check_finite(logits: torch.Tensor) -> None:
    if not are_finite(logits):
        raise UserError(NOT_FINITE)


def _argmax(logits: torch.Tensor) -> int:
    """Return the token with the highest logit, or one whose logit is NaN.

    numpy's argmax runs in one thread. torch's would wake its threads, which then spin during the next step.
    """
    return int(logits.numpy().argmax())


def _normal(value: float) -> float:
    """Return the number, or the nearest normal number above 0 of float32, in which scores are."""
    return min(max(float(value), _FLOAT32.tiny), _FLOAT32.max)


def _choice_of(params: SamplingParams, seed: int | None) -> Choice:
    """Return what the options say of each token; a greedy sequence has no seed."""
    is_greedy = params.temperature == 0
    return Choice(
        temperature=0.0 if is_greedy else _normal(1 if params.temperature is None else params.temperature),
        top_k=int(params.top_k or 0),
        top_p=float(params.top_p or 1),
        min_p=float(params.min_p or 0),
        typical_p=float(params.typical_p or 1),
        seed=seed or 0,
        biases=_biases(params.logit_bias or {}),
        num_logprobs=params.logprobs,
    )


def _biases(logit_bias: Mapping[int, float | None]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the tokens that have a bias, and the biases; None if no token has one."""
    biases = [(int(token), float(bias)) for token, bias in logit_bias.items() if bias]
    if not biases:
        return None
    return torch.tensor([token for token, _ in biases]), torch.tensor([bias for _, bias in biases])
