"""Runs steps of the model on this machine's processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import cpu, select_operators
from granite4_neuron.ops.launch_parameters import HEURISTIC, LaunchTable, find_launch_table, tuned_config_folder
from granite4_neuron.state import HybridState


@dataclass(frozen=True)
class Row:
    """Tokens that a step adds to one sequence: the slot it lives in, its length so far, at least one new token."""

    slot: int
    start: int
    tokens: Sequence[int]


def step_inputs(rows: Sequence[Row], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows as the model takes them, padded on the right: input_ids, positions [rows, tokens]; lengths, slots [rows]."""
    input_ids = torch.tensor([[*row.tokens, *[0] * (tokens - len(row.tokens))] for row in rows])
    positions = torch.tensor([[row.start] for row in rows]) + torch.arange(tokens)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    return input_ids, positions, lengths, torch.tensor([row.slot for row in rows])


class CPURuntime:
    """A model with its generation defaults, ready to run steps.

    Args:
        model: with weights. It stays as it is: the runtime has a model of its own over the same weights.
        generation_config: the checkpoint's defaults for generation.
        kernels: "fused" for compiled kernels, "torch" for plain torch; see `ops.cpu.operators`.
        tuned_configs: a folder of tuned launch parameters; None for what GRANITE4_TUNED_CONFIG_FOLDER says, if
            anything. See `ops.launch_parameters`.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `ops.select_operators`.

    Raises:
        UserError: there is no such folder, the table in it for this model is broken, or the Mamba kernels cannot run.
    """

    # Beyond this a step gains no speed, and its activations would fall out of the processor's caches.
    tokens_per_step = 512
    # They share a step's tokens; with fewer than 64 of each the scan would become a loop over tokens.
    prompts_per_step = 8

    def __init__(
        self,
        model: GraniteMoeHybridForCausalLM,
        generation_config: GenerationConfig,
        kernels: str = "fused",
        tuned_configs: str | Path | None = None,
        *,
        prefill_scan: str = "chunked",
        decode_kernel: str = "torch",
    ):
        degree = model.parallel.degree
        operators = select_operators(cpu.operators(kernels), model.config, degree, prefill_scan, decode_kernel)
        self.model = model.bind(operators)
        self.generation_config = generation_config
        self._num_heads = self.config.rank_dimensions(degree).mamba_heads
        self._launch_table = _launch_table(self.config, tuned_config_folder(tuned_configs))

    @property
    def config(self) -> GraniteMoeHybridConfig:
        return self.model.config

    @property
    def refusals(self) -> tuple[str, ...]:
        """A sentence for each faster way of computing that this runtime does not take."""
        return self.model.operators.refusals

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """State for slots 1 to `num_sequences`; the cache takes memory only as it is written."""
        dtype, degree = self.model.dtype, self.model.parallel.degree
        return HybridState.allocate(
            self.config, num_sequences, max_length, dtype, tp_degree=degree, kernel_layout=self.model.kernel_layout
        )

    @torch.inference_mode()
    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Add each row's tokens to its sequence.

        Returns:
            float32 logits after each row's last token, [rows, vocab_size]; with `all_logits` after every token,
            [rows, longest row, vocab_size], unspecified where a row is shorter.
        """
        return self.model(
            *step_inputs(rows, max(len(row.tokens) for row in rows)),
            state,
            kv_length=max(row.start + len(row.tokens) for row in rows),
            all_logits=all_logits,
            launch_parameters=self._launch_table.at(len(rows) * self._num_heads),
        )


def _launch_table(config: GraniteMoeHybridConfig, folder: Path | None) -> LaunchTable:
    if MAMBA not in config.layer_types:
        return LaunchTable({1: HEURISTIC})  # no layer looks at it
    return find_launch_table(config.mamba_d_head, config.mamba_d_state, torch.float32, folder)
