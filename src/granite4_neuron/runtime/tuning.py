"""Which launch parameters are the fastest on this machine for a model's Mamba-2 layers; see `ops.launch_parameters`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.state import HybridState
from granite4_neuron.ops import LaunchParameters, cpu, mamba_chunk_scan_combined
from granite4_neuron.ops.launch_parameters import CHOICES, LaunchTable, find_launch_table, write_table
from granite4_neuron.runtime.cpu import CPURuntime

# Medians of one and the same candidate differ by as much.
MARGIN = 0.02


@dataclass(frozen=True)
class Choice:
    """A launch parameter at one batch size: what the package has, and what was the fastest here; median times."""

    batch_size: int
    name: str
    default: int
    default_seconds: float
    chosen: int
    chosen_seconds: float


def tune(
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    batch_sizes: Iterable[int],
    rounds: int = 100,
) -> Iterator[Choice]:
    """Measure all choices of each launch parameter on the kernel that it is of; one `Choice` each, as they come.

    Candidates take turns, so that all see the same machine. The package's own value stays unless another one is faster
    by more than `MARGIN`.

    Args:
        config: of the model; its weights do not matter.
        dtype: of activations.
        batch_sizes: rows of a step of decode.
        rounds: how often each candidate runs in decode; in prefill it is a quarter of that, in plain torch a tenth.

    Raises:
        UserError: the model has no Mamba layers, or there are no fused kernels here.
    """
    if MAMBA not in config.layer_types:
        raise UserError("this model has no Mamba layers; there is nothing to tune.")
    if not cpu.has_fused_kernels():
        raise UserError("the fused kernels, which tuning measures, need a C++ compiler.")
    table = find_launch_table(config.mamba_d_head, config.mamba_d_state, torch.float32)
    for batch_size in batch_sizes:
        default = table.at(batch_size * config.mamba_n_heads)
        for name, run, times in (
            ("heads_per_task", _decode(config, dtype, batch_size, default), rounds),
            ("chunk_size", _prefill(config, dtype, batch_size, default), rounds // 4 + 1),
            ("torch_chunk_size", _prefill_in_torch(config, dtype, batch_size), rounds // 10 + 1),
        ):
            yield _choose(batch_size, name, getattr(default, name), run, times)


def write_choices(file: Path, before: LaunchTable | None, choices: Iterable[Choice], num_heads: int) -> None:
    """Write the chosen launch parameters into a table, in which entries of other batches stay as they are in `before`.

    Raises:
        UserError: the file cannot be written.
    """
    chosen: dict[int, dict[str, int]] = {}
    for choice in choices:
        chosen.setdefault(choice.batch_size * num_heads, {})[choice.name] = choice.chosen
    tuned = {batch_heads: LaunchParameters(**values) for batch_heads, values in chosen.items()}
    write_table(file, LaunchTable({**(before.entries if before else {}), **tuned}))


def _choose(batch_size: int, name: str, default: int, run: Callable[[int], None], rounds: int) -> Choice:
    seconds: dict[int, list[float]] = {value: [] for value in CHOICES[name]}
    for turn in range(1 + rounds):
        for value, measured in seconds.items():
            started = time.perf_counter()
            run(value)
            if turn > 0:  # the first one finds cold caches
                measured.append(time.perf_counter() - started)
    medians = {value: statistics.median(measured) for value, measured in seconds.items()}
    fastest = min(medians, key=medians.__getitem__)
    chosen = default if medians[default] <= (1 + MARGIN) * medians[fastest] else fastest
    return Choice(batch_size, name, default, medians[default], chosen, medians[chosen])


def _decode(
    config: GraniteMoeHybridConfig, dtype: torch.dtype, batch_size: int, default: LaunchParameters
) -> Callable[[int], None]:
    """A step of one token through the mixers of all layers, whose state comes from memory as it does in a model."""
    layers = config.layer_types.count(MAMBA)
    mixer = _Mixer(config, dtype, layers, batch_size, tokens=1)
    return lambda heads_per_task: mixer.run(replace(default, heads_per_task=heads_per_task))


def _prefill(
    config: GraniteMoeHybridConfig, dtype: torch.dtype, batch_size: int, default: LaunchParameters
) -> Callable[[int], None]:
    """A full step of a long prompt, or of as many as share one, through one mixer."""
    rows = min(batch_size, CPURuntime.rows_per_step)
    mixer = _Mixer(config, dtype, 1, rows, tokens=CPURuntime.tokens_per_step // rows)
    return lambda chunk_size: mixer.run(replace(default, chunk_size=chunk_size))


def _prefill_in_torch(config: GraniteMoeHybridConfig, dtype: torch.dtype, batch_size: int) -> Callable[[int], None]:
    """The same step's scan."""
    rows = min(batch_size, CPURuntime.rows_per_step)
    tokens = CPURuntime.tokens_per_step // rows
    heads, head_dim, d_state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    x = torch.randn(rows, tokens, heads, head_dim, dtype=dtype)
    B, C = (torch.randn(rows, tokens, config.mamba_n_groups, d_state, dtype=dtype) for _ in range(2))
    dt, A, D = torch.rand(rows, tokens, heads), -torch.rand(heads), torch.randn(heads, dtype=dtype)
    state = torch.zeros(rows, heads, head_dim, d_state)
    return lambda chunk_size: mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, initial_states=state, return_final_states=True
    )


class _Mixer:
    """`cpu.mamba_mixer` with random inputs and weights, over the states of several layers one after the other."""

    def __init__(self, config: GraniteMoeHybridConfig, dtype: torch.dtype, layers: int, rows: int, tokens: int):
        config = replace(config, layer_types=(MAMBA,) * layers, num_hidden_layers=layers)
        self._states = HybridState.allocate(config, rows, max_length=1, dtype=dtype).layers
        channels, heads = config.rank_dimensions().mamba_conv_dim, config.mamba_n_heads
        self._projected = torch.randn(rows, tokens, channels + heads).to(dtype)
        weights = (
            torch.randn(channels, 1, config.mamba_d_conv),
            torch.randn(channels),
            torch.randn(heads) - 2,
            torch.rand(heads),
            torch.randn(heads),
        )
        self._weights = [weight.to(dtype) for weight in weights]
        slots = torch.arange(rows) + 1
        self._rows = torch.full((rows,), tokens), slots, slots, torch.ones_like(slots)
        self._n_groups, self._time_step_limit = config.mamba_n_groups, config.time_step_limit

    def run(self, parameters: LaunchParameters) -> None:
        sizes = self._n_groups, parameters.chunk_size, parameters.heads_per_task
        for state in self._states:
            cpu.mamba_mixer(
                self._projected,
                self._weights,
                state.conv_state,
                state.ssm_state,
                self._rows,
                sizes,
                self._time_step_limit,
            )
