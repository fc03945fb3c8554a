"""Runs steps of the model on this machine's processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import cpu
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
        model: with weights.
        generation_config: the checkpoint's defaults for generation.
        kernels: "fused" for compiled kernels, "torch" for plain torch; see `ops.cpu.operators`.
    """

    # Beyond this a step gains no speed, and its activations would fall out of the processor's caches.
    tokens_per_step = 512
    # They share a step's tokens; with fewer than 64 of each the scan would become a loop over tokens.
    prompts_per_step = 8

    def __init__(self, model: GraniteMoeHybridForCausalLM, generation_config: GenerationConfig, kernels: str = "fused"):
        self.model = model
        model.use(cpu.operators(kernels))
        self.generation_config = generation_config

    @property
    def config(self) -> GraniteMoeHybridConfig:
        return self.model.config

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
        )
