"""Calls that rank 0 of a split model sends to the others, and their answers.

Every rank has its own states and verifications. Rank 0 numbers them, and calls refer to them by number.
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

    number: of the state or the verification that the call returns, if it returns one.
    alive: the numbers that rank 0 still holds; the other ranks first release all others.
    answers: whether rank 0 waits for the result.
    """

    name: str
    arguments: Sequence[Any]
    number: int
    alive: Sequence[int]
    answers: bool


class OfRank(tuple):
    """An argument that differs between ranks: one item for each."""


class Refusal(NamedTuple):
    """The answer of a rank that raised a UserError."""

    sentence: str


def result_or_refusal(method: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a method; return a `Refusal` if it raises a UserError."""
    try:
        return method(*arguments)
    except UserError as error:
        return Refusal(str(error))


def to_bytes(message: Any, numbered: Mapping[int, Any]) -> bytes:
    """Return a call or an answer as bytes.

    Args:
        numbered: the states and verifications that the message may have, by their numbers.

    Raises:
        KeyError: the message has one that is not numbered.
    """
    file = io.BytesIO()
    _Pickler(file, numbered).dump(message)
    return file.getvalue()


def from_bytes(message: bytes, numbered: Mapping[int, Any], runtime: Runtime) -> Any:
    """Return the message of `to_bytes`, with this rank's states and verifications.

    Args:
        runtime: of this rank, for snapshots.
    """
    return _Unpickler(io.BytesIO(message), numbered, runtime).load()


class _Pickler(pickle.Pickler):
    """Writes states and verifications as numbers. Tensors are written as bytes: torch would put them into files of
    shared memory, which a killed process leaves behind.
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
        raise KeyError(f"this {type(value).__name__} does not belong to this runtime.")


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
