"""Snapshots of a prefix cache in the files of a folder, for later and concurrent processes."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import re
import reprlib
import shutil
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from granite4_neuron.engine.prefix.interface import any_length
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.state.snapshot import LOGITS, Snapshot, cut_keys_and_values, padded_keys_and_values
from granite4_neuron.system.regular_files import check_name

_LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{1,9})-(\d{1,9})-([0-9a-f]{64})\.safetensors")
_UNFINISHED = re.compile(rf"\.{_NAME.pattern}\..*")  # `Snapshot.save` writes in such a folder first
_HEADER_BYTES = 2**16  # of a file, at most; the largest model's header has 20 kB
_WAITING = 8  # most snapshots that wait to be written; each holds its memory until then
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class _File:
    """start, length: of its snapshot. key: see `PrefixFolder._keys`."""

    start: int
    length: int
    key: str

    @property
    def name(self) -> str:
        return f"{self.start}-{self.length}-{self.key}.safetensors"


class PrefixFolder:
    """Snapshots of sequences by their tokens, in files of a folder. The least recently used are removed first.

    A file has the recurrent state and the logits after a sequence's tokens, and the keys and values since the longest
    shorter snapshot of the same sequence in the folder. A thread writes it, completely or not at all. Processes may
    share a folder; a process sees the files of another when it starts and whenever it writes. States under an adapter
    are not written, because the adapter's number may differ in the next process.

    A file that is damaged or does not match its name is logged once and then ignored. A failure to write is logged too;
    the next snapshot is tried again.

    num_bytes: of the files in the folder when it last looked.

    Args:
        folder: created if it does not exist.
        max_bytes: limit of its files in bytes; None for no limit.
        runtime: the model that runs the sequences.

    Raises:
        UserError: the limit is not a number of bytes; or the folder cannot be made or read, belongs to another user, or
            other users may enter it.
    """

    def __init__(self, folder: Path, max_bytes: int | None, runtime: Runtime):
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0):
            raise UserError(
                f"max_bytes is {reprlib.repr(max_bytes)}; it must be a whole number of bytes, or None for no limit."
            )
        self.folder = folder
        self.max_bytes = max_bytes
        self._runtime = runtime
        self._model = hashlib.sha256(str(runtime.fingerprint).encode())
        self._refused: set[_File] = set()
        self._is_failing = False
        _make_private(folder)
        try:
            self._look()
        except OSError as error:
            raise UserError(f"{folder} cannot be read ({error.strerror}).") from None
        self._queue: queue.Queue[tuple[Sequence[int], Sequence[Snapshot], torch.Tensor] | None]
        self._queue = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="prefix folder", daemon=True)
        self._thread.start()

    def find(
        self, tokens: Sequence[int], least: int, is_cut_point: Callable[[int], bool] = any_length
    ) -> Snapshot | None:
        """Read the longest prefix of a sequence that has at least `least` tokens and ends at a cut point, with its
        tokens and logits.
        """
        if tokens[0] >= self._runtime.config.vocab_size:  # the key of an adapter or a salt: see `_write`
            return None
        while (chain := self._longest_chain(tokens, least, is_cut_point)) is not None:
            if (snapshots := self._read(chain)) is not None:
                length = chain[-1].length
                tensors = padded_keys_and_values(snapshots, length)
                return replace(snapshots[-1], start=0, tensors=tensors, tokens=tuple(tokens[:length]), note="")
        return None

    def keep(self, tokens: Sequence[int], snapshots: Sequence[Snapshot], logits: torch.Tensor) -> None:
        """Queue a snapshot to be written if it is not there, and record its use. Drop it if the queue is full.

        Args:
            tokens: as for `PrefixCache.insert`.
            snapshots: consecutive, up to the last of the tokens. Their tensors are not copied.
            logits: [vocab_size], float32, after the last of them.
        """
        with suppress(queue.Full):
            self._queue.put_nowait((tokens, snapshots, logits))

    def close(self) -> None:
        """Write the queued snapshots, for `_CLOSE_SECONDS` at most."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _keys(self, tokens: Sequence[int], lengths: Iterable[int]) -> dict[int, str]:
        """Return, for each length, a hash of the model and that many first tokens."""
        data, digest, done, keys = array("q", tokens), self._model.copy(), 0, {}
        for length in sorted(lengths):
            digest.update(data[done:length])
            keys[length], done = digest.hexdigest(), length
        return keys

    def _longest_chain(
        self, tokens: Sequence[int], least: int, is_cut_point: Callable[[int], bool] = any_length
    ) -> list[_File] | None:
        """Return the files, in order, that hold the longest prefix that ends at a cut point; None if there are none."""
        files = {file.key: file for file in self._files if file not in self._refused}
        keys = self._keys(tokens, {file.length for file in files.values() if file.length <= len(tokens)})
        for length in sorted(keys, reverse=True):
            if length >= least and is_cut_point(length) and (chain := _chain(files, keys, length)) is not None:
                return chain
        return None

    def _read(self, chain: Sequence[_File]) -> list[Snapshot] | None:
        """Return the snapshots of files, all but the last without recurrent state. If a file is gone or invalid, return
        None and ignore that file from now on.
        """
        snapshots = []
        for file in chain:
            path = self.folder / file.name
            try:
                snapshot = Snapshot.load(path, self._runtime, keys_and_values_only=file != chain[-1])
                if (snapshot.start, snapshot.length, snapshot.note) != (file.start, file.length, file.key):
                    raise UserError(f"{path} belongs to another sequence than its name says.")
                if file == chain[-1] and LOGITS not in snapshot.tensors:
                    raise UserError(f"{path} has no logits.")
            except UserError as error:
                if path.exists():
                    self._refused.add(file)
                    _LOGGER.warning("The prefix cache ignores a file: %s", error)
                else:  # another process has removed it
                    self._files -= {file}
                return None
            snapshots.append(snapshot)
        return snapshots

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for the next snapshot and write it; return false if there will be no more.

        A failure is logged once until a write succeeds again, and ends neither the thread nor the process. An
        unforeseen error is logged with its traceback.
        """
        if (item := self._queue.get()) is None:
            return False
        try:
            self._write(*item)
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                is_foreseen = isinstance(error, (OSError, UserError, MemoryError))
                reason = str(error) or type(error).__name__
                _LOGGER.warning(
                    "The prefix cache keeps nothing in %s for now: %s", self.folder, reason, exc_info=not is_foreseen
                )
            self._is_failing = True
        return True

    def _write(self, tokens: Sequence[int], snapshots: Sequence[Snapshot], logits: torch.Tensor) -> None:
        if max(tokens) >= self._runtime.config.vocab_size or self._is_used(tokens):
            return
        length = len(tokens)
        # A GPU's memory is not this thread's to fill.
        snapshots = [
            replace(one, tensors={name: tensor.cpu() for name, tensor in one.tensors.items()}) for one in snapshots
        ]
        with self._locked():
            sizes = self._look()
            if self._is_used(tokens):  # another process has written it
                return
            before = self._longest_chain(tokens[:-1], 1) or []
            self._touch(before)
            file = _File(before[-1].length if before else 0, length, self._keys(tokens, [length])[length])
            tensors = cut_keys_and_values(padded_keys_and_values(snapshots, length), file.start, length)
            snapshot = replace(snapshots[-1], start=file.start, tensors={**tensors, LOGITS: logits}, note=file.key)
            if self._make_room(snapshot.num_bytes + _HEADER_BYTES, sizes, before):
                snapshot.save(self.folder / file.name)
                self._refused.discard(file)
                self._look()

    def _is_used(self, tokens: Sequence[int]) -> bool:
        """Record a use of the snapshot of exactly these tokens; return whether there is one."""
        chain = self._longest_chain(tokens, len(tokens))
        try:
            self._touch(chain or [])
        except FileNotFoundError:
            return False
        return chain is not None

    def _touch(self, chain: Sequence[_File]) -> None:
        for file in chain:
            os.utime(self.folder / file.name)

    def _make_room(self, needed: int, sizes: Mapping[_File, int], spared: Sequence[_File]) -> bool:
        """Remove the least recently used files until there is room. If that cannot be enough, return false at once."""
        if self.max_bytes is None:
            return True
        if sum(sizes[file] for file in spared) + needed > self.max_bytes:
            return False
        total = sum(sizes.values())
        for file, size in sizes.items():
            if total + needed <= self.max_bytes:
                break
            if file not in spared:
                (self.folder / file.name).unlink(missing_ok=True)
                total -= size
        return True

    def _look(self) -> dict[_File, int]:
        """Update the list of files; return them as `_sizes` does."""
        sizes = self._sizes()
        self._files, self.num_bytes = frozenset(sizes), sum(sizes.values())
        return sizes

    def _sizes(self) -> dict[_File, int]:
        """Return the files of all models with their bytes, the least recently used first."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is not None and entry.is_file(follow_symlinks=False):
                    file = _File(int(match[1]), int(match[2]), match[3])
                    with suppress(FileNotFoundError):  # another process may have removed it
                        about = entry.stat()
                        # A longer snapshot needs the shorter ones, so it comes first.
                        found.append((about.st_mtime_ns, -file.length, file, about.st_size))
        found.sort(key=lambda each: each[:2])
        return {file: size for _, _, file, size in found if file.start < file.length}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder for writing; remove unfinished files of processes that have ended."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for name in os.listdir(self.folder):
                if _UNFINISHED.fullmatch(name):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)


def _chain(files: Mapping[str, _File], keys: Mapping[int, str], length: int) -> list[_File] | None:
    """Return the files whose snapshots together make a sequence of that length; None if one is missing."""
    chain: list[_File] = []
    while length:
        file = files.get(keys.get(length, ""))
        if file is None or file.length != length:
            return None
        chain.insert(0, file)
        length = file.start
    return chain


def _make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter, or check that an existing one is private.

    Raises:
        UserError: it is not private, or cannot be made.
    """
    check_name(folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise UserError(f"{folder} is not a folder, and could not be made ({error.strerror}).") from None
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise UserError(f"{folder} must be a folder that you own and nobody else may enter: chmod 700 {folder}")
