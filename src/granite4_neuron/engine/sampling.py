"""Which token comes next."""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Sequence
from numbers import Real

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from granite4_neuron.errors import UserError


def with_overrides(
    defaults: GenerationConfig,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> GenerationConfig:
    """The checkpoint's defaults with what the caller has set; None leaves a default.

    Temperature 0 means greedy. Any other sampling option given means sampling, also where the defaults are greedy.
    """
    config = copy.deepcopy(defaults)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        config.do_sample = True
    if repetition_penalty is not None:
        given["repetition_penalty"] = repetition_penalty
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(f"{name} is {reprlib.repr(value)}, and must be a number.")
        setattr(config, name, value)
    if config.temperature == 0:
        config.do_sample = False
    return config


class Sampler:
    """Picks one sequence's next token, greedily or by chance, after transformers' logits processors.

    Args:
        config: do_sample, temperature, top_k, top_p, min_p, repetition_penalty.
        seed: of this sequence's random numbers; None for different ones each time.

    Raises:
        UserError: an option is outside its range.
    """

    def __init__(self, config: GenerationConfig, seed: int | None):
        try:
            self._processors = _processors(config)
        except ValueError as error:
            raise UserError(str(error).replace("`", "").rstrip(".") + ".") from None
        self._do_sample = config.do_sample
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        elif 0 <= seed < 2**63:
            self._generator.manual_seed(seed)
        else:
            raise UserError(f"seed is {seed}, and must be between 0 and 2**63 - 1.")

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """The token to append.

        Args:
            logits: [vocab_size], float32.
            tokens: the sequence so far, prompt included.

        Raises:
            UserError: the logits, under the options, are not finite.
        """
        scores = self._scores(logits, tokens)
        # By numpy, in one thread: a call of torch's would wake its threads, to spin beside those of the next step.
        likeliest = int(scores.numpy().argmax())
        if not math.isfinite(scores[likeliest]):
            raise UserError("no token can be chosen: the model's logits, under the sampling options, are not finite.")
        if not self._do_sample:
            return likeliest
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def fork(self) -> Sampler:
        """One that picks as this one would, and leaves its random numbers as they are."""
        forked = copy.copy(self)
        forked._generator = self._generator.clone_state()
        return forked

    def _scores(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The logits under the options; their softmax is what a token is drawn from."""
        return self._processors(torch.tensor([tokens]), logits[None])[0] if self._processors else logits


def _processors(config: GenerationConfig) -> LogitsProcessorList:
    """In the order in which transformers' generate applies them."""
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
