"""Texts that follow a JSON schema, a regular expression, a list of choices or a grammar, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import llguidance
import llguidance.hf
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.sampling import NoTokenLeft
from granite4_neuron.errors import UserError
from granite4_neuron.grammar_process import GrammarFailed, GrammarProcess, error_of, new_matcher

Kind = Literal["json", "regex", "choice", "grammar", "lark", "structural_tag"]

_MOST_CHARACTERS = 2**16  # of a grammar
_MOST_TAGS = 128
_NAMES: Mapping[Kind, str] = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "lark": "the grammar",
    "structural_tag": "the structural tag",
}
# Between the parts of JSON. Without a bound, a small model may write spaces for ever.
_WHITESPACE = r"[ \n\t]{1,40}"


class GrammarConstraint:
    """A grammar at one place of a text; see `engine.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def fork(self) -> GrammarConstraint:
        """See `Constraint.fork`."""
        return GrammarConstraint(self._matcher.deep_copy())

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Constraint.mask`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(bool)
        if self._matcher.is_error() or not allowed.any():
            raise NoTokenLeft(f"the grammar takes no further token ({error_of(self._matcher) or 'none spells it'}).")
        masked = np.full(len(logits), -np.inf, np.float32)
        np.copyto(masked, logits.numpy(), where=allowed)
        return torch.from_numpy(masked)

    def accept(self, token: int) -> None:
        """See `Constraint.accept`."""
        self._matcher.consume_token(token)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """See `Constraint.count_allowed`."""
        return self._matcher.validate_tokens(list(tokens))


class Grammars:
    """Makes constraints for the tokens of one model. Several threads may share one.

    A vocabulary of 100,000 tokens takes a second to read.

    Args:
        tokenizer: the model's.
        vocab_size: of the model; at least that of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
        added = tokenizer.added_tokens_decoder.values()
        self._special_tokens = [token.content for token in added if token.special]
        self._process = GrammarProcess(self._special_tokens)
        self._failure: str | None = None
        end = tokenizer.eos_token_id
        try:
            if end is None:  # llguidance would guess one
                raise ValueError("it has no end-of-sequence token")
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=end)
        except ValueError as error:
            self._failure = f"this checkpoint's tokenizer does not work with grammars ({error})."

    def constraint(self, kind: Kind, value: Any) -> GrammarConstraint:
        """Make the constraint of one kind of vLLM's structured outputs.

        The text may end, with the tokenizer's end-of-sequence token, where it is complete, and must where nothing can
        follow. JSON has at most 40 spaces and newlines in a row.

        Args:
            kind: "json", "regex", "choice", "grammar", "lark" or "structural_tag".
            value: a JSON schema as a text or an object; a regular expression in Rust's syntax; texts of which the
                text is one; a grammar in Lark's or GBNF's syntax; one in Lark's; or, as a text or an object, structures
                ("begin", "schema", "end") and triggers: a trigger in the text begins one of its structures.

        Raises:
            UserError: the value is wrong or too long, has something that llguidance does not support, or takes too much
                time or memory to compile; or the tokenizer does not work with grammars.
        """
        if self._failure is not None:
            raise UserError(self._failure)
        text = self._tags(value) if kind == "structural_tag" else _text(kind, value)
        if len(text) > _MOST_CHARACTERS:
            raise UserError(f"{_NAMES[kind]} has {len(text):,} characters, and may have {_MOST_CHARACTERS:,}.")
        try:
            grammar = self._process.convert("lark" if kind == "structural_tag" else kind, text)
            return GrammarConstraint(new_matcher(self._tokenizer, grammar))
        except GrammarFailed as error:
            raise UserError(f"{_NAMES[kind]} cannot be used ({str(error).rstrip('.')}).") from None

    def _tags(self, value: Any) -> str:
        """Return the grammar, in Lark's syntax, of a text with structural tags.

        Raises:
            UserError: the value is none, or has too many.
        """
        triggers, structures = _triggers_and_structures(value)
        tags = []
        for structure in structures:
            begin = structure["begin"]
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise UserError(f"the structural tag has no trigger with which {json.dumps(begin)} begins.")
            grammar = with_bounded_spaces(structure["schema"])
            tags.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=grammar, end=structure["end"]))
        # llguidance takes all triggers of this form for special tokens, or none.
        named = [trigger for trigger in triggers if trigger.startswith("<") and trigger.endswith(">")]
        are_special = all(trigger in self._special_tokens for trigger in named)
        return llguidance.StructTag.to_grammar(tags, assume_special=are_special)

    def close(self) -> None:
        """End the process in which grammars are tried; it starts again when it is needed."""
        self._process.close()


def with_bounded_spaces(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema with this package's options for llguidance, and no others."""
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def _text(kind: Kind, value: Any) -> str:
    """Return a value as `llguidance.grammar_from` takes it.

    Raises:
        UserError: it is of a wrong type.
    """
    if kind == "json":
        return json.dumps(with_bounded_spaces(_object(kind, value)))
    if kind == "choice":
        is_right = isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
        if not is_right:
            raise UserError("the list of choices must be of texts, at least one, and none of them empty.")
        return json.dumps(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{_NAMES[kind]} must be a text, and not empty.")
    return value


def _object(kind: Kind, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{_NAMES[kind]} is not JSON ({error}).") from None
    if not isinstance(value, Mapping):
        raise UserError(f"{_NAMES[kind]} must be an object.")
    return value


def _triggers_and_structures(value: Any) -> tuple[list[str], list[Mapping[str, Any]]]:
    tag = _object("structural_tag", value)
    triggers, structures = tag.get("triggers"), tag.get("structures")
    lists = [each for each in (triggers, structures) if isinstance(each, list) and 0 < len(each) <= _MOST_TAGS]
    is_right = len(lists) == 2 and tag.keys() <= {"type", "triggers", "structures"}
    if not is_right or not all(map(_is_trigger, triggers)) or not all(map(_is_structure, structures)):
        raise UserError(
            'the structural tag must have "structures", each with a "begin" and an "end", texts, and a "schema", and '
            f'"triggers", with which they begin; up to {_MOST_TAGS} of both. "format" is not supported.'
        )
    return triggers, structures


def _is_trigger(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_structure(value: Any) -> bool:
    types = {"begin": str, "schema": Mapping, "end": str}
    is_right = isinstance(value, Mapping) and value.keys() == types.keys()
    return is_right and all(isinstance(value[name], kind) for name, kind in types.items())
