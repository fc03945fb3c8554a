"""A sequence's state as an object of its own, and as a file."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from granite4_neuron.config import ModelConfig
from granite4_neuron.config.dtypes import STORED_DTYPES
from granite4_neuron.config.json_files import FileFormat
from granite4_neuron.errors import UserError
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.system.regular_files import check_regular

# Shape and dtype of tensors by name; a dtype that no state has is given by its name in safetensors.
Layout = Mapping[str, tuple[torch.Size, torch.dtype | str]]

LOGITS = "logits"  # after the last token; a prefix cache adds them
_DTYPES = {stored: getattr(torch, name) for stored, name in STORED_DTYPES.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


# Of a file's facts about its snapshot.
FORMAT = FileFormat(
    "granite4-neuron snapshot",
    version=3,
    fields={
        "start": _is_count,
        "length": _is_count,
        "dtype": _is_text,
        "fingerprint": _is_text,
        "tokens": lambda value: isinstance(value, list) and all(map(_is_count, value)),
        "note": _is_text,
        "digests": _are_texts,
    },
    what="a snapshot of a sequence",
    remedy="make the snapshot again",
)


class Model(Protocol):
    """The model that snapshots are compared with: a `Runtime` that makes them."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def max_length(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def state_dtype(self) -> torch.dtype: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    def slot_layout(self, start: int, length: int) -> Layout: ...


@dataclass(frozen=True)
class Snapshot:
    """The state of a sequence after `length` tokens, in memory of its own, on the host or on the runtime's device.

    start, length: positions start to length - 1 have their keys and values here; the recurrent state is the one after
        `length` tokens.
    tensors: of one slot, by layer and field of `state.HybridState`: "layers.0.ssm_state".
    dtype: of the model's activations and cache.
    fingerprint: of the runtime that made it.
    tokens: the sequence's, all `length` of them; empty if unknown.
    note: any text of the caller's, kept in the file.
    """

    start: int
    length: int
    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    fingerprint: Fingerprint
    tokens: tuple[int, ...] = ()
    note: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())

    def starting_at(self, start: int) -> Snapshot:
        """Return one that has the keys and values from a later position on, in memory of their own."""
        if start == self.start:
            return self
        tensors = cut_keys_and_values(self.tensors, start - self.start, self.length - self.start)
        return replace(self, start=start, tensors=tensors)

    def check(self, model: Model) -> None:
        """Check that it is a snapshot of this model, with all of a sequence's state and nothing else.

        Raises:
            UserError: it is not.
        """
        layout = {name: (one.shape, one.dtype) for name, one in self.tensors.items()}
        _check_all("the snapshot", self, str(self.dtype), layout, model)

    def save(self, file: Path) -> None:
        """Write, atomically, a safetensors file that only its owner may read; if that fails, the old file stays.

        Raises:
            UserError: it cannot be written.
        """
        about = dict(**FORMAT.header, start=self.start, length=self.length)
        about |= dict(dtype=str(self.dtype), fingerprint=str(self.fingerprint), tokens=self.tokens, note=self.note)
        about |= dict(digests={name: _digest(tensor) for name, tensor in self.tensors.items()})
        with _partial_file(file) as (partial, target):
            save_file(dict(self.tensors), partial, metadata={"snapshot": json.dumps(about)})
            os.chmod(partial, 0o600)
            _flush(partial)
            os.replace(partial, target)

    @classmethod
    def load(cls, file: Path, model: Model, *, keys_and_values_only: bool = False) -> Snapshot:
        """Read a file that `save` wrote of a sequence of this model: all, or its keys and values only.

        Its metadata is checked before tensors are read, and each tensor is checked against its digest.

        Raises:
            UserError: it cannot be read, is not such a file, is damaged, or of another model, dtype or version.
        """
        try:
            check_regular(file)
            with safe_open(file, framework="pt") as stored:
                about = _about(file, (stored.metadata() or {}).get("snapshot", "null"))
                tokens, fingerprint = tuple(about["tokens"]), Fingerprint.parse(about["fingerprint"])
                header = cls(about["start"], about["length"], {}, model.dtype, fingerprint, tokens, about["note"])
                slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (a handle, not a dict)
                layout = {
                    name: (torch.Size(one.get_shape()), _DTYPES.get(one.get_dtype(), one.get_dtype()))
                    for name, one in slices.items()
                }
                _check_all(str(file), header, about["dtype"], layout, model)
                names = [name for name in layout if _has_positions(name) or not keys_and_values_only]
                # A copy, because the tensor is a view of the file, which may change or become shorter.
                tensors = {name: stored.get_tensor(name).clone() for name in names}
            for name, tensor in tensors.items():
                if _digest(tensor) != about["digests"].get(name):
                    raise UserError(f"{file} is damaged ({name} has other numbers); {FORMAT.remedy}.")
            return replace(header, tensors=tensors)
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror or error}).") from None
        except SafetensorError as error:
            raise UserError(f"{file} is damaged or incomplete ({error}); {FORMAT.remedy}.") from None


def check_place(file: Path) -> None:
    """Check, before any work is done, that `Snapshot.save` may write this file; raise UserError if not."""
    with _partial_file(file):
        pass


@contextmanager
def _partial_file(file: Path) -> Iterator[tuple[str, Path]]:
    """Make a temporary folder beside a file that is to be written; yield a file in it, and the file to replace.

    Raises:
        UserError: the folder cannot be made, or the block failed to write.
    """
    try:
        with suppress(FileNotFoundError):
            check_regular(file)
        target = Path(os.path.realpath(file))  # a link stays, its target is replaced
        # In a folder of its own, because safetensors first writes to another file under a name that it chooses.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            yield os.path.join(folder, target.name), target
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error  # without the name of the partial file
        raise UserError(f"{file} could not be written ({reason}).") from None


def check_chain(
    snapshots: Sequence[Snapshot],
    dtype: torch.dtype,
    fingerprint: Fingerprint,
    max_length: int,
    state_dtype: torch.dtype,
) -> None:
    """Check that snapshots, one after another, make a sequence that a model's state has room for.

    Raises:
        UserError: one is of another model, or they are too long.
        ValueError: they leave out some keys and values.
    """
    starts, lengths = [one.start for one in snapshots], [0, *(one.length for one in snapshots)]
    if not snapshots or starts != lengths[:-1]:
        raise ValueError(f"snapshots that start at {starts} and end at {lengths[1:]} are not one sequence.")
    # Only the last one has the recurrent state.
    layout = {name: (one.shape, one.dtype) for name, one in snapshots[-1].tensors.items()}
    for snapshot in snapshots:
        _check_dtypes("the snapshot", str(snapshot.dtype), _state_dtype(layout), dtype, state_dtype)
        _check_fingerprint("the snapshot", snapshot.fingerprint, fingerprint)
    if lengths[-1] > max_length:
        raise UserError(f"the snapshot has {lengths[-1]} tokens and the state has room for {max_length}.")


def views_of_positions(tensors: Mapping[str, torch.Tensor], start: int, length: int) -> dict[str, torch.Tensor]:
    """Return a slot's tensors, with views of keys and values that have positions start to length - 1 only."""
    return {name: tensor[:, start:length] if _has_positions(name) else tensor for name, tensor in tensors.items()}


def cut_keys_and_values(tensors: Mapping[str, torch.Tensor], start: int, length: int) -> dict[str, torch.Tensor]:
    """Return `views_of_positions`, with the keys and values in memory of their own."""
    views = views_of_positions(tensors, start, length)
    return {name: view.clone() if _has_positions(name) else view for name, view in views.items()}


def padded_keys_and_values(snapshots: Sequence[Snapshot], max_length: int) -> dict[str, torch.Tensor]:
    """Return the last snapshot's tensors with all keys and values, [kv_heads, max_length, head_dim], zero-padded.
    Snapshots that were read from files are on the host, and others may be on a device; the result is where the last is.
    """
    tensors = dict(snapshots[-1].tensors)
    for name in filter(_has_positions, tensors):
        kv_heads, _, head_dim = tensors[name].shape
        joined = torch.cat([one.tensors[name].to(tensors[name].device) for one in snapshots], dim=1)
        padding = joined.new_zeros(kv_heads, max_length - joined.shape[1], head_dim)
        tensors[name] = torch.cat([joined, padding], dim=1)
    return tensors


def recurrent_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a slot's tensors without its keys and values: the state that belongs to one length only."""
    return {name: tensor for name, tensor in tensors.items() if not _has_positions(name)}


def keys_and_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a slot's keys and values, [kv_heads, positions, head_dim]."""
    return {name: tensor for name, tensor in tensors.items() if _has_positions(name)}


def _has_positions(name: str) -> bool:
    """Return whether a slot's tensor of that name is [kv_heads, positions, head_dim]."""
    return name.endswith((".key", ".value"))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _flush(file: str) -> None:
    """Flush a file to the disk, so that it is whole under its later name even after a loss of power."""
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
        raise UserError(f"{file} is damaged or incomplete ({error}); {FORMAT.remedy}.") from None
    FORMAT.check(file, about)
    return about


def _check_all(what: str, snapshot: Snapshot, dtype: str, layout: Layout, model: Model) -> None:
    _check_dtypes(what, dtype, _state_dtype(layout), model.dtype, model.state_dtype)
    _check_fingerprint(what, snapshot.fingerprint, model.fingerprint)
    _check_sequence(what, snapshot, model)
    _check_layout(what, snapshot, layout, model)


def _check_sequence(what: str, snapshot: Snapshot, model: Model) -> None:
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
    """Compare its tensors with the layout that the model has for such a sequence."""
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


def _check_dtypes(
    what: str,
    its_dtype: str,
    its_state_dtype: torch.dtype | str | None,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> None:
    if its_dtype != str(dtype):
        raise UserError(f"{what} was made in {its_dtype} and the model runs in {dtype}; make it again.")
    if its_state_dtype not in (None, state_dtype):
        raise UserError(
            f"{what} has SSM states in {its_state_dtype} and the model runs with {state_dtype}; make it again."
        )


def _check_fingerprint(what: str, its_own: Fingerprint, fingerprint: Fingerprint) -> None:
    difference = its_own.difference(fingerprint)
    if difference == "weights":
        raise UserError(
            f"{what} was made with another checkpoint, or with other weights or adapters of it; make it again."
        )
    if difference == "numerics":
        raise UserError(
            f"{what} was made with other kernels or options, or another version of this package; make it again."
        )


def _state_dtype(layout: Layout) -> torch.dtype | str | None:
    """Return the dtype of the SSM states; None where there are none."""
    return next((dtype for name, (_, dtype) in layout.items() if name.endswith(".ssm_state")), None)
