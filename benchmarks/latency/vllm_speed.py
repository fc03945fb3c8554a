"""Granite 4 in vLLM on this machine's CPU: with this package, without it, and this package's own engine, in turns.

    python -m benchmarks.latency.vllm_speed --random-weights h-350m

Prefill is one prompt and its first token. Decode is the further tokens of a batch of short prompts. Results are
medians. Each turn is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.errors import reports_errors
from granite4_neuron.commands.output import print_table

PREFILL, BATCHES, PROMPT, TOKENS = (512, 2048), (1, 4, 16), 16, 32
WAYS = ("this package", "vLLM", "own engine")
_MAX_LENGTH = 2304
Generate = Callable[[Sequence[Sequence[int]], int], None]


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.turn:
        print(json.dumps(_measure(_generate(options.turn, options.model), options.repeats)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _random_model(options.random_weights, Path(folder) / "model")
        results: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
        for _ in range(options.turns):
            for way in options.ways:
                results[way].append(_turn(way, model, options.repeats))
    table = Table("tokens/s", *options.ways)
    for name in results[options.ways[0]][0]:
        table.add_row(name, *(f"{statistics.median(turn[name] for turn in results[way]):.4g}" for way in options.ways))
    print_table(table)
    return 0


def _turn(way: str, model: str, repeats: int) -> dict[str, float]:
    # This package sets GOMP_SPINCOUNT in the processes that vLLM starts. vLLM alone is slower with it.
    own = {"VLLM_PLUGINS": ""} if way == "vLLM" else {"GOMP_SPINCOUNT": "0"}
    command = [sys.executable, "-m", __spec__.name, "--turn", way, "--model", model, "--repeats", str(repeats)]
    environment = {**os.environ, **own, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _generate(way: str, model: str) -> Generate:
    if way == "own engine":
        return _own(model)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=_MAX_LENGTH,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=3 * 2**29,
    )

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)

    return generate


def _own(model: str) -> Generate:
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.devices.cpu import operators as cpu
    from granite4_neuron.devices.cpu.runtime import CPURuntime
    from granite4_neuron.engine import Engine, Request

    runtime = CPURuntime(load_model(model, operators=cpu.choose_operators()), GenerationConfig(do_sample=False))

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> None:
        engine = Engine(runtime, num_sequences=len(prompts), max_length=_MAX_LENGTH)
        for prompt in prompts:
            engine.add(Request(list(prompt), max_tokens=tokens))
        while engine.has_work:
            engine.step()

    return generate


def _measure(generate: Generate, repeats: int) -> dict[str, float]:
    """Return tokens per second."""
    generate(_prompts(1, PROMPT), 2)
    rates = {f"prefill {length}": length / _seconds(generate, 1, length, 1, repeats) for length in PREFILL}
    for batch in BATCHES:
        first = _seconds(generate, batch, PROMPT, 1, repeats)
        rest = _seconds(generate, batch, PROMPT, TOKENS, repeats) - first
        rates[f"decode, batch {batch}"] = batch * (TOKENS - 1) / rest
    return rates


def _seconds(generate: Generate, batch: int, length: int, tokens: int, repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        prompts = _prompts(batch, length)
        started = time.perf_counter()
        generate(prompts, tokens)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _prompts(batch: int, length: int) -> list[list[int]]:
    return [[100 + (7 * row + 13 * position) % 1000 for position in range(length)] for row in range(batch)]


def _random_model(name: str, folder: Path) -> str:
    import torch

    from granite4_neuron.checkpoint.random_weights import random_model
    from granite4_neuron.checkpoint.saving import save_model
    from granite4_neuron.config import published_config

    save_model(random_model(published_config(name), dtype=torch.bfloat16), folder)
    return str(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="a checkpoint folder")
    model.add_argument("--random-weights", metavar="NAME", help="real dimensions, random weights")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--turns", type=int, default=2, help="processes of each way (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats within a process (default: %(default)s)")
    parser.add_argument("--turn", choices=WAYS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
