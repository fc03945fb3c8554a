"""Processes that each have a device: collectives between them, and models split over them."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed
from transformers import GenerationConfig

from benchmarks.probe.device import compiled, judge, milliseconds
from benchmarks.probe.models import layer_model, steps, texts
from benchmarks.probe.process import EQUAL, FACT, Finding, Place
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.ranks import ProcessGroupSpec, check_devices, listen
from granite4_neuron.devices.torch.split import SplitRuntime
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.model.parallel import Parallel

_WIDTH = 4096
_TOKENS = (1, 128)


def group(place: Place, degree: str) -> Iterator[Finding]:
    """The ranks' process group, and its barrier."""
    yield from _on_each_rank(place, int(degree), _meet)


def all_reduce(place: Place, degree: str) -> Iterator[Finding]:
    """Sums over the ranks, of the hidden states of a token and of a prompt, in a compiled graph."""
    yield from _on_each_rank(place, int(degree), _sum)


def all_gather(place: Place, degree: str) -> Iterator[Finding]:
    """The ranks' parts of logits side by side, in a compiled graph."""
    yield from _on_each_rank(place, int(degree), _gather)


def layer(place: Place, kind: str, degree: str) -> Iterator[Finding]:
    """A model of one layer, see `models.layer`."""
    if too_few := _too_few(place, int(degree)):
        yield too_few
        return
    model = layer_model(kind)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        cpu = CPURuntime(model, GenerationConfig(), cpu_kernels="torch")
        with _split(place, Path(folder), int(degree)) as ours:
            yield from steps(cpu, ours)


def text(place: Place, degree: str) -> Iterator[Finding]:
    """Greedy texts of the bundled model."""
    if too_few := _too_few(place, int(degree)):
        yield too_few
        return
    with _split(place, bundled_checkpoint(), int(degree)) as ours:
        yield texts(ours)


@contextmanager
def _split(place: Place, folder: Path, degree: int) -> Iterator[SplitRuntime]:
    options = dict(device=place.device, compiler=place.compiler, prefill_buckets=(128,))
    runtime = SplitRuntime(folder, torch.float32, GenerationConfig(), tp_degree=degree, **options)
    try:
        yield runtime
    finally:
        runtime.close()


def _too_few(place: Place, degree: int) -> Finding | None:
    """Return a finding if the machine has too few GPUs, or a Neuron chip would be used in part. Only Neuron's runtime
    knows the number of its cores.
    """
    if place.device == "cuda" and torch.cuda.device_count() < degree:
        return Finding("devices", FACT, message=f"torch finds {torch.cuda.device_count()} GPUs here")
    if place.device == "neuron" and degree == 2:
        message = "not tried: published ports report that two ranks are not valid with LNC=2 on one chip"
        return Finding("devices", FACT, message=message)
    return None


def _on_each_rank(place: Place, degree: int, function: Callable[[Place, Parallel], list[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a function of each rank's place; this process is rank 0."""
    if too_few := _too_few(place, degree):
        yield too_few
        return
    check_devices(place.device, degree)
    listener, context = listen(), multiprocessing.get_context("spawn")
    group = ProcessGroupSpec.at(listener, degree, place.device)
    pipes, processes = [], []
    for rank in range(1, degree):
        ours, theirs = context.Pipe()
        arguments = (theirs, group, rank, place.compiler, function)
        processes.append(context.Process(target=_worker_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    group.join(0, listener)
    yield from _named(0, function(*_place_of(group, 0, place.compiler)))
    for rank, pipe in enumerate(pipes, start=1):
        yield from _named(rank, pipe.recv())
    for process in processes:
        process.join()
    torch.distributed.destroy_process_group()


def _worker_main(
    pipe: Connection,
    group: ProcessGroupSpec,
    rank: int,
    compiler: str | None,
    function: Callable[[Place, Parallel], list[Finding]],
) -> None:
    group.join(rank)
    pipe.send(function(*_place_of(group, rank, compiler)))
    torch.distributed.destroy_process_group()


def _place_of(group: ProcessGroupSpec, rank: int, compiler: str | None) -> tuple[Place, Parallel]:
    everyone = torch.distributed.group.WORLD
    assert everyone is not None  # the ranks have joined
    return Place(group.device_of(rank), compiler), Parallel(rank, group.degree, everyone.group_name)


def _named(rank: int, findings: list[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield replace(finding, what=f"rank {rank}, {finding.what}")


def _meet(place: Place, parallel: Parallel) -> list[Finding]:
    torch.distributed.barrier()
    device = torch.empty(1, device=place.device).device
    return [Finding("group", EQUAL, message=f"{torch.distributed.get_backend()}, {device}")]


def _sum(place: Place, parallel: Parallel) -> list[Finding]:
    return _collective(place, parallel, parallel.all_reduce, sum)


def _gather(place: Place, parallel: Parallel) -> list[Finding]:
    return _collective(place, parallel, parallel.all_gather, lambda parts: torch.cat(parts, -1))


@torch.no_grad()
def _collective(
    place: Place,
    parallel: Parallel,
    function: Callable[[torch.Tensor], torch.Tensor],
    definition: Callable[[list[torch.Tensor]], torch.Tensor],
) -> list[Finding]:
    """Compare a collective with its definition, which takes all ranks' tensors, and time it."""
    findings = []
    for tokens in _TOKENS:
        every = [
            torch.randn(1, tokens, _WIDTH, generator=torch.Generator().manual_seed(rank))
            for rank in range(parallel.degree)
        ]
        given, run = every[parallel.rank].to(place.device), compiled(place, function)
        findings.append(judge(f"{tokens} tokens", run(given), definition(every)))
        time = milliseconds(place, lambda run=run, given=given: run(given))
        findings.append(Finding(f"time of {tokens} tokens", FACT, message=f"{time:.3f} ms", numbers={"ms": time}))
    return findings
