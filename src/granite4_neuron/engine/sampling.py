"""Sampling: the choice of the next token."""

from __future__ import annotations

import copy
import math
import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from granite4_neuron.engine.constraint import Constraint
from granite4_neuron.engine.sampling_params import SamplingParams, is_list, is_whole
from granite4_neuron.engine.token_rules import TokenRules
from granite4_neuron.errors import UserError, described
from granite4_neuron.runtime.interface import MOST_TOP_K, Draw

NOT_FINITE = "no token can be chosen: the model's logits are not finite."
_NOTHING_LEFT = (
    "no token can be chosen: the request's options (a grammar or another constraint, allowed_token_ids, bad_words, "
    "min_tokens, logits_processors) together allow none."
)
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


class Sampler:
    """Chooses the next token of one sequence, greedily or by sampling, among those that its `TokenRules` allow.

    Biases and penalties change the model's logits first; then tokens that may not come next get -inf; then the
    request's processors run, and what only sampling needs. This is the order of transformers' generate.

    Args:
        params: the options, with the checkpoint's defaults.
        prompt_length: how many of the sequence's tokens are the prompt's.
    """

    def __init__(self, params: SamplingParams, prompt_length: int):
        self._rules = TokenRules(params, prompt_length)
        self._changes = _changes(params, prompt_length)
        self._processors = LogitsProcessorList(map(_RequestsProcessor, params.logits_processors or ()))
        self._warpers = _warpers(params)
        self._constraint = _fork(params.constraint)
        self._certain: list[int] = []  # the tokens that the constraint forces, as far as they are known
        self._is_greedy = params.temperature == 0
        options = _temperature(params), params.top_k or 0, params.top_p or 1
        self._options = Draw(*options, params.min_p or 0, torch.empty(0))
        self._noise: deque[torch.Tensor] = deque()  # of the next choices, in order
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token is always the one with the model's highest logit, or the first of equal ones."""
        return self._is_greedy and self._is_free

    @property
    def is_drawn(self) -> bool:
        """Whether the token is drawn with temperature, top_k, top_p and min_p alone, which a `Draw` describes."""
        return not self._is_greedy and self._options.top_k <= MOST_TOP_K and self._is_free

    @property
    def _is_free(self) -> bool:
        """Whether all tokens may come next, and no option changes logits."""
        return self._constraint is None and not (self._rules.forbid_any or self._changes or self._processors)

    def draw(self, ahead: int, vocab_size: int) -> Draw:
        """Return how a device is to draw the token that comes after `ahead` others, if `is_drawn`."""
        return self._options._replace(noise=self.noise(ahead, vocab_size))

    def count_drawn(self) -> None:
        """Discard the next token's noise, with which a device has drawn that token."""
        self._noise.popleft()

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """Choose the token to append from the model's logits; see `mask` and `choose`."""
        return self.choose(self.mask(logits), tokens)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [vocab_size] with -inf for tokens that the constraint forbids; without one, the same tensor.

        If it allows one token, the logits decide nothing, and that token gets 0: it may also be forced, without logits.

        Raises:
            NoTokenLeft: the constraint forbids all tokens.
            RequestFault: the constraint fails.
            UserError: the logits are not finite.
        """
        if self._constraint is None:
            return logits
        zeros = torch.zeros_like(logits)
        with _blamed_on(_CONSTRAINT):
            allowed = _checked(self._constraint.mask(zeros.clone()), logits) > -math.inf
        count = np.count_nonzero(allowed.numpy())
        if count > 1:
            _check_finite(logits)
        masked = torch.where(allowed, logits if count > 1 else zeros, -math.inf)
        if not are_finite(masked):
            raise NoTokenLeft("no token can be chosen: the request's constraint allows none.")
        return masked

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

    def certain(self, tokens: Sequence[int], most: int, vocab_size: int) -> Sequence[int]:
        """Return at most `most` tokens that will be chosen next whatever the logits, because the constraint allows no
        others, and the other rules allow these. Processors see the scores of every token, so with them there are none.

        Args:
            tokens: the sequence so far, prompt included.

        Raises:
            RequestFault: the constraint fails.
        """
        if self._constraint is None or self._processors or most < 1:
            return ()
        if not self._certain:
            with _blamed_on(_CONSTRAINT):
                forced = self._constraint.forced(most)
                are_tokens = is_list(forced) and all(is_whole(token) and 0 <= token < vocab_size for token in forced)
                if not are_tokens or len(forced) > most:
                    raise UserError(f"the tokens that it forces are {reprlib.repr(forced)}")
            for token in forced:
                if not self._rules.allows(token, [*tokens, *self._certain]):
                    break
                self._certain.append(token)
        return self._certain[:most]

    def take_certain(self, vocab_size: int) -> int:
        """Return the first of the `certain` tokens and advance as `choose` does. The random numbers advance too, so
        that later tokens get the same ones.
        """
        token = self._certain[0]
        if not self._is_greedy:
            self.noise(0, vocab_size)
            self._noise.popleft()
        self._advance(token)
        return token

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """Choose the token to append, and advance the constraint by it.

        Args:
            logits: [vocab_size], float32, from `mask`.
            tokens: the sequence so far, prompt included.

        Raises:
            NoTokenLeft: the request's options allow no token.
            RequestFault: a logits processor or the constraint fails.
            UserError: the logits are not finite.
        """
        token = self._choose(logits, tokens)
        self._advance(token)
        return token

    def _advance(self, token: int) -> None:
        self._certain = self._certain[1:] if self._certain[:1] == [token] else []
        if self._constraint is not None:
            with _blamed_on(_CONSTRAINT):
                self._constraint.accept(token)

    def _choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        scores = self._scores(logits, tokens)
        if self._is_greedy:
            return _argmax(scores)
        quotients = scores.softmax(-1).div_(self.noise(0, len(scores)))
        self._noise.popleft()
        return _argmax(quotients)

    def noise(self, ahead: int, vocab_size: int) -> torch.Tensor:
        """Return the random numbers [vocab_size] of the choice that comes after `ahead` others, in float32.

        They do not depend on logits, so they may be drawn before the logits are known. Each choice has its own numbers,
        whenever they are drawn. With probabilities p, the token with the highest p / noise is chosen, bit by bit as in
        torch.multinomial: noise has an exponential distribution, so each token wins with its probability.
        """
        while len(self._noise) <= ahead:
            # `exponential_` computes the same numbers one by one, which takes 2.6 times as long.
            uniform = torch.empty(vocab_size, dtype=torch.float64).uniform_(generator=self._generator)
            self._noise.append(uniform.neg_().log1p_().neg_().float())
        return self._noise[ahead]

    def fork(self) -> Sampler:
        """Return a copy that chooses the same tokens and advances neither random numbers nor constraint of this one.

        Raises:
            RequestFault: the constraint fails.
        """
        forked = copy.copy(self)
        forked._generator, forked._noise = self._generator.clone_state(), self._noise.copy()
        forked._constraint = _fork(self._constraint)
        forked._certain = list(self._certain)
        return forked

    def _scores(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Apply the options to logits [vocab_size]. A token is drawn from the softmax of the result, and the highest
        number of it is finite.

        Raises: see `choose`.
        """
        _check_finite(logits)  # before options can be blamed
        if self._is_free and self._is_greedy:
            return logits
        scores = logits[None]
        input_ids = cast(torch.LongTensor, torch.tensor([tokens]))  # transformers' name for int64
        if self._changes:
            scores = self._changes(input_ids, scores).clamp(_FLOAT32.min, _FLOAT32.max)
        if not self._is_free:
            by_constraint = None if self._constraint is None else logits.numpy() > -math.inf
            allowed = torch.from_numpy(self._rules.allowed(by_constraint, tokens, len(logits)))
            scores = torch.where(allowed, scores, -math.inf)
            if self._processors:
                scores = torch.where(allowed, self._processors(input_ids, scores), -math.inf)
            if not are_finite(scores[0]):
                raise NoTokenLeft(_NOTHING_LEFT)
        return self._warpers(input_ids, scores)[0]


class _RequestsProcessor(LogitsProcessor):
    """A logits processor that a request brings."""

    def __init__(self, processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self._processor = processor
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        self._name = f"the request's logits processor {name}"

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the processor's scores.

        Raises:
            RequestFault: the processor fails.
        """
        with _blamed_on(self._name):
            result = _checked(self._processor(input_ids, scores), scores)
            highest = float(result[0, _argmax(result[0])])
            if math.isnan(highest) or highest == math.inf:
                raise UserError("it returned NaN" if math.isnan(highest) else "it returned infinity")
            return result


class OccurrencePenaltyLogitsProcessor(LogitsProcessor):
    """Makes generated tokens less likely, as OpenAI's frequency and presence penalties do
    (https://platform.openai.com/docs/api-reference/completions).

    Args:
        frequency: subtracted from a token's logit for each time that it was generated.
        presence: subtracted once if it was generated.
        prompt_length: the first tokens, which do not count.
    """

    def __init__(self, frequency: float, presence: float, prompt_length: int):
        self._frequency = frequency
        self._presence = presence
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Subtract the penalties.

        Args:
            input_ids: [batch_size, tokens].
            scores: [batch_size, vocab_size].
        """
        generated = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class DifferenceTemperatureWarper(LogitsProcessor):
    """Divides each score's difference to the highest one, so that no temperature leaves all of them infinite.

    Args:
        temperature: one of float32's normal numbers.
    """

    def __init__(self, temperature: float):
        self._temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the quotients.

        Args:
            input_ids: [batch_size, tokens].
            scores: [batch_size, vocab_size]; the highest is finite.
        """
        return (scores - scores.amax(-1, keepdim=True)) / self._temperature


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


def _temperature(params: SamplingParams) -> float:
    """Return the temperature to sample with; any number for a greedy sequence."""
    return 1.0 if params.temperature is None else _normal(params.temperature)


def _changes(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """Return processors for the options that change the model's own logits, in the order of transformers' generate."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        biases = {(token,): float(bias or 0) for token, bias in params.logit_bias.items()}
        # Annotated to take lists, but with a list transformers 4.57 refuses the token 0.
        processors.append(SequenceBiasLogitsProcessor(biases))  # type: ignore[arg-type]  # it takes a dictionary too
    if params.frequency_penalty or params.presence_penalty:
        penalties = params.frequency_penalty or 0, params.presence_penalty or 0
        processors.append(OccurrencePenaltyLogitsProcessor(*penalties, prompt_length))
    if params.repetition_penalty not in (None, 1):
        processors.append(RepetitionPenaltyLogitsProcessor(_normal(params.repetition_penalty)))
    return processors


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """Return processors for the options that only sampling needs, in the order of transformers' generate. Each leaves
    the likeliest token.
    """
    processors = LogitsProcessorList()
    if params.temperature == 0:
        return processors
    if params.temperature not in (None, 1):
        processors.append(DifferenceTemperatureWarper(_temperature(params)))
    if params.top_k not in (None, 0):
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p not in (None, 1):
        processors.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p is not None:
        processors.append(MinPLogitsWarper(float(params.min_p)))
    return processors
