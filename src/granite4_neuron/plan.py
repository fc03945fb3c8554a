"""What of a model fits into the memory of a Trainium2 core: weights, state, cache, and what a step needs besides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from granite4_neuron import graphs
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.layers.parallel import Parallel
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.state import sequence_bytes, token_bytes

# Logical cores of 24 GB, each a pair of physical cores (LNC=2), as the Neuron SDK sets them up on Trainium2.
INSTANCES = {"trn2.3xlarge": 4, "trn2.48xlarge": 64}
CORE_BYTES = 24 * 10**9
# A step of prefill; what it needs besides grows linearly with it.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Plan:
    """Bytes that one logical core holds.

    state: of all sequences, whatever their length. cache: keys and values of all sequences, up to the context's
    length. logits: of one token per sequence, over the whole vocabulary, in float32, and as gathered from all ranks.
    temporaries: the most that a step of prefill needs besides, or None where torch_xla is not there to tell.
    """

    config: GraniteMoeHybridConfig
    dtype: torch.dtype
    tp_degree: int
    batch_size: int
    context: int
    weights: int
    state: int
    cache: int
    logits: int
    temporaries: int | None

    @property
    def total(self) -> int:
        return self._fixed + self.state + self.cache + self.logits

    @property
    def fits(self) -> bool:
        return self.total <= CORE_BYTES

    @property
    def longest_context(self) -> int:
        """The most tokens per sequence that fit at this batch size, up to the model's limit; 0 for none."""
        free = CORE_BYTES - self._fixed - self.state - self.logits
        per_token = self.batch_size * token_bytes(self.config, self.dtype, self.tp_degree)
        if free < 0 or not per_token:
            return 0 if free < 0 else self.config.max_position_embeddings
        return min(self.config.max_position_embeddings, free // per_token)

    @property
    def largest_batch(self) -> int:
        """The most sequences of this context that fit; 0 for none."""
        return max(0, CORE_BYTES - self._fixed) // ((self.state + self.cache + self.logits) // self.batch_size)

    @property
    def _fixed(self) -> int:
        return self.weights + (self.temporaries or 0)

    def verdict(self) -> str:
        """One sentence: it fits, or why not and what would."""
        gigabytes = f"{self.total / 1e9:.1f} of {CORE_BYTES / 1e9:.0f} GB"
        if self.fits:
            return f"It fits: {gigabytes} per core."
        if self._fixed >= CORE_BYTES:
            need = f"{self._fixed / 1e9:.1f} GB"
            return f"It does not fit: weights and the temporaries of a step need {need}; split it over more ranks."
        return (
            f"It does not fit: {gigabytes} per core; up to {self.longest_context:,} tokens do at this batch size, or "
            f"{self.largest_batch} sequences of this context."
        )


def plan(
    config: GraniteMoeHybridConfig, dtype: torch.dtype, instance: str, tp_degree: int, batch_size: int, context: int
) -> Plan:
    """What a core of `instance` holds of a model.

    Args:
        config, dtype: the model and the dtype of its weights, activations and cache.
        instance: one of INSTANCES.
        tp_degree: ranks, one per logical core.
        batch_size: sequences at a time.
        context: tokens of each sequence, prompt and continuation.

    Raises:
        UserError: tp_degree does not divide the model or is more than the instance has cores, or the context is longer
            than the model's.
    """
    if tp_degree > INSTANCES[instance]:
        raise UserError(f"tp_degree is {tp_degree}; {instance} has {INSTANCES[instance]} logical cores of 24 GB.")
    if context > config.max_position_embeddings:
        raise UserError(f"the context is {context}; the model's longest is {config.max_position_embeddings}.")
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config, parallel=Parallel(0, tp_degree))
    weights = sum(parameter.numel() for parameter in model.parameters())
    if config.tie_word_embeddings:
        weights += model.lm_head.weight.numel()  # NxD Inference keeps the embedding and the head apart
    return Plan(
        config,
        dtype,
        tp_degree,
        batch_size,
        context,
        weights=weights * dtype.itemsize,
        state=batch_size * sequence_bytes(config, dtype, tp_degree),
        cache=batch_size * context * token_bytes(config, dtype, tp_degree),
        logits=batch_size * config.vocab_size * torch.float32.itemsize * 2,
        temporaries=_temporaries(config, tp_degree, context),
    )


def _temporaries(config: GraniteMoeHybridConfig, tp_degree: int, context: int) -> int | None:
    """From the graph of one layer of each kind: layers run one after another, and share what they need.

    In float32, in which most of a step's arithmetic is whatever the dtype; XLA's CPU compiler would count float32
    copies of bfloat16 weights.
    """
    kinds = tuple(dict.fromkeys(config.layer_types))
    layers = replace(config, layer_types=kinds, num_hidden_layers=len(kinds), vocab_size=tp_degree)
    tokens = min(PREFILL_TOKENS, context)
    try:
        report = next(graphs.report(layers, torch.float32, tp_degree, 1, (tokens,), context))
    except graphs.ToolsMissing:
        return None
    return report.temporary_bytes
