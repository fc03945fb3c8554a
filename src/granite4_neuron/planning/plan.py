"""Adds up the memory of a Neuron core: a model's weights, state and cache, its graphs, and a step's temporaries.

Tensors are exact. Graphs and temporaries are estimates with an upper end. So a plan has a sum and an upper limit of it
(`at_most`). It fits if the upper limit fits.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions
from granite4_neuron.devices.neuron.sdk import INSTANCES, Chip
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import HEAD, Parameter, parameters
from granite4_neuron.ops import FORMATS
from granite4_neuron.planning.analysis import temporaries
from granite4_neuron.planning.analysis.device_graphs import DeviceGraphOptions
from granite4_neuron.planning.analysis.graph_memory import GRAPHS_AT_MOST, MICROCODE_BYTES, GraphMemory, graph_memory
from granite4_neuron.state.sizes import sequence_bytes, token_bytes

GIBIBYTE = 2**30

FITS, OPEN, DOES_NOT_FIT = "fits", "open", "does not fit"

# Temporaries of Trainium2's compiler, as a multiple of XLA's compiler's for a CPU, which `temporaries` estimates.
# One figure is known: another port of h-small (pull request 69 of NxD Inference) needs 24.46 GiB for prompts of 256
# tokens, of which 15.4 are inputs and outputs. Its scan makes tensors of [tokens, heads, head_dim, d_state] in float32,
# of 1 GiB each, of all 128 heads on each rank. XLA's compiler needs 2.05 GiB for it, as if two were live at a time.
# Neuron's needs as much as nine. The runtime adds to this: it gives a tensor of more than 512 MiB memory of its own
# beside the scratchpad that all graphs share ("Neuron Device Memory" in the SDK's documentation). This package has no
# such tensors.
TEMPORARIES_AT_MOST = (24.46 - 15.4) / 2.05


@dataclass(frozen=True)
class Plan:
    """Bytes on one logical core.

    state: the state of a sequence of any length.
    token: keys and values of one token.
    logits: of one token of a sequence, over the whole vocabulary in float32, as a rank computes them and as gathered
        from all ranks.
    options: the graphs that are compiled.
    chip: that the core is of.
    draft: the plan of a draft model that is loaded too. A step's temporaries are the larger of the two models'.
    quantize: the format that the weights are counted in, see `quantized`; None for `dtype`.
    """

    config: ModelConfig
    dtype: torch.dtype
    tp_degree: int
    batch_size: int
    context: int
    weights: int
    state: int
    token: int
    logits: int
    options: GraphOptions | DeviceGraphOptions
    chip: Chip
    draft: Plan | None = None
    quantize: str | None = None

    @property
    def core_bytes(self) -> int:
        """The memory of a logical core."""
        return self.chip.core_bytes

    @property
    def tensors(self) -> int:
        """Bytes of weights and sequences, including the draft model's. They are exact."""
        own = self.weights + self.batch_size * (self.state + self.logits) + self.cache
        return own if self.draft is None else own + self.draft.tensors

    @property
    def cache(self) -> int:
        """Bytes of keys and values, of all sequences and the null slot if there is one."""
        return (self.batch_size + self.options.null_slots) * self.cache_length * self.token

    @property
    def cache_length(self) -> int:
        """The tokens that each slot of the cache has room for."""
        return self.options.cache_length(self.config, self.context)

    @property
    def temporaries(self) -> int:
        """An estimate of the largest temporaries of a step, of a prompt or of decode."""
        prompts = [
            temporaries.of_prompt(self.config, self.tp_degree, min(tokens, self.context), self.context)
            for tokens in self.prompt_lengths
        ]
        own = max(*prompts, temporaries.of_decode(self.config, self.tp_degree, self.batch_size, self.context))
        return own if self.draft is None else max(own, self.draft.temporaries)

    @property
    def total(self) -> int:
        return self.tensors + MICROCODE_BYTES + self._graph_bytes + self.temporaries

    @property
    def at_most(self) -> int:
        estimated = GRAPHS_AT_MOST * self._graph_bytes + round(TEMPORARIES_AT_MOST * self.temporaries)
        return self.tensors + MICROCODE_BYTES + estimated

    @property
    def outcome(self) -> str:
        """FITS if the upper limit fits; DOES_NOT_FIT if the sum does not; OPEN in between."""
        if self.at_most <= self.core_bytes:
            return FITS
        return DOES_NOT_FIT if self.total > self.core_bytes else OPEN

    @property
    def max_context(self) -> int:
        own = self.config.max_position_embeddings
        return own if self.draft is None else min(own, self.draft.max_context)

    @property
    def graphs(self) -> list[GraphMemory]:
        """The memory of each of this model's graphs, without those of the draft model."""
        made = self.options.graphs(self.config, self.batch_size, self.context)
        return [graph_memory(graph, self.config, self.weights, self.tp_degree) for graph in made]

    @property
    def prompt_lengths(self) -> list[int]:
        """The tokens of the graphs for prompts, ascending."""
        return self.options.prompt_lengths(self.context)

    @property
    def with_fewest_graphs(self) -> Plan:
        """The plan with one graph of each kind."""
        options, _ = self.options.fewest(self.context)
        draft = None if self.draft is None else replace(self.draft, options=options)
        return replace(self, options=options, draft=draft)

    def quantized(self, quantize: str) -> Plan:
        """Return this plan with the weights in one of `QUANTIZATIONS`. No backend for Neuron computes with them."""
        return replace(self, quantize=quantize)._over(self.tp_degree)

    @property
    def fewest_ranks(self) -> Plan | None:
        """The plan of this over the fewest ranks that fit for certain, with one graph of each kind if need be; None if
        the model cannot be split over so many. It may be more ranks than an instance has.
        """
        for tp_degree in self.config.tp_degrees():
            if self.draft is None or tp_degree in self.draft.config.tp_degrees():
                split = self._over(tp_degree)
                for each in (split, split.with_fewest_graphs):
                    if each.outcome == FITS:
                        return each
        return None

    @property
    def chips(self) -> int:
        return math.ceil(self.tp_degree / self.chip.logical_cores)

    @property
    def chips_in_words(self) -> str:
        return f"{self.chips} chip{'' if self.chips == 1 else 's'}"

    @property
    def longest_context(self) -> int:
        """The most tokens per sequence that fit at this batch size, up to the model's limit; 0 for none."""
        return _largest(self.max_context, lambda context: self._at(self.batch_size, context).at_most <= self.core_bytes)

    @property
    def largest_batch(self) -> int:
        """The most sequences of this context that fit; 0 for none."""
        enough = self.core_bytes // (self.state + self.cache_length * self.token + self.logits)
        return _largest(enough, lambda batch_size: self._at(batch_size, self.context).at_most <= self.core_bytes)

    def where_it_fits(self) -> str:
        """Return a clause on `fewest_ranks`, to follow "over more ranks"."""
        split = self.fewest_ranks
        if split is None:
            return f"no number up to {self.config.tp_degrees()[-1]} surely fits"
        return f"{split.tp_degree} fit, on {split.chips_in_words}"

    def verdict(self) -> str:
        """Return whether it fits, how certain that is, and what would fit."""
        capacity = f"of a core's {_shown(self.core_bytes)} GiB"
        known = (
            f"weights and sequences take {_shown(self.tensors)} {capacity}, and {_shown(self.total)} with what is "
            f"estimated, at most {_shown(self.at_most)}"
        )
        if self.outcome == FITS:
            return f"It fits: {known}."
        if self.tensors > self.core_bytes:
            alone = f"weights and sequences alone take {_shown(self.tensors)} {capacity}"
            return f"It does not fit: {alone}.{self._what_fits()}"
        says = "It is open whether it fits" if self.outcome == OPEN else "By estimate it does not fit"
        return f"{says}: {known}.{self._what_fits()}"

    def _what_fits(self) -> str:
        fewest = self.with_fewest_graphs
        if fewest.outcome == FITS:
            return (
                f" With fewer graphs it does, at most {_shown(fewest.at_most)} GiB with "
                f"{self.options.fewest(self.context)[1]}."
            )
        if fewest._at(1, 1).at_most > self.core_bytes:
            return f" Split it over more ranks: {self.where_it_fits()}."
        longest, largest = self.longest_context, self.largest_batch
        if not longest and not largest:
            return " Take fewer graphs and shorter sequences."
        return f" {longest:,} tokens do at this batch size, or {largest:,} sequences of this context."

    def _over(self, tp_degree: int) -> Plan:
        draft = None if self.draft is None else self.draft._over(tp_degree)
        weights, state, token = _tensor_bytes(self.config, self.dtype, tp_degree, self.quantize)
        return replace(self, tp_degree=tp_degree, draft=draft, weights=weights, state=state, token=token)

    def _at(self, batch_size: int, context: int) -> Plan:
        draft = None if self.draft is None else self.draft._at(batch_size, context)
        return replace(self, batch_size=batch_size, context=context, draft=draft)

    @property
    def _graph_bytes(self) -> int:
        own = sum(graph.total for graph in self.graphs)
        return own if self.draft is None else own + self.draft._graph_bytes


def _shown(count: int) -> str:
    """Return GiB."""
    return f"{count / GIBIBYTE:.1f}"


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `limit` that fits, if all smaller numbers fit too; 0 for none."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda number: not fits(number))


def plan(
    config: ModelConfig,
    dtype: torch.dtype,
    instance: str,
    tp_degree: int,
    batch_size: int,
    context: int,
    options: GraphOptions | DeviceGraphOptions,
    draft: Plan | None = None,
) -> Plan:
    """Plan the memory of a model on a core of `instance`.

    Args:
        config, dtype: the model and the dtype of its weights, activations and cache.
        instance: one of INSTANCES.
        tp_degree: ranks, one per logical core.
        batch_size: sequences at a time.
        context: tokens of each sequence, prompt and continuation.
        options: the graphs that are compiled.
        draft: the plan of a draft model beside it.

    Raises:
        UserError: tp_degree does not divide the model or is more than the instance has cores, or the context is longer
            than the model's.
    """
    check_ranks(instance, tp_degree)
    if context > config.max_position_embeddings:
        raise UserError(f"the context is {context}; the model's longest is {config.max_position_embeddings}.")
    weights, state, token = _tensor_bytes(config, dtype, tp_degree)
    return Plan(
        config,
        dtype,
        tp_degree,
        batch_size,
        context,
        weights=weights,
        state=state,
        token=token,
        logits=config.vocab_size * torch.float32.itemsize * 2,
        options=options,
        chip=INSTANCES[instance].chip,
        draft=draft,
    )


def _tensor_bytes(
    config: ModelConfig, dtype: torch.dtype, tp_degree: int, quantize: str | None = None
) -> tuple[int, int, int]:
    """Return a rank's bytes of weights, of a sequence's state, and of a token's keys and values."""
    # A tied head is stored a second time: by NxD Inference, and on PyTorch's device with its inputs first.
    table = parameters(replace(config, tie_word_embeddings=False), tp_degree)
    weights = {name: one.nbytes(dtype.itemsize) for name, one in table.items()}
    if quantize is not None:
        weights |= {name: _quantized_bytes(name, one, quantize) for name, one in table.items() if one.may_be_quantized}
    sequence = sequence_bytes(config, dtype.itemsize, tp_degree), token_bytes(config, dtype.itemsize, tp_degree)
    return sum(weights.values()), *sequence


def _quantized_bytes(name: str, matrix: Parameter, quantize: str) -> int:
    of_model = FORMATS[quantize]
    layout = (of_model.head if name == HEAD else of_model).layout(torch.Size(matrix.shape))
    return sum(size.numel() * dtype.itemsize for size, dtype in layout.values())


def check_ranks(instance: str, tp_degree: int) -> None:
    """Check that an instance has a logical core for each rank; raise UserError if not."""
    cores = INSTANCES[instance].logical_cores
    if tp_degree > cores:
        raise UserError(f"tp_degree is {tp_degree}; {instance} has {cores} logical cores.")
