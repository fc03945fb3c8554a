"""The cost of a model's compiled graphs, from the graphs themselves. Nothing runs and no weight is allocated.

A graph is traced with one layer of each kind, and for each kind once more with a second layer of it. All layers of a
kind cost the same, so this gives the cost of any number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial

import torch

from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.devices.graphs.moe import MOST_GATHERED
from granite4_neuron.devices.graphs.operators import XLA
from granite4_neuron.devices.graphs.runtime import TOKENS, unpacked
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import step_of
from granite4_neuron.planning.analysis import hlo_lint
from granite4_neuron.planning.analysis.hlo_cost import (
    Cost,
    count,
    hlo_proto,
    hlo_text,
    parameter_numbers,
    temporary_bytes,
    tracer,
)
from granite4_neuron.planning.analysis.live_set import LiveSet
from granite4_neuron.planning.analysis.roofline import Minimum, minimum, minimum_of_commit
from granite4_neuron.state.hybrid_state import HybridState, KeyValueState, LayerState, MambaState, input_output_aliases

# The parts of a graph that are traced separately, if a model has them; the rest are norms, routers and residuals.
EMBEDDING, HEAD, EXPERTS, SHARED_MLP, REST = "embedding", "head", "experts", "shared MLP", "rest"
COMPONENTS = (MAMBA, ATTENTION, EXPERTS, SHARED_MLP, EMBEDDING, HEAD, REST)

PREFILL, DECODE, VERIFY, COMMIT = "prefill", "decode", "verify", "commit"


@dataclass(frozen=True)
class Graph:
    """A graph of one rank, to be traced.

    kind: "prefill", "decode", "verify" or "commit".
    tokens: tokens of each row.
    config, dtype: the model's, which is traced whole.
    tp_degree, num_sequences, max_length: as `report` takes them; attention visits all of the cache.
    experts_decode: "all" or "gather", see `devices.selection`; None for a Neuron device's own.
    """

    kind: str
    tokens: int
    config: ModelConfig
    dtype: torch.dtype
    tp_degree: int
    num_sequences: int
    max_length: int
    experts_decode: str | None = None

    @property
    def rows(self) -> int:
        """One sequence in prefill, and all of them in the other kinds."""
        return 1 if self.kind == PREFILL else self.num_sequences

    def meta_model(self, rank: int = 0, group: str | None = None) -> HybridForCausalLM:
        """Return a rank's model, without memory. `group`: see `Parallel`; no process group needs to have this name."""
        with torch.device("meta"):
            model = model_of(self.config, Parallel(rank, self.tp_degree, group)).to("meta")
        for name, weight in list(model.named_parameters()):
            if name not in model.float32_weights():
                set_parameter(model, name, weight.to(self.dtype))
        model.tie_weights()
        return model

    def meta_state(self) -> HybridState:
        """Return the rank's state, without memory."""
        sizes = (self.config, self.num_sequences, self.max_length, self.dtype, "meta", self.tp_degree)
        return HybridState.allocate(*sizes, has_null_slot=False)

    def with_layers(self, layer_types: Sequence[str]) -> Graph:
        """Return the graph of a model with other layers."""
        config = replace(self.config, layer_types=tuple(layer_types), num_hidden_layers=len(layer_types))
        return replace(self, config=config)

    def minimum(self) -> Minimum:
        """Return its minimum cost: in prefill for a prompt's first tokens, in other steps for full caches."""
        sizes = self.config, self.tp_degree, self.dtype, self.rows, self.tokens
        if self.kind == COMMIT:
            return minimum_of_commit(*sizes)
        context = 0 if self.kind == PREFILL else self.max_length - self.tokens
        return minimum(*sizes, context, verifies=self.kind == VERIFY)


@dataclass(frozen=True)
class Traced:
    """A graph and its parts, as serialised HLO modules; sizes in bytes.

    donated: {number of a parameter: number of the output that takes its memory}.
    components: each traced from its own placeholders, by its name in `COMPONENTS` and the type of its layers, None
        outside of layers.
    widens_places: see `hlo_lint.findings`.
    keeps_layouts: whether the device keeps weights as the graph takes them, so that it must not transpose one.
    """

    proto: bytes
    donated: Mapping[int, int]
    components: Mapping[tuple[str, str | None], bytes]
    weight_bytes: int
    state_bytes: int
    widens_places: bool = False
    keeps_layouts: bool = False

    @property
    def states(self) -> Collection[int] | None:
        """The numbers of the parameters that are state, for `hlo_lint.findings`."""
        return self.donated.keys() if self.keeps_layouts else None


@dataclass(frozen=True)
class GraphReport:
    """One graph of one rank; sizes in bytes.

    cost: the whole graph's. components: the cost of all layers' components, by their names in `COMPONENTS`.
    findings: those of `hlo_lint`. notes: the choices made for the graph with their reasons, and its collectives.
    few: the graph with one layer of each kind. prompt_tokens: of a prompt's graph.
    live_set: of a prompt's graph, once its chip is known.
    """

    graph: str
    weight_bytes: int
    state_bytes: int  # donated: the new state takes its memory
    cost: Cost
    components: Mapping[str, Cost]
    minimum: Minimum
    findings: tuple[str, ...]
    few: Traced = field(repr=False)
    notes: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    live_set: LiveSet | None = None

    @cached_property
    def temporary_bytes(self) -> int:
        """Temporaries of the graph with one layer of each kind, because layers run one after another and share memory.

        The first access compiles the graph for the CPU, which takes seconds.
        """
        return temporary_bytes(self.few.proto, self.few.donated)

    def numbers(self) -> dict[str, object]:
        """Return all fields except the graph itself, and the temporaries, as values for JSON."""
        values = {name: value for name, value in asdict(self).items() if name != "few"}
        return {**values, "temporary_bytes": self.temporary_bytes}

    @property
    def flops_ratio(self) -> float:
        """FLOPs, as a multiple of the minimum."""
        return self.cost.flops / self.minimum.flops if self.minimum.flops else 1.0  # a copy has no FLOPs

    @property
    def bytes_ratio(self) -> float:
        """Bytes accessed, as a multiple of the minimum."""
        return self.cost.bytes_accessed / self.minimum.bytes_accessed

    @property
    def fused_ratio(self) -> float:
        """Bytes that move if element-wise work moves nothing, as a multiple of the minimum."""
        return self.cost.fused_bytes / self.minimum.bytes_accessed


def trace_xla(graph: Graph) -> Traced:
    """Trace a graph of `devices.xla.runtime.XLARuntime`."""
    return _Tracing(graph).traced()


def report(
    config: ModelConfig,
    dtype: torch.dtype,
    tp_degree: int,
    batch_size: int,
    buckets: Sequence[int],
    max_length: int,
    verified_tokens: int | None = None,
    trace_graph: Callable[[Graph], Traced] = trace_xla,
) -> Iterator[GraphReport]:
    """Report the graphs of a runtime: prefill of one sequence per bucket, and decode of the whole batch.

    With `verified_tokens` also verification of the whole batch and its commit, which is only the recurrences.

    Args:
        config, dtype: the model.
        tp_degree: ranks; the graphs are one rank's. `trace_xla` leaves out communication between ranks, because its
            runtime has one rank.
        batch_size: sequences in the state, all of which the decode graph takes, in the order of their slots.
        buckets: tokens of the prefill graphs.
        max_length: length of the cache, all of which attention visits.
        verified_tokens: tokens of each sequence in a verification, the last one and drafts; None for no such graph.
        trace_graph: `trace_xla` or `torch_graphs.trace_torch`.

    Raises:
        ToolsMissing: the tools that trace or count the graphs are not installed.
        UserError: tp_degree does not divide the model.
    """
    kinds = [(f"prefill {bucket}", PREFILL, bucket) for bucket in buckets]
    kinds.append((f"decode, batch {batch_size}", DECODE, 1))
    if verified_tokens is not None:
        kinds.append((f"verify {verified_tokens}, batch {batch_size}", VERIFY, verified_tokens))
        if config.layers_with(MAMBA):
            kinds.append((f"commit {verified_tokens}, batch {batch_size}", COMMIT, verified_tokens))
    for name, kind, tokens in kinds:
        graph = Graph(kind, tokens, config, dtype, tp_degree, batch_size, max_length)
        trace = partial(_trace_layers, trace_graph, graph)
        prompt_tokens = tokens if kind == PREFILL else None
        num_experts = config.num_local_experts if kind == DECODE and graph.rows > MOST_GATHERED else 0
        reported = graph_report(name, config, trace, graph.minimum(), num_experts, tp_degree)
        yield replace(reported, prompt_tokens=prompt_tokens)


def _trace_layers(trace_graph: Callable[[Graph], Traced], graph: Graph, layer_types: Sequence[str]) -> Traced:
    return trace_graph(graph.with_layers(layer_types))


def graph_report(
    name: str,
    config: ModelConfig,
    trace: Callable[[Sequence[str]], Traced],
    least: Minimum,
    num_experts: int = 0,
    tp_degree: int = 1,
) -> GraphReport:
    """Report a model's graph, from graphs of few layers.

    Args:
        config: the model's.
        trace: makes the graph of a model with other `layer_types`.
        least: the minimum cost of the graph.
        num_experts: as `hlo_lint.findings` takes it.
        tp_degree: ranks, of one of which the graph is.

    Raises:
        ToolsMissing: jax is not installed.
    """
    layer_types = config.layer_types
    kinds = tuple(dict.fromkeys(layer_types))
    few = trace(kinds)
    cost_of_few = cost = count(few.proto, few.states)
    weight_bytes, state_bytes = few.weight_bytes, few.state_bytes
    of_few = outside = _collectives(few)
    of_layers: dict[str, Counter[tuple[str, str]]] = {}
    for kind in kinds:
        times = layer_types.count(kind) - 1
        if times or of_few:
            more = trace((*kinds, kind))
            cost += (count(more.proto, more.states) - cost_of_few) * times
            weight_bytes += (more.weight_bytes - few.weight_bytes) * times
            state_bytes += (more.state_bytes - few.state_bytes) * times
            of_layers[kind] = _collectives(more) - of_few
            outside = outside - of_layers[kind]
    findings = hlo_lint.findings(hlo_text(few.proto), few.widens_places, num_experts, few.states)
    for kind, found in of_layers.items():
        parts = config.parts(kind)
        needed = parts.count + (parts.mixer == MAMBA and config.has_collective_for_norms(tp_degree))
        findings += hlo_lint.findings_of_layer(kind, found, needed)
    return GraphReport(
        graph=name,
        weight_bytes=weight_bytes,
        state_bytes=state_bytes,
        cost=cost,
        components=_components(few, layer_types, cost),
        minimum=least,
        findings=tuple(findings),
        few=few,
        notes=(_note(cost, outside, of_layers),) if of_few else (),
    )


def _collectives(traced: Traced) -> Counter[tuple[str, str]]:
    return hlo_lint.collectives(hlo_lint.instructions(hlo_text(traced.proto)))


def _note(cost: Cost, outside: Counter[tuple[str, str]], of_layers: Mapping[str, Counter[tuple[str, str]]]) -> str:
    """Return a sentence on the collectives of a graph.

    Args:
        cost: the whole graph's.
        outside, of_layers: the collectives outside of layers, and those of a layer of each kind.
    """
    found = {"outside of layers": outside} | {f"in each {kind} layer": each for kind, each in of_layers.items()}
    parts = []
    for where, each in found.items():
        listed = ", ".join(f"{number} {opcode} of {dtype}" for (opcode, dtype), number in sorted(each.items()))
        parts.append(f"{listed or 'none'} {where}")
    given = f"a rank gives {cost.collective_bytes / 1e6:.4g} MB to {cost.collectives} collectives"
    return f"{given}: {'; '.join(parts)}."


def _components(traced: Traced, layer_types: Sequence[str], whole: Cost) -> dict[str, Cost]:
    if not traced.components:
        return {}
    costs: dict[str, Cost] = {}
    for (name, layer_type), component in traced.components.items():
        times = 1 if layer_type is None else layer_types.count(layer_type)
        costs[name] = costs.get(name, Cost()) + count(component) * times
    costs[REST] = whole - sum(costs.values(), Cost())
    return {name: costs[name] for name in COMPONENTS if name in costs}


class _Tracing:
    """Traces one graph."""

    def __init__(self, graph: Graph):
        self.placeholder = tracer()
        self.kind, self.dtype = graph.kind, graph.dtype
        self.rows, self.tokens = graph.rows, graph.tokens
        self.state = graph.meta_state()
        model = graph.meta_model()
        self.weights = dict(model.named_parameters())
        for name, weight in self.weights.items():
            set_parameter(model, name, self.placeholder(tuple(weight.shape), weight.dtype))
        for module in model.modules():
            for name, value in module.named_buffers(recurse=False):
                setattr(module, name, self.placeholder(tuple(value.shape), value.dtype))
        model.tie_weights()
        operators = select_operators(XLA, graph.config, graph.tp_degree, experts_decode=graph.experts_decode)
        self.model = model.bind(operators)

    @torch.no_grad()
    def traced(self) -> Traced:
        state = self._new_state()
        before = {tensor: tensor.clone() for tensor in state.tensors()}
        results = self._commit(state) if self.kind == COMMIT else self._step(state)
        written = (tensor for layer in state.layers if self._is_written(layer) for tensor in vars(layer).values())
        aliases = input_output_aliases(written, len(results))
        outputs = [*results, *aliases]
        numbers = parameter_numbers(outputs, [before[tensor] for tensor in aliases])
        return Traced(
            hlo_proto(outputs),
            donated=dict(zip(numbers, aliases.values(), strict=True)),
            components={name: hlo_proto(part) for name, part in self._components()},
            weight_bytes=sum(weight.nbytes for weight in self.weights.values()),
            state_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.tensors()),
        )

    def _step(self, state: HybridState) -> list[torch.Tensor]:
        """Return logits, and the inputs kept for the commit."""
        ids, positions, lengths, slots = self._inputs()
        step = step_of(positions, lengths, slots, state, verifies=self.kind == VERIFY)
        if self.kind != VERIFY:
            return [self.model(ids, step, state)]
        hidden_states, kept_inputs = self.model.hidden_states(ids, step, state)
        return [self.model.head(hidden_states), *kept_inputs]

    def _commit(self, state: HybridState) -> list[torch.Tensor]:
        """Return nothing: a commit only writes state."""
        kept_inputs = [self._kept_input() for layer in self.model.model.layers if layer.is_mamba]
        _, positions, lengths, slots = self._inputs()
        self.model.advance(kept_inputs, step_of(positions, lengths, slots, state), state)
        return []

    def _components(self) -> Iterator[tuple[tuple[str, str | None], list[torch.Tensor]]]:
        """Yield each component's key in `Traced.components` and its outputs."""
        model, config = self.model, self.model.config
        for kind, layer, layer_state in zip(
            config.layer_types, model.model.layers, self._new_state().layers, strict=True
        ):
            for name, outputs in self._components_of_layer(layer, layer_state):
                yield (name, kind), outputs
        if self.kind == COMMIT:
            return
        yield (EMBEDDING, None), [model.model.embed_tokens(self._ids())]
        judged = (self.rows, self.tokens) if self.kind == VERIFY else (self.rows,)
        yield (HEAD, None), [model.head(self.placeholder((*judged, config.hidden_size), self.dtype))]

    def _components_of_layer(
        self, layer: DecoderLayer, layer_state: LayerState
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        step = step_of(*self._where(), self._new_state(), verifies=self.kind == VERIFY)
        if self.kind == COMMIT:
            if isinstance(layer_state, MambaState):
                layer.advance(self._kept_input(), step, layer_state)
                yield MAMBA, list(vars(layer_state).values())
            return
        if layer.has_mixer:
            output, inputs = layer.mix(self._hidden_states(), step, layer_state, self.model.model.rotary(step))
            written = vars(layer_state).values() if self._is_written(layer_state) else ()
            kept_inputs = [inputs] if step.verifies and inputs is not None else []
            yield MAMBA if layer.is_mamba else ATTENTION, [output, *written, *kept_inputs]
        if layer.has_feed_forward:
            if layer.block_sparse_moe is not None:
                yield EXPERTS, [layer.block_sparse_moe(self._hidden_states())]
            yield SHARED_MLP, [layer.shared_mlp(self._hidden_states())]

    def _kept_input(self) -> torch.Tensor:
        """Return the kept inputs of one layer: x, B, C and dt of each token."""
        sizes = self.model.config.rank_dimensions(self.model.parallel.degree)
        return self.placeholder((self.rows, self.tokens, sizes.mamba_conv_dim + sizes.mamba_heads), self.dtype)

    def _is_written(self, layer: LayerState) -> bool:
        if self.kind == COMMIT:
            return isinstance(layer, MambaState)
        return self.kind != VERIFY or isinstance(layer, KeyValueState)

    def _new_state(self) -> HybridState:
        layers = [
            type(layer)(*(self.placeholder(tuple(tensor.shape), tensor.dtype) for tensor in vars(layer).values()))
            for layer in self.state.layers
        ]
        return replace(self.state, layers=layers)

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return input_ids, positions, lengths and slots from the one tensor with which the runtime transfers them."""
        input_ids, positions, lengths, slots = unpacked(
            self.placeholder((self.rows, TOKENS + self.tokens), torch.int32)
        )
        return input_ids, positions, lengths, slots if self.kind == PREFILL else None

    def _ids(self) -> torch.Tensor:
        return self.placeholder((self.rows, self.tokens), torch.int32)

    def _where(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return positions, lengths, slots."""
        slots = self.placeholder((self.rows,), torch.int32) if self.kind == PREFILL else None
        return self._ids(), self.placeholder((self.rows,), torch.int32), slots

    def _hidden_states(self) -> torch.Tensor:
        return self.placeholder((self.rows, self.tokens, self.model.config.hidden_size), self.dtype)
