"""Estimates of a step's temporaries in bytes, fitted to XLA's compiler for a CPU on this package's graphs.

The compiler was given graphs in float32 with one layer of each kind. All layers need as much, because they run one
after another. The factors here cover its temporaries for h-small and Nemotron 3 Nano 30B-A3B, with 128, 512 and 2,048
tokens, on one and on four ranks, with 2,048 entries of the cache and with the longest context.
"""

from __future__ import annotations

import torch

from granite4_neuron.config import ATTENTION, ModelConfig
from granite4_neuron.devices.graphs.moe import ALL, expert_path
from granite4_neuron.ops.attention import block_length
from granite4_neuron.planning.analysis.live_set import live_set

# A prompt's temporaries, as multiples of its graph's live set in bfloat16; of the scores of a block of keys in float32,
# with more than 64 blocks and with fewer; and of the tensors of experts.
_OF_LIVE_SET, _OF_SCORES_OF_MANY, _OF_SCORES, _OF_EXPERTS = 25, 18, 10, 1.25
_MANY_BLOCKS = 64
# Decode copies a block of keys and values of each sequence, 1.04 times their size in float32, and for few tokens the
# chosen experts, 1.42 times their size.
_OF_KEYS_AND_VALUES, _OF_CHOSEN = 1.05, 1.5
_NUMBER = torch.float32.itemsize


def of_prompt(config: ModelConfig, tp_degree: int, tokens: int, context: int) -> int:
    """Estimate a rank's temporaries of a graph for some tokens of a prompt.

    The largest are activations that many operations share, the scores of attention for one block of the cache, or the
    rows of the experts; these lie in memory at different times.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    rank = config.rank_dimensions(tp_degree)
    estimates: list[float] = [_OF_LIVE_SET * live_set(config, tp_degree, torch.bfloat16, tokens).live]
    if config.layers_with(ATTENTION):
        block = min(block_length(tokens, context), context)
        factor = _OF_SCORES_OF_MANY if context > _MANY_BLOCKS * block else _OF_SCORES
        estimates.append(factor * rank.attention_heads * tokens * block * _NUMBER)
    if config.num_local_experts:
        estimates.append(_OF_EXPERTS * _entries_of_experts(config, rank.intermediate_size, tokens) * _NUMBER)
    return round(max(estimates))


def of_decode(config: ModelConfig, tp_degree: int, batch_size: int, context: int) -> int:
    """Estimate a rank's temporaries of a step of decode; raise UserError if tp_degree does not divide the model."""
    rank, entries = config.rank_dimensions(tp_degree), 0.0
    if config.layers_with(ATTENTION):
        keys = min(block_length(1, context), context)
        entries += _OF_KEYS_AND_VALUES * batch_size * 2 * keys * rank.key_value_heads * config.head_dim
    if config.num_local_experts:
        expert = _widths(config) * rank.intermediate_size * config.expert_hidden_size
        entries += _OF_CHOSEN * config.num_experts_per_tok * expert
    return round(entries * _NUMBER)


def _entries_of_experts(config: ModelConfig, width: int, tokens: int) -> int:
    """Return the entries of the experts' rows during their computation, for the form that a graph has."""
    experts, hidden = config.num_local_experts, config.expert_hidden_size
    path = expert_path(tokens, config.num_experts_per_tok, experts, width, gathers=False)
    inner = _widths(config) * width
    if path.name == ALL:
        return tokens * experts * inner
    row = 2 * hidden + inner
    own = experts * path.capacity * row
    return max(own, path.num_blocks * (path.capacity * row + inner * hidden))  # further blocks fetch weights


def _widths(config: ModelConfig) -> int:
    """Return the total width of an expert's matrices, in multiples of its own: gate, up and down, or without a gate."""
    return 3 if config.has_gated_mlp else 2
