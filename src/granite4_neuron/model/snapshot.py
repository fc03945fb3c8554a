"""A sequence's state as an object of its own, and as a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.regular_files import check_regular

# Shape and dtype of tensors by their names; a dtype that no state has is there by its name in safetensors.
Layout = Mapping[str, tuple[torch.Size, torch.dtype | str]]

FORMAT = "granite4-neuron snapshot"
VERSION = 2
LOGITS = "logits"  # after the last token; a prefix cache adds them
_SAMPLES = 64  # values of each weight
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in safetensors


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


# Fields of a file about its snapshot, beside format and version.
_FIELDS = {
    "start": _is_count,
    "length": _is_count,
    "dtype": _is_text,
    "fingerprint": _is_text,
    "tokens": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "note": _is_text,
    "digests": _are_texts,
}


class Model(Protocol):
    """The model that snapshots are compared with: a `Runtime` that makes them."""

    @property
    def config(self) -> GraniteMoeHybridConfig: ...

    @property
    def max_length(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def state_dtype(self) -> torch.dtype: ...

    @property
    def fingerprint(self) -> str: ...

    def slot_layout(self, start: int, length: int) -> Layout: ...


@dataclass(frozen=True)
class Snapshot:
    """The state of a sequence after `length` tokens, in memory of its own on the host.

    start, length: positions start to length - 1 have their keys and values here; the recurrent state is that after
        `length` tokens.
    tensors: of one slot, by layer and field of `state.HybridState`: "layers.0.ssm_state".
    dtype: of the model's activations and cache.
    fingerprint: of the model's weights.
    tokens: the sequence's, all `length` of them; empty if unknown.
    note: any text of the caller's, kept in the file.
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

    def check(self, model: Model) -> None:
        """Check that it is of this model, and holds all of a sequence's state there and nothing else.

        Raises:
            UserError: it is not, or does not.
        """
        _check_about("the snapshot", self, str(self.dtype), model)
        _check_layout("the snapshot", self, {name: (one.shape, one.dtype) for name, one in self.tensors.items()}, model)

    def save(self, file: Path) -> None:
        """Write a safetensors file that only its owner may read: all of it, or nothing, and then the old file stays.

        Raises:
            UserError: it cannot be written.
        """
        about = dict(format=FORMAT, version=VERSION, start=self.start, length=self.length)
        about |= dict(dtype=str(self.dtype), fingerprint=self.fingerprint, tokens=self.tokens, note=self.note)
        about |= dict(digests={name: _digest(tensor) for name, tensor in self.tensors.items()})
        target = Path(os.path.realpath(file))  # a link stays, its target is replaced
        try:
            with suppress(FileNotFoundError):
                check_regular(file)
            # In a folder of its own, because safetensors writes to another file first, whose name it chooses.
            with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
                partial = os.path.join(folder, target.name)
                save_file(dict(self.tensors), partial, metadata={"snapshot": json.dumps(about)})
                os.chmod(partial, 0o600)
                _flush(partial)
                os.replace(partial, target)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error  # without the name of the partial file
            raise UserError(f"{file} could not be written ({reason}).") from None

    @classmethod
    def load(cls, file: Path, model: Model, *, keys_and_values_only: bool = False) -> Snapshot:
        """Read a file that `save` wrote of a sequence of this model: all, or its keys and values only.

        What it says is compared before tensors are read, and then each tensor with its digest.

        Raises:
            UserError: it cannot be read, is no such file, is damaged, or of another model, dtype or version.
        """
        try:
            check_regular(file)
            with safe_open(file, framework="pt") as stored:
                about = _about(file, (stored.metadata() or {}).get("snapshot", "null"))
                tokens, note = tuple(about["tokens"]), about["note"]
                header = cls(about["start"], about["length"], {}, model.dtype, about["fingerprint"], tokens, note)
                _check_about(str(file), header, about["dtype"], model)
                slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (a handle, not a dict)
                layout = {
                    name: (torch.Size(one.get_shape()), _DTYPES.get(one.get_dtype(), one.get_dtype()))
                    for name, one in slices.items()
                }
                _check_layout(str(file), header, layout, model)
                names = [name for name in layout if _has_positions(name) or not keys_and_values_only]
                # A copy, because the tensor is a view of the file, which may change or become shorter.
                tensors = {name: stored.get_tensor(name).clone() for name in names}
            for name, tensor in tensors.items():
                if _digest(tensor) != about["digests"].get(name):
                    raise UserError(f"{file} is damaged ({name} has other numbers); make the snapshot again.")
            return replace(header, tensors=tensors)
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror or error}).") from None
        except SafetensorError as error:
            raise UserError(f"{file} is damaged or incomplete ({error}); make the snapshot again.") from None


def check_chain(
    snapshots: Sequence[Snapshot],
    dtype: torch.dtype,
    fingerprint: str,
    max_length: int,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """Check that snapshots, one after another, make a sequence that a model's state has room for.

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
    layout = {name: (one.shape, one.dtype) for name, one in snapshots[-1].tensors.items()}
    _check_state("the snapshot", _state_dtype(layout), state_dtype)
    if lengths[-1] > max_length:
        raise UserError(f"the snapshot has {lengths[-1]} tokens and the state has room for {max_length}.")


def cut_keys_and_values(tensors: Mapping[str, torch.Tensor], start: int, length: int) -> dict[str, torch.Tensor]:
    """Return a slot's tensors with those positions of its keys and values only, in memory of their own."""
    return {
        name: tensor[:, start:length].clone() if _has_positions(name) else tensor for name, tensor in tensors.items()
    }


def padded_keys_and_values(snapshots: Sequence[Snapshot], max_length: int) -> dict[str, torch.Tensor]:
    """Return the last snapshot's tensors with all keys and values, [kv_heads, max_length, head_dim], zero-padded."""
    tensors = dict(snapshots[-1].tensors)
    for name in filter(_has_positions, tensors):
        kv_heads, _, head_dim = tensors[name].shape
        joined = torch.cat([one.tensors[name] for one in snapshots], dim=1)
        padding = joined.new_zeros(kv_heads, max_length - joined.shape[1], head_dim)
        tensors[name] = torch.cat([joined, padding], dim=1)
    return tensors


def recurrent_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a slot's tensors without its keys and values: those that belong to one length only."""
    return {name: tensor for name, tensor in tensors.items() if not _has_positions(name)}


def keys_and_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a slot's keys and values, [kv_heads, positions, head_dim]."""
    return {name: tensor for name, tensor in tensors.items() if _has_positions(name)}


def _has_positions(name: str) -> bool:
    """Return whether a slot's tensor of that name is [kv_heads, positions, head_dim]."""
    return name.endswith((".key", ".value"))


class Weights(Protocol):
    """A weight as `fingerprint` reads it: a tensor, or a matrix that is kept otherwise."""

    shape: torch.Size


def fingerprint(weights: Iterable[tuple[str, Weights]], dtype: torch.dtype, *facts: object) -> str:
    """Return 64 hex digits that tell a model from others by its weights' names, shapes and some values of each, by its
    dtype, and by further facts that states depend on.

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


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def _flush(file: str) -> None:
    """Have a file on the disk, so that it is whole under its later name even after a loss of power."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _about(file: Path, text: str) -> dict[str, Any]:
    """Read a file's facts about its snapshot, each field of its type."""
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged or incomplete ({error}); make the snapshot again.") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UserError(f"{file} is no snapshot of a sequence.")
    if about.get("version") != VERSION:
        raise UserError(
            f"{file} has version {reprlib.repr(about.get('version'))} of the format and this package reads {VERSION}; "
            "make the snapshot again."
        )
    for name, is_right in _FIELDS.items():
        if not is_right(about.get(name)):
            wrong = f"{name} is {reprlib.repr(about[name])}" if name in about else f"it has no {name}"
            raise UserError(f"{file} is damaged or incomplete ({wrong}); make the snapshot again.")
    return about


def _check_about(what: str, snapshot: Snapshot, dtype: str, model: Model) -> None:
    _check(what, dtype, snapshot.fingerprint, model.dtype, model.fingerprint)
    start, length, tokens = snapshot.start, snapshot.length, snapshot.tokens
    if not start < length <= model.max_length:
        raise UserError(
            f"{what} is of tokens {reprlib.repr(start)} to {reprlib.repr(length)}, and the model's longest sequence "
            f"has {model.max_length}; make it again."
        )
    if tokens and len(tokens) != length:
        raise UserError(f"{what} has {len(tokens)} tokens and the state after {length}; make it again.")
    if tokens and max(tokens) >= model.config.vocab_size:
        raise UserError(f"{what} has a token id outside the vocabulary; make it again.")


def _check_layout(what: str, snapshot: Snapshot, layout: Layout, model: Model) -> None:
    """Compare its tensors with those that the model would make of such a sequence."""
    _check_state(what, _state_dtype(layout), model.state_dtype)
    expected = dict(model.slot_layout(snapshot.start, snapshot.length))
    if LOGITS in layout:
        expected[LOGITS] = torch.Size([model.config.vocab_size]), torch.float32
    for name in sorted(layout.keys() | expected.keys()):
        if name not in layout:
            raise UserError(f"{what} lacks {name}; make it again.")
        if name not in expected:
            raise UserError(f"{what} has {name}, which a sequence of this model does not have; make it again.")
        if layout[name] != expected[name]:
            (shape, dtype), (its_shape, its_dtype) = layout[name], expected[name]
            raise UserError(
                f"{what} has {name} of shape {list(shape)} in {dtype} instead of {list(its_shape)} in {its_dtype}; "
                "make it again."
            )


def _check(what: str, its_dtype: str, its_fingerprint: str, dtype: torch.dtype, fingerprint: str) -> None:
    if its_dtype != str(dtype):
        raise UserError(f"{what} was made in {its_dtype} and the model runs in {dtype}; make it again.")
    if its_fingerprint != fingerprint:
        raise UserError(f"{what} was made with another checkpoint, or other weights of it; make it again.")


def _check_state(what: str, its_dtype: torch.dtype | str | None, dtype: torch.dtype) -> None:
    if its_dtype not in (None, dtype):
        raise UserError(f"{what} has SSM states in {its_dtype} and the model runs with {dtype}; make it again.")


def _state_dtype(layout: Layout) -> torch.dtype | str | None:
    """Return the dtype of the SSM states; None where there are none."""
    return next((dtype for name, (_, dtype) in layout.items() if name.endswith(".ssm_state")), None)
