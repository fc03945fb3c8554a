"""Texts that follow a JSON schema, a regular expression, a list of choices or a grammar, by llguidance."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import llguidance
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.config.json_files import parse_json
from granite4_neuron.engine.sampling import NoTokenLeft
from granite4_neuron.errors import UserError
from granite4_neuron.generation.closed_objects import TooManyMembers, close_objects
from granite4_neuron.generation.equal_schemas import equal_schema
from granite4_neuron.generation.schema_faults import MOST_TRIALS, place_of_fault
from granite4_neuron.generation.schema_references import has_endless_reference
from granite4_neuron.system.sandbox.grammar_process import (
    COMPILE_SECONDS,
    DeferredWorker,
    GrammarFailed,
    GrammarProcess,
    GrammarTooCostly,
    GrammarWorker,
    Mask,
    Matcher,
    Vocabulary,
    WorkerEnded,
)
from granite4_neuron.system.sandbox.limited_process import NoProcess, Stop
from granite4_neuron.system.stack import in_large_stack

Result = TypeVar("Result")

Kind = Literal["json", "regex", "choice", "grammar", "lark", "structural_tag"]

MOST_CHARACTERS = 2**16  # of a grammar, and of each schema in it
_MOST_TAGS = 128
_NAMES: Mapping[Kind, str] = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "lark": "the grammar",
    "structural_tag": "the structural tag",
}
# Between the parts of JSON, as llguidance's options. Without a bound, a small model may write spaces for ever.
_ANY_WHITESPACE = {"whitespace_pattern": r"[ \n\t]{1,40}"}
# As Python's json.dumps writes it, and so what chat templates show of calls and schemas.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Processor time for a text, and for each of its tokens. Masks of large schemas take up to 0.02 s, most others less than
# 0.001 s.
_TEXT_SECONDS = 0.5
_TOKEN_SECONDS = 0.01


class GrammarConstraint:
    """A grammar at one place of a text; see `engine.Constraint`.

    Its processor time is limited: to half a second, and to 0.01 s a token on average. Work beyond that is given up, and
    the next mask says so.

    Args:
        matcher: of the grammar; or a process with it, which can be ended within a mask, too, perhaps one that only the
            first mask or a fork starts. With a process no drafts are allowed, and no token is `forced`.
        after_thought: see the method of this name; None if nobody calls it.
    """

    def __init__(
        self,
        matcher: Matcher | GrammarWorker | DeferredWorker,
        after_thought: Callable[[str], GrammarConstraint] | None,
    ):
        self._matcher = matcher
        self._after_thought = after_thought
        self._seconds_left = _TEXT_SECONDS
        self._accepted: list[int] = []  # tokens that the matcher does not have yet

    def fork(self) -> GrammarConstraint:
        """See `Constraint.fork`."""
        forked = copy(self)
        forked._accepted = list(self._accepted)
        if self._seconds_left > 0:
            try:
                forked._matcher = self._matcher.fork()
            except WorkerEnded:
                forked._seconds_left = -math.inf
        return forked

    def after_thought(self, ends_thought: str) -> GrammarConstraint:
        """Return the constraint of a text that begins with a thought; the grammar begins after it.

        Args:
            ends_thought: see `Grammars.compile`.

        Raises:
            UserError: it takes too much time or memory to compile.
        """
        assert self._after_thought is not None
        return self._after_thought(ends_thought)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Constraint.mask`."""
        is_allowed = np.unpackbits(self.bits(len(logits)), count=len(logits), bitorder="little").view(bool)
        return torch.where(torch.from_numpy(is_allowed), logits, -math.inf)

    def bits(self, vocab_size: int) -> np.ndarray:
        """See `BitConstraint.bits`."""
        mask = self._mask() if self._seconds_left > 0 else None
        if mask is None or self._seconds_left <= 0:
            raise NoTokenLeft("the grammar takes too much processor time; use a simpler or less ambiguous one.")
        if mask.has_ended:
            raise NoTokenLeft("the grammar allows no further token (its text has ended).")
        allowed = np.frombuffer(mask.bits, np.uint8)[: -(-vocab_size // 8)].copy()
        allowed[-1] &= 0xFF >> -vocab_size % 8  # there may be bits beyond the vocabulary
        if mask.error or not allowed.any():
            raise NoTokenLeft(f"the grammar allows no further token ({mask.error or 'none spells it'}).")
        return allowed

    def accept(self, token: int) -> None:
        """See `Constraint.accept`."""
        self._seconds_left = min(self._seconds_left + _TOKEN_SECONDS, _TEXT_SECONDS)
        self._accepted.append(token)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """See `Constraint.count_allowed`."""
        return self._run(lambda matcher: matcher.count_allowed(tokens), 0)

    def forced(self, most: int) -> Sequence[int]:
        """See `Constraint.forced`."""
        return self._run(lambda matcher: matcher.forced(most), ())

    def _mask(self) -> Mask | None:
        """Return the mask of the token that follows; None if its process was ended."""
        accepted, self._accepted = self._accepted, []
        try:
            if isinstance(self._matcher, DeferredWorker):
                self._matcher = self._matcher.fork()
            if isinstance(self._matcher, GrammarWorker):
                mask = self._matcher.mask(accepted, self._seconds_left)
            else:
                mask = self._matcher.mask(accepted)
        except WorkerEnded:
            self._seconds_left = -math.inf
            return None
        self._seconds_left -= mask.seconds
        return mask

    def _run(self, work: Callable[[Matcher], Result], otherwise: Result) -> Result:
        """Return the result of the matcher's work, or `otherwise` if it is in a process or no time is left."""
        if not isinstance(self._matcher, Matcher) or self._seconds_left <= 0:
            return otherwise
        accepted, self._accepted = self._accepted, []
        started = time.thread_time()
        self._matcher.advance(accepted)
        result = work(self._matcher)
        self._seconds_left -= time.thread_time() - started
        return result


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar that has been compiled, within limits of time and memory. It may go to another process.

    kind: see `Grammars.compile`.
    text: in llguidance's format, which `Matcher.of` compiles within the same limits.
    worker: a process that has it, for kinds where a mask may take seconds. Elsewhere a change of processes is not worth
        its time.
    without_thought: the text of what follows a thought; None for the same.
    """

    kind: Kind
    text: str
    worker: GrammarWorker | None
    without_thought: str | None = None


class Matchers:
    """Makes constraints of compiled grammars for the tokens of one model. A vocabulary of 100,000 tokens takes a second
    to read.

    Args:
        tokenizer: the model's.
        vocab_size: of the model; at least that of the tokenizer.

    Raises:
        ValueError: llguidance does not support the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
        self._vocabulary = vocabulary_of(tokenizer, vocab_size)
        self._tokenizer = self._vocabulary.read()

    def constraint(
        self, grammar: CompiledGrammar, after_thought: Callable[[str], GrammarConstraint] | None = None
    ) -> GrammarConstraint:
        """Make the constraint of a grammar; see `GrammarConstraint` for `after_thought`."""
        matcher: Matcher | GrammarWorker | None = grammar.worker
        if matcher is None:
            end, text = self._vocabulary.end, grammar.text
            matcher = in_large_stack(lambda: Matcher.of(self._tokenizer, end, text))
        return GrammarConstraint(matcher, after_thought)


class Grammars:
    """Makes constraints for the tokens of one model. Several threads may share one.

    A vocabulary of 100,000 tokens takes a second to read. The process that compiles grammars reads it at the same time.

    Args:
        tokenizer: the model's.
        vocab_size: of the model; at least that of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int):
        added = tokenizer.added_tokens_decoder.values()
        self._special_tokens = [token.content for token in added if token.special]
        self._failure: str | None = None
        try:
            self._process = GrammarProcess(vocabulary_of(tokenizer, vocab_size))
            with suppress(NoProcess):  # the first grammar says so
                self._process.start()
            try:
                self._matchers = Matchers(tokenizer, vocab_size)
            except ValueError:
                self._process.close()
                raise
        except ValueError as error:
            self._failure = f"this checkpoint's tokenizer does not work with grammars ({error})."

    def constraint(self, kind: Kind, value: Any, stop: Stop | None = None, **options: Any) -> GrammarConstraint:
        """Make the constraint of one kind of vLLM's structured outputs; see `compile`."""
        return self.constraint_of(self.compile(kind, value, stop, **options))

    def constraint_of(self, grammar: CompiledGrammar) -> GrammarConstraint:
        """Make the constraint of a compiled grammar."""
        return self._matchers.constraint(grammar, partial(self._constraint_after_thought, grammar))

    def deferred_constraint_of(self, grammar: CompiledGrammar) -> GrammarConstraint:
        """Make the constraint of a compiled grammar for texts that may wait long. If it needs a process, each fork
        compiles the grammar again in one; until then there is none. It is not for `after_thought`.
        """
        if grammar.worker is None:
            return self._matchers.constraint(grammar)
        return GrammarConstraint(DeferredWorker(self._process, grammar.text), None)

    def compile(
        self,
        kind: Kind,
        value: Any,
        stop: Stop | None = None,
        *,
        disable_any_whitespace: bool = True,
        ends_thought: str | None = None,
    ) -> CompiledGrammar:
        """Compile the grammar of one kind of vLLM's structured outputs.

        The text may end, with the tokenizer's end-of-sequence token, where it is complete, and must where nothing can
        follow. See `schema_text` for JSON.

        Args:
            kind: "json", "regex", "choice", "grammar", "lark" or "structural_tag".
            value: a JSON schema as a string or an object; a regular expression in Rust's syntax; strings of which the
                text is one; a grammar in Lark's or GBNF's syntax; one in Lark's; or, as a text or an object, structures
                ("begin", "schema", "end") and triggers: a trigger in the text begins one of its structures.
            stop: ends the compilation from another thread.
            disable_any_whitespace: see `schema_text`.
            ends_thought: what ends the thought that the text begins with, and the grammar begins after it and up to two
                newlines; None if it begins with none.

        Raises:
            UserError: the kind or the value is wrong, or too long, has something that llguidance does not support, or
                takes too much time or memory to compile; or the tokenizer does not work with grammars.
            Stopped: `stop` was set.
        """
        if kind not in get_args(Kind):
            raise UserError(f"the kind of a structured output must be one of {', '.join(get_args(Kind))}.")
        if self._failure is not None:
            raise UserError(self._failure)
        if kind == "structural_tag":
            text = self._tags(value, disable_any_whitespace)
        else:
            text = _text(kind, value, disable_any_whitespace)
        _check_length(text, _NAMES[kind])
        try:
            format = "lark" if kind in ("choice", "structural_tag") else kind
            worker, grammar = self._process.compile(format, text, stop)
        except GrammarFailed as error:
            fault = self._fault(_object(value, ""), error, stop) if kind == "json" else str(error).rstrip(".")
            raise UserError(f"{_NAMES[kind]} cannot be used ({fault}).") from None
        compiled = CompiledGrammar(kind, grammar, worker if kind == "grammar" else None)
        return compiled if ends_thought is None else self._after_thought(compiled, ends_thought)

    def why_not(self, schema: Mapping[str, Any], stop: Stop | None = None) -> str | None:
        """Return why texts cannot follow a JSON schema, and which part of it is the cause; None if they can.

        Raises:
            Stopped: `stop` was set.
        """
        if self._failure is not None:
            return self._failure.rstrip(".")
        try:
            text = schema_text(schema, "it")
            _check_length(text, "it")
            self._process.compile("json", text, stop)
        except UserError as error:
            return str(error).rstrip(".")
        except GrammarFailed as error:
            return self._fault(schema, error, stop)
        return None

    def _fault(self, schema: Mapping[str, Any], error: GrammarFailed, stop: Stop | None) -> str:
        if isinstance(error, GrammarTooCostly):  # each of its parts may be, too
            return str(error)

        def error_alone(part: Mapping[str, Any]) -> str | None:
            # All trials together may take as long as a grammar. llguidance says what it does not support before the
            # work that may be costly, within 0.03 s in the longest schemas.
            try:
                self._process.compile("json", schema_text(part, "it"), stop, COMPILE_SECONDS / MOST_TRIALS)
            except (GrammarFailed, UserError) as found:
                return str(found)
            return None

        return place_of_fault(schema, str(error), error_alone)

    def _after_thought(self, grammar: CompiledGrammar, ends_thought: str) -> CompiledGrammar:
        """Return the grammar of a thought and then of a text of a grammar."""
        without_thought = grammar.without_thought or grammar.text
        whole = _after_thought(without_thought, ends_thought, self._special_tokens)
        try:
            worker, whole = self._process.compile("llguidance", whole)
        except GrammarFailed as error:
            raise UserError(f"{_NAMES[grammar.kind]} cannot be used ({str(error).rstrip('.')}).") from None
        return CompiledGrammar(grammar.kind, whole, worker if grammar.kind == "grammar" else None, without_thought)

    def _constraint_after_thought(self, grammar: CompiledGrammar, ends_thought: str) -> GrammarConstraint:
        return self.constraint_of(self._after_thought(grammar, ends_thought))

    def _tags(self, value: Any, disable_any_whitespace: bool) -> str:
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
            name = "the schema of a structural tag"
            grammar = schema_text(structure["schema"], name, disable_any_whitespace=disable_any_whitespace)
            tags.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=grammar, end=structure["end"]))
        # llguidance takes all triggers of this form for special tokens, or none.
        named = [trigger for trigger in triggers if trigger.startswith("<") and trigger.endswith(">")]
        are_special = all(trigger in self._special_tokens for trigger in named)
        return llguidance.StructTag.to_grammar(tags, assume_special=are_special)

    def close(self) -> None:
        """End the process in which grammars are compiled; it starts again when it is needed."""
        if self._failure is None:
            self._process.close()


def vocabulary_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Vocabulary:
    """Return the tokens of a model; raise ValueError if a text has no end."""
    if tokenizer.eos_token_id is None:  # llguidance would guess one
        raise ValueError("it has no end-of-sequence token")
    return Vocabulary(_definition(tokenizer), vocab_size, tokenizer.eos_token_id)


def _definition(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a tokenizer as its tokenizer.json has it, with the tokens that were added later."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()


def schema_text(schema: Mapping[str, Any] | str, name: str, *, disable_any_whitespace: bool = True) -> str:
    """Return a JSON schema as a text, with this package's options for llguidance, and no others. It is written as
    `equal_schema` does it, and its objects are closed as `close_objects` does it.

    Args:
        name: of the schema, in messages.
        disable_any_whitespace: JSON has ", " between its parts and ": " behind names, and no further space outside of
            strings; otherwise up to 40 spaces, tabs and newlines may be around each part.

    Raises:
        UserError: it is not an object in JSON, it is too long, or no value can be valid because it refers to itself.
    """
    given = _object(schema, name)
    try:
        text = json.dumps(given)
        _check_length(text, name)  # before the work that it takes
        plain = json.loads(text)
        closed = close_objects(equal_schema(plain))
    except TooManyMembers as error:
        raise UserError(f"{name} has {error}.") from None
    except UserError:  # a ValueError too
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON ({error}).") from None
    if has_endless_reference(plain):
        raise UserError(f"{name} has a $ref that leads back to itself, so that no value is ever valid.")
    return json.dumps({**closed, "x-guidance": _COMPACT if disable_any_whitespace else _ANY_WHITESPACE})


def _check_length(text: str, name: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{name} has {len(text):,} characters, and may have {MOST_CHARACTERS:,}.")


def thought_rules(ends_thought: str, special: Collection[str]) -> list[str]:
    """Return the rules, in Lark's syntax, of `thought`: a TEXT with its end and up to two newlines behind it.

    Args:
        ends_thought: see `Grammars.compile`.
        special: the special tokens of the vocabulary, as texts.
    """
    lazy, end = ("", ends_thought) if ends_thought in special else ("[lazy]", json.dumps(ends_thought))
    return [
        "thought: ended_thought SPACE",
        f"ended_thought{lazy}: TEXT {end}",
        r"SPACE: /\n{0,2}/",
    ]


def _after_thought(grammar: str, ends_thought: str, special: Collection[str]) -> str:
    """Return a grammar of a thought and then of a text of another grammar, both in llguidance's format."""
    rules = ["start: thought @answer", *thought_rules(ends_thought, special), r"TEXT: /(.|\n)*/"]
    first = {"lark_grammar": "\n".join(["%llguidance {}", *rules])}
    # Grammars in Lark's syntax stay as they are, and others are in JSON.
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}]})


def _text(kind: Kind, value: Any, disable_any_whitespace: bool) -> str:
    """Return a value as `llguidance.grammar_from` takes it, choices as a grammar in Lark's syntax.

    Raises:
        UserError: it is of a wrong type.
    """
    if kind == "json":
        return schema_text(value, _NAMES[kind], disable_any_whitespace=disable_any_whitespace)
    if kind == "choice":
        is_right = isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
        if not is_right:
            raise UserError("the list of choices must have at least one string, and no empty one.")
        # One terminal: as alternatives of a rule, each choice would be an item of the parser.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))
    if not isinstance(value, str) or not value:
        raise UserError(f"{_NAMES[kind]} must be a string that is not empty.")
    return value


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        value = parse_json(value, name)
    if not isinstance(value, Mapping):
        raise UserError(f"{name} must be an object.")
    return value


def _triggers_and_structures(value: Any) -> tuple[list[str], list[Mapping[str, Any]]]:
    tag = _object(value, _NAMES["structural_tag"])
    triggers, structures = _some(tag.get("triggers")), _some(tag.get("structures"))
    is_right = triggers and structures and tag.keys() <= {"type", "triggers", "structures"}
    if not is_right or not all(map(_is_trigger, triggers)) or not all(map(_is_structure, structures)):
        raise UserError(
            'the structural tag must have "structures", each with a "begin" and an "end", strings, and a "schema", and '
            f'"triggers", with which they begin; up to {_MOST_TAGS} of both. "format" is not supported.'
        )
    return triggers, structures


def _some(value: Any) -> list[Any]:
    """Return a list that is not too long; an empty one for anything else."""
    return value if isinstance(value, list) and len(value) <= _MOST_TAGS else []


def _is_trigger(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_structure(value: Any) -> bool:
    types = {"begin": str, "schema": Mapping, "end": str}
    is_right = isinstance(value, Mapping) and value.keys() == types.keys()
    return is_right and all(isinstance(value[name], kind) for name, kind in types.items())
