"""Times to the first token of one prompt with several adapters, one after another: activated LoRA beside plain LoRA.

    python -m benchmarks.engine.adapters h-350m --prompt-length 4096 --adapters 4

Weights are random, with the real dimensions. Both kinds have the same matrices, and each kind has its own prefix cache.
Each plain adapter runs the prompt. Activated ones run it once together: up to their invocations its state is the
model's, and comes from the cache. The ratio is the ratio of the sums, from one run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import ModelConfig, published_config
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.model.adapters import Adapter, LowRank
from granite4_neuron.model.parameters import parameters

INVOCATION = 8  # the number of tokens, about as many as a role's


def random_adapter(config: ModelConfig, rank: int, seed: int) -> Adapter:
    """Return a plain LoRA adapter of all projections in layers."""
    generator = torch.Generator().manual_seed(seed)
    additions = {}
    for name, parameter in parameters(config).items():
        if name.startswith("model.layers.") and (name.endswith("_proj.weight") or "shared_mlp" in name):
            rows, columns = parameter.shape
            down = torch.randn(rank, columns, generator=generator) * columns**-0.5
            additions[name] = LowRank(down, torch.randn(rows, rank, generator=generator) * 0.1 * rank**-0.5)
    return Adapter(additions)


def new_engine(runtime: CPURuntime, max_length: int) -> Engine:
    """Return an engine with a prefix cache of its own."""
    return Engine(runtime, 1, max_length=max_length, prefix_cache=PrefixCache(runtime, None, runtime.tokens_per_step))


def first_token_ms(engine: Engine, name: str | None, prompt: Sequence[int]) -> float:
    """Return the time to the first token of a prompt with an adapter."""
    started = time.perf_counter()
    engine.add(Request(prompt, 1, adapter=name))
    while engine.has_work:
        engine.step()
    return 1e3 * (time.perf_counter() - started)


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the family member")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--adapters", type=at_least(1), default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--rank", type=at_least(1), default=32, metavar="R", help="default: %(default)s")
    parser.add_argument("--prompt-length", type=at_least(1), default=4096, metavar="N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    config = published_config(options.name)
    tokens = torch.randint(config.vocab_size, (options.prompt_length,), generator=torch.Generator().manual_seed(0))
    plain, activated, prompts = {}, {}, []
    for number in range(options.adapters):
        invocation = [number] * INVOCATION
        prompts.append([*tokens.tolist(), *invocation])
        plain[f"plain {number}"] = random_adapter(config, options.rank, number)
        activated[f"activated {number}"] = replace(plain[f"plain {number}"], invocation=tuple(invocation))
    model = random_model(config, dtype=getattr(torch, options.dtype))
    runtime = CPURuntime(model, GenerationConfig(), adapters={**plain, **activated})
    first_token_ms(new_engine(runtime, 64), None, prompts[0][-16:])  # the first step of a process takes longer
    engines = [new_engine(runtime, len(prompts[0]) + 1) for _ in range(2)]
    times = [  # the two kinds take turns, because a machine's speed changes
        [first_token_ms(engine, name, prompt) for engine, name in zip(engines, names, strict=True)]
        for *names, prompt in zip(plain, activated, prompts, strict=True)
    ]
    plain_ms, activated_ms = zip(*times, strict=True)
    table = Table("adapter", "plain LoRA, ms", "activated LoRA, ms")
    for number, both in enumerate(times, start=1):
        table.add_row(str(number), *(f"{milliseconds:,.0f}" for milliseconds in both))
    table.add_section()
    table.add_row("all", f"{sum(plain_ms):,.0f}", f"{sum(activated_ms):,.0f}")
    print(f"{options.name}, {options.dtype}, rank {options.rank}, a prompt of {options.prompt_length:,} tokens")
    print_table(table)
    print(f"plain / activated: {sum(plain_ms) / sum(activated_ms):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
