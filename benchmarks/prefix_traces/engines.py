"""Engines that serve traces: this package's with several policies, and others."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx
import torch
import transformers

from benchmarks.errors import Failed
from benchmarks.other_engines.llama_cpp import gguf_of
from benchmarks.other_engines.llama_server import LLAMA_CPP, running, stream
from benchmarks.prefix_traces.policies import POLICIES, MarconiCache
from benchmarks.prefix_traces.traces import Tokens, Turn, replay
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache, Request

NO_CACHE = "no cache"


def first_token_times(turns: Sequence[Turn], folder: Path, max_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds to the first token of each prompt, for each policy and without a cache: medians over repeats.

    Prompts are served one at a time: each without a cache and with each policy in turns.
    """
    model = load_model(folder, torch.bfloat16, operators=cpu.choose_operators())
    runtime = CPURuntime(model, transformers.GenerationConfig())
    runs = [_first_token_times(turns, runtime, max_bytes) for _ in range(repeats)]
    return {name: list(map(statistics.median, zip(*(run[name] for run in runs), strict=True))) for name in runs[0]}


def _first_token_times(turns: Sequence[Turn], runtime: CPURuntime, max_bytes: int) -> dict[str, list[float]]:
    caches: dict[str, PrefixCache | None] = {NO_CACHE: None}
    caches |= {name: policy(runtime, max_bytes) for name, policy in POLICIES.items()}
    longest = _longest(turns)
    engines = {name: Engine(runtime, 1, max_length=longest, prefix_cache=cache) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}

    def serve(prompt: Tokens, length: int) -> Tokens:
        # The first of a round finds the processor's caches and clock as another left them.
        first = len(times[NO_CACHE]) % len(engines)
        order = [*engines, *engines][first : first + len(engines)]
        for name in order:
            seconds, answer = _generate(engines[name], prompt, length)
            times[name].append(seconds)
            if isinstance(caches[name], MarconiCache):
                caches[name].tune()
        return answer

    replay(turns, serve)
    return times


def _generate(engine: Engine, prompt: Tokens, length: int) -> tuple[float, Tokens]:
    """Return the seconds to the first token, and all new tokens."""
    tokens, first = [], 0.0
    started = time.perf_counter()
    engine.add(Request(prompt, length, temperature=0))
    while engine.has_work:
        for output in engine.step():
            first = first or time.perf_counter() - started
            tokens.append(output.token)
    return first, tokens


def _longest(turns: Sequence[Turn]) -> int:
    lengths: dict[int, int] = {}
    for turn in turns:
        lengths[turn.session] = lengths.get(turn.session, 0) + len(turn.new) + turn.answer_length
    return max(lengths.values()) + 1


class Answer(NamedTuple):
    """The number of a prompt's tokens that were cached, the seconds to the first new token, and all new tokens."""

    found: int
    seconds: float
    tokens: Tokens


class Served(Protocol):
    """Another project's engine."""

    def generate(self, prompt: Tokens, length: int) -> Answer:
        """Return `length` greedy new tokens.

        Raises:
            Failed: the engine cannot do this.
        """

    def close(self) -> None:
        """End it."""


class VLLMWithPlugin:
    """vLLM with this package's plugin, in another process. Its cache shares the memory with the running sequence."""

    def __init__(self, folder: Path, max_bytes: int, turns: Sequence[Turn], options: argparse.Namespace):
        if importlib.util.find_spec("vllm") is None:
            raise Failed("vLLM is not installed in this environment.")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is closed with this object)
        job = dict(model=str(folder), max_model_len=_longest(turns), kv_cache_memory_bytes=max_bytes)
        environment = os.environ | dict(VLLM_PLUGINS="granite4_neuron_cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        environment |= dict(OMP_NUM_THREADS=str(torch.get_num_threads()), VLLM_CPU_OMP_THREADS_BIND="nobind")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.prefix_traces.vllm_process", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def generate(self, prompt: Tokens, length: int) -> Answer:
        try:
            self._process.stdin.write(json.dumps([prompt, length]) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or "null")
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._log.seek(0)
            lines = [line.strip() for line in self._log.read().splitlines() if "Error: " in line]
            raise Failed(lines[-1].removeprefix("[rank0]: ") if lines else "its process ended.")
        return Answer(answer["cached"], answer["seconds"], answer["tokens"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


class LlamaServer:
    """llama-server with its own defaults. It may keep as much of ended sequences as the cache may hold."""

    def __init__(self, folder: Path, max_bytes: int, turns: Sequence[Turn], options: argparse.Namespace):
        threads = str(torch.get_num_threads())
        with ExitStack() as stack:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            weights = gguf_of(folder, "bfloat16", options.llama_cpp, files)
            arguments = ["-t", threads, "-tb", threads, "--cache-ram", str(max(1, max_bytes // 2**20))]
            self._client = stack.enter_context(running(options.llama_cpp, weights, arguments))
            self._stack = stack.pop_all()

    def generate(self, prompt: Tokens, length: int) -> Answer:
        body = dict(prompt=prompt, n_predict=length, temperature=0, ignore_eos=True, return_tokens=True)
        started = time.perf_counter()
        try:
            times, events = zip(*((time.perf_counter(), event) for event in stream(self._client, body)), strict=True)
        except httpx.TransportError as error:
            raise Failed(f"{error}") from None
        tokens = [token for event in events for token in event["tokens"]]
        return Answer(events[-1]["timings"]["cache_n"], times[0] - started, tokens)

    def close(self) -> None:
        self._stack.close()


ENGINES: dict[str, type[Served]] = {"vllm-plugin": VLLMWithPlugin, LLAMA_CPP: LlamaServer}


def answers(turns: Sequence[Turn], served: Served) -> tuple[int, list[Answer]]:
    """Replay a trace; return how many tokens prompts had, and the answers."""
    tokens, given = 0, []

    def serve(prompt: Tokens, length: int) -> Tokens:
        nonlocal tokens
        tokens += len(prompt)
        given.append(served.generate(prompt, length))
        return given[-1].tokens

    replay(turns, serve)
    return tokens, given
