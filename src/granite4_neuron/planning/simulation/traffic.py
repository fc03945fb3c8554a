"""Traffic: requests with arrivals, lengths of prompts and answers, and the tokens that prompts share.

A file has a line of JSON for each request, in this package's format, which docs/planning.md describes, or in that of
Mooncake's traces: `timestamp` in milliseconds, `input_length`, `output_length`, and `hash_ids` of blocks of 512 tokens.
"""

from __future__ import annotations

import math
import random
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from granite4_neuron.config.json_files import parse_json
from granite4_neuron.errors import UserError
from granite4_neuron.planning.simulation.lengths import MOST_TOKENS, Lengths
from granite4_neuron.system.regular_files import check_regular

BLOCK = 512  # tokens per block in Mooncake's traces
_ANSWER = 0  # each token of an answer; no part of a prompt begins with it


class Part(NamedTuple):
    """Tokens that prompts may share, all of them or their beginning: `first`, followed by zeros.

    Different parts have different first tokens, except answers, which are zeros. First tokens are not ids of a
    vocabulary, which has too few.
    """

    first: int
    length: int


class Arrival(NamedTuple):
    """A request.

    time: its arrival in seconds.
    prompt: its length in tokens. answer: the number of new tokens requested.
    conversation: its number; None if it belongs to none.
    parts: the prompt's parts in order.
    """

    time: float
    prompt: int
    answer: int
    conversation: int | None
    parts: tuple[Part, ...]

    def tokens(self) -> list[int]:
        """Return the prompt's tokens."""
        tokens: list[int] = []
        for first, length in self.parts:
            tokens.append(first)
            tokens += [0] * (length - 1)
        return tokens


@dataclass(frozen=True)
class _Field:
    is_right: Callable[[Any], bool]
    must_be: str


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _is_length(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST_TOKENS


def _is_name(value: Any) -> bool:
    return value is None or type(value) in (str, int)


def _are_blocks(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


_TIME = _Field(_is_number, "a number of at least 0")
_LENGTH = _Field(_is_length, f"a whole number from 1 to {MOST_TOKENS:,}")
_NAME = _Field(_is_name, "a string or a whole number")
_FIELDS: Mapping[str, _Field] = {
    "arrival": _TIME,
    "prompt_tokens": _LENGTH,
    "answer_tokens": _LENGTH,
    "prefix": _NAME,
    "prefix_tokens": _Field(lambda value: value is None or _is_length(value), f"{_LENGTH.must_be}, or null"),
    "conversation": _NAME,
}
_OPTIONAL = ("prefix", "prefix_tokens", "conversation")
_MOONCAKE: Mapping[str, _Field] = {
    "timestamp": _Field(_is_number, "a number of milliseconds"),
    "input_length": _LENGTH,
    "output_length": _LENGTH,
    "hash_ids": _Field(_are_blocks, "a list of whole numbers"),
}


def read_traffic(file: Path) -> list[Arrival]:
    """Read a file of requests; return them in order of their arrivals.

    Raises:
        UserError: the file cannot be read or has no requests, or a line is not a request.
    """
    try:
        check_regular(file)
        with open(file, encoding="utf-8") as lines:
            records = [_record(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    except UnicodeError:
        raise UserError(f"{file} is not text in UTF-8.") from None
    if not records:
        raise UserError(f"{file} has no requests; give it a line of JSON for each.")
    records.sort(key=lambda record: record["arrival"])
    return list(_Sharing().arrivals(records))


def poisson(
    rate: float, prompts: Lengths, answers: Lengths, number: int, prefix_tokens: int = 0, seed: int = 0
) -> list[Arrival]:
    """Return requests whose arrivals are a Poisson process.

    Args:
        rate: requests per second on average.
        prefix_tokens: length of the prefix that all prompts share.
    """
    chance, arrivals, time = random.Random(seed), [], 0.0
    for first in range(2, number + 2):
        own = max(1, prompts.draw(chance) - prefix_tokens)
        parts = ([Part(1, prefix_tokens)] if prefix_tokens else []) + [Part(first, own)]
        arrivals.append(Arrival(time, prefix_tokens + own, answers.draw(chance), None, tuple(parts)))
        time += chance.expovariate(rate)
    return arrivals


def at_rate(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the same requests, arriving `factor` times as fast."""
    return [arrival._replace(time=arrival.time / factor) for arrival in arrivals]


def _record(file: Path, number: int, line: str) -> dict[str, Any]:
    """Read a line; Mooncake's fields get this package's names.

    Raises:
        UserError: it is not a request.
    """
    where = f"{file}, line {number}"
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object.")
    fields = _MOONCAKE if "timestamp" in record else _FIELDS
    for name, field in fields.items():
        if name not in record and name not in _OPTIONAL:
            raise UserError(f"{where} has no {name}; a request has {', '.join(each for each in fields)}.")
        if not field.is_right(record.get(name)):
            raise UserError(f"{where}: {name} is {reprlib.repr(record[name])}, and must be {field.must_be}.")
    if fields is _MOONCAKE:
        return _of_mooncake(where, record)
    if unknown := record.keys() - fields.keys():
        raise UserError(f"{where} has {', '.join(sorted(unknown))}; a request has {', '.join(fields)}.")
    if (record.get("prefix") is None) != (record.get("prefix_tokens") is None):
        raise UserError(f"{where}: prefix and prefix_tokens belong together; give both or neither.")
    if (record.get("prefix_tokens") or 0) > record["prompt_tokens"]:
        raise UserError(f"{where}: prefix_tokens are {record['prefix_tokens']}, more than prompt_tokens.")
    return record


def _of_mooncake(where: str, record: dict[str, Any]) -> dict[str, Any]:
    length, blocks = record["input_length"], record["hash_ids"]
    if len(blocks) != math.ceil(length / BLOCK):
        raise UserError(
            f"{where}: a prompt of {length:,} tokens has {math.ceil(length / BLOCK)} blocks of {BLOCK}, and hash_ids "
            f"has {len(blocks)}."
        )
    return {
        "arrival": record["timestamp"] / 1000,
        "prompt_tokens": length,
        "answer_tokens": record["output_length"],
        "blocks": blocks,
    }


class _Sharing:
    """Numbers the parts that prompts share."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Any], int] = {}
        self._next = 1
        self._conversations: dict[int, tuple[Part, ...]] = {}  # the parts so far, with the last answer

    def arrivals(self, records: Sequence[Mapping[str, Any]]) -> Iterator[Arrival]:
        """Yield requests for records, which are in order of their arrivals."""
        for record in records:
            name = record.get("conversation")
            conversation = None if name is None else self._number("conversation", name)
            prompt, answer = record["prompt_tokens"], record["answer_tokens"]
            parts = self._blocks(record) if "blocks" in record else self._parts(record, conversation)
            if conversation is not None:
                self._conversations[conversation] = (*parts, Part(_ANSWER, answer))
            yield Arrival(float(record["arrival"]), prompt, answer, conversation, parts)

    def _parts(self, record: Mapping[str, Any], conversation: int | None) -> tuple[Part, ...]:
        """Return the shared part of the prompt, its conversation so far or its prefix, and its own part.

        A prompt that is not longer than its conversation so far starts a new conversation.
        """
        prompt = record["prompt_tokens"]
        shared = self._conversations.get(conversation, ()) if conversation is not None else ()
        length = sum(part.length for part in shared)
        if not 0 < length < prompt:
            shared, length = (), 0
            if record.get("prefix") is not None:
                length = record["prefix_tokens"]
                shared = (Part(self._number("prefix", record["prefix"]), length),)
        return (*shared, Part(self._new(), prompt - length)) if length < prompt else shared

    def _blocks(self, record: Mapping[str, Any]) -> tuple[Part, ...]:
        numbers = [self._number("block", block) for block in record["blocks"]]
        last = record["prompt_tokens"] - BLOCK * (len(numbers) - 1)
        return (*(Part(number, BLOCK) for number in numbers[:-1]), Part(numbers[-1], last))

    def _number(self, kind: str, name: Any) -> int:
        key = kind, name
        if key not in self._numbers:
            self._numbers[key] = self._new()
        return self._numbers[key]

    def _new(self) -> int:
        self._next += 1
        return self._next - 1
