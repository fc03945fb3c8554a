"""The graphs of `devices.torch.runtime.TorchRuntime` on a Neuron device, listed without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.devices.graphs.runtime import (
    PREFILL_BUCKETS,
    VERIFY_BUCKETS,
    buckets_up_to,
    cache_buckets,
    cache_length,
)
from granite4_neuron.devices.neuron.compiled_graphs import (
    COMMIT,
    DRAW,
    EMBEDDING,
    HEAD,
    LAYER,
    TOKEN,
    VERIFICATION,
    CompiledGraph,
)
from granite4_neuron.runtime.prompt_cuts import pieces, used_buckets


@dataclass(frozen=True)
class DeviceGraphOptions:
    """`compiled_graphs.GraphOptions` for a PyTorch device, with one graph of all layers for decode.

    context_buckets: tokens of the pieces of prompts, ascending.
    verified_tokens: tokens of a sequence in a verification; 0 for none.
    null_slots: slots of the cache beside the sequences', see `state.hybrid_state`.
    """

    null_slots: ClassVar[int] = 1
    context_buckets: Sequence[int] = PREFILL_BUCKETS
    verified_tokens: int = 0

    @property
    def longest_prompt(self) -> int:
        return self.context_buckets[-1]

    def prompt_lengths(self, context: int) -> list[int]:
        return list(self.context_buckets)

    def prompt_pieces(self, start: int, stop: int, seq_len: int) -> list[int]:
        return pieces(stop - start, self.context_buckets)

    def cache_length(self, config: ModelConfig, context: int) -> int:
        return cache_length(context, config.max_position_embeddings)

    def fewest(self, context: int) -> tuple[DeviceGraphOptions, str]:
        longest = self.longest_prompt
        return replace(self, context_buckets=(longest,)), f"--prefill-buckets {longest}"

    def graphs(self, config: ModelConfig, batch_size: int, seq_len: int) -> list[CompiledGraph]:
        """Return the graphs that `TorchRuntime.warm_up` makes."""
        lengths = cache_buckets(self.cache_length(config, seq_len))
        verified = buckets_up_to(self.verified_tokens, VERIFY_BUCKETS)
        prompts = used_buckets(lengths[-1], self.context_buckets)
        graphs = [CompiledGraph(EMBEDDING, tokens) for tokens in prompts]
        for kind in dict.fromkeys(config.layer_types):
            if config.parts(kind).mixer == ATTENTION:
                graphs += [CompiledGraph(LAYER, each, tokens, kind) for tokens in prompts for each in lengths]
            else:
                graphs += [CompiledGraph(LAYER, tokens, layer_type=kind) for tokens in prompts]
        graphs += [CompiledGraph(TOKEN, length) for length in lengths]
        graphs += [CompiledGraph(VERIFICATION, length, tokens) for tokens in verified for length in lengths]
        if config.layers_with(MAMBA):
            graphs += [CompiledGraph(COMMIT, lengths[-1], tokens) for tokens in verified]
        # The head of prompts takes the last token, or tokens that divide all buckets.
        graphs += [CompiledGraph(HEAD, tokens) for tokens in sorted({1, math.gcd(*self.context_buckets)})]
        return [*graphs, CompiledGraph(DRAW, 1)]
