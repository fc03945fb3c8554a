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

Kind = Literal["json", "regex", "choice", "grammar", "lark"]

_MOST_CHARACTERS = 2**16  # of a grammar
_NAMES: Mapping[Kind, str] = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "lark": "the grammar",
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
        self._process = GrammarProcess([token.content for token in added if token.special])
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
            kind: "json", "regex", "choice", "grammar" or "lark".
            value: a JSON schema as a text or an object; a regular expression in Rust's syntax; texts of which the
                text is one; a grammar in Lark's or GBNF's syntax; or one in Lark's.

        Raises:
            UserError: the value is wrong or too long, has something that llguidance does not support, or takes too much
                time or memory to compile; or the tokenizer does not work with grammars.
        """
        if self._failure is not None:
            raise UserError(self._failure)
        text = _text(kind, value)
        if len(text) > _MOST_CHARACTERS:
            raise UserError(f"{_NAMES[kind]} has {len(text):,} characters, and may have {_MOST_CHARACTERS:,}.")
        try:
            return GrammarConstraint(new_matcher(self._tokenizer, self._process.convert(kind, text)))
        except GrammarFailed as error:
            raise UserError(f"{_NAMES[kind]} cannot be used ({str(error).rstrip('.')}).") from None

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
        return json.dumps(with_bounded_spaces(_schema(value)))
    if kind == "choice":
        is_right = isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
        if not is_right:
            raise UserError("the list of choices must be of texts, at least one, and none of them empty.")
        return json.dumps(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{_NAMES[kind]} must be a text, and not empty.")
    return value


def _schema(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the JSON schema is not JSON ({error}).") from None
    if not isinstance(value, Mapping):
        raise UserError("the JSON schema must be an object.")
    return value
