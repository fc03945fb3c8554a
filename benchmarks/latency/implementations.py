"""Implementations in a latency benchmark: this package, transformers, llama.cpp and OpenVINO, one process each."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.latency.bound import Machine, Rates
from benchmarks.other_engines.llama_cpp import LlamaCpp
from benchmarks.other_engines.openvino import OpenVino
from granite4_neuron import UserError, stream_generate
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.engine_options import drafts_with_mtp
from granite4_neuron.commands.options import backend_options, drawing_options, dtype_of, kernels_of
from granite4_neuron.commands.output import peak_memory_bytes
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.devices.backends import BACKENDS
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.devices.torch.split import SplitRuntime

MACHINE = "machine"
OURS = "granite4-neuron"
PLAIN = "granite4-neuron, torch kernels"
TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"
OPENVINO = "openvino"


@dataclass(frozen=True)
class Point:
    """A point to measure: `batch_size` random prompts of one length, and the number of new tokens of each.

    busy_processes: the number of other processes that each keep a processor busy meanwhile.
    """

    batch_size: int
    prompt_length: int
    output_length: int
    busy_processes: int = 0


@dataclass(frozen=True)
class Run:
    """The measurements of an implementation at a point.

    times: when its tokens came, in seconds from the start.
    peak_bytes: the most memory that its process has held so far.
    weight_bytes: the weights' part of it; 0 if they are in another process or on a device.
    round_trips: seconds of a round trip between two threads just before and just after the run; None if unknown.
    """

    times: list[float]
    peak_bytes: int
    weight_bytes: int
    round_trips: tuple[float | None, float | None] = (None, None)


class Ours:
    """This package, on one of its backends, through its public generation loop."""

    weight_bytes = 0

    def __init__(self, folder: Path, options: argparse.Namespace):
        self._sampling = drawing_options(options)
        if options.backend == "nxdi":
            self._runtime = BACKENDS["nxdi"].load(
                open_checkpoint(folder), transformers.GenerationConfig(), compiled=options.compiled
            )
        elif options.tp_degree > 1:
            dtype = weights_dtype(folder, options)
            self._runtime = SplitRuntime(folder, dtype, transformers.GenerationConfig(), **runtime_options(options))
        elif options.backend == "torch":
            dtype = weights_dtype(folder, options)
            is_random = draws_weights(options)
            config = open_checkpoint(folder).config
            model = random_model(config, dtype=dtype) if is_random else load_model(folder, dtype)
            chosen = runtime_options(options)
            del chosen["tp_degree"]
            self._runtime = TorchRuntime(model, transformers.GenerationConfig(), **chosen)
        else:
            self._runtime = cpu_runtime(folder, options)
        if options.backend != "nxdi":
            self.weight_bytes = self._runtime.weight_bytes

    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """Run a point. Return when the first and each further token of all prompts was complete, in seconds from the
        start.
        """
        options: dict[str, Any] = dict(max_tokens=output_length, ignore_eos=True, **self._sampling)
        times, started = [], time.perf_counter()
        for number, _ in enumerate(stream_generate(self._runtime, None, prompts, **options)):
            if number % len(prompts) == len(prompts) - 1:
                times.append(time.perf_counter() - started)
        return times


class Transformers:
    """transformers' model, one cached forward pass per step."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str):
        if open_checkpoint(folder).folder is None:
            raise UserError(f"transformers does not read {folder}; convert writes a checkpoint folder of it.")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.weight_bytes = self._model.get_memory_footprint(return_buffers=False)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """See `Ours.run`."""
        times, started = [], time.perf_counter()
        tokens, cache = torch.tensor(prompts, device=self._model.device), None
        for _ in range(output_length):
            output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            tokens.tolist()  # waits for a device
            times.append(time.perf_counter() - started)
        return times


def random_prompts(vocab_size: int, point: Point, seed: int = 0) -> list[list[int]]:
    """Return the point's prompts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (point.batch_size, point.prompt_length), generator=generator).tolist()


def cpu_runtime(folder: Path, options: argparse.Namespace) -> CPURuntime:
    """Return this package's runtime for the checkpoint in a folder."""
    operators = cpu.choose_operators(options.cpu_kernels)
    dtype = weights_dtype(folder, options)
    checkpoint = open_checkpoint(folder)
    checkpoint = checkpoint.with_mtp() if drafts_with_mtp(options) else checkpoint
    model = load_model(checkpoint, dtype, quantize=options.quantize, operators=operators, keep_quantized=QUANTIZATIONS)
    state_dtype = options.state_dtype and dtype_of(options.state_dtype)
    chosen = dict(cpu_kernels=options.cpu_kernels, tuned_configs=options.tuned_configs, state_dtype=state_dtype)
    return CPURuntime(model, transformers.GenerationConfig(), **chosen, **kernels_of(options, options.kernels))


def runtime_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the backend's options except the dtype, with the kernels that --kernels chooses."""
    chosen = backend_options(options) | kernels_of(options, options.kernels)
    return {each.name: chosen[each.name] for each in BACKENDS[options.backend].options if each.name != "dtype"}


def draws_weights(options: argparse.Namespace) -> bool:
    """Return whether the process that runs the model draws random weights: on one device, if nothing is compared."""
    is_alone = options.backend == "torch" and options.tp_degree == 1 and not options.compare
    return options.random_weights is not None and is_alone


def weights_dtype(folder: Path, options: argparse.Namespace) -> torch.dtype:
    """Return the requested dtype, or the stored weights'."""
    return getattr(torch, options.dtype or open_checkpoint(folder).dtype)


def weights_format(folder: Path, options: argparse.Namespace) -> str | None:
    """Return the requested format, or the stored weights', the one with the fewest bits if there are several."""
    stored = open_checkpoint(folder).quantization
    if options.quantize or stored is None:
        return options.quantize
    return stored.name if stored.name in QUANTIZATIONS else f"int{min(scheme.bits for scheme in stored.schemes)}"


@contextmanager
def worker_process(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Connection]:
    """Start a process that runs points with an implementation, for `ask`; it ends with the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    dtype = None if options.backend == "nxdi" else weights_dtype(folder, options)
    # A daemon may not start the processes of a model that is split over devices.
    is_daemon = options.tp_degree == 1
    process = context.Process(target=_serve, args=(theirs, name, folder, dtype, options), daemon=is_daemon)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def ask(worker: Connection, name: str, point: Point, turn: int) -> Run | Rates:
    """Let a worker run a point. The machine's worker answers with its rates."""
    try:
        worker.send((point, turn))
        answer = worker.recv()
    except (EOFError, OSError):
        raise UserError(f"the process that ran {name} died; is there enough memory?") from None
    if isinstance(answer, UserError):
        raise answer
    return answer


def _serve(
    connection: Connection, name: str, folder: Path, dtype: torch.dtype | None, options: argparse.Namespace
) -> None:
    """Run points in a process of its own until the other side closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side gets the signal too, and closes the connection
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    try:
        implementation = _implementation(name, folder, dtype, options)
    except UserError as error:
        connection.send(error)
        return
    vocab_size = open_checkpoint(folder).config.vocab_size
    while True:
        try:
            point, turn = connection.recv()
        except EOFError:
            return
        if name == MACHINE:
            connection.send(implementation.rates())
            continue
        try:
            times = implementation.run(random_prompts(vocab_size, point, turn), point.output_length)
        except UserError as error:
            connection.send(error)
            return
        connection.send(Run(times, _peak_bytes(name, options.device), implementation.weight_bytes))


def _implementation(name: str, folder: Path, dtype: torch.dtype | None, options: argparse.Namespace) -> Any:
    if name == MACHINE:
        return Machine(dtype)
    if name == TRANSFORMERS:
        return Transformers(folder, dtype, options.device)
    if name == LLAMA_CPP:
        return LlamaCpp(options.llama_cpp, options.gguf, options.threads, options.device)
    if name == OPENVINO:
        return OpenVino(options.openvino, dtype, options.threads, max(options.batch_size))
    return Ours(folder, options)


def _peak_bytes(name: str, device: str) -> int:
    """Return the most memory that an implementation has held so far, on the GPU if it runs there.

    llama.cpp does not report GPU memory, so that is its process's memory.
    """
    if device.startswith("cuda") and name != LLAMA_CPP:
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_bytes(resource.RUSAGE_CHILDREN if name == LLAMA_CPP else resource.RUSAGE_SELF)
