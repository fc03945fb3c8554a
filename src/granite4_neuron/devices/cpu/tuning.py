"""Measures launch parameters on this machine for a model's Mamba-2 layers; see `ops.launch_parameters`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.ops.launch_parameters import CHOICES, HEURISTIC, file_name, write_launch_parameters
from granite4_neuron.runtime.interface import Row

# A default is kept unless another value is faster by more than this.
MARGIN = 0.05
_TURNS = 5
_STEPS_PER_TURN = 3
# The step that each parameter affects: kernels, layers, rows, tokens of each row. Decode has several layers, so that
# states and weights come from memory, as in a whole model.
_STEPS = {
    "chunk_size": ("fused", 1, 1, CPURuntime.tokens_per_step),
    "heads_per_task": ("fused", 4, 4, 1),
    "torch_chunk_size": ("torch", 1, 1, CPURuntime.tokens_per_step),
}


class Choice(NamedTuple):
    """The median time of a step in seconds with each value of a launch parameter, and the value to use."""

    name: str
    seconds: dict[int, float]
    value: int


def tune(
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Choice]:
    """Measure each launch parameter, in steps of a few of the model's Mamba layers with random weights.

    Args:
        progress: called with (values measured, values to measure); each is measured several times.

    Raises:
        UserError: the model has no Mamba layers, or there are no fused kernels here.
    """
    if MAMBA not in config.layer_types:
        raise UserError("this model has no Mamba layers; there is nothing to tune.")
    if not cpu.has_fused_kernels():
        raise UserError("the fused kernels, which tuning measures, need a C++ compiler.")
    config = replace(config, vocab_size=256, num_local_experts=0)
    done, total = 0, _TURNS * sum(len(CHOICES[name]) for name in vars(HEURISTIC))
    progress(done, total)
    for name, default in vars(HEURISTIC).items():
        layers = _STEPS[name][1]
        few = replace(config, layer_types=(MAMBA,) * layers, num_hidden_layers=layers)
        model = random_model(few, dtype=dtype)
        times: dict[int, list[float]] = {value: [] for value in CHOICES[name]}
        for _ in range(_TURNS):  # alternate, so that all values are measured under the same load
            for value, measured in times.items():
                measured += _step_times(model, name, value)
                done += 1
                progress(done, total)
        seconds = {value: statistics.median(measured) for value, measured in times.items()}
        fastest = min(seconds, key=seconds.__getitem__)
        yield Choice(name, seconds, default if seconds[default] <= (1 + MARGIN) * seconds[fastest] else fastest)


def _step_times(model: HybridForCausalLM, name: str, value: int) -> list[float]:
    """Return the seconds of each of a few steps with this value of a parameter."""
    kernels, _, num_rows, tokens = _STEPS[name]
    config = model.config
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / file_name(config.mamba_d_head, config.mamba_d_state, torch.float32)
        write_launch_parameters(file, replace(HEURISTIC, **{name: value}))
        runtime = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels, tuned_configs=folder)
    start = 1 if tokens == 1 else 0
    rows = [Row(slot + 1, start, [0] * tokens) for slot in range(num_rows)]
    state = runtime.allocate(num_rows, start + tokens)
    runtime.step(state, rows)  # not timed: its caches are cold
    times = []
    for _ in range(_STEPS_PER_TURN):
        started = time.perf_counter()
        runtime.step(state, rows)
        times.append(time.perf_counter() - started)
    return times
