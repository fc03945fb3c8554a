"""Run the model step by step as a runtime does, and the oracle beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from granite4_neuron.evaluation.reference import load_reference
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.step import step_of
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState, MambaState


def poisoned_state(
    model: HybridForCausalLM, num_sequences: int, max_length: int, has_null_slot: bool = True
) -> HybridState:
    """Return state full of NaN except for the null slot's zeros, so that a read before a write shows."""
    dtype = model.dtype
    state = HybridState.allocate(
        model.config,
        num_sequences,
        max_length,
        dtype,
        tp_degree=model.parallel.degree,
        kernel_layout=model.kernel_layout,
        has_null_slot=has_null_slot,
    )
    for layer in state.layers:
        for tensor in vars(layer).values():
            tensor[NULL_SLOT + (has_null_slot and isinstance(layer, MambaState)) :] = math.nan
    return state


@torch.inference_mode()
def run_cuts(
    model: HybridForCausalLM, tokens: torch.Tensor, cuts: Sequence[int], slots: Sequence[int] | None = None
) -> torch.Tensor:
    """Return logits of tokens [batch, length], with the sequences cut into steps of the given sizes."""
    batch, length = tokens.shape
    assert sum(cuts) == length
    slots = torch.tensor(slots if slots is not None else range(1, batch + 1))
    state = poisoned_state(model, int(slots.max()), length)
    logits, start = [], 0
    for size in cuts:
        positions = torch.arange(start, start + size).expand(batch, -1)
        step = step_of(positions, torch.full((batch,), size), slots, state, kv_length=start + size)
        logits.append(model(tokens[:, start : start + size], step, state, all_logits=True))
        start += size
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def reference_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return transformers' logits of whole sequences, without a cache."""
    return load_reference(folder, dtype)(tokens, use_cache=False).logits.float()


def random_tokens(vocab_size: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
