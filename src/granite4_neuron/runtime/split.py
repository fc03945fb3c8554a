"""Runs steps of a model that is split over several devices of this machine, a process for each: tensor parallelism.

Every process has a rank, and with it a part of each layer's weights and state (`model.parallel`). This one is rank 0.
It sends each call to the others, which make the same call; within a step the ranks add up what they have.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import GenerationConfig

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.source import read_config
from granite4_neuron.errors import UserError
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.state import HybridState
from granite4_neuron.runtime.interface import Ability, Row, Verification
from granite4_neuron.runtime.torch_device import TorchRuntime, find_device

_COMMUNICATION = {"cpu": "gloo", "cuda": "nccl"}  # by device
_EXIT_WITHOUT_OTHERS = 1
_SECONDS_TO_END = 10  # a rank needs less, unless it waits for one that has gone


class SplitRuntime(TorchRuntime):
    """The `Runtime` of a model that is split over `tp_degree` devices of one kind.

    If another rank's process ends by itself, this process ends too, with a sentence: it may be waiting for that rank
    within a step, and nothing else would end this.

    Args:
        folder, dtype, progress: as of `load_model`; progress is that of this rank.
        generation_config: the checkpoint's defaults for generation.
        tp_degree: at least 2.
        device: "cpu" or "cuda"; the ranks are on cuda:0, cuda:1 and so on.
        options: of `TorchRuntime`; each can be sent to another process.

    Raises:
        UserError: the model cannot be split so, there are too few devices, this process has such a model already, or
            as `load_model` and `TorchRuntime`.
    """

    cannot: Mapping[Ability, str] = {
        "snapshot": "the state of a model that is split over devices stays there, so none of it can be kept for later; "
        "leave out tp_degree, or what keeps prefixes."
    }

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype | None,
        generation_config: GenerationConfig,
        *,
        tp_degree: int,
        device: str,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ):
        read_config(folder).rank_dimensions(tp_degree)
        _check_devices(device, tp_degree)
        self._meeting = tempfile.TemporaryDirectory()  # the ranks may exchange words in it at any time
        job = _Job(folder, dtype, tp_degree, device, os.path.join(self._meeting.name, "ranks"), options)
        self._others = _Others(job)
        job.join(0)
        super().__init__(job.load(0, progress), generation_config, device=job.device_of(0), **options)
        self._others.wait_until_ready()
        self._numbers = itertools.count()
        self._states: weakref.WeakKeyDictionary[HybridState, int] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """End the other ranks' processes; the runtime is of no use afterwards."""
        self._memories.clear()
        self._graphs.clear()
        self._others.close()

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """Implement `Runtime.allocate`, on every rank."""
        number = next(self._numbers)
        self._others.call("allocate", number, num_sequences, max_length)
        try:
            state = super().allocate(num_sequences, max_length)
        finally:
            refusals = self._others.answers()
        if any(refusals):
            raise UserError(next(filter(None, refusals)))
        self._states[state] = number
        self._others.forget_with(state, number)
        return state

    def warm_up(self, state: HybridState, verifies: bool = False) -> None:
        """Implement `Runtime.warm_up`, on every rank."""
        self._others.call("warm_up", self._states[state], verifies)
        super().warm_up(state, verifies)

    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Implement `Runtime.step`; every rank has the logits."""
        self._others.call("step", self._states[state], rows, all_logits)
        return super().step(state, rows, all_logits)

    def verify(self, state: HybridState, rows: Sequence[Row]) -> Verification:
        """Implement `Runtime.verify`; each rank keeps its own inputs."""
        number = next(self._numbers)
        self._others.call("verify", self._states[state], rows, number)
        verification = _Numbered(number=number, **vars(super().verify(state, rows)))
        self._others.forget_with(verification, number)
        return verification

    def commit(self, state: HybridState, verification: Verification, accepted: Sequence[int]) -> None:
        """Implement `Runtime.commit`, on every rank."""
        self._others.call("commit", self._states[state], verification.number, accepted)
        super().commit(state, verification, accepted)

    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Implement `Runtime.copy`, on every rank."""
        self._others.call("copy", self._states[state], source, destination, length)
        super().copy(state, source, destination, length)


@dataclass(frozen=True)
class _Numbered(Verification):
    """A verification, with the number by which other ranks know it."""

    number: int = field(kw_only=True)


@dataclass(frozen=True)
class _Job:
    """What each rank loads, and where they meet.

    meeting: a file that does not exist yet.
    """

    folder: Path
    dtype: torch.dtype | None
    degree: int
    device: str
    meeting: str
    options: Mapping[str, Any]

    def device_of(self, rank: int) -> str:
        return f"{self.device}:{rank}" if self.device == "cuda" else self.device

    def join(self, rank: int) -> None:
        """Wait until all ranks are there."""
        device = None
        if self.device == "cuda":
            device = torch.device(self.device_of(rank))
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            _COMMUNICATION[self.device],
            init_method=f"file://{self.meeting}",
            rank=rank,
            world_size=self.degree,
            device_id=device,
        )

    def load(self, rank: int, progress: Callable[[int, int], None] | None = None) -> GraniteMoeHybridForCausalLM:
        parallel = Parallel(rank, self.degree, torch.distributed.group.WORLD)
        return load_model(self.folder, self.dtype, parallel, progress=progress)


class _Others:
    """The processes of ranks 1 and up, which make the calls that they are sent, one after another."""

    def __init__(self, job: _Job):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        threads = max(1, torch.get_num_threads() // job.degree)
        for rank in range(1, job.degree):
            ours, theirs = context.Pipe()
            arguments = theirs, job, rank, threads
            process = context.Process(target=_follow, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._forgotten: list[int] = []
        self._ends = threading.Event()
        # With a priority, so that it comes before multiprocessing ends daemons by force.
        self._close = Finalize(self, _end, (self._pipes, self._processes, self._ends), exitpriority=0)
        threading.Thread(target=_watch, args=(self._processes, self._ends), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait until all have loaded their parts.

        Raises:
            UserError: one could not.
        """
        refusals = [each for each in self.answers() if each]
        if refusals:
            self.close()
            raise UserError(refusals[0])

    def call(self, name: str, *arguments: Any) -> None:
        """Have each of them make a call, while this process goes on."""
        forgotten, self._forgotten[:] = list(self._forgotten), []
        for pipe in self._pipes:
            pipe.send((forgotten, name, arguments))

    def answers(self) -> list[str | None]:
        """Wait for an answer of each: None, or why it could not."""
        return [pipe.recv() for pipe in self._pipes]

    def forget_with(self, thing: HybridState | Verification, number: int) -> None:
        """Have them let go of what they keep by a number once this process has let go of its own part."""
        # Not at once: that may be at any time, also in the middle of a message.
        weakref.finalize(thing, self._forgotten.append, number).atexit = False

    def close(self) -> None:
        self._close()


def _check_devices(device: str, tp_degree: int) -> None:
    """Check that there is a device for each rank, and that this process may become rank 0.

    Raises:
        UserError: not so.
    """
    if device not in _COMMUNICATION:
        devices = " or ".join(_COMMUNICATION)
        raise UserError(f"tp_degree is {tp_degree} and the device is {device}; a model is split over {devices} only.")
    find_device(device)
    if device == "cuda" and torch.cuda.device_count() < tp_degree:
        raise UserError(f"tp_degree is {tp_degree} and torch finds {torch.cuda.device_count()} GPUs here.")
    if torch.distributed.is_initialized():
        raise UserError("this process has a model that is split over devices, or a process group; it can have one.")


def _end(pipes: Sequence[Connection], processes: Sequence[Any], ends: threading.Event) -> None:
    ends.set()
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(_SECONDS_TO_END)
    if all(process.exitcode == 0 for process in processes):
        torch.distributed.destroy_process_group()
    for process in processes:
        process.kill()


def _watch(processes: Sequence[Any], ends: threading.Event) -> None:
    """End this process if another rank's has failed: it may be waiting for that rank, and would for ever."""
    multiprocessing.connection.wait([process.sentinel for process in processes])
    failed = [process.name for process in processes if process.exitcode]
    if failed and not ends.is_set():
        print(
            f"granite4-neuron: the process of {', '.join(failed)} has failed, and the others cannot go on without it.",
            file=sys.stderr,
        )
        os._exit(_EXIT_WITHOUT_OTHERS)


def _follow(pipe: Connection, job: _Job, rank: int, threads: int) -> None:
    """Be a rank: load its part, and make the calls that rank 0 sends until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets the signal too, and closes the pipe
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        job.join(rank)
        runtime = TorchRuntime(job.load(rank), GenerationConfig(), device=job.device_of(rank), **job.options)
    except UserError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    follower = _Follower(pipe, runtime)
    while True:
        try:
            forgotten, name, arguments = pipe.recv()
        except EOFError:
            break
        follower.forget(forgotten)
        try:
            getattr(follower, name)(*arguments)
        except (UserError, ValueError):
            # Of arguments, before any work: rank 0 raises the same.
            continue
    torch.distributed.destroy_process_group()


def _end_with_parent() -> None:
    """End this process with its parent's, also while it waits for rank 0 within a step."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(0)


class _Follower:
    """A rank's part of what `SplitRuntime` does, with states and verifications by their numbers."""

    def __init__(self, pipe: Connection, runtime: TorchRuntime):
        self._pipe = pipe
        self._runtime = runtime
        self._kept: dict[int, Any] = {}

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def allocate(self, number: int, num_sequences: int, max_length: int) -> None:
        try:
            self._kept[number] = self._runtime.allocate(num_sequences, max_length)
        except UserError as error:
            self._pipe.send(str(error))
        else:
            self._pipe.send(None)

    def warm_up(self, state: int, verifies: bool) -> None:
        self._runtime.warm_up(self._kept[state], verifies)

    def step(self, state: int, rows: Sequence[Row], all_logits: bool) -> None:
        self._runtime.step(self._kept[state], rows, all_logits)

    def verify(self, state: int, rows: Sequence[Row], number: int) -> None:
        self._kept[number] = self._runtime.verify(self._kept[state], rows)

    def commit(self, state: int, verification: int, accepted: Sequence[int]) -> None:
        self._runtime.commit(self._kept[state], self._kept[verification], accepted)

    def copy(self, state: int, source: int, destination: int, length: int) -> None:
        self._runtime.copy(self._kept[state], source, destination, length)
