"""Ranks' shares of a checkpoint's weights, for a model that is split over several devices: tensor parallelism."""

from __future__ import annotations

import torch

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.weight_plan import WeightPlan
from granite4_neuron.config import ModelConfig
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.parameters import parameter
from granite4_neuron.ops.operators import TORCH
from granite4_neuron.system import available_memory


def rank_slice(name: str, tensor: torch.Tensor, config: ModelConfig, rank: int, degree: int) -> torch.Tensor:
    """Return the part of a stored tensor that belongs to one of `degree` ranks."""
    whole, part = (parameter(name, config, ranks) for ranks in (1, degree))
    axis = whole.split_axis
    if degree == 1 or axis is None:
        return tensor
    pieces, start = [], 0
    for size, length in zip(whole.blocks, part.blocks, strict=True):
        # With fewer parts than ranks, neighbouring ranks have the same part.
        number = rank * (size // length) // degree
        pieces.append(tensor.narrow(axis, start + number * length, length))
        start += size
    return torch.cat(pieces, dim=axis)


def rank_slices(name: str, tensor: torch.Tensor, config: ModelConfig, degree: int) -> torch.Tensor:
    """Return all ranks' slices, one after another, for a framework that gives each rank an equal run of a tensor.

    The result is longer than `tensor` if ranks share a part.
    """
    axis = parameter(name, config).split_axis
    if axis is None:
        return tensor
    return torch.cat([rank_slice(name, tensor, config, rank, degree) for rank in range(degree)], dim=axis)


def check_memory_of_ranks(checkpoint: Checkpoint, dtype: torch.dtype | None, degree: int) -> None:
    """Check that this machine has memory for the parts of all ranks, before they load them at once.

    Raises:
        UserError: there is not enough memory, or the config cannot be split over this many ranks.
    """
    with torch.device("meta"):
        part = model_of(checkpoint.config, Parallel(0, degree))
    num_bytes = degree * WeightPlan(part, dtype or getattr(torch, checkpoint.dtype), {}, TORCH).num_bytes
    what = f"the weights in {checkpoint.path} for {degree} ranks"
    available_memory.check_available(num_bytes, what, "bfloat16 takes half of float32", processes=degree)
