"""What a model needs of a GPU's memory, for the backend torch on cuda. What graphs, libraries and kernels take is
estimated, the rest is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.loading import check_quantization
from granite4_neuron.checkpoint.weight_plan import WeightPlan, formats_for, model_format
from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.cuda.choices import ChoiceTables
from granite4_neuron.devices.cuda.torch_device import CUDA
from granite4_neuron.devices.graphs.runtime import PREFILL_BUCKETS, cache_length
from granite4_neuron.errors import UserError
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.ops.operators import TORCH
from granite4_neuron.runtime.prompt_cuts import used_buckets
from granite4_neuron.state.sizes import sequence_bytes, token_bytes

# What CUDA, its libraries and compiled kernels take.
LIBRARIES = 2**30


@dataclass(frozen=True)
class GpuPlan:
    """Bytes on one GPU.

    format: by which the model is named, if weights are quantized.
    cache: keys and values of all sequences, as many as the cache of a state of this context has room for.
    choices: what the device needs of each sequence to choose its tokens.
    steps: an estimate of what the captured graphs of prompts keep for their activations.
    """

    format: str | None
    weights: int
    states: int
    cache: int
    choices: int
    steps: int

    @property
    def total(self) -> int:
        return self.weights + self.states + self.cache + self.choices + self.steps + LIBRARIES


def gpu_plan(
    config: ModelConfig,
    dtype: torch.dtype,
    quantize: str | None,
    batch_size: int,
    context: int,
    checkpoint: Checkpoint | None = None,
) -> GpuPlan:
    """Plan a model on one GPU.

    Args:
        quantize: one of `choices.QUANTIZATIONS`, or None.
        batch_size, context: sequences at a time, and tokens of each.
        checkpoint: whose quantized weights stay so; None for weights in dtype.

    Raises:
        UserError: a GPU does not compute with these weights, the checkpoint's are quantized in another format, or the
            context is longer than the model's.
    """
    if context > config.max_position_embeddings:
        raise UserError(f"the context is {context}; the model's longest is {config.max_position_embeddings}.")
    if checkpoint is not None:
        check_quantization(checkpoint, quantize, Parallel())
    with torch.device("meta"):
        model = model_of(config)
    stored = {} if checkpoint is None else checkpoint.quantized_weights(model, keep=() if quantize else CUDA.formats)
    formats = {name: each.format for name, each in stored.items()} or formats_for(model, quantize)
    for name in {each.name for each in formats.values()} - {*CUDA.formats}:
        raise UserError(f"{name} weights do not run on a GPU, which computes with {', '.join(CUDA.formats)}.")
    weights = WeightPlan(model, dtype, formats, TORCH).num_bytes
    length, itemsize = cache_length(context, config.max_position_embeddings), dtype.itemsize
    # At most: a graph for each length of a prompt's piece, with memory of its own.
    pieces = used_buckets(length, (*PREFILL_BUCKETS, *CUDA.long_prompts))
    steps = sum(pieces) * _activations(config, itemsize)
    states = batch_size * sequence_bytes(config, itemsize)
    cache = (batch_size + 1) * length * token_bytes(config, itemsize)  # idle rows write to a slot of their own
    tables = ChoiceTables(batch_size, config.vocab_size, torch.device("meta")).tables
    choices = sum(table.nbytes for table in tables)
    return GpuPlan(model_format(formats).name if formats else None, weights, states, cache, choices, steps)


def _activations(config: ModelConfig, itemsize: int) -> int:
    """Estimate the bytes that a layer's activations take for each token of a prompt."""
    rank = config.rank_dimensions(1)
    inner = config.mamba_n_heads * config.mamba_d_head
    mixer = (inner + rank.mamba_conv_dim + config.mamba_n_heads) * itemsize + (inner + rank.mamba_conv_dim) * 4
    experts = config.num_experts_per_tok * (config.expert_hidden_size + rank.intermediate_size) * itemsize
    residuals = config.hidden_size * (2 * 4 + 2 * itemsize)
    return residuals + max(mixer, experts if config.num_local_experts else 0)
