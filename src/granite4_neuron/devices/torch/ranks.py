"""The processes of a model that is split over devices: they start, load their part, run calls, and end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed
from transformers import GenerationConfig

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.devices.neuron.torchneuron.cores import check_cores, take_core, visible_cores
from granite4_neuron.devices.torch.devices import find_device
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.rank_calls import NUMBERED, Refusal, from_bytes, result_or_refusal, to_bytes
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.system.signals import SIGNALS_TO_END
from granite4_neuron.system.terminal import guard_streams

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

_EXIT_WITHOUT_OTHERS = 1
_EXIT_WITHOUT_GUARD = 3
_NAME = "rank "  # of processes
_LOOPBACK = "127.0.0.1"
_INTERFACE = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}  # variables that choose one
_NO_GUARD = (
    "a model that is split over devices starts processes, which import this program's main module again; call load "
    'below `if __name__ == "__main__":` there.'
)
_SECONDS_TO_FAIL_TOO = 5
_SECONDS_TO_BE_SEEN = 1  # a call may fail shortly before the end of the process that it needs is noticed


@dataclass(frozen=True)
class ProcessGroupSpec:
    """The process group of a model's ranks: where they connect, and which devices they have.

    port: of this machine, where rank 0 listens.
    cores: the Neuron cores that the processes may use; None for all of this machine, or for another device.
    """

    degree: int
    device: str
    port: int
    cores: Sequence[int] | None

    @classmethod
    def at(cls, listener: socket.socket, degree: int, device: str, **others: Any) -> Self:
        """Return the group at rank 0's listener, with the cores that this process may use. `others`: further fields."""
        cores = visible_cores() if device == "neuron" else None
        return cls(degree, device, listener.getsockname()[1], cores, **others)

    def device_of(self, rank: int) -> str:
        """Return the name of the device in the rank's own process, which sees only one Neuron core."""
        return f"{self.device}:{rank}" if self.device == "cuda" else self.device

    def join(self, rank: int, listener: socket.socket | None = None) -> None:
        """Wait until all ranks are connected.

        Args:
            listener: of rank 0, at `port`. The store that all ranks use until the end takes it over.

        Raises:
            UserError: they cannot connect.
        """
        device, communication = None, DEVICES[self.device].communication
        if self.device == "cuda":
            device = torch.device(self.device_of(rank))
            torch.cuda.set_device(device)
        if self.device == "neuron":
            take_core(rank, self.degree, self.cores)
        try:
            store = torch.distributed.TCPStore(
                _LOOPBACK,
                self.port,
                self.degree,
                is_master=listener is not None,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            torch.distributed.init_process_group(
                communication, store=store, rank=rank, world_size=self.degree, device_id=device
            )
        except RuntimeError as error:
            reason, variable = str(error).splitlines()[0], _INTERFACE.get(communication)
            chosen = os.environ.get(variable) if variable else None
            hint = f"; {variable} is {chosen!r}, and must name a network interface of this machine" if chosen else ""
            raise UserError(f"the processes of a split model cannot connect to each other ({reason}){hint}.") from None


@dataclass(frozen=True)
class ShardSpec(ProcessGroupSpec):
    """The part of a checkpoint that each rank loads, and its runtime's options."""

    folder: Path
    dtype: torch.dtype | None
    options: Mapping[str, Any]

    def load(self, rank: int, **listeners: Any) -> HybridForCausalLM:
        group = torch.distributed.group.WORLD
        assert group is not None  # `join` has made it
        parallel = Parallel(rank, self.degree, group.group_name)
        return load_model(self.folder, self.dtype, parallel, **listeners)


def listen() -> socket.socket:
    """Return a socket where rank 0 listens, for processes of this machine only."""
    return socket.create_server((_LOOPBACK, 0))


class RankProcesses:
    """The processes of ranks 1 and up. Each runs the calls that it gets, one after another."""

    def __init__(self, spec: ShardSpec):
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        threads = max(1, torch.get_num_threads() // spec.degree)
        self._ends = threading.Event()
        try:
            with _interrupts_for_later():
                for rank in range(1, spec.degree):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=_worker_main, args=(theirs, spec, rank, threads), name=f"{_NAME}{rank}", daemon=True
                    )
                    _start(process)
                    theirs.close()
                    self._pipes.append(ours)
                    self._processes.append(process)
                self._watcher = threading.Thread(target=_watch, args=(self._processes, self._ends), daemon=True)
                self._watcher.start()
        except BaseException:
            self._ends.set()
            for each in self._processes:
                each.kill()
            raise

    def send(self, messages: Sequence[bytes]) -> None:
        """Send each process its message: a call to run while this process continues.

        Raises:
            UserError: they have ended.
        """
        if self._ends.is_set():
            raise UserError("the other processes of this split model have ended; load it again, in a new process.")
        for pipe, message in zip(self._pipes, messages, strict=True):
            pipe.send_bytes(message)

    def answers(self) -> list[bytes]:
        """Wait for an answer from each."""
        return [pipe.recv_bytes() for pipe in self._pipes]

    def end_if_one_has_ended(self, error: BaseException) -> None:
        """End this process if a call failed here because one of the others has ended unexpectedly."""
        if not isinstance(error, (RuntimeError, OSError, EOFError)):
            return
        if multiprocessing.connection.wait([each.sentinel for each in self._processes], _SECONDS_TO_BE_SEEN):
            self._watcher.join()  # it ends this process

    def end(self, seconds: float) -> bool:
        """Close the pipes, which ends the processes; after `seconds` kill those that still run.

        Returns:
            Whether all ended without being killed.
        """
        self._ends.set()
        try:
            for pipe in self._pipes:
                pipe.close()
            self._watcher.join(seconds)
        finally:  # also if this is interrupted
            for process in self._processes:
                process.kill()
        self._watcher.join()
        return all(process.exitcode == 0 for process in self._processes)


@contextmanager
def _interrupts_for_later() -> Iterator[None]:
    """Delay signals, and block them in the processes that are started: rank 0 ends those processes itself."""
    resource_tracker.ensure_running()  # started here, because starting it later would unblock the signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_TO_END)  # new processes inherit it
    held = []
    # Another thread of this process may take the signal; Python's handler then runs in the main thread.
    handles = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *_: held.append(True)) if handles else None
    try:
        yield
    finally:
        if handles:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if held:
        signal.raise_signal(signal.SIGINT)


def check_devices(device: str, tp_degree: int) -> None:
    """Check that there is a device for each rank, and that this process may become rank 0.

    Raises:
        UserError: a device is missing, or this process may not.
    """
    if device not in DEVICES:
        *others, last = DEVICES
        devices = f"{', '.join(others)} or {last}"
        raise UserError(f"tp_degree is {tp_degree} and the device is {device}; a model is split over {devices} only.")
    find_device(device)
    if device == "cuda" and torch.cuda.device_count() < tp_degree:
        raise UserError(f"tp_degree is {tp_degree} and torch finds {torch.cuda.device_count()} GPUs here.")
    if device == "neuron":
        check_cores(tp_degree)
    if torch.distributed.is_initialized():
        raise UserError("this process has a model that is split over devices, or a process group; it can have one.")


def _start(process: BaseProcess) -> None:
    """Start a rank's process. A rank whose main module has no guard gets here while it imports that module, and ends.

    Raises:
        UserError: another process than a rank imports its main module in this way.
    """
    try:
        process.start()
    except RuntimeError:  # from multiprocessing, while a process imports the main module
        if multiprocessing.current_process().name.startswith(_NAME):
            os._exit(_EXIT_WITHOUT_GUARD)
        raise UserError(_NO_GUARD) from None


def _watch(processes: Sequence[BaseProcess], ends: threading.Event) -> None:
    """End this process if another rank's process has ended too early, because this one may be waiting for it."""
    running = list(processes)
    while running:
        ended = multiprocessing.connection.wait([process.sentinel for process in running])
        for process in [each for each in running if each.sentinel in ended]:
            running.remove(process)
            process.join()
            if not ends.is_set():
                _end_without(process)


def _end_without(process: BaseProcess) -> NoReturn:
    failed = f"the process of {process.name} has failed, and the others cannot continue without it."
    try:
        print(f"granite4-neuron: {_NO_GUARD if process.exitcode == _EXIT_WITHOUT_GUARD else failed}", file=sys.stderr)
    finally:  # also if stderr is closed
        os._exit(_EXIT_WITHOUT_OTHERS)


def _worker_main(pipe: Connection, spec: ShardSpec, rank: int, threads: int) -> None:
    """Run a rank other than 0: load its part, and run the calls that rank 0 sends until it closes the pipe."""
    for number in SIGNALS_TO_END:  # ignore them: starting multiprocessing's resource tracker would unblock them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    guard_streams()
    torch.set_num_threads(threads)
    runtime, answer = None, None
    try:
        spec.join(rank)
    except UserError as error:
        _stay_away(pipe, error)
        return
    try:
        runtime = TorchRuntime(spec.load(rank), GenerationConfig(), device=spec.device_of(rank), **spec.options)
    except UserError as error:
        answer = Refusal(str(error))
    _answer(pipe, answer)
    numbered: dict[int, Any] = {}
    while (message := _next_message(pipe)) is not None and runtime is not None:
        _make_call(pipe, runtime, message, numbered)
    if runtime is not None:
        runtime.release_graphs()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _stay_away(pipe: Connection, error: UserError) -> None:
    """Say why this rank cannot join the others. If rank 0 cannot join either, it ends by itself. Otherwise it waits for
    this rank, and notices the end of this process.
    """
    _answer(pipe, Refusal(str(error)))
    if not pipe.poll(_SECONDS_TO_FAIL_TOO):
        print(f"granite4-neuron: {error}", file=sys.stderr, flush=True)
        os._exit(_EXIT_WITHOUT_OTHERS)


def _make_call(pipe: Connection, runtime: TorchRuntime, message: bytes, numbered: dict[int, Any]) -> None:
    """Run a call from rank 0 with this rank's states and verifications; first release those that it has released."""
    call = from_bytes(message, numbered, runtime)
    for number in numbered.keys() - set(call.alive):
        del numbered[number]
    method = getattr(runtime, call.name)
    result = result_or_refusal(method, call.arguments) if call.answers else method(*call.arguments)
    if isinstance(result, NUMBERED):
        numbered[call.number], result = result, None
    if call.answers:
        _answer(pipe, result)


def _answer(pipe: Connection, answer: Any) -> None:
    with suppress(BrokenPipeError):  # rank 0 has closed it
        pipe.send_bytes(to_bytes(answer, {}))


def _next_message(pipe: Connection) -> bytes | None:
    """Wait for a call; None if rank 0 has closed the pipe."""
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def _end_with_parent() -> None:
    """End this process when its parent ends, even while it waits for rank 0 within a step."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a rank other than 0 is a child
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)
