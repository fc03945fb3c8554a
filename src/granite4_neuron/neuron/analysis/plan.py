"""Adds up the memory of a Trainium2 core: a model's weights, state and cache, its graphs, and a step's temporaries."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from granite4_neuron.config import ATTENTION, GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameters
from granite4_neuron.neuron.analysis import graphs
from granite4_neuron.neuron.analysis.graph_memory import MICROCODE_BYTES, GraphMemory, graph_memory
from granite4_neuron.neuron.analysis.hlo_cost import ToolsMissing
from granite4_neuron.neuron.compiled_graphs import GraphOptions
from granite4_neuron.neuron_sdk import CONTINUATION_TOKENS, INSTANCES
from granite4_neuron.state.sizes import sequence_bytes, token_bytes

# Memory of a logical core: 24 GiB of a chip's 96 ("Trainium2 architecture" in the Neuron SDK's documentation), less 7 %
# that are left free, because allocations are aligned and must be in one piece.
CORE_BYTES = 24 * 10**9
# Tokens of a prefill step, with which its temporaries grow linearly.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Temporaries:
    """The largest temporaries of a step in bytes: of prefill, and of decode by the number of sequences."""

    prefill: int
    decode: int
    decode_of_a_sequence: int

    def of(self, batch_size: int) -> int:
        return max(self.prefill, self.decode + batch_size * self.decode_of_a_sequence)


@dataclass(frozen=True)
class Plan:
    """Bytes on one logical core.

    state: of a sequence of any length. token: keys and values of one token. logits: of one token of a sequence, over
    the whole vocabulary in float32, as a rank computes them and as gathered from all ranks. scores: per token of
    context, in NxD Inference's attention while a prompt is continued. temporaries: of this package's own graphs,
    without kernels; None without torch_xla. draft: of a draft model that is loaded too; a step's temporaries are those
    of the larger model.
    """

    config: GraniteMoeHybridConfig
    tp_degree: int
    batch_size: int
    context: int
    weights: int
    state: int
    token: int
    logits: int
    scores: int
    temporaries: Temporaries | None
    options: GraphOptions
    draft: Plan | None = None

    @property
    def total(self) -> int:
        return self._bytes(self.batch_size, self.context)

    @property
    def fits(self) -> bool:
        return self.total <= CORE_BYTES

    @property
    def max_context(self) -> int:
        own = self.config.max_position_embeddings
        return own if self.draft is None else min(own, self.draft.max_context)

    @property
    def graphs(self) -> list[GraphMemory]:
        """The memory of each of this model's graphs, without those of the draft model."""
        return self._graphs(self.batch_size, self.context)

    @property
    def resident(self) -> int:
        """Bytes of weights, sequences and graphs, which stay there between steps; those of the draft model too."""
        return self._resident(self.batch_size, self.context)

    @property
    def with_fewest_graphs(self) -> Plan:
        """The plan with one graph of each kind."""
        options = replace(self.options, context_buckets=(self._longest_bucket,), token_buckets=(self.context,))
        draft = None if self.draft is None else replace(self.draft, options=options)
        return replace(self, options=options, draft=draft)

    @property
    def _longest_bucket(self) -> int:
        return min(max(self.options.context_buckets or [self.options.max_context_length]), self.context)

    @property
    def longest_context(self) -> int:
        """The most tokens per sequence that fit at this batch size, up to the model's limit; 0 for none."""
        return _largest(self.max_context, lambda context: self._bytes(self.batch_size, context) <= CORE_BYTES)

    @property
    def largest_batch(self) -> int:
        """The most sequences of this context that fit; 0 for none."""
        enough = CORE_BYTES // (self.state + self.context * self.token + self.logits)
        return _largest(enough, lambda batch_size: self._bytes(batch_size, self.context) <= CORE_BYTES)

    def verdict(self) -> str:
        """Return one sentence: it fits, or why it does not and what would fit."""
        gigabytes = f"{self.total / 1e9:.1f} of {CORE_BYTES / 1e9:.0f} GB"
        if self.fits:
            return f"It fits: {gigabytes} per core."
        fewest = self.with_fewest_graphs
        alone = fewest._bytes(0, 1)
        if alone >= CORE_BYTES:
            need = f"{alone / 1e9:.1f} GB"
            return f"It does not fit: weights and the temporaries of a step need {need}; split it over more ranks."
        if fewest.fits:
            return (
                f"It does not fit: {gigabytes} per core; with fewer graphs it does, {fewest.total / 1e9:.1f} GB with "
                f"--context-buckets {self._longest_bucket} --token-buckets {self.context}."
            )
        return (
            f"It does not fit: {gigabytes} per core; up to {self.longest_context:,} tokens do at this batch size, or "
            f"{self.largest_batch} sequences of this context."
        )

    def _graphs(self, batch_size: int, context: int) -> list[GraphMemory]:
        made = self.options.graphs(self.config, batch_size, context)
        layers = len(self.config.layer_types)
        return [graph_memory(graph, layers, self.weights, self.tp_degree) for graph in made]

    def _resident(self, batch_size: int, context: int) -> int:
        sequences = batch_size * (self.state + context * self.token + self.logits)
        own = self.weights + sequences + sum(graph.total for graph in self._graphs(batch_size, context))
        return own if self.draft is None else own + self.draft._resident(batch_size, context)

    def _bytes(self, batch_size: int, context: int) -> int:
        temporaries = 0 if self.temporaries is None else self.temporaries.of(batch_size)
        return MICROCODE_BYTES + self._resident(batch_size, context) + context * self.scores + temporaries


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, where all smaller ones do; 0 for none."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def plan(
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    instance: str,
    tp_degree: int,
    batch_size: int,
    context: int,
    options: GraphOptions,
    draft: Plan | None = None,
) -> Plan:
    """Plan the memory of a model on a core of `instance`.

    Args:
        config, dtype: the model and the dtype of its weights, activations and cache.
        instance: one of INSTANCES.
        tp_degree: ranks, one per logical core.
        batch_size: sequences at a time.
        context: tokens of each sequence, prompt and continuation.
        options: which graphs there are.
        draft: the plan of a draft model beside it.

    Raises:
        UserError: tp_degree does not divide the model or is more than the instance has cores, or the context is longer
            than the model's.
    """
    check_ranks(instance, tp_degree)
    if context > config.max_position_embeddings:
        raise UserError(f"the context is {context}; the model's longest is {config.max_position_embeddings}.")
    # NxD Inference stores a tied head a second time.
    table = parameters(replace(config, tie_word_embeddings=False), tp_degree)
    heads = config.rank_dimensions(tp_degree).attention_heads if ATTENTION in config.layer_types else 0
    return Plan(
        config,
        tp_degree,
        batch_size,
        context,
        weights=sum(one.numel for one in table.values()) * dtype.itemsize,
        state=sequence_bytes(config, dtype.itemsize, tp_degree),
        token=token_bytes(config, dtype.itemsize, tp_degree),
        logits=config.vocab_size * torch.float32.itemsize * 2,
        scores=heads * CONTINUATION_TOKENS * torch.float32.itemsize,
        temporaries=find_temporaries(config, tp_degree, context),
        options=options,
        draft=draft,
    )


def check_ranks(instance: str, tp_degree: int) -> None:
    """Check that an instance has a logical core for each rank.

    Raises:
        UserError: it does not.
    """
    if tp_degree > INSTANCES[instance]:
        raise UserError(f"tp_degree is {tp_degree}; {instance} has {INSTANCES[instance]} logical cores of 24 GB.")


def find_temporaries(
    config: GraniteMoeHybridConfig,
    tp_degree: int,
    context: int,
    report: Callable[..., Iterator[graphs.GraphReport]] = graphs.report,
) -> Temporaries | None:
    """Count graphs of one layer of each kind: layers run one after another and share their temporaries.

    The graphs are in float32, as is most of a step's arithmetic with any dtype; in bfloat16, XLA's CPU compiler would
    count float32 copies of weights.

    Args:
        report: `graphs.report`, or NxD Inference's `graph_costs.report` with kernels.

    Returns:
        None where torch_xla or jax is not installed.
    """
    kinds = tuple(dict.fromkeys(config.layer_types))
    layers = replace(config, layer_types=kinds, num_hidden_layers=len(kinds), vocab_size=tp_degree)
    few, many = 1, 9

    def prefill_and_decode(batch_size: int) -> tuple[graphs.GraphReport, graphs.GraphReport]:
        """Return the first graph and that of decode; those after it are not traced."""
        reports = report(layers, torch.float32, tp_degree, batch_size, (min(PREFILL_TOKENS, context),), context)
        return next(reports), next(each for each in reports if each.graph.startswith("decode"))

    try:
        (prefill, decode), (_, more) = prefill_and_decode(few), prefill_and_decode(many)
    except ToolsMissing:
        return None
    per_sequence = (more.temporary_bytes - decode.temporary_bytes) // (many - few)
    return Temporaries(prefill.temporary_bytes, decode.temporary_bytes - few * per_sequence, per_sequence)
