"""A sequence's state as an object of its own, and as a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from granite4_neuron.errors import UserError

FORMAT = "granite4-neuron snapshot"
VERSION = 1
_SAMPLES = 64  # values of each weight


@dataclass(frozen=True)
class Snapshot:
    """What a sequence of `length` tokens leaves behind, in memory of its own on the host.

    start, length: positions start to length - 1 have their keys and values here; the recurrent state is that after
        `length` tokens.
    tensors: of one slot, by layer and field of `state.HybridState`: "layers.0.ssm_state".
    dtype: of the model's activations and cache.
    fingerprint: of the model's weights.
    tokens: the sequence's, all `length` of them; empty if unknown.
    note: what the caller wants to find in the file again.
    """

    start: int
    length: int
    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    fingerprint: str
    tokens: tuple[int, ...] = ()
    note: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())

    @property
    def state_dtype(self) -> torch.dtype:
        """Of its SSM states."""
        states = (tensor for name, tensor in self.tensors.items() if name.endswith(".ssm_state"))
        return next((state.dtype for state in states), torch.float32)

    def check(self, dtype: torch.dtype, fingerprint: str, state_dtype: torch.dtype = torch.float32) -> None:
        """See whether it is of this model, with SSM states in `state_dtype`.

        Raises:
            UserError: it is not.
        """
        _check("the snapshot", str(self.dtype), self.fingerprint, dtype, fingerprint)
        _check_state("the snapshot", self, state_dtype)

    def save(self, file: Path) -> None:
        """Write a safetensors file that only its owner may read: all of it, or nothing, and then the old file stays.

        Raises:
            UserError: it cannot be written.
        """
        about = dict(format=FORMAT, version=VERSION, start=self.start, length=self.length)
        about |= dict(dtype=str(self.dtype), fingerprint=self.fingerprint, tokens=self.tokens, note=self.note)
        partial = None
        try:
            descriptor, partial = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
            os.close(descriptor)
            save_file(dict(self.tensors), partial, metadata={"snapshot": json.dumps(about)})
            os.replace(partial, file)
            partial = None
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error  # without the name of the partial file
            raise UserError(f"{file} could not be written ({reason}).") from None
        finally:
            if partial is not None:
                os.unlink(partial)

    @classmethod
    def load(
        cls, file: Path, dtype: torch.dtype, fingerprint: str, state_dtype: torch.dtype = torch.float32
    ) -> Snapshot:
        """Read a file that `save` wrote for a model of this dtype and fingerprint, with SSM states in `state_dtype`.

        Raises:
            UserError: it cannot be read, is no such file, is damaged, or of another model, dtype or version.
        """
        if file.is_dir():
            raise UserError(f"{file} is a folder; give the file of a snapshot.")
        try:
            with safe_open(file, framework="pt") as stored:
                about = json.loads((stored.metadata() or {}).get("snapshot", "{}"))
                if about.get("format") != FORMAT:
                    raise UserError(f"{file} is no snapshot of a sequence.")
                if about["version"] != VERSION:
                    raise UserError(
                        f"{file} has version {about['version']} of the format and this package reads {VERSION}; "
                        "make the snapshot again."
                    )
                _check(str(file), about["dtype"], about["fingerprint"], dtype, fingerprint)
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (a handle, not a dict)
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error}).") from None
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"{file} is damaged or incomplete ({error}); make the snapshot again.") from None
        snapshot = cls(
            about["start"], about["length"], tensors, dtype, fingerprint, tuple(about["tokens"]), about.get("note", "")
        )
        _check_state(str(file), snapshot, state_dtype)
        return snapshot


def check_chain(
    snapshots: Sequence[Snapshot],
    dtype: torch.dtype,
    fingerprint: str,
    max_length: int,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """See whether snapshots, one after another, make a sequence that a model's state has room for.

    Raises:
        UserError: one is of another model, or they are too long.
        ValueError: they leave out some keys and values.
    """
    starts, lengths = [one.start for one in snapshots], [0, *(one.length for one in snapshots)]
    if not snapshots or starts != lengths[:-1]:
        raise ValueError(f"snapshots that start at {starts} and end at {lengths[1:]} are not one sequence.")
    for snapshot in snapshots:
        _check("the snapshot", str(snapshot.dtype), snapshot.fingerprint, dtype, fingerprint)
    # Only the last one has the recurrent state.
    _check_state("the snapshot", snapshots[-1], state_dtype)
    if lengths[-1] > max_length:
        raise UserError(f"the snapshot has {lengths[-1]} tokens and the state has room for {max_length}.")


def cut_keys_and_values(tensors: Mapping[str, torch.Tensor], start: int, length: int) -> dict[str, torch.Tensor]:
    """A slot's tensors with those positions of its keys and values only, in memory of their own."""
    return {
        name: tensor[:, start:length].clone() if _has_positions(name) else tensor for name, tensor in tensors.items()
    }


def padded_keys_and_values(snapshots: Sequence[Snapshot], max_length: int) -> dict[str, torch.Tensor]:
    """The last snapshot's tensors with the keys and values of all, [kv_heads, max_length, head_dim], zero-padded."""
    tensors = dict(snapshots[-1].tensors)
    for name in filter(_has_positions, tensors):
        kv_heads, _, head_dim = tensors[name].shape
        joined = torch.cat([one.tensors[name] for one in snapshots], dim=1)
        padding = joined.new_zeros(kv_heads, max_length - joined.shape[1], head_dim)
        tensors[name] = torch.cat([joined, padding], dim=1)
    return tensors


def recurrent_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A slot's tensors without its keys and values: what is of one length only."""
    return {name: tensor for name, tensor in tensors.items() if not _has_positions(name)}


def keys_and_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A slot's keys and values, [kv_heads, positions, head_dim]."""
    return {name: tensor for name, tensor in tensors.items() if _has_positions(name)}


def _has_positions(name: str) -> bool:
    """Whether a slot's tensor of that name is [kv_heads, positions, head_dim]."""
    return name.endswith((".key", ".value"))


class Weights(Protocol):
    """What `fingerprint` reads: a tensor, or a matrix that is kept otherwise."""

    shape: torch.Size


def fingerprint(weights: Iterable[tuple[str, Weights]], dtype: torch.dtype, *facts: object) -> str:
    """Tells a model from others by its weights' names, shapes and some values of each, by its dtype, and by further
    facts that states depend on: 64 hex digits.

    Values are evenly spaced, so that two trainings of one architecture differ; what goes unseen is a change of a few
    single weights.
    """
    digest = hashlib.sha256(repr((dtype, *facts)).encode())
    for name, weight in sorted(weights, key=lambda named: named[0]):
        count = math.prod(weight.shape)
        places = torch.arange(0, count, max(1, count // _SAMPLES))
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(_values(weight, places).float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _values(weight: Weights, places: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.detach().flatten()[places.to(weight.device)]
    columns = weight.shape[-1]
    return weight.rows(places // columns).gather(1, (places % columns)[:, None])


def _check(what: str, its_dtype: str, its_fingerprint: str, dtype: torch.dtype, fingerprint: str) -> None:
    if its_dtype != str(dtype):
        raise UserError(f"{what} was made in {its_dtype} and the model runs in {dtype}; make it again.")
    if its_fingerprint != fingerprint:
        raise UserError(f"{what} was made with another checkpoint, or other weights of it; make it again.")


def _check_state(what: str, snapshot: Snapshot, state_dtype: torch.dtype) -> None:
    if snapshot.state_dtype != state_dtype:
        raise UserError(
            f"{what} has SSM states in {snapshot.state_dtype} and the model runs with {state_dtype}; make it again."
        )
