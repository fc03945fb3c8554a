"""Soak test of the server: many clients at once, some of which disconnect or send malformed requests.

    python -m benchmarks.soak
    python -m benchmarks.soak --requests 2000 --clients 32

It starts a server process with the bundled model in float32, a prefix cache and speculation, and sends requests of
mixed kinds. It compares each text with that of an idle engine without cache and drafts. Before and after, while the
server is idle, it compares the process's slots in use, snapshots, file descriptors and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from granite4_neuron import load
from granite4_neuron.engine import Engine
from granite4_neuron.serving.protocol import ChatBody, CompletionBody, parse
from granite4_neuron.serving.sequences import Limits, SequenceMaker

MAX_LENGTH, NUM_SEQUENCES, MAX_QUEUE = 512, 4, 64
DISCONNECT_SHARE, MALFORMED_SHARE = 0.1, 0.05
TOLERANCE = 0.05
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Body = dict[str, Any]


def _kinds() -> list[tuple[str, Body]]:
    """Requests of every kind: path and body."""
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
    (COMPLETIONS, b'{"prompt": "x", "tools": []}'),
    (COMPLETIONS, b'{"prompt": [100000000]}'),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": 100000}'),
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
        """Whether nothing is in use and the rest is unchanged within the tolerance."""
        names = ("snapshots", "file_descriptors", "memory_bytes")
        pairs = [(getattr(self, name), getattr(before, name)) for name in names]
        return self.slots == self.snapshots_in_use == 0 and all(abs(now - was) <= TOLERANCE * was for now, was in pairs)


@dataclass
class Report:
    """statuses: of all responses. mismatches: texts that differ from those of an idle engine."""

    statuses: Counter = field(default_factory=Counter)
    disconnected: int = 0
    malformed: int = 0
    compared_texts: int = 0
    mismatches: list[str] = field(default_factory=list)
    seconds: float = 0.0
    before: Surroundings | None = None
    after: Surroundings | None = None

    @property
    def is_good(self) -> bool:
        has_5xx = any(status >= 500 for status in self.statuses)
        return not self.mismatches and not has_5xx and self.after.is_like(self.before)


def soak(num_requests: int, num_clients: int, seed: int = 0) -> Report:
    """Run the test. The server process ends with it."""
    kinds = _kinds()
    expected = _alone(kinds)
    with _server() as (address, pid):
        return asyncio.run(_soak(address, pid, kinds, expected, num_requests, num_clients, seed))


def _alone(kinds: list[tuple[str, Body]]) -> list[list[str]]:
    """The texts of each kind's choices, generated one by one in an idle engine."""
    runtime, tokenizer = load(dtype=torch.float32)
    limits = Limits(MAX_LENGTH, None, NUM_SEQUENCES + MAX_QUEUE)
    maker = SequenceMaker(runtime, tokenizer, limits)
    engine = Engine(runtime, 1, max_length=MAX_LENGTH, tokenizer=tokenizer)
    texts = []
    for path, body in kinds:
        kind, make = (CompletionBody, maker.of_completion) if path == COMPLETIONS else (ChatBody, maker.of_chat)
        texts.append([])
        for request in make(parse(kind, json.dumps(body).encode(), limits.num_tokens)):
            engine.add(request)
            text = tokenizer.decode(request.tokens) if body.get("echo") else ""
            while engine.has_work:
                text += "".join(output.text for output in engine.step())
            texts[-1].append(text)
    maker.close()
    return texts


@contextmanager
def _server() -> Iterator[tuple[str, int]]:
    """A server process: its address and its process id."""
    limits = [f"--max-num-seqs={NUM_SEQUENCES}", f"--max-queue={MAX_QUEUE}", f"--max-model-len={MAX_LENGTH}"]
    reuse = ["--prefix-cache", "256MiB", "--speculate", "ngram:4"]
    command = [sys.executable, "-m", "granite4_neuron", "serve", "--port", "0", "--dtype", "float32", *limits, *reuse]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield re.search(r"at (http://\S+)/v1", process.stdout.readline())[1], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


async def _soak(
    address: str,
    pid: int,
    kinds: list[tuple[str, Body]],
    expected: list[list[str]],
    num_requests: int,
    num_clients: int,
    seed: int,
) -> Report:
    report, chance = Report(), random.Random(seed)
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        # Each kind twice, and as many clients as later: what is allocated once is there before it is measured.
        jobs = iter(list(range(len(kinds))) * 2)
        await asyncio.gather(*[_client(client, jobs, kinds, expected, Report(), None) for _ in range(num_clients)])
        report.before = await _surroundings(client, pid)
        started = time.perf_counter()
        jobs = iter([chance.randrange(len(kinds)) for _ in range(num_requests)])
        await asyncio.gather(*[_client(client, jobs, kinds, expected, report, chance) for _ in range(num_clients)])
        report.seconds = time.perf_counter() - started
        report.after = await _surroundings(client, pid)
    return report


async def _client(
    client: httpx.AsyncClient,
    jobs: Iterator[int],
    kinds: list[tuple[str, Body]],
    expected: list[list[str]],
    report: Report,
    chance: random.Random | None,
) -> None:
    """Send one request after the other; without `chance`, none is malformed or abandoned."""
    for number in jobs:
        path, body = kinds[number]
        way = 1.0 if chance is None else chance.random()
        if way < MALFORMED_SHARE:
            report.malformed += 1
            path, content = chance.choice(MALFORMED)
            report.statuses[(await client.post(path, content=content)).status_code] += 1
        elif way < MALFORMED_SHARE + DISCONNECT_SHARE:
            report.disconnected += 1
            await _go_away(client, path, body, chance.random() * 0.2)
        else:
            status, texts = await _ask(client, path, body)
            report.statuses[status] += 1
            report.compared_texts += len(expected[number])
            if texts != expected[number]:
                report.mismatches.append(f"{path} {body}: {texts} and not {expected[number]}")


async def _go_away(client: httpx.AsyncClient, path: str, body: Body, seconds: float) -> None:
    """Send a request and disconnect after some seconds."""
    asking = asyncio.create_task(_ask(client, path, {**body, "ignore_eos": True, "max_tokens": 300}))
    await asyncio.wait([asking], timeout=seconds)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _ask(client: httpx.AsyncClient, path: str, body: Body) -> tuple[int, list[str]]:
    """The status and the texts of all choices."""
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
    """Once the server has nothing to do."""
    while True:
        lines = (await client.get("/metrics")).text.splitlines()
        values = dict(line.split() for line in lines if line.startswith("granite4_neuron_") and "{" not in line)
        numbers = {name.removeprefix("granite4_neuron_"): float(value) for name, value in values.items()}
        slots = numbers["num_requests_running"] + numbers["num_requests_waiting"]
        if slots == 0:
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # for sockets to close
    in_use, snapshots = numbers["prefix_cache_snapshots_in_use"], numbers["prefix_cache_snapshots"]
    status = Path(f"/proc/{pid}/status").read_text()
    memory = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
    return Surroundings(slots, in_use, snapshots, len(os.listdir(f"/proc/{pid}/fd")), memory)


def main(arguments: list[str] | None = None) -> int:
    """Print the report; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    report = soak(options.requests, options.clients, options.seed)
    print(f"{options.requests} requests from {options.clients} clients in {report.seconds:.1f} s")
    print(f"answers by status: {dict(sorted(report.statuses.items()))}")
    print(f"gone away: {report.disconnected}, malformed: {report.malformed}")
    print(f"texts compared: {report.compared_texts}, not as they are alone: {len(report.mismatches)}")
    print(f"before: {report.before}\nafter:  {report.after}")
    for mismatch in report.mismatches[:5]:
        print(mismatch)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
