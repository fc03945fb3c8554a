"""Sampling options: each is defined once, here, with its name, default and allowed values."""

from __future__ import annotations

import difflib
import inspect
import math
import reprlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import torch
from transformers import GenerationConfig

from granite4_neuron.engine.constraint import Constraint
from granite4_neuron.errors import UserError
from granite4_neuron.ops.sampling import MAX_LOGPROBS

_NUM_SEEDS = 2**63
_MOST_STOP = 2**14  # characters of all stop strings together

Params = TypeVar("Params", bound="SamplingParams")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number of any library, and not a boolean."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for double precision
        return False


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of any library, and not a boolean."""
    # Fast path: a prompt may have a hundred thousand tokens, and the check below takes a microsecond.
    if type(value) is int:
        return True
    return isinstance(value, Integral) and not isinstance(value, bool)


def are_whole(values: object) -> TypeGuard[Collection[int]]:
    """Return whether a value is a collection of integers."""
    return isinstance(values, Collection) and all(map(is_whole, values))


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence, and not a text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


@dataclass(frozen=True)
class Option:
    """The rule for an option's values.

    is_valid: whether a value is allowed.
    requirement: describes allowed values in messages.
    convert: makes the value that is kept; without an argument, the value for None.
    from_checkpoint: whether None means the value in the checkpoint's generation_config.json.
    turns_on_sampling: whether any value means that tokens are sampled, even if the checkpoint's default is greedy.
    is_setting: whether it is a single number that shapes a text; a chat has these as `/set NAME VALUE`.
    """

    is_valid: Callable[[Any], bool]
    requirement: str
    convert: Callable[..., Any] | None = None
    from_checkpoint: bool = False
    turns_on_sampling: bool = False
    is_setting: bool = False

    def check(self, name: str, value: object) -> None:
        """Check a value; messages call the option `name`.

        Raises:
            UserError: the value is not allowed.
        """
        if not self.is_valid(value):
            raise UserError(f"{name} is {reprlib.repr(value)}, and must be {self.requirement}.")


def option(is_valid: Callable[[Any], bool], requirement: str, *, default: Any = None, **rule: Any) -> Any:
    """Return a field of a dataclass of options. Arguments are as in `Option`; None is allowed if it is the default."""
    return field(default=default, metadata={"option": Option(is_valid, requirement, **rule)})


_setting = partial(option, is_setting=True)
# An option of a logits warper: transformers' name for a processor that only sampling needs.
_warper = partial(_setting, from_checkpoint=True, turns_on_sampling=True)


def _is_count(value: object) -> bool:
    return is_whole(value) and value >= 0


def _are_ids(value: object) -> bool:
    return are_whole(value) and all(0 <= id < 2**63 for id in value)


def _are_texts(value: object) -> bool:
    texts: Any = [value] if isinstance(value, str) else value
    are_right = is_list(texts) and all(isinstance(text, str) and text for text in texts)
    return are_right and len("".join(texts)) <= _MOST_STOP


def _to_texts(value: str | Sequence[str] = ()) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _are_phrases(value: object) -> bool:
    return is_list(value) and all(is_list(tokens) and tokens and _are_ids(tokens) for tokens in value)


def _to_phrases(value: Sequence[Sequence[int]] | None = None) -> tuple[tuple[int, ...], ...] | None:
    return None if value is None else tuple(map(tuple, value))


def _are_biases(value: object) -> bool:
    def is_bias(bias: object) -> bool:
        return bias is None or (is_number(bias) and -100 <= bias <= 100)

    return isinstance(value, Mapping) and all(map(is_whole, value)) and all(map(is_bias, value.values()))


def _is_penalty(value: object) -> bool:
    return is_number(value) and -2 <= value <= 2


def _are_callable(value: object) -> bool:
    return is_list(value) and all(map(callable, value))


def _is_num_logprobs(value: object) -> bool:
    return is_whole(value) and 0 <= value <= MAX_LOGPROBS


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options that decide how a sequence's tokens are chosen, when it ends and what is reported. The names are vLLM's
    or transformers'.

    temperature: divides the logits; 0 is greedy.
    top_k: choose among this many of the likeliest tokens; 0 for all.
    top_p: choose among the likeliest tokens whose probabilities add up to this.
    min_p: choose among tokens at least this many times as likely as the likeliest.
    typical_p: choose among the tokens nearest to the expected surprise whose probabilities add up to this.
    repetition_penalty: above 1, makes tokens of the prompt and of the text less likely.
    frequency_penalty, presence_penalty: subtracted from a token's logit once for each time that it was generated, and
        once if it was generated at all.
    logit_bias: added to the logits of tokens, by token id.
    allowed_token_ids: only these tokens are chosen; one of `stop_token_ids` can end the sequence only if it is among
        them. None for all.
    bad_words_ids: lists of tokens, as in transformers' generate: the last token of a list is not chosen after the
        others.
    suppress_tokens, begin_suppress_tokens: tokens that are never chosen, and that are not chosen first.
    no_repeat_ngram_size: no this many tokens in a row are chosen that the prompt or the text has already; 0 for no such
        rule.
    seed: of the sequence's random numbers, which depend on it, on a token's place and on the token; None for a
        different seed each time, which `PromptReport` tells.
    stop: one string or several that end the text and are not part of it.
    stop_token_ids: tokens that end the sequence.
    min_tokens: before this many new tokens none of `stop_token_ids` is chosen, and no string of `stop` ends the text.
    logits_processors: classes of transformers, or functions, that are called with the tokens so far, [1, tokens] int64,
        and the scores of the next one, [1, vocab_size] float32, and return new scores. They run after biases and
        penalties and before the temperature, as in transformers' generate, and must depend on their arguments only.
    logprobs: report the log-probability of each new token and of this many top tokens; None for no report.
    prompt_logprobs: the same for the prompt's tokens. The whole prompt then runs, whatever a prefix cache has.
    constraint: limits which tokens may follow (see `engine.Constraint`). It applies before any other option changes
        logits and before log-probabilities of new tokens are computed. Each sequence advances a copy of it.

    Which tokens the options allow together is decided by `token_rules.TokenRules`.

    An option that is None takes the checkpoint's value if there is one (see `with_defaults`); otherwise it has no
    effect.

    Raises:
        UserError: an option is outside its range.
    """

    temperature: float | None = _warper(lambda value: is_number(value) and value >= 0, "a number of at least 0")
    top_k: int | None = _warper(_is_count, "a whole number of at least 0")
    top_p: float | None = _warper(lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and at most 1")
    min_p: float | None = _warper(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
    typical_p: float | None = _warper(
        lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"
    )
    repetition_penalty: float | None = _setting(
        lambda value: is_number(value) and value > 0, "a number above 0", from_checkpoint=True
    )
    frequency_penalty: float | None = _setting(_is_penalty, "a number from -2 to 2")
    presence_penalty: float | None = _setting(_is_penalty, "a number from -2 to 2")
    logit_bias: Mapping[int, float | None] | None = option(
        _are_biases, "a dictionary of numbers from -100 to 100 by token id", convert=dict
    )
    allowed_token_ids: Collection[int] | None = option(
        lambda value: _are_ids(value) and len(value) > 0, "a list or a set of token ids, at least one"
    )
    bad_words_ids: Sequence[Sequence[int]] | None = option(
        _are_phrases, "a list of lists of token ids, none of them empty", convert=_to_phrases, from_checkpoint=True
    )
    suppress_tokens: Collection[int] | None = option(_are_ids, "a list or a set of token ids", from_checkpoint=True)
    begin_suppress_tokens: Collection[int] | None = option(
        _are_ids, "a list or a set of token ids", from_checkpoint=True
    )
    no_repeat_ngram_size: int | None = option(_is_count, "a whole number of at least 0", from_checkpoint=True)
    seed: int | None = _setting(
        lambda value: is_whole(value) and 0 <= value < _NUM_SEEDS, "a whole number from 0 to 2**63 - 1"
    )
    stop: str | Sequence[str] | None = option(
        _are_texts,
        f"a string or a list of strings, none of them empty, and {_MOST_STOP:,} characters at most",
        convert=_to_texts,
    )
    stop_token_ids: Collection[int] | None = option(_are_ids, "a list or a set of token ids", convert=frozenset)
    min_tokens: int | None = option(_is_count, "a whole number of at least 0", from_checkpoint=True)
    logits_processors: Sequence[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] | None = option(
        _are_callable, "a list of functions of tokens and scores", convert=tuple
    )
    logprobs: int | None = option(_is_num_logprobs, f"a whole number from 0 to {MAX_LOGPROBS}")
    prompt_logprobs: int | None = option(_is_num_logprobs, f"a whole number from 0 to {MAX_LOGPROBS}")
    constraint: Constraint | None = option(  # noqa: RUF009 (it is dataclasses.field)
        lambda value: hasattr(value, "fork") and hasattr(value, "mask"), "a constraint, with the methods of one"
    )

    @classmethod
    def of_keywords(cls, function: Callable[..., object], options: Mapping[str, Any]) -> SamplingParams:
        """Return the options that `function` takes beside its own parameters.

        Raises:
            TypeError: there is no such option; the message names the nearest one.
            UserError: an option is outside its range.
        """
        names = [each.name for each in fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, [*names, *inspect.signature(function).parameters], 1)
                raise TypeError(f"there is no option {name!r}{f'; did you mean {near[0]}?' if near else ''}")
        return cls(**options)

    def __post_init__(self) -> None:
        for each in fields(self):
            rule, value = each.metadata["option"], getattr(self, each.name)
            if value is not None or each.default is not None:
                rule.check(each.name, value)
            if rule.convert is not None:
                # A converted copy, which the caller cannot change later.
                object.__setattr__(self, each.name, rule.convert() if value is None else rule.convert(value))

    def with_defaults(self: Params, defaults: GenerationConfig) -> Params:
        """Return a copy with the checkpoint's values where an option is None.

        If the checkpoint's default is greedy, the temperature is 0, unless an option turns sampling on.

        Raises:
            UserError: a default is outside its range.
        """
        given = [name for name in SAMPLING_OPTIONS if getattr(self, name) is not None]
        values = {
            name: getattr(defaults, name, None)
            for name, rule in SAMPLING_OPTIONS.items()
            if rule.from_checkpoint and name not in given
        }
        if not defaults.do_sample and not any(SAMPLING_OPTIONS[name].turns_on_sampling for name in given):
            values["temperature"] = 0
        return replace(self, **values)

    def with_seed(self: Params) -> Params:
        """Return a copy with a random seed, unless there is one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(_NUM_SEEDS))

    def with_seed_offset(self: Params, number: int) -> Params:
        """Return a copy for text `number` of several, with the seed plus that number."""
        return self if self.seed is None else replace(self, seed=(self.seed + number) % _NUM_SEEDS)


SAMPLING_OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(SamplingParams)}
