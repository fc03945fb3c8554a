"""Times steps of a runtime on a PyTorch device, without an engine: a token of every sequence, and prompts. It
also counts what a step sends to the device and gets from it.

    python -m benchmarks.devices.steps --random-weights h-350m --device cuda --batch-size 1 8 32 --prompt-length 2048

A token is timed in four ways. In the first, tokens are random, so that the sequences of a batch choose different
experts, and a step ends when its logits are on the host. In the second the device chooses the tokens and runs each in
the next step; a step ends when the host has the tokens of the one before. The third and the fourth are the same for
tokens that are sampled (temperature 0.8, top_k 50, top_p 0.9): the host draws them by logits, or the device does. Times
are medians, after the steps that compile. With --slots the state has more slots, which are idle.

Launches are those of graphs, which torch.compile has made, or which were captured on a GPU. A token's share is that of
the memory bound: the time in which the device reads its weights, states and caches and writes the states, at the rate
at which it adds up a tensor of 2 GiB, divided by the token's time. For a prompt on a GPU "kernels" is the time of all
its kernels, by torch.profiler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from benchmarks.latency.bound import decode_bytes
from benchmarks.latency.implementations import Point, random_prompts
from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.weight_plan import formats_for
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table, write
from granite4_neuron.config import published_config
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.config.published import published_names
from granite4_neuron.devices.cuda.cuda_graph import CudaGraph
from granite4_neuron.devices.options import STATE_DTYPES
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.engine import Sampler, SamplingParams
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.parameters import EMBEDDING, HEAD
from granite4_neuron.runtime.interface import FROM_DEVICE, Decoded, Row
from granite4_neuron.state.sizes import sequence_bytes

_PROMPT = 100  # tokens of each sequence before its tokens are timed
_READ_BYTES, _READS = 2**31, 10
_PROFILED = 4  # steps


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = _parser().parse_args(arguments)
    config = published_config(options.random_weights)
    if options.layers is not None:
        kinds = config.layer_types[: options.layers]
        config = replace(config, layer_types=kinds, num_hidden_layers=len(kinds))
    model = random_model(config, dtype=torch.bfloat16)
    if options.quantize is not None:
        _quantize(model, options.quantize, torch.device(options.device))
    state_dtype = getattr(torch, options.state_dtype)
    choices = dict(
        prefill_buckets=options.prefill_buckets,
        device=options.device,
        graphs=options.graphs,
        batch_invariant=options.batch_invariant,
        state_dtype=state_dtype,
    )
    runtime = CountingRuntime(model, GenerationConfig(), **choices)
    rate = _bytes_per_second(runtime)
    write(f"{options.random_weights}, {config.num_hidden_layers} layers; memory is read at {rate / 1e12:.2f} TB/s")
    of_copies = "copies to device", "bytes", "copies to host", "bytes"
    table = Table("", "ms, median", "kernels, ms", "share", "launches", *of_copies)

    def add(name: str, digits: int, ms: float, read: float | None = None, kernels: float | None = None) -> None:
        count = runtime.count_of_step
        copies = [f"{number:,}" for number in (count.to_device, count.bytes_in, count.to_host, count.bytes_out)]
        share = "" if read is None else f"{1e3 * read / rate / ms:.0%}"
        of_kernels = "" if kernels is None else f"{kernels:.2f}"
        table.add_row(name, f"{ms:.{digits}f}", of_kernels, share, f"{count.launches}", *copies)

    for batch_size in options.batch_size:
        read = decode_bytes(config, torch.bfloat16, batch_size, _PROMPT, options.quantize, state_dtype.itemsize)
        # States are written too.
        read += batch_size * sequence_bytes(config, torch.bfloat16.itemsize, state_itemsize=state_dtype.itemsize)
        size = runtime, batch_size, options.steps, max(batch_size, options.slots)
        add(f"a token, batch {batch_size}", 2, _token_ms(*size), read)
        add(f"chosen there, batch {batch_size}", 2, _chosen_token_ms(*size), read)
        add(f"sampled here, batch {batch_size}", 2, _token_ms(*size, samples=True), read)
        add(f"sampled there, batch {batch_size}", 2, _chosen_token_ms(*size, samples=True), read)
    for length in options.prompt_length:
        ms, kernels = _prompt_ms(runtime, length, options.steps)
        add(f"a prompt of {length:,}", 2, ms, kernels=kernels)
    print_table(table)
    return 0


def _quantize(model: HybridForCausalLM, quantize: str, device: torch.device) -> None:
    """Quantize a model as `checkpoint.loading.load_model` does."""
    for name, format in formats_for(model, quantize).items():
        weight = model.get_parameter(name if name != HEAD else EMBEDDING)
        set_parameter(model, name, format.quantize(weight.to(device)).to(torch.device("cpu")))
    model.tie_weights()


@dataclass
class Count:
    """The launches of a step, and the copies to the device and back."""

    launches: int = 0
    to_device: int = 0
    bytes_in: int = 0
    to_host: int = 0
    bytes_out: int = 0


class CountingRuntime(TorchRuntime):
    """A runtime that counts what the last timed step sends to the device and gets from it."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.count_of_step = Count()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.count_of_step.launches += 1
        return super()._call(function, *arguments)

    def _replay(self, graph: CudaGraph, inputs: torch.Tensor, kept_inputs: Sequence[torch.Tensor]) -> Any:
        self.count_of_step.launches += 1
        self._count_input(inputs)
        return super()._replay(graph, inputs, kept_inputs)

    def _to_device(self, inputs: torch.Tensor) -> torch.Tensor:
        self._count_input(inputs)
        return super()._to_device(inputs)

    def _start_copy(self, output: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._count_output(output)
        return super()._start_copy(output)

    def _count_input(self, inputs: torch.Tensor) -> None:
        self.count_of_step.to_device += 1
        self.count_of_step.bytes_in += inputs.nbytes

    def _count_output(self, output: torch.Tensor) -> None:
        self.count_of_step.to_host += 1
        self.count_of_step.bytes_out += output.nbytes


def _bytes_per_second(runtime: TorchRuntime) -> float:
    """Return the median rate at which the device reads memory."""
    numbers = torch.ones(_READ_BYTES // 4, device=runtime.device)
    times = []
    for _ in range(_READS):
        started = time.perf_counter()
        numbers.sum().item()
        times.append(time.perf_counter() - started)
    return _READ_BYTES / statistics.median(times)


def _token_ms(runtime: CountingRuntime, batch_size: int, steps: int, slots: int, samples: bool = False) -> float:
    state = runtime.allocate(slots, _PROMPT + steps + 2)
    tokens = random_prompts(runtime.config.vocab_size, Point(batch_size, _PROMPT + steps + 2, output_length=0))
    first = slots - batch_size + 1
    runtime.step(state, [Row(slot, 0, each[:_PROMPT]) for slot, each in enumerate(tokens, first)])
    position = _PROMPT
    samplers = _samplers(batch_size) if samples else []

    def step() -> None:
        nonlocal position
        logits = runtime.step(state, [Row(slot, position, [each[position]]) for slot, each in enumerate(tokens, first)])
        for sampler, row_logits in zip(samplers, logits, strict=False):
            sampler(row_logits, range(position))
        position += 1

    return _median_ms(runtime, step, steps)


def _chosen_token_ms(runtime: CountingRuntime, batch_size: int, steps: int, slots: int, samples: bool = False) -> float:
    state = runtime.allocate(slots, _PROMPT + steps + 4)
    prompts = random_prompts(runtime.config.vocab_size, Point(batch_size, _PROMPT + 1, output_length=0))
    first = slots - batch_size + 1
    runtime.step(state, [Row(slot, 0, each[:_PROMPT]) for slot, each in enumerate(prompts, first)])
    samplers: Sequence[Sampler | None] = _samplers(batch_size) if samples else [None] * batch_size

    def decode(position: int, tokens: Sequence[int]) -> Decoded:
        rows = []
        for slot, (token, sampler) in enumerate(zip(tokens, samplers, strict=True), first):
            draw = sampler and sampler.draw((), 0, 0)
            rows.append(Row(slot, position, [token], draw=draw))
        return runtime.decode(state, rows)

    launched, position = decode(_PROMPT, [each[-1] for each in prompts]), _PROMPT + 1

    def step() -> None:
        nonlocal launched, position
        following = decode(position, [FROM_DEVICE] * batch_size)
        launched.tokens()
        launched, position = following, position + 1

    return _median_ms(runtime, step, steps)


def _samplers(count: int) -> list[Sampler]:
    return [Sampler(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=seed), 0) for seed in range(count)]


def _prompt_ms(runtime: CountingRuntime, length: int, steps: int) -> tuple[float, float | None]:
    """Return the time of a prompt and, on a GPU, that of its kernels."""
    state = runtime.allocate(1, length)
    [prompt] = random_prompts(runtime.config.vocab_size, Point(1, length, output_length=0))

    def step() -> None:
        runtime.step(state, [Row(1, 0, prompt)])

    ms = _median_ms(runtime, step, steps)
    return ms, _kernels_ms(step) if runtime.device.type == "cuda" else None


def _kernels_ms(step: Callable[[], object]) -> float:
    """Return the time of a step's kernels. They must not overlap, as those of decode do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED):
            step()
    events = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    return sum(each.device_time for each in events) / _PROFILED / 1e3


def _median_ms(runtime: CountingRuntime, step: Callable[[], object], steps: int) -> float:
    step()
    times = []
    for _ in range(steps):
        runtime.count_of_step = Count()
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def add_model_and_device(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, the device and the numbers of sequences."""
    names = ", ".join(published_names())
    parser.add_argument("--random-weights", metavar="NAME", required=True, help=f"in bfloat16, one of {names}")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    parser.add_argument("--batch-size", type=at_least(1), nargs="+", default=[1], metavar="N", help="default: 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_and_device(parser)
    parser.add_argument("--prompt-length", type=at_least(1), nargs="*", default=[], metavar="N", help="default: none")
    parser.add_argument("--prefill-buckets", type=at_least(1), nargs="+", metavar="N", help="as for generate")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="the model's first N layers (default: all)")
    parser.add_argument("--graphs", metavar="WHAT", help="as for generate (default: the device's)")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="quantize the large weights (default: none)")
    parser.add_argument("--batch-invariant", action="store_true", default=None, help="as for generate")
    parser.add_argument("--state-dtype", choices=STATE_DTYPES, default="float32", help="as for generate")
    parser.add_argument("--slots", type=at_least(1), default=1, metavar="N", help="of a state, if more than sequences")
    parser.add_argument(
        "--steps", type=at_least(1), default=40, metavar="N", help="timed steps of each kind (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
