"""Sampling: which token comes next."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from granite4_neuron.errors import UserError


def is_number(value: object) -> bool:
    """Whether it is a finite number of any library's, and not a boolean."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond those of double precision
        return False


def is_whole(value: object) -> bool:
    """Whether it is an integer of any library's, and not a boolean."""
    if type(value) is int:  # a prompt may have a hundred thousand, and what follows takes a microsecond
        return True
    return isinstance(value, Integral) and not isinstance(value, bool)


# What each option must be, and how that is called.
SAMPLING_RANGES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "temperature": (lambda value: is_number(value) and value >= 0, "a number of at least 0"),
    "top_k": (lambda value: is_whole(value) and value >= 0, "a whole number of at least 0"),
    "top_p": (lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "frequency_penalty": (lambda value: is_number(value) and -2 <= value <= 2, "a number from -2 to 2"),
    "presence_penalty": (lambda value: is_number(value) and -2 <= value <= 2, "a number from -2 to 2"),
    "logit_bias": (lambda value: is_number(value) and -100 <= value <= 100, "a number from -100 to 100"),
    "seed": (lambda value: is_whole(value) and 0 <= value < 2**63, "a whole number from 0 to 2**63 - 1"),
}


def check_sampling(options: Mapping[str, object]) -> None:
    """Check that options, by name, are in their ranges; None always is.

    Raises:
        UserError: one is not.
    """
    for name, value in options.items():
        is_right, what = SAMPLING_RANGES[name]
        if value is not None and not is_right(value):
            raise UserError(f"{name} is {reprlib.repr(value)}, and must be {what}.")


def with_overrides(
    defaults: GenerationConfig,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> GenerationConfig:
    """The checkpoint's defaults with the caller's options; None keeps a default.

    Temperature 0 means greedy. Any other sampling option turns sampling on, even if the defaults are greedy.

    Raises:
        UserError: an option is outside its range.
    """
    config = copy.deepcopy(defaults)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        config.do_sample = True
    if repetition_penalty is not None:
        given["repetition_penalty"] = repetition_penalty
    check_sampling(given)
    for name, value in given.items():
        setattr(config, name, value)
    if config.temperature == 0:
        config.do_sample = False
    return config


class NoTokenLeft(UserError):
    """A request's own options leave no token to choose, although the model's logits are finite."""


class Sampler:
    """Chooses the next token of one sequence, greedily or by sampling, with transformers' logits processors.

    Args:
        config: do_sample, temperature, top_k, top_p, min_p, repetition_penalty.
        seed: of this sequence's random numbers; None for different ones each time.
        additions: processors that run before those, see `additions`.

    Raises:
        UserError: an option is outside its range.
    """

    def __init__(self, config: GenerationConfig, seed: int | None, additions: Sequence[LogitsProcessor] = ()):
        options = ("temperature", "top_k", "top_p", "min_p") if config.do_sample else ()
        check_sampling({name: getattr(config, name) for name in (*options, "repetition_penalty")} | {"seed": seed})
        self._processors = LogitsProcessorList([*additions, *_processors(config)])
        self._do_sample = config.do_sample
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """The token to append.

        Args:
            logits: [vocab_size], float32.
            tokens: the sequence so far, prompt included.

        Raises:
            NoTokenLeft: the logits are finite, but not after the options have been applied.
            UserError: the logits are not finite.
        """
        scores = self._scores(logits, tokens)
        likeliest = _likeliest(scores)
        if not math.isfinite(scores[likeliest]):
            if not math.isfinite(logits[_likeliest(logits)]):
                raise UserError("no token can be chosen: the model's logits are not finite.")
            raise NoTokenLeft(
                "no token can be chosen: under the request's sampling options the logits are not finite; a temperature "
                "or repetition_penalty further from 0 would keep them so."
            )
        if not self._do_sample:
            return likeliest
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def fork(self) -> Sampler:
        """A copy that chooses the same tokens and does not advance this one's random numbers."""
        forked = copy.copy(self)
        forked._generator = self._generator.clone_state()
        return forked

    def _scores(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The logits under the options; their softmax is what a token is drawn from."""
        return self._processors(torch.tensor([tokens]), logits[None])[0] if self._processors else logits


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
        """Penalised scores.

        Args:
            input_ids: [batch_size, tokens].
            scores: [batch_size, vocab_size].
        """
        generated = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def additions(
    logit_bias: Mapping[int, float | None],
    frequency_penalty: float | None,
    presence_penalty: float | None,
    prompt_length: int,
) -> list[LogitsProcessor]:
    """Processors for a request's logit_bias, frequency_penalty and presence_penalty; None is 0.

    Args:
        prompt_length: tokens before the generated ones.

    Raises:
        UserError: a number is outside its range.
    """
    check_sampling({"frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty})
    for bias in logit_bias.values():
        check_sampling({"logit_bias": bias})
    processors: list[LogitsProcessor] = []
    if logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(id,): float(bias or 0) for id, bias in logit_bias.items()}))
    if frequency_penalty or presence_penalty:
        processors.append(
            OccurrencePenaltyLogitsProcessor(frequency_penalty or 0, presence_penalty or 0, prompt_length)
        )
    return processors


def _likeliest(logits: torch.Tensor) -> int:
    """The token of the highest logit, or one whose logit is NaN.

    It uses numpy, in one thread: torch's argmax would wake its threads, which then spin beside those of the next step.
    """
    return int(logits.numpy().argmax())


def _processors(config: GenerationConfig) -> LogitsProcessorList:
    """Processors of the sampling options, in the order in which transformers' generate applies them."""
    processors = LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if config.do_sample:
        if config.temperature not in (None, 1.0):
            processors.append(TemperatureLogitsWarper(float(config.temperature)))
        if config.top_k not in (None, 0):
            processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p not in (None, 1.0):
            processors.append(TopPLogitsWarper(float(config.top_p)))
        if config.min_p is not None:
            processors.append(MinPLogitsWarper(float(config.min_p)))
    return processors
