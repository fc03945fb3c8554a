"""The minimum cost of a step on one rank: the FLOPs of the mathematics, and the bytes that must move once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.model.parameters import HEAD, matmul_weights
from granite4_neuron.state.sizes import mamba_state_shapes, sequence_bytes, token_bytes


@dataclass(frozen=True)
class Minimum:
    """The minimum of one rank and one step. All fields except flops are in bytes.

    weights: those that the step's tokens need, read once. state: the Mamba layers', read and written. key_values: read
    for the context, written for the step's tokens. activations: the residual stream in float32.
    """

    flops: float
    weights: float
    state: int
    key_values: int
    activations: int

    @property
    def bytes_accessed(self) -> float:
        return self.weights + self.state + self.key_values + self.activations


def minimum(
    config: ModelConfig,
    tp_degree: int,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
    context: int,
    *,
    verifies: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Minimum:
    """Return the minimum cost of a step of `tokens` tokens in each of `batch_size` sequences.

    Assumptions:

    * Each token takes two FLOPs per weight, counting only its top_k experts. The head is applied to one token per
      sequence, or to all tokens of a verification. Attention takes four FLOPs per token, head, element of head_dim and
      visible entry. The recurrence takes six per token and entry of the state (the decay, two for dt * x * B, the sum,
      two for the product with C).
    * Every weight is read once, but only those experts that some token chose: if choices are independent and uniform,
      n tokens choose num_experts * (1 - (1 - top_k / num_experts) ** n) distinct ones on average. The embedding is not
      counted.
    * States are read and written once. Of the keys and values, `context` entries per sequence are read and those of the
      step's tokens are written. A verification reads states and writes none.
    * Of the activations only the residual stream moves, in float32: for each part of a layer, mixer or MLP, the norm
      reads it, and the sum reads and writes it.

    Args:
        tp_degree: ranks, over which the model is split.
        dtype: of weights, conv_state, keys and values.
        context: cache entries of each sequence before this step.
        verifies: whether the step is a verification: it has logits of all its tokens, and leaves states as they are.
        state_dtype: of SSM states.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    all_tokens = batch_size * tokens
    matrices = matmul_weights(config, tp_degree)
    head = matrices.pop(HEAD).numel
    experts = sum(one.numel for one in matrices.values() if one.is_of_experts)
    shared = sum(one.numel for one in matrices.values()) - experts
    mamba_layers, attention_layers = config.layers_with(MAMBA), config.layers_with(ATTENTION)
    dimensions = config.rank_dimensions(tp_degree)

    token_weights = chosen = 0.0  # weights of experts
    if config.num_local_experts:
        token_weights = experts * config.num_experts_per_tok / config.num_local_experts
        chosen = experts * (1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** all_tokens)

    conv_shape, ssm_shape = mamba_state_shapes(config, tp_degree)
    conv_entries, ssm_entries = conv_shape[0] * conv_shape[1], ssm_shape[0] * ssm_shape[1] * ssm_shape[2]
    seen = batch_size * (tokens * context + tokens * (tokens + 1) // 2)
    flops = 2 * all_tokens * (shared + token_weights)
    flops += 2 * (all_tokens if verifies else batch_size) * head
    flops += 4 * attention_layers * seen * dimensions.attention_heads * config.head_dim
    flops += 6 * mamba_layers * all_tokens * ssm_entries

    state_bytes = conv_entries * dtype.itemsize + ssm_entries * state_dtype.itemsize
    return Minimum(
        flops=flops,
        weights=(shared + chosen + head) * dtype.itemsize,
        state=(1 if verifies else 2) * mamba_layers * batch_size * state_bytes,
        key_values=token_bytes(config, dtype.itemsize, tp_degree) * (batch_size * context + all_tokens),
        activations=3 * config.num_parts * all_tokens * config.hidden_size * torch.float32.itemsize,
    )


def minimum_of_commit(
    config: ModelConfig,
    tp_degree: int,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
    *,
    state_dtype: torch.dtype = torch.float32,
) -> Minimum:
    """Return the minimum cost of a commit; arguments as in `minimum`.

    The state is read and written once, and the kept inputs are read: x, B, C and dt of each token. An entry of the
    state takes two FLOPs for its decay and two for each token.
    """
    layers, dimensions = config.layers_with(MAMBA), config.rank_dimensions(tp_degree)
    _, ssm_shape = mamba_state_shapes(config, tp_degree)
    kept = layers * batch_size * tokens * (dimensions.mamba_conv_dim + dimensions.mamba_heads)
    return Minimum(
        flops=(2 + 2 * tokens) * layers * batch_size * prod(ssm_shape),
        weights=0,
        state=2 * batch_size * sequence_bytes(config, dtype.itemsize, tp_degree, state_dtype.itemsize),
        key_values=0,
        activations=kept * dtype.itemsize,
    )


def minimum_of_copy(
    config: ModelConfig,
    tp_degree: int,
    dtype: torch.dtype,
    length: int,
    *,
    state_dtype: torch.dtype = torch.float32,
) -> Minimum:
    """Return the minimum cost of copying a slot of `length` tokens: reading and writing it once."""
    return Minimum(
        flops=0,
        weights=0,
        state=2 * sequence_bytes(config, dtype.itemsize, tp_degree, state_dtype.itemsize),
        key_values=2 * length * token_bytes(config, dtype.itemsize, tp_degree),
        activations=0,
    )
