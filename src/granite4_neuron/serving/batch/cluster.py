"""Answers a batch on the machines of a Ray cluster, by Ray Data: a model for each worker.

A piece of work is a part of the input, which the worker reads itself. A line's result depends on the line only. So the
results are those of one machine, whichever worker does a part, and even if a part is done again because a worker was
lost.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from granite4_neuron.errors import UserError
from granite4_neuron.serving.batch.batch import Batch, Result
from granite4_neuron.serving.batch.lines import Lines

_PARTS_OF_A_WORKER = 8  # at least, so that all workers end at about the same time
_MOST_PARTS = 10_000  # Ray plans all of them at once
_SMALLEST = 1 / 64  # of a good portion
_SECONDS = 10  # for a connection


class _Worker:
    """Answers parts of the input.

    Args:
        make: loads the model.
        size: of a part, in places.
    """

    def __init__(self, make: Callable[[], Batch], lines: Lines, start: int, size: int):
        self._batch = make()
        self._lines = lines
        self._start = start
        self._size = size

    def __call__(self, parts: Mapping[str, Any]) -> dict[str, list[Any]]:
        found: list[Result] = []
        for number in parts["id"].tolist():
            start = self._start + number * self._size
            found += self._batch.results(self._lines.read(start, min(start + self._size, self._lines.size)))
        return {name: [getattr(result, name) for result in found] for name in Result.__dataclass_fields__}


class Cluster:
    """Answers batches on a cluster.

    Args:
        address: "local" for a cluster that is started here and ended again; otherwise as `ray.init` takes it.
        num_workers: how many models run; None for one for each node.
        devices: what each needs beside processors, by Ray's names.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(self, address: str, num_workers: int | None, devices: Mapping[str, float]):
        if find_spec("ray") is None:
            raise UserError("--ray needs Ray; install it with: pip install 'granite4-neuron[ray]'.")
        self._address = address
        self._num_workers = num_workers
        self._devices = dict(devices)

    def results(self, make: Callable[[], Batch], lines: Lines, start: int) -> Iterator[Result]:
        """Yield the results of the lines from a place on, in their order.

        Args:
            make: loads the model on a worker, which must be able to read its files and the input at the same paths.

        Raises:
            UserError: there is no such cluster, it is too small, or a worker cannot load the model or read the input.
        """
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        with _connected(self._address):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            num_workers = self._num_workers or len(nodes)
            num_cpus = cpus_of_a_worker(nodes, num_workers, self._devices)
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its plans, and tracebacks of workers
            context = DataContext.get_current()
            context.execution_options.preserve_order = True
            context.enable_progress_bars = False
            size = _size_of_a_part(lines, start, num_workers)
            number = -(-(lines.size - start) // size)
            parts = ray.data.range(number, override_num_blocks=number)
            others = {name: amount for name, amount in self._devices.items() if name != "GPU"}
            answered = parts.map_batches(
                _Worker,
                fn_constructor_args=(make, lines, start, size),
                batch_size=1,
                compute=ActorPoolStrategy(size=num_workers),
                num_cpus=num_cpus,
                num_gpus=self._devices.get("GPU", 0),
                **({"resources": others} if others else {}),
            )
            try:
                for row in answered.iter_rows():
                    yield Result(**row)
            except ray.exceptions.RayError as error:
                raise UserError(f"the cluster has failed: {reason_of(error)}") from None


def cpus_of_a_worker(nodes: Sequence[Mapping[str, float]], num_workers: int, devices: Mapping[str, float]) -> int:
    """Return how many processors each worker gets: as many as there are for all of them, with one left, without which
    Ray would wait for ever.

    Args:
        nodes: what each has, by Ray's names.
        devices: what a worker needs beside processors.

    Raises:
        UserError: there is no room for so many workers.
    """
    total = int(sum(node.get("CPU", 0) for node in nodes))
    for num_cpus in range(total, 0, -1):
        needed = {"CPU": num_cpus, **devices}
        rooms = sum(min(int(node.get(name, 0) // amount) for name, amount in needed.items()) for node in nodes)
        if rooms >= num_workers and num_workers * num_cpus < total:
            return num_cpus
    beside = "".join(f", each with {amount:g} {name}" for name, amount in devices.items())
    raise UserError(
        f"the cluster has {total} CPUs on {len(nodes)} nodes; {num_workers} workers{beside} need {num_workers + 1} "
        "CPUs, one of them for Ray's own work. Give fewer --workers, or a larger cluster."
    )


def _size_of_a_part(lines: Lines, start: int, num_workers: int) -> int:
    """Return how many places a part has."""
    places = lines.size - start
    even = places // (num_workers * _PARTS_OF_A_WORKER)
    return max(min(even, lines.portion), int(lines.portion * _SMALLEST), -(-places // _MOST_PARTS))


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to a cluster within the block; raise UserError if there is none."""
    import ray

    if place := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):
        try:  # Ray itself would try for minutes
            socket.create_connection((place[1], int(place[2])), _SECONDS).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"there is no Ray cluster at {address} ({error}).") from None
    try:
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except Exception as error:
        # For a cluster that does not start in time Ray raises a plain one.
        known = OSError, RuntimeError, ValueError, ray.exceptions.RayError
        if type(error) is not Exception and not isinstance(error, known):
            raise
        raise UserError(f"there is no Ray cluster at {address} ({error}).") from None
    try:
        yield
    finally:
        ray.shutdown()


def reason_of(error: Exception) -> str:
    """Return what a worker said: the last of Ray's many lines that names an exception."""
    lines = str(error).splitlines()
    said = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)] or lines or [type(error).__name__]
    return said[-1].removeprefix(f"{UserError.__module__}.{UserError.__qualname__}: ")
