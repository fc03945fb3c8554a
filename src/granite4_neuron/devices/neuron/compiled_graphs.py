"""The graphs that `granite4-neuron compile` makes of a model, each a NEFF. NxD Inference is not needed to list them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from granite4_neuron.config import MAMBA, MODEL_TYPE, ModelConfig
from granite4_neuron.config.json_files import read_object
from granite4_neuron.devices.neuron.sdk import CONTINUATION_TOKENS
from granite4_neuron.errors import UserError

# In the folder of compiled graphs, what NxD Inference saves of its options.
CONFIG_FILE = "neuron_config.json"

# Kinds of graphs.
CONTEXT, CONTINUATION, TOKEN, VERIFICATION, COMMIT, COPY = (
    "context",
    "continuation",
    "token",
    "verification",
    "commit",
    "copy of a slot",
)
# Graphs for prompts on PyTorch's device, where each type of layer has its own, and for choosing tokens.
EMBEDDING, LAYER, HEAD, DRAW = "embedding", "layer", "head", "draw"
_SHORTEST_BUCKET = 128


@dataclass(frozen=True)
class CompiledGraph:
    """kind: one of the above.
    bucket: the entries of the cache that a step reads, or its tokens if it reads none.
    tokens: tokens of each sequence, if graphs of a kind and bucket differ in that. layer_type: the type of a LAYER.
    """

    kind: str
    bucket: int
    tokens: int | None = None
    layer_type: str | None = None

    @property
    def name(self) -> str:
        """The kind in words, such as "mamba layer"."""
        return self.kind if self.layer_type is None else f"{self.layer_type} {self.kind}"


@dataclass(frozen=True)
class GraphOptions:
    """The options of the compile command that decide which graphs are compiled.

    max_context_length: tokens of the largest graph for prompts. verified_tokens: tokens of a sequence in a
    verification; 0 for none. context_buckets, token_buckets: lengths of prompts and of the cache, ascending; None for
    `default_context_buckets` and for NxD Inference's own. null_slots: slots of the cache beside the sequences'; NxD
    Inference's has none, see `nxdi.state.HybridCacheManager`.
    """

    null_slots: ClassVar[int] = 0
    max_context_length: int = 512
    verified_tokens: int = 0
    context_buckets: Sequence[int] | None = None
    token_buckets: Sequence[int] | None = None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the largest graph for prompts."""
        return max(self.context_buckets or [self.max_context_length])

    def prompt_lengths(self, context: int) -> list[int]:
        """Return the tokens of the graphs for prompts, ascending: for a prompt's first part and further parts."""
        first = self._context_buckets(context)
        return sorted({*first, continuation_tokens(first)} if first[-1] < context else first)

    def prompt_pieces(self, start: int, stop: int, seq_len: int) -> list[int]:
        """Return `prompt_pieces` of the graphs for sequences of up to seq_len tokens. If none of them continues
        prompts, tokens after a prompt's first piece are decoded one by one.
        """
        context = self._context_buckets(seq_len)
        if start and seq_len <= continuation_tokens(context):
            return [1] * (stop - start)
        return prompt_pieces(start, stop, context)

    def cache_length(self, config: ModelConfig, context: int) -> int:
        """Return the length of the cache for sequences of up to `context` tokens."""
        return context

    def fewest(self, context: int) -> tuple[GraphOptions, str]:
        """Return the options for one graph of each kind, and their form on the command line."""
        longest = min(self.longest_prompt, context)
        options = replace(self, context_buckets=(longest,), token_buckets=(context,))
        return options, f"--context-buckets {longest} --token-buckets {context}"

    def _context_buckets(self, seq_len: int) -> list[int]:
        return list(self.context_buckets or default_context_buckets(min(self.max_context_length, seq_len)))

    def graphs(self, config: ModelConfig, batch_size: int, seq_len: int) -> list[CompiledGraph]:
        """Return the graphs for sequences of up to seq_len tokens. A draft model has them too, from its own config."""
        context = self._context_buckets(seq_len)
        token = list(self.token_buckets or default_token_buckets(seq_len))
        shortest = continuation_tokens(context)
        buckets = {
            CONTEXT: context,
            CONTINUATION: [bucket for bucket in token if bucket > shortest],
            TOKEN: token,
            VERIFICATION: token if self.verified_tokens else [],
            COMMIT: [seq_len] if self.verified_tokens and config.layers_with(MAMBA) else [],
            COPY: [seq_len] if batch_size > 1 else [],
        }
        return [CompiledGraph(kind, bucket) for kind, each in buckets.items() for bucket in each]


def compiled_ranks(compiled: Path) -> int:
    """Return how many ranks, each with a core, a folder's graphs were compiled for.

    Raises:
        UserError: the folder has no such graphs.
    """
    file = compiled / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{compiled} has no {CONFIG_FILE}; give the folder that the compile command wrote.")
    options = read_object(file).get("neuron_config")
    ranks = options.get("tp_degree") if isinstance(options, dict) else None
    if type(ranks) is not int or ranks < 1:
        raise UserError(f"{file} is damaged (it has no number of ranks); compile the model again.")
    return ranks


def is_compiled(config: ModelConfig) -> bool:
    """Return whether the port to NxD Inference has a model for this config: the one that it registers."""
    return config.model_type == MODEL_TYPE


def continuation_tokens(context_buckets: Sequence[int]) -> int:
    """Return the tokens of the graphs that continue a prompt. They are the same in all buckets of the cache."""
    return min(context_buckets[-1], CONTINUATION_TOKENS)


def prompt_pieces(start: int, stop: int, context_buckets: Sequence[int]) -> list[int]:
    """Return the tokens of the graphs that a prompt's tokens from `start` to `stop` run in, one after another. Only the
    last graph is padded.

    A prompt begins in the smallest context graph that holds it, or else in the largest, and goes on in graphs that
    continue it.

    Args:
        context_buckets: tokens of the context graphs, ascending.
    """
    first = [] if start else [next((each for each in context_buckets if each >= stop), context_buckets[-1])]
    tokens = continuation_tokens(context_buckets)
    return first + [tokens] * len(range(start + sum(first), stop, tokens))


def default_context_buckets(longest: int) -> list[int]:
    """Return the lengths of graphs for prompts: 128, 512, and powers of two from there on, up to `longest`."""
    buckets = [_SHORTEST_BUCKET]
    while buckets[-1] < longest:
        buckets.append(max(CONTINUATION_TOKENS, 2 * buckets[-1]))
    return [*buckets[:-1], longest]


def default_token_buckets(longest: int) -> list[int]:
    """Return NxD Inference's own buckets: powers of two from 128 on, with `longest` in place of the last.

    Source: `generate_buckets` in NxD Inference's modules/autobucketing.py.
    """
    first, end = int(math.log2(_SHORTEST_BUCKET)), round(math.log2(longest))
    return [2**power for power in range(first, end)] + [longest]
