"""What the compiled graphs of a model cost, from the graphs themselves: nothing is run and no weight is allocated.

A graph is traced with one layer of each kind, and with one more of each: all layers of a kind cost the same, so that
this gives the cost of any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from granite4_neuron import hlo_lint
from granite4_neuron.checkpoint import set_parameter
from granite4_neuron.config import ATTENTION, MAMBA, GraniteMoeHybridConfig
from granite4_neuron.hlo_cost import Cost, count, hlo_proto, hlo_text, parameter_numbers, temporary_bytes, tracer
from granite4_neuron.layers.parallel import Parallel
from granite4_neuron.minimum import Minimum, minimum
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM, step_of
from granite4_neuron.ops.xla import XLA
from granite4_neuron.state import HybridState

# The parts of a graph that are traced on their own, where a model has them; the rest are norms, routers and residuals.
EMBEDDING, HEAD, EXPERTS, SHARED_MLP, REST = "embedding", "head", "experts", "shared MLP", "rest"
COMPONENTS = (MAMBA, ATTENTION, EXPERTS, SHARED_MLP, EMBEDDING, HEAD, REST)


@dataclass(frozen=True)
class Traced:
    """A graph and its parts, as serialised HLO modules; sizes in bytes.

    donated: the number of each parameter whose memory an output takes, and that of the output.
    components: of one layer each, by their names in `COMPONENTS`, each traced from placeholders of its own.
    """

    proto: bytes
    donated: Mapping[int, int]
    components: Mapping[str, bytes]
    weight_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class GraphReport:
    """One graph of one rank; sizes in bytes.

    cost: of the whole graph. components: what it is made of, by their names in `COMPONENTS`: the cost of all layers.
    temporary_bytes: those of the graph with one layer of each kind, compiled for the CPU; layers run one after another,
    and share what they need.
    """

    graph: str
    weight_bytes: int
    state_bytes: int  # donated: the new state takes its memory
    cost: Cost
    components: Mapping[str, Cost]
    minimum: Minimum
    temporary_bytes: int
    findings: tuple[str, ...]  # of hlo_lint
    notes: tuple[str, ...] = ()  # what was chosen for it, and why

    @property
    def flops_ratio(self) -> float:
        """FLOPs, as a multiple of the minimum."""
        return self.cost.flops / self.minimum.flops

    @property
    def bytes_ratio(self) -> float:
        """Bytes accessed, as a multiple of the minimum."""
        return self.cost.bytes_accessed / self.minimum.bytes_accessed


def report(
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    tp_degree: int,
    batch_size: int,
    buckets: Sequence[int],
    max_length: int,
) -> Iterator[GraphReport]:
    """The graphs of `runtime.xla.XLARuntime`: prefill of one sequence for each bucket, and decode of the whole batch.

    The minimum of prefill is that of a prompt's first tokens, the one of decode that of full caches.

    Args:
        config, dtype: the model.
        tp_degree: ranks; the graphs are those of one of them, without what the ranks say to each other.
        batch_size: sequences in the state, all of which the decode graph takes, in the order of their slots.
        buckets: tokens of the prefill graphs.
        max_length: of the cache, and what attention visits.

    Raises:
        ToolsMissing: torch_xla or jax is not installed.
        UserError: tp_degree does not divide the model.
    """
    for bucket in (*buckets, None):

        def trace(layer_types: Sequence[str], bucket: int | None = bucket) -> Traced:
            layers = replace(config, layer_types=tuple(layer_types), num_hidden_layers=len(layer_types))
            return _Tracing(layers, dtype, tp_degree, batch_size, bucket, max_length).traced()

        if bucket is None:
            name, least = f"decode, batch {batch_size}", (batch_size, 1, max_length - 1)
        else:
            name, least = f"prefill {bucket}", (1, bucket, 0)
        yield graph_report(name, config.layer_types, trace, minimum(config, tp_degree, dtype, *least))


def graph_report(
    name: str, layer_types: Sequence[str], trace: Callable[[Sequence[str]], Traced], least: Minimum
) -> GraphReport:
    """The report of a model's graph, from graphs of few layers.

    Args:
        layer_types: of the model.
        trace: makes the graph of a model with other `layer_types`.
        least: what the graph has to do.

    Raises:
        ToolsMissing: jax is not installed.
    """
    kinds = tuple(dict.fromkeys(layer_types))
    few = trace(kinds)
    cost_of_few = cost = count(few.proto)
    weight_bytes, state_bytes = few.weight_bytes, few.state_bytes
    for kind in kinds:
        times = layer_types.count(kind) - 1
        if times:
            more = trace((*kinds, kind))
            cost += (count(more.proto) - cost_of_few) * times
            weight_bytes += (more.weight_bytes - few.weight_bytes) * times
            state_bytes += (more.state_bytes - few.state_bytes) * times
    return GraphReport(
        graph=name,
        weight_bytes=weight_bytes,
        state_bytes=state_bytes,
        cost=cost,
        components=_components(few, layer_types, cost),
        minimum=least,
        temporary_bytes=temporary_bytes(few.proto, few.donated),
        findings=tuple(hlo_lint.findings(hlo_text(few.proto))),
    )


def _components(traced: Traced, layer_types: Sequence[str], whole: Cost) -> dict[str, Cost]:
    times = {MAMBA: layer_types.count(MAMBA), ATTENTION: layer_types.count(ATTENTION), EMBEDDING: 1, HEAD: 1}
    costs = {
        name: count(traced.components[name]) * times.get(name, len(layer_types))
        for name in COMPONENTS
        if name in traced.components
    }
    return {**costs, REST: whole - sum(costs.values(), Cost())}


class _Tracing:
    """One graph of a rank: prefill of `bucket` tokens, or decode where it is None."""

    def __init__(
        self,
        config: GraniteMoeHybridConfig,
        dtype: torch.dtype,
        tp_degree: int,
        num_sequences: int,
        bucket: int | None,
        max_length: int,
    ):
        self.placeholder = tracer()
        self.dtype, self.max_length, self.is_decode = dtype, max_length, bucket is None
        self.rows, self.tokens = (num_sequences, 1) if bucket is None else (1, bucket)
        with torch.device("meta"):
            self.model = GraniteMoeHybridForCausalLM(config, Parallel(0, tp_degree)).bind(XLA)
            self.state = HybridState.allocate(
                config, num_sequences, max_length, dtype, "meta", tp_degree, has_null_slot=False
            )
        self.weights = dict(self.model.named_parameters())
        for name, weight in self.weights.items():
            set_parameter(self.model, name, self.placeholder(tuple(weight.shape), dtype))
        self.model.tie_weights()

    @torch.no_grad()
    def traced(self) -> Traced:
        state = self._new_state()
        before = [tensor.clone() for tensor in state.tensors()]
        logits = self.model(self._ids(), *self._where(), state, kv_length=self.max_length)
        aliases = state.input_output_aliases(first=1)
        outputs = [logits, *aliases]
        return Traced(
            hlo_proto(outputs),
            donated=dict(zip(parameter_numbers(outputs, before), aliases.values(), strict=True)),
            components={name: hlo_proto(part) for name, part in self._parts()},
            weight_bytes=sum(weight.numel() for weight in self.weights.values()) * self.dtype.itemsize,
            state_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.tensors()),
        )

    def _parts(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Each component's name and outputs, from the first layer that has it."""
        model, config = self.model, self.model.config
        for kind, layer, layer_state in zip(
            config.layer_types, model.model.layers, self._new_state().layers, strict=True
        ):
            step = step_of(*self._where(), self.max_length, self._new_state())
            if kind == MAMBA:
                output = layer.mamba(self._hidden_states(), step, layer_state)
            else:
                rotary = model.model.rotary(step)
                output = layer.self_attn(self._hidden_states(), step, layer_state, rotary)
            yield kind, [output, *vars(layer_state).values()]
        layer = model.model.layers[0]
        if layer.block_sparse_moe is not None:
            yield EXPERTS, [layer.block_sparse_moe(self._hidden_states())]
        yield SHARED_MLP, [layer.shared_mlp(self._hidden_states())]
        yield EMBEDDING, [model.model.embed_tokens(self._ids())]
        yield HEAD, [model.head(self.placeholder((self.rows, config.hidden_size), self.dtype))]

    def _new_state(self) -> HybridState:
        layers = [
            type(layer)(*(self.placeholder(tuple(tensor.shape), tensor.dtype) for tensor in vars(layer).values()))
            for layer in self.state.layers
        ]
        return replace(self.state, layers=layers)

    def _ids(self) -> torch.Tensor:
        return self.placeholder((self.rows, self.tokens), torch.int64)

    def _where(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """positions, lengths, slots."""
        slots = None if self.is_decode else self.placeholder((self.rows,), torch.int64)
        return self._ids(), self.placeholder((self.rows,), torch.int64), slots

    def _hidden_states(self) -> torch.Tensor:
        return self.placeholder((self.rows, self.tokens, self.model.config.hidden_size), self.dtype)
