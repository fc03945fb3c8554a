"""Weights as they lie in memory, kept in a file, so that the next start need not convert them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.weight_plan import WeightPlan
from granite4_neuron.errors import UserError
from granite4_neuron.system.large_memory import LargeMemory, MappedMemory, block_bytes

_ENDING = ".weights"
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size
_HEADER_BYTES = 4096  # so that the weights begin with a page


@dataclass(frozen=True)
class WeightCache:
    """A folder of such files, one for each checkpoint and form of its weights.

    layout: names everything besides a model's plan that decides the bytes of weights in memory.
    """

    folder: Path
    layout: str

    def entry(self, checkpoint: Checkpoint, plan: WeightPlan) -> CachedWeights:
        """Return the place of a model's weights."""
        path = checkpoint.path.resolve()
        form = plan.form()
        name = _digest_of([str(path), *form]).hex()[:16]
        file = self.folder / f"{path.stem}-{name}{_ENDING}"
        fingerprint = _digest_of([self.layout, *form, *_files(path)])
        return CachedWeights(file, block_bytes(plan.tensors()), fingerprint)


@dataclass(frozen=True)
class CachedWeights:
    """The file with one model's weights: a fingerprint, and from the second page on the bytes as they lie in memory.

    num_bytes: of the weights.
    fingerprint: of the checkpoint's files, by their sizes and times of modification, and of the weights' form.
    """

    file: Path
    num_bytes: int
    fingerprint: bytes

    def mapped(self) -> MappedMemory | None:
        """Return the weights as memory that can be handed out; None if they are not there.

        Raises:
            UserError: they cannot be read.
        """
        try:
            with self.file.open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == _HEADER_BYTES + self.num_bytes
                if not is_whole or file.read(_DIGEST_BYTES) != self.fingerprint:
                    return None
                return MappedMemory(file, _HEADER_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read the weights kept in {self.file}: {error.strerror}.") from error

    def write(self, memory: LargeMemory) -> None:
        """Keep the weights in the memory that has been handed out. The file is there whole, or not at all.

        Raises:
            UserError: it cannot be written.
        """
        part = self.file.with_suffix(f"{_ENDING}.{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("wb") as file:
                    file.write(self.fingerprint.ljust(_HEADER_BYTES, b"\0"))
                    file.write(memory.used)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self.file)
            finally:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot keep the weights in {self.file}: {error.strerror}.") from error


def _files(path: Path) -> list[str]:
    """Return the name, size and time of modification of the checkpoint's files. Weights may be kept among them."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    files = [file for file in files if file.is_file() and _ENDING not in file.suffixes]
    about = [(file.name, file.stat()) for file in files]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in about]


def _digest_of(facts: Sequence[str]) -> bytes:
    return _DIGEST("\n".join(facts).encode()).digest()
