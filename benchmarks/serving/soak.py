"""Soak test of the server: many clients at once, some of which disconnect, send malformed requests, or are hostile.

    python -m benchmarks.serving.soak
    python -m benchmarks.serving.soak --requests 2000 --clients 32 --hostile 16
    python -m benchmarks.serving.soak --seconds 100 -- --backend torch --device cuda --batch-invariant

It starts a server process with the bundled model in float32, or with the model and backend that follow `--`. The server
has a prefix cache and speculation, and gets requests of mixed kinds. The test compares each text with an idle engine's,
without cache and drafts. Meanwhile hostile clients (`hostile_clients.py`) try to stop the server, and another client
asks for /health. Before and after, while the server is idle, it compares the process's slots in use,
snapshots, file descriptors and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx

from benchmarks.errors import reports_errors
from benchmarks.serving.hostile_clients import CHAT, COMPLETIONS, KINDS, attack
from granite4_neuron.commands.options import add_model, add_runtime, load_runtime, model_checkpoint
from granite4_neuron.engine import Engine
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.serving.apis.chat.protocol import ChatBody, CompletionBody, parse
from granite4_neuron.serving.sequences import Limits, RequestBuilder

MAX_LENGTH, NUM_SEQUENCES, MAX_QUEUE = 512, 4, 64
DISCONNECT_SHARE, MALFORMED_SHARE = 0.1, 0.05
MODEL = ("--dtype", "float32")
JSON = {"Content-Type": "application/json"}
TOLERANCE = 0.05

Body = dict[str, Any]


def _kinds() -> list[tuple[str, Body]]:
    """Return requests of every kind: path and body."""
    starts = ["An assignment statement", "The import", "Lambda expressions", "A class definition", "é\N{SNOWMAN}"]
    shared = "The standard type hierarchy, as far as it is described in this reference and not elsewhere, "
    options: list[Body] = [
        {},
        {"temperature": 0.8, "seed": 3, "n": 2},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 4},
        {"frequency_penalty": 0.7, "presence_penalty": 0.5, "logit_bias": {"40": 2, "41": -100}},
        {"repetition_penalty": 1.2, "stop": ["the", "\n\n"]},
        {"logprobs": 2, "echo": True},
        {"ignore_eos": True, "max_tokens": 60},
    ]
    kinds = [
        (COMPLETIONS, {"prompt": start, "max_tokens": 24, "stream": bool((number + place) % 2), **option})
        for number, option in enumerate(options)
        for place, start in enumerate(starts[number % 2 :: 2])
    ]
    kinds += [(COMPLETIONS, {"prompt": shared + start, "max_tokens": 12}) for start in starts]
    kinds.append((COMPLETIONS, {"prompt": [starts[0], [5, 6, 7], starts[1]], "max_tokens": 10}))
    for number, topic in enumerate(("assert", "import", "global")):
        messages = [{"role": "user", "content": f"What is the {topic} statement?<|end_of_text|>"[: 30 + 20 * number]}]
        kinds.append((CHAT, {"messages": messages, "max_tokens": 30, "stream": number != 1}))
    return kinds


MALFORMED: list[tuple[str, bytes]] = [
    (COMPLETIONS, b"nonsense"),
    (COMPLETIONS, b'{"prompt": "x", "mirostat": 2}'),
    (COMPLETIONS, b'{"prompt": [100000000]}'),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": -1}'),
    (COMPLETIONS, b'{"prompt": "x", "temperature": -1}'),
    (CHAT, b'{"messages": [{"role": "nobody", "content": ""}]}'),
    ("/v1/nothing", b"{}"),
]


@dataclass
class Surroundings:
    """The resources of an idle server."""

    slots: float
    snapshots_in_use: float
    snapshots: float
    file_descriptors: int
    memory_bytes: int

    def is_like(self, before: Surroundings) -> bool:
        """Return whether nothing is in use and the rest is unchanged within the tolerance."""
        # Where prompts are cut, and so how many snapshots there are, depends on the order of requests.
        tolerances = {"snapshots": 5 * TOLERANCE, "file_descriptors": TOLERANCE, "memory_bytes": TOLERANCE}
        pairs = [(getattr(self, name), getattr(before, name), tolerance) for name, tolerance in tolerances.items()]
        is_unchanged = all(abs(now - was) <= tolerance * was for now, was, tolerance in pairs)
        return self.slots == self.snapshots_in_use == 0 and is_unchanged


@dataclass
class Report:
    """statuses: counts of all responses to clients that are not hostile.
    hostile: how hostile clients' connections ended, by kind.
    mismatches: texts that differ from those of an idle engine.
    health_seconds: how long each answer of /health took.
    log: the server's standard error.
    """

    statuses: Counter = field(default_factory=Counter)
    hostile: Counter = field(default_factory=Counter)
    disconnected: int = 0
    malformed: int = 0
    compared_texts: int = 0
    mismatches: list[str] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    log: str = ""
    before: Surroundings | None = None
    after: Surroundings | None = None

    @property
    def is_good(self) -> bool:
        has_5xx = any(status >= 500 for status in self.statuses)
        has_lost = any(outcome.endswith("lost") for outcome in self.hostile)
        return not (self.mismatches or has_5xx or has_lost or self.log) and self.after.is_like(self.before)


@dataclass(frozen=True)
class Load:
    """A load of up to `num_requests` requests, none of which starts more than `seconds` after the first."""

    num_requests: int
    num_clients: int
    num_hostile: int = 0
    seed: int = 0
    seconds: float = math.inf

    def jobs(self, num_kinds: int, chance: random.Random) -> Iterator[int]:
        """Draw the kinds of the requests, for all clients together."""
        started = time.perf_counter()
        for _ in range(self.num_requests):
            if time.perf_counter() - started > self.seconds:
                return
            yield chance.randrange(num_kinds)


def soak(load: Load, model: Sequence[str] = MODEL) -> Report:
    """Run the test. The server process ends with it.

    Args:
        model: the options of `serve` for the backend, and for another model than the bundled one.
    """
    kinds, model = _kinds(), ["--model", str(bundled_checkpoint()), *model]
    expected = _alone(kinds, model)
    with tempfile.TemporaryFile("w+") as log:
        with _server(log, model) as (address, pid):
            report = asyncio.run(_soak(address, pid, kinds, expected, load))
        log.seek(0)
        report.log = log.read()
    return report


def _alone(kinds: list[tuple[str, Body]], model: Sequence[str]) -> list[list[str]]:
    """Generate the texts of each kind's choices, one by one in an idle engine."""
    parser = argparse.ArgumentParser(prog="serve")
    add_model(parser)
    add_runtime(parser)
    options = parser.parse_args(model)
    runtime, tokenizer = load_runtime(options, model_checkpoint(options))
    limits = Limits(MAX_LENGTH, None, NUM_SEQUENCES + MAX_QUEUE)
    maker = RequestBuilder(runtime, tokenizer, limits, names=())
    engine = Engine(runtime, 1, max_length=MAX_LENGTH, tokenizer=tokenizer)
    texts = []
    for path, body in kinds:
        is_completion = path == COMPLETIONS
        kind, make = (CompletionBody, maker.completion_requests) if is_completion else (ChatBody, maker.chat_requests)
        texts.append([])
        prepared = make(parse(kind, json.dumps(body).encode(), limits.num_tokens))
        for request in maker.constrained(prepared):
            engine.add(request)
            text = tokenizer.decode(request.tokens) if body.get("echo") else ""
            while engine.has_work:
                text += "".join(output.text for output in engine.step())
            texts[-1].append(text)
    maker.close()
    return texts


@contextmanager
def _server(log: TextIO, model: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Start a server process; yield its address and its process id. Its standard error goes to `log`.

    Raises:
        UserError: the server ended at once; the message has its log.
    """
    limits = [f"--max-num-seqs={NUM_SEQUENCES}", f"--max-queue={MAX_QUEUE}", f"--max-model-len={MAX_LENGTH}"]
    reuse = ["--prefix-cache", "256MiB", "--speculate", "ngram:4"]
    command = [sys.executable, "-m", "granite4_neuron", "serve", "--port", "0", *model, *limits, *reuse]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            address = re.search(r"at (http://\S+)/v1", process.stdout.readline())
            if address is None:
                process.wait()
                log.seek(0)
                raise UserError(f"the server did not start: {log.read()[-2000:]}")
            yield address[1], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


async def _soak(
    address: str,
    pid: int,
    kinds: list[tuple[str, Body]],
    expected: list[list[str]],
    load: Load,
) -> Report:
    report, chance = Report(), random.Random(load.seed)
    limits = httpx.Limits(max_connections=load.num_clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        # Each kind twice, with as many clients as later: one-time allocations happen before the measurement.
        jobs = iter(list(range(len(kinds))) * 2)
        clients = [_client(client, jobs, kinds, expected, Report(), None) for _ in range(load.num_clients)]
        await asyncio.gather(*clients, *[_hostile(address, Counter(), chance, 1) for _ in range(load.num_hostile)])
        report.before = await _surroundings(client, pid)
        started = time.perf_counter()
        jobs = load.jobs(len(kinds), chance)
        others = [asyncio.create_task(_hostile(address, report.hostile, chance)) for _ in range(load.num_hostile)]
        others.append(asyncio.create_task(_ask_for_health(address, report.health_seconds)))
        await asyncio.gather(*[_client(client, jobs, kinds, expected, report, chance) for _ in range(load.num_clients)])
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        report.seconds = time.perf_counter() - started
        for _ in range(20):  # the last sockets close after their clients are gone; leaked ones stay open
            report.after = await _surroundings(client, pid)
            if report.after.is_like(report.before):
                break
    return report


async def _client(
    client: httpx.AsyncClient,
    jobs: Iterator[int],
    kinds: list[tuple[str, Body]],
    expected: list[list[str]],
    report: Report,
    chance: random.Random | None,
) -> None:
    """Send requests one after another. Without `chance`, none is malformed or abandoned."""
    for number in jobs:
        path, body = kinds[number]
        way = 1.0 if chance is None else chance.random()
        if way < MALFORMED_SHARE:
            report.malformed += 1
            path, content = chance.choice(MALFORMED)
            report.statuses[(await client.post(path, content=content, headers=JSON)).status_code] += 1
        elif way < MALFORMED_SHARE + DISCONNECT_SHARE:
            report.disconnected += 1
            await _go_away(client, path, body, chance.random() * 0.2)
        else:
            status, texts = await _ask(client, path, body)
            report.statuses[status] += 1
            report.compared_texts += len(expected[number])
            if texts != expected[number]:
                report.mismatches.append(f"{path} {body}: {texts} and not {expected[number]}")


async def _hostile(address: str, outcomes: Counter, chance: random.Random, rounds: int | None = None) -> None:
    """Make connections of each hostile kind one after another, until cancelled if `rounds` is not given."""
    for _ in itertools.count() if rounds is None else range(rounds):
        for kind in chance.sample(KINDS, len(KINDS)):
            await attack(address, kind, chance, outcomes)


async def _ask_for_health(address: str, seconds: list[float]) -> None:
    """Ask for /health again and again until cancelled."""
    async with httpx.AsyncClient(base_url=address, timeout=300) as client:
        while True:
            started = time.perf_counter()
            await client.get("/health")
            seconds.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)


async def _go_away(client: httpx.AsyncClient, path: str, body: Body, seconds: float) -> None:
    """Send a request and disconnect after some seconds."""
    asking = asyncio.create_task(_ask(client, path, {**body, "ignore_eos": True, "max_tokens": 300}))
    await asyncio.wait([asking], timeout=seconds)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _ask(client: httpx.AsyncClient, path: str, body: Body) -> tuple[int, list[str]]:
    """Send a request; return the status and the texts of all choices."""
    texts: dict[int, str] = {}
    if not body.get("stream"):
        response = await client.post(path, json=body)
        _add_texts(texts, response.json().get("choices", ()))
        return response.status_code, list(texts.values())
    async with client.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _add_texts(texts, json.loads(line.removeprefix("data: ")).get("choices", ()))
    return response.status_code, [texts[index] for index in sorted(texts)]


def _add_texts(texts: dict[int, str], choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        texts[choice["index"]] = texts.get(choice["index"], "") + said["content"]


async def _surroundings(client: httpx.AsyncClient, pid: int) -> Surroundings:
    """Return the surroundings once the server has nothing to do."""
    while True:
        lines = (await client.get("/metrics")).text.splitlines()
        found = (re.match(r"(?:granite4_neuron_|vllm:)(\w+)(?:{.*})? (\S+)$", line) for line in lines)
        numbers = {each[1]: float(each[2]) for each in found if each}
        slots = numbers["num_requests_running"] + numbers["num_requests_waiting"]
        if slots == 0:
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # until sockets have closed
    in_use, snapshots = numbers["prefix_cache_snapshots_in_use"], numbers["prefix_cache_snapshots"]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    processes = [Path(f"/proc/{each}") for each in (pid, *children)]  # the engine's and the front end
    memory = sum(int(re.search(r"VmRSS:\s+(\d+) kB", (each / "status").read_text())[1]) for each in processes)
    descriptors = sum(len(list((each / "fd").iterdir())) for each in processes)
    return Surroundings(slots, in_use, snapshots, descriptors, memory * 1024)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--hostile", type=int, default=8, metavar="N", help="hostile clients (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="end after so many seconds, if --requests is larger",
    )
    parser.add_argument(
        "model", nargs="*", default=MODEL, metavar="-- OPTION", help="options of serve: the model, the backend"
    )
    options = parser.parse_args(arguments)
    load = Load(options.requests, options.clients, options.hostile, options.seed, options.seconds)
    report = soak(load, options.model)
    num_requests = sum(report.statuses.values()) + report.disconnected
    print(f"{num_requests} requests from {options.clients} clients in {report.seconds:.1f} s")
    print(f"answers by status: {dict(sorted(report.statuses.items()))}")
    print(f"gone away: {report.disconnected}, malformed: {report.malformed}")
    print(f"texts compared: {report.compared_texts}, not as they are alone: {len(report.mismatches)}")
    print(f"hostile clients: {dict(sorted(report.hostile.items()))}")
    health = sorted(report.health_seconds)
    print(f"/health of {len(health)}: p50 {health[len(health) // 2] * 1e3:.0f} ms, longest {health[-1] * 1e3:.0f} ms")
    print(f"said on standard error: {report.log!r:.500}")
    print(f"before: {report.before}\nafter:  {report.after}")
    for mismatch in report.mismatches[:5]:
        print(mismatch)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
