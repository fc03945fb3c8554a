"""Calls that rank 0 of a split model sends to the others, and their answers.

Every rank has states and verifications of its own. Rank 0 numbers them; in a call each stands for the rank's own.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import safetensors.torch

from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Runtime, Verification
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Snapshot

NUMBERED = (HybridState, Verification)


class Call(NamedTuple):
    """A call of a runtime's method.

    number: of the state or the verification that it returns, if it returns one.
    alive: the numbers of those that rank 0 holds; the other ranks let go of all others first.
    answers: whether rank 0 waits for what it returns.
    """

    name: str
    arguments: Sequence[Any]
    number: int
    alive: Sequence[int]
    answers: bool


class OfRank(tuple):
    """An argument that differs between ranks: one item for each."""


class Refusal(NamedTuple):
    """The answer of a rank, in place of a result, when it raises a UserError."""

    sentence: str


def result_or_refusal(method: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a method; return a `Refusal` if it raises a UserError."""
    try:
        return method(*arguments)
    except UserError as error:
        return Refusal(str(error))


def encode(message: Any, numbered: Mapping[int, Any]) -> bytes:
    """Return a call or an answer as bytes.

    Args:
        numbered: the states and verifications that the message may have, by their numbers.

    Raises:
        KeyError: the message has another one.
    """
    file = io.BytesIO()
    _Pickler(file, numbered).dump(message)
    return file.getvalue()


def decode(message: bytes, numbered: Mapping[int, Any], runtime: Runtime) -> Any:
    """Return what `encode` was given, with states and verifications of this rank.

    Args:
        runtime: of this rank, for snapshots.
    """
    return _Unpickler(io.BytesIO(message), numbered, runtime).load()


class _Pickler(pickle.Pickler):
    """Writes states and verifications as numbers. Tensors are written as bytes: torch would put them into files of
    shared memory, which a process that is killed leaves behind.
    """

    def __init__(self, file: io.BytesIO, numbered: Mapping[int, Any]):
        super().__init__(file)
        self._numbered = numbered

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Snapshot):
            return Snapshot, value.start, value.length, safetensors.torch.save(dict(value.tensors))
        if not isinstance(value, NUMBERED):
            return None
        for number, each in self._numbered.items():
            if each is value:
                return number
        raise KeyError(f"this {type(value).__name__} is not of this runtime.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, numbered: Mapping[int, Any], runtime: Runtime):
        super().__init__(file)
        self._numbered = numbered
        self._runtime = runtime

    def persistent_load(self, id: Any) -> Any:
        if isinstance(id, int):
            return self._numbered[id]
        _, start, length, stored = id
        tensors = safetensors.torch.load(stored)
        return Snapshot(start, length, tensors, self._runtime.dtype, self._runtime.fingerprint)
