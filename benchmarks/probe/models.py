"""Layers of real widths, the bundled model and, with random weights, whole models, through the runtime of devices."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.probe.device import ROOT, judge
from benchmarks.probe.process import EQUAL, FACT, WRONG, Finding, Place
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import command_line
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch import backend as torch_device
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.engine import Engine, Request
from granite4_neuron.generation import bundled_checkpoint, generate, load
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.runtime.interface import Row, Runtime

_LAYERS = {"mamba": ("h-350m", "mamba"), "attention": ("h-350m", "attention"), "experts": ("h-tiny", "mamba")}
_PROMPTS = ["An assignment statement", "The import statement is used to find a module and"]
MAX_LENGTH = 3000  # a cache of this length has graphs of two lengths


def layer(place: Place, kind: str) -> Iterator[Finding]:
    """A model of one layer, with narrower experts and a small vocabulary."""
    yield from steps(*_runtimes(place, layer_model(kind), 128))


def kernels(place: Place, prefill_scan: str) -> Iterator[Finding]:
    """A Mamba layer's graphs with the NKI kernels in them."""
    if importlib.util.find_spec("nki") is None:
        yield Finding("kernels", FACT, message="no package nki here")
        return
    yield from steps(*_runtimes(place, layer_model("mamba"), 128, prefill_scan=prefill_scan, decode_kernel="nki"))


def bucket(place: Place, tokens: str) -> Iterator[Finding]:
    """The bundled model's graphs for prompts of a bucket, with two lengths of the cache."""
    cpu, ours = _runtimes(place, load_model(bundled_checkpoint(), torch.float32), int(tokens))
    started = time.perf_counter()
    ours.warm_up(ours.allocate(2, MAX_LENGTH))
    yield _compilations(ours, started)
    yield from steps(cpu, ours)


def verification(place: Place) -> Iterator[Finding]:
    """The bundled model's graphs for verification and commit, for two lengths of the cache."""
    cpu, ours = _runtimes(place, load_model(bundled_checkpoint(), torch.float32), 128)
    states = [runtime.allocate(2, MAX_LENGTH) for runtime in (cpu, ours)]
    started = time.perf_counter()
    ours.warm_up(states[1], verified_tokens=ours.tokens_per_verification)
    yield _compilations(ours, started)
    both = list(zip((cpu, ours), states, strict=True))
    for runtime, state in both:
        runtime.step(state, [Row(1, 0, _tokens(50))])
    expected, found = (runtime.verify(state, [Row(1, 50, _tokens(4))]) for runtime, state in both)
    yield judge("verify", found.logits, expected.logits)
    for (runtime, state), result in zip(both, (expected, found), strict=True):
        runtime.commit(state, result, [2])
    expected, found = (runtime.step(state, [Row(1, 52, [7])]) for runtime, state in both)
    yield judge("after commit", found, expected)


def text(place: Place) -> Iterator[Finding]:
    """Greedy texts of the bundled model."""
    yield texts(_on_device(place, load_model(bundled_checkpoint(), torch.float32), 128))


def texts(ours: TorchRuntime) -> Finding:
    """Compare texts of the bundled model with those of the CPU."""
    cpu, tokenizer = load(dtype=torch.float32)
    expected, found = (generate(each, tokenizer, _PROMPTS, max_tokens=24, temperature=0) for each in (cpu, ours))
    if found == expected:
        return Finding("text", EQUAL, message="as on the CPU")
    return Finding("text", WRONG, message=f"{found}, not {expected}")


def warm_up(place: Place) -> Iterator[Finding]:
    """Prompts and tokens of several sequences, after the engine has warmed up."""
    ours = _on_device(place, load_model(bundled_checkpoint(), torch.float32), 128)
    engine = Engine(ours, 2, max_length=500)
    started = time.perf_counter()
    engine.warm_up()
    yield _compilations(ours, started)
    before = ours.num_compilations
    for length in (5, 200, 130):
        engine.add(Request(_tokens(length), 8))
    started, steps = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started
    numbers = {"steps": steps, "seconds": seconds}
    yield Finding("steps", FACT, message=f"{1e3 * seconds / steps:.1f} ms each", numbers=numbers)
    more = ours.num_compilations - before
    yield Finding("further graphs", WRONG if more else EQUAL, message=str(more))


def fallbacks(place: Place) -> Iterator[Finding]:
    """Operators of the bundled model that TorchNeuron computes on the CPU."""
    try:
        import torch_neuronx
    except ImportError:
        yield Finding("fallbacks", FACT, message="no torch_neuronx here to ask")
        return
    if not hasattr(torch_neuronx, "get_fallback_ops"):
        yield Finding("fallbacks", FACT, message="this torch_neuronx does not say")
        return
    torch_neuronx.clear_op_tracking()
    ours = _on_device(place, load_model(bundled_checkpoint(), torch.float32), 128)
    state = ours.allocate(1, 200)
    ours.step(state, [Row(1, 0, _tokens(50))])
    ours.step(state, [Row(1, 50, [7])])
    names = sorted(map(str, torch_neuronx.get_fallback_ops()))
    yield Finding("fallbacks", WRONG if names else EQUAL, message=", ".join(names), numbers={"operators": names})


def latency(place: Place, name: str, tp_degree: str) -> Iterator[Finding]:
    """benchmark_latency.py on a model with random weights, in its own dtype."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latency.json"
        command = [sys.executable, str(ROOT / "benchmark_latency.py"), "--random-weights", name, "--backend", "torch"]
        command += ["--device", place.device, "--tp-degree", tp_degree]
        command += command_line(torch_device.OPTIONS, _chosen(place))
        command += ["--batch-size", "1", "8", "--prompt-length", "512", "2048"]
        subprocess.run([*command, "--output-length", "64", "--json", str(file)], check=True)
        numbers = json.loads(file.read_text(encoding="utf-8"))
    for result in numbers["results"]:
        what = f"{result['batch_size']} x {result['prompt_length']}"
        message = f"first token {result['first_token_ms']:.1f} ms, then {result['token_ms_p50']:.2f}"
        yield Finding(what, FACT, message=message, numbers=result)


def _chosen(place: Place) -> dict[str, Any]:
    """Return all options of the backend; the device and the degree, which are passed separately, have defaults."""
    defaults = {option.name: option.default for option in torch_device.OPTIONS}
    return defaults | dict(compiler=place.compiler) | place.options


def layer_model(kind: str) -> HybridForCausalLM:
    name, layer_type = _LAYERS[kind]
    small = dict(vocab_size=2048, bos_token_id=1, eos_token_id=1, pad_token_id=0, intermediate_size=128)
    config = published_config(name)
    return random_model(replace(config, layer_types=(layer_type,), num_hidden_layers=1, **small))


def _on_device(place: Place, model: HybridForCausalLM, tokens: int, **mamba_kernels: str) -> TorchRuntime:
    options = {**place.options, **mamba_kernels}
    return TorchRuntime(model, GenerationConfig(), (tokens,), device=place.device, compiler=place.compiler, **options)


def _runtimes(
    place: Place, model: HybridForCausalLM, tokens: int, **mamba_kernels: str
) -> tuple[CPURuntime, TorchRuntime]:
    return CPURuntime(model, GenerationConfig(), cpu_kernels="torch"), _on_device(place, model, tokens, **mamba_kernels)


def steps(cpu: Runtime, ours: TorchRuntime) -> Iterator[Finding]:
    """Yield findings on two prompts, one of a whole bucket and one of a part, and a token of each."""
    longest = ours.tokens_per_step
    states = [runtime.allocate(2, MAX_LENGTH) for runtime in (cpu, ours)]

    def logits(rows: list[Row]) -> list[torch.Tensor]:
        return [runtime.step(state, rows) for runtime, state in zip((cpu, ours), states, strict=True)]

    expected, found = logits([Row(1, 0, _tokens(longest)), Row(2, 0, _tokens(50))])
    yield judge(f"prefill {longest}", found, expected)
    for step in range(3):
        expected, found = logits([Row(1, longest + step, [7]), Row(2, 50 + step, [9])])
        yield judge(f"decode {step + 1}", found, expected)


def _tokens(number: int) -> list[int]:
    return torch.randint(3, 1000, (number,), generator=torch.Generator().manual_seed(number)).tolist()


def _compilations(runtime: TorchRuntime, started: float) -> Finding:
    seconds = time.perf_counter() - started
    numbers = {"graphs": runtime.num_compilations, "seconds": seconds}
    return Finding("compiled", FACT, message=f"{runtime.num_compilations} graphs in {seconds:.0f} s", numbers=numbers)
