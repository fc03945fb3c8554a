"""Runs steps of the model as graphs of torch.compile, on a PyTorch device, over state that stays there.

Graphs are functions of tensors: weights are those of a module among the arguments, and state tensors are arguments that
are written in place. So all layers of a kind share a graph, and a compiler sees which of its inputs it may overwrite:
TorchNeuron makes them `input_output_aliases`.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import nn
from transformers import GenerationConfig

from granite4_neuron.choices import KV_WRITES, NO_ADAPTERS
from granite4_neuron.errors import UserError, check_choice
from granite4_neuron.model.causal_lm import (
    HybridForCausalLM,
    OneByOne,
    through_layers,
)
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.step import DenseStep
from granite4_neuron.ops import default_experts_decode, select_operators
from granite4_neuron.ops.gpu import GPU
from granite4_neuron.ops.xla import LOOPS, write_cache_as
from granite4_neuron.ops.xla.mamba import CHUNK_SIZE
from granite4_neuron.ops.xla.topk import TEMPERATURE, drawn, likeliest
from granite4_neuron.runtime.backends.torch_device import DEVICES, GRAPHS, graphs_of, kind_of_device
from granite4_neuron.runtime.cuda_graph import CudaGraph, start_copy, tensor_cores, to_host
from granite4_neuron.runtime.graphs import (
    LENGTH,
    PREFILL_BUCKETS,
    SLOT,
    VERIFY_BUCKETS,
    DecodedOnDevice,
    GraphRuntime,
    Tensors,
    bucket_of_cache,
    buckets_up_to,
    cache_buckets,
    decode_inputs,
    draw_inputs,
    graph_inputs,
    unpacked,
    with_chosen,
)
from granite4_neuron.runtime.interface import Ability, Decoded, Row
from granite4_neuron.runtime.prompt_cuts import Multiples
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState, KeyValueState, MambaState, NoState

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

COMPILERS = {"cpu": "inductor", "cuda": "inductor", "neuron": "neuron"}
# Where nothing has to fit into an SBUF, a long prompt takes fewer pieces.
_BUCKETS = {"cpu": (*PREFILL_BUCKETS, 2048), "cuda": (*PREFILL_BUCKETS, 2048), "neuron": PREFILL_BUCKETS}

Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
Call = Callable[..., Any]  # how functions of `run_step` and `run_advance` are called: as graphs, or as parts of one


class GraphKey(NamedTuple):
    """The constants of a step's graphs; with the shapes of their inputs they tell which graph a step takes.

    kv_length: how many cache entries attention visits.
    in_order: whether row i is in slot i + 1, for all slots.
    looks_up: whether the rows' recurrent state is looked up by slot; otherwise entry i of it is row i's.
    all_logits: logits of every token rather than of each row's last one.
    verifies: whether recurrent state is left as it is, and its inputs are returned.
    chooses: whether it is of one token, may run those that were chosen on the device, and chooses the next ones.
    """

    kv_length: int
    in_order: bool = False
    looks_up: bool = False
    all_logits: bool = False
    verifies: bool = False
    chooses: bool = False


class TorchRuntime(GraphRuntime):
    """The `Runtime` of a PyTorch device, through torch.compile. On a GPU each step is also captured as a CUDA graph.

    Args:
        model: with weights, which are copied to the device; it is not changed.
        generation_config, prefill_buckets: as `GraphRuntime` takes them; None for the device's buckets.
        device: "cpu", "cuda" or "neuron"; also with an index: "cuda:1".
        graphs: of decode, verification and commit. "layer" for one graph for each kind of layer, shared by all layers
            of that kind, one before and one after them; "model" for a single graph, which takes much longer to compile;
            a number, such as 8, for graphs of so many layers, shared by those that have the same kinds in the same
            order. None for the device's default: "model" on neuron, "layer" elsewhere. Prompts always have a graph for
            each kind of layer: they compute long enough between two launches.
        compiler: a backend of torch.compile, or its name; None for the device's.
        kv_write: how keys and values are written to their cache, see `ops.xla.write_cache_as`.
        prefill_by_view: give prefill a view of its slot's recurrent state in place of the slot's number; None for the
            device's choice. Not on a GPU: a CUDA graph has the addresses of its inputs.
        batch_invariant: on a GPU, decode a state of one sequence with the kernels of several, so that a token has the
            same bits in both, and when it is verified. Otherwise a state of one sequence has kernels of its own, which
            take less time and add up in another order. None for the device's choice, which is the latter.
        prefill_scan, decode_kernel, experts_decode: see `ops.select_operators`; None for the device's own.

    Raises:
        UserError: there is no such device here, or no such choice.
    """

    cannot: Mapping[Ability, str] = {"adapters": NO_ADAPTERS}

    def __init__(
        self,
        model: HybridForCausalLM,
        generation_config: GenerationConfig,
        prefill_buckets: Sequence[int] | None = None,
        *,
        device: str = DEVICES[0],
        graphs: str | int | None = None,
        compiler: str | Compiler | None = None,
        kv_write: str = KV_WRITES[0],
        prefill_by_view: bool | None = None,
        batch_invariant: bool | None = None,
        prefill_scan: str = "chunked",
        decode_kernel: str = "torch",
        experts_decode: str | None = None,
    ):
        graphs = graphs_of(graphs, device)
        check_choice("kv_write", kv_write, KV_WRITES)
        where, kind = use_device(device), kind_of_device(device)
        if kind == "cuda" and experts_decode is not None:
            raise UserError(
                f"experts_decode is {experts_decode}; on a GPU a Triton kernel reads the chosen experts, and nothing "
                "else is to be chosen."
            )
        if kind == "neuron":
            experts_decode = experts_decode or default_experts_decode(decode_kernel)
        base = GPU if where.type == "cuda" else LOOPS
        degree = model.parallel.degree
        operators = select_operators(base, model.config, degree, prefill_scan, decode_kernel, experts_decode)
        operators = replace(operators, write_cache=write_cache_as(kv_write))
        if batch_invariant is not None and operators.single_token_layer is None:
            raise UserError("batch_invariant is for a GPU, whose kernels for one sequence are others than for several.")
        if batch_invariant:
            operators = replace(operators, single_token_layer=None)
        super().__init__(model, operators, generation_config, prefill_buckets or _BUCKETS[kind], where)
        if where.type == "cuda" and not any(tokens % CHUNK_SIZE for tokens in self.prefill_buckets):
            self.prompt_cuts = Multiples(CHUNK_SIZE)
        compiler = compiler or COMPILERS[kind]
        self._compiler = find_compiler(compiler)
        name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
        self.kernels = "torch", name, graphs, getattr(compiler, "__name__", compiler), prefill_scan, decode_kernel
        self.kernels = *self.kernels, experts_decode, bool(batch_invariant)
        self.num_compilations = 0
        self._layers_per_graph = {"layer": 1, "model": None}[graphs] if graphs in GRAPHS else int(graphs)
        self._captures = where.type == "cuda"
        if self._captures and prefill_by_view:
            raise UserError("prefill_by_view is not for a GPU: its graphs have the addresses of their inputs.")
        self._prefill_by_view = not self._captures if prefill_by_view is None else prefill_by_view
        self._graphs: dict[tuple, Callable[..., Any]] = {}
        self._is_warm = False
        self._memories: list[_Memory] = []

    def warm_up(self, state: HybridState, verified_tokens: int = 0) -> None:
        """Implement `Runtime.warm_up`. Afterwards it is a RuntimeError if a step needs another graph."""
        nothing = [Row(slot, 0, []) for slot in range(1, state.num_sequences + 1)]
        # All steps share the head of all logits.
        lengths = cache_buckets(state.max_length)
        self._run_prefill(state, graph_inputs(nothing[:1], self.prefill_buckets[0]), lengths[0], all_logits=True)
        for kv_length in lengths:
            decoded = self._run_decode(state, decode_inputs([], state.num_sequences), kv_length)
            self._run_draw(state, [], *decoded)
            for tokens in self.prefill_buckets:
                self._run_prefill(state, graph_inputs(nothing[:1], tokens), kv_length, all_logits=False)
            for tokens in buckets_up_to(verified_tokens, VERIFY_BUCKETS):
                inputs = graph_inputs(nothing, tokens)
                _, kept_inputs = self._run_verify(state, inputs, kv_length)
                self._run_advance(state, kept_inputs, inputs)
        self._is_warm = True

    def with_model(self, model: HybridForCausalLM) -> Self:
        """Implement `BoundModel.with_model`; the new runtime has compiled no graphs."""
        other = super().with_model(model)
        other._graphs, other._memories, other._is_warm = {}, [], False
        return other

    def release_graphs(self) -> None:
        """Let go of all graphs: what they hold, such as a connection of GPUs, cannot end before them."""
        self._memories.clear()
        self._graphs.clear()

    @torch.no_grad()
    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Implement `Runtime.copy`, of the whole slot: its part of a tensor is contiguous."""
        self._write_slot(state, state.slot_views(source), destination)

    def _allocate(self, num_sequences: int, length: int) -> HybridState:
        """Allocate a state, or use one again that nobody holds any more: captured graphs have its addresses.

        Raises:
            UserError: the device has no room for it.
        """
        spare = [memory for memory in self._memories if memory.user() is None]
        fitting = [memory for memory in spare if memory.shape == (num_sequences, length)][:1]
        self._memories = [memory for memory in self._memories if memory not in spare] + fitting
        if not fitting:
            try:
                state = super()._allocate(num_sequences, length)
            except torch.OutOfMemoryError:
                raise UserError(
                    f"{self.device} has no room for the state of {num_sequences:,} sequences of up to {length:,} "
                    "tokens; take fewer or shorter ones."
                ) from None
            fitting = [_Memory(state, torch.zeros(num_sequences, dtype=torch.int32, device=self.device))]
            self._memories += fitting
        return fitting[0].acquire()

    @torch.no_grad()
    def decode(self, state: HybridState, rows: Sequence[Row]) -> Decoded:
        """Implement `Runtime.decode`."""
        inputs = decode_inputs(rows, state.num_sequences)
        logits, tokens = self._run_decode(state, inputs, bucket_of_cache(rows, state))
        entries = [row.slot - 1 for row in rows]
        if self._captures:  # the outputs do not outlive the next step
            logits = logits.clone()
        if any(row.draw is not None for row in rows):
            tokens = self._run_draw(state, rows, logits, tokens)
        return DecodedOnDevice(logits, self._start_copy(tokens), entries, self._to_host)

    def _decoded(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> torch.Tensor:
        logits, _ = self._run_decode(state, inputs, kv_length)
        return self._to_host(logits)

    def _run_decode(
        self, state: HybridState, inputs: torch.Tensor, kv_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the graph of decode; return logits, and each slot's likeliest token.

        Args:
            inputs: of `decode_inputs`, on the host.
        """
        key = GraphKey(kv_length, in_order=True, chooses=True)
        logits, tokens, _ = self._execute(run_step, state, key, inputs)
        return logits, tokens

    @torch.no_grad()
    def _run_draw(
        self, state: HybridState, rows: Sequence[Row], logits: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run the graph that draws the tokens of rows that draw one; return each slot's token.

        Args:
            logits, tokens: of `_run_decode`.
        """
        memory = self._memory(state)
        inputs = draw_inputs(rows, state.num_sequences, self.config.vocab_size)

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return self._call(draw, *inputs, memory.chosen)

        if not self._captures:
            return run(self._to_device(inputs), logits, tokens)
        return self._run_captured(memory, (draw,), run, inputs, (logits, tokens), TEMPERATURE)

    def _run_prefill(self, state: HybridState, inputs: torch.Tensor, kv_length: int, all_logits: bool) -> torch.Tensor:
        key = GraphKey(kv_length, looks_up=not self._prefill_by_view, all_logits=all_logits)
        if self._captures and not all_logits:
            logits, _ = self._execute(run_step, state, key, inputs)
            return self._to_host(logits)
        slot = None if key.looks_up else int(inputs[0, SLOT])
        hidden_states, *_ = self._execute(run_layers, state, key, inputs, slot=slot)
        # Parts of one size, cut outside of the graphs: so prompts of all lengths share those of the head.
        length = max(1, int(inputs[0, LENGTH]))
        size = math.gcd(*self.prefill_buckets) if all_logits else 1
        parts = [hidden_states[0, at : at + size] for at in range(0 if all_logits else length - 1, length, size)]
        logits = torch.cat([self._to_host(self._head(part)) for part in parts])
        return logits[None] if all_logits else logits

    @torch.no_grad()
    def _head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with tensor_cores(self.device, self.model.dtype):
            return self._call(head, self.model, GraphKey(0, all_logits=True), hidden_states)

    def _run_verify(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> tuple[torch.Tensor, Tensors]:
        key = GraphKey(kv_length, in_order=True, all_logits=True, verifies=True)
        logits, kept_inputs = self._execute(run_step, state, key, inputs)
        # A verification outlives the next step, and the outputs of a captured graph do not.
        return self._to_host(logits), [kept.clone() for kept in kept_inputs] if self._captures else kept_inputs

    def _run_advance(self, state: HybridState, kept_inputs: Tensors, inputs: torch.Tensor) -> None:
        self._execute(run_advance, state, GraphKey(0, in_order=True), inputs, kept_inputs)

    def _read_slot(self, state: HybridState, slot: int) -> Mapping[str, torch.Tensor]:
        return {name: view.clone() for name, view in state.slot_views(slot).items()}

    def _write_slot(self, state: HybridState, tensors: Mapping[str, torch.Tensor], slot: int) -> None:
        for name, view in state.slot_views(slot).items():
            view.copy_(tensors[name])

    @torch.no_grad()
    def _execute(
        self,
        function: Callable[..., Any],
        state: HybridState,
        key: GraphKey,
        inputs: torch.Tensor,
        kept_inputs: Tensors = (),
        slot: int | None = None,
    ) -> Any:
        """Run `run_step`, `run_layers` or `run_advance`; with a slot, on views of its recurrent state.

        Args:
            inputs: of `graph_inputs`, on the host.
            kept_inputs: that `run_advance` takes.
        """
        memory = self._memory(state)
        chosen = memory.chosen

        def run(*inputs: torch.Tensor) -> Any:
            tensors = [*([chosen] if key.chooses else ()), *state_tensors(state, slot)]
            with tensor_cores(self.device, self.model.dtype):
                if key.in_order and self._layers_per_graph is None:
                    return self._call(function, call_inline, self.model, key, inputs, tensors)
                size = self._layers_per_graph if key.in_order and self._layers_per_graph else 1
                return function(self._call, self.model, key, inputs, tensors, size)

        if not self._captures or (key.all_logits and not key.verifies):
            # Logits of a prompt are too large to keep memory for them.
            return run(self._to_device(inputs), *kept_inputs)
        return self._run_captured(memory, (function, key), run, inputs, kept_inputs, LENGTH)

    def _memory(self, state: HybridState) -> _Memory:
        return next(memory for memory in self._memories if memory.user() is state)

    def _run_captured(
        self,
        memory: _Memory,
        what: tuple,
        run: Callable[..., Any],
        inputs: torch.Tensor,
        others: Tensors,
        column: int,
    ) -> Any:
        """Replay what `run` computes of inputs on the host and others on the device; capture it if it is new.

        Args:
            column: of the inputs; a row that has 0 there changes nothing, so that trying and capturing do no harm.
        """
        capture = (*what, inputs.shape)
        if capture not in memory.captured:
            idle = inputs.clone()
            idle[:, column] = 0
            memory.captured[capture] = CudaGraph(run, idle, others, self.device)
        return self._replay(memory.captured[capture], inputs, others)

    def _replay(self, graph: CudaGraph, inputs: torch.Tensor, kept_inputs: Tensors) -> Any:
        return graph.replay(inputs, kept_inputs)

    def _to_device(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.device)

    def _to_host(self, output: torch.Tensor) -> torch.Tensor:
        return to_host(output) if self._captures else output.cpu()

    def _start_copy(self, output: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what copies an output to the host; if the output is overwritten, the copy begins at once."""
        return start_copy(output) if self._captures else output.cpu

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function as a graph, which is compiled if there is none yet for such arguments."""
        graph = (function, *map(_kind, arguments))
        if graph not in self._graphs:
            self._graphs[graph] = self._compile(function)
        return self._graphs[graph](*arguments)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        is_new = True
        itself = weakref.ref(self)  # torch never lets go of a compiler, nor of what it holds

        def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            nonlocal is_new
            runtime = itself()
            assert runtime is not None  # it calls its graphs itself
            if runtime._is_warm or not is_new:
                raise RuntimeError(f"{function.__name__} would be compiled again, for arguments that were not foreseen")
            is_new = False
            runtime.num_compilations += 1
            compiled = runtime._compiler(graph, inputs)
            runtime._wait_for_ranks()
            return compiled

        return compile_apart(function, compiler)

    def _wait_for_ranks(self) -> None:
        """Wait until every rank has compiled a graph. One that ran it earlier would wait for the others within it, and
        a device does not wait for as long as a compiler may take.
        """
        if self.model.parallel.group is not None:
            torch.distributed.barrier()


@dataclass(eq=False)
class _Memory:
    """A state's tensors, with the CUDA graphs that have their addresses.

    chosen: [num_sequences] in int32, the token that was chosen last for each slot.
    user: the state that has them now.
    """

    state: HybridState
    chosen: torch.Tensor
    user: Callable[[], HybridState | None] = lambda: None
    captured: dict[tuple, CudaGraph] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return self.state.num_sequences, self.state.max_length

    def acquire(self) -> HybridState:
        state = copy.copy(self.state)
        self.user = weakref.ref(state)
        return state


def find_device(name: str) -> torch.device:
    """Return the device with a name, without using it: a process that has used a Neuron core keeps it until its end.

    Raises:
        UserError: there is none.
    """
    kind = kind_of_device(name)
    check_choice("device", kind, DEVICES)
    if kind == "neuron" and not hasattr(torch, "neuron"):
        raise UserError(
            "the device neuron needs the torch-neuronx of Neuron SDK 2.33 or later, which is not installed; see "
            "docs/trainium.md."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no GPU here; the device cuda needs one, and a torch that is built for it.")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _no_device(name, error) from None


def use_device(name: str) -> torch.device:
    """Return the device that tensors have which are made on the one with a name.

    Raises:
        UserError: there is none.
    """
    find_device(name)
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as error:
        raise _no_device(name, error) from None


def _no_device(name: str, error: RuntimeError) -> UserError:
    return UserError(f"there is no device {name} here ({str(error).splitlines()[0]}).")


def find_compiler(compiler: str | Compiler) -> Compiler:
    """Return the backend of torch.compile with a name.

    Raises:
        UserError: there is none.
    """
    try:
        return torch._dynamo.lookup_backend(compiler)
    except torch._dynamo.exc.InvalidBackend:
        names = ", ".join(sorted({*torch.compiler.list_backends(), "eager", "aot_eager"}))
        raise UserError(f"compiler is {compiler!r}; the backends of torch.compile here are {names}.") from None


def compile_apart(function: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    """Compile a function of a module. torch.compile keeps graphs, and tries them, by code object: this has its own."""
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(own, backend=compiler, fullgraph=True, dynamic=False)


def state_tensors(state: HybridState, slot: int | None = None) -> list[torch.Tensor]:
    """Return the state's tensors; of recurrent states views of one slot, [1, ...], if one is given."""
    if slot is None:
        return list(state.tensors())
    entry = slice(slot - 1, slot)
    return [
        tensor[entry] if isinstance(layer, MambaState) else tensor
        for layer in state.layers
        for tensor in vars(layer).values()
    ]


def run_step(
    call: Call,
    model: HybridForCausalLM,
    key: GraphKey,
    inputs: Tensors,
    tensors: Tensors,
    layers_per_graph: int = 1,
) -> tuple[torch.Tensor | list[torch.Tensor], ...]:
    """Compute `model.forward` or, with `key.verifies`, `model.verify`; arguments as of `run_layers`.

    Returns:
        Logits; with `key.chooses` each row's likeliest token, [rows] in int32; kept inputs as of `run_layers`.
    """
    hidden_states, where, kept_inputs = run_layers(call, model, key, inputs, tensors, layers_per_graph)
    if key.chooses:
        return *call(choosing_head, model, GraphKey(0), hidden_states, *where, tensors[0]), kept_inputs
    return call(head, model, GraphKey(0, all_logits=key.all_logits), hidden_states, *where), kept_inputs


def run_layers(
    call: Call,
    model: HybridForCausalLM,
    key: GraphKey,
    inputs: Tensors,
    tensors: Tensors,
    layers_per_graph: int = 1,
) -> tuple[torch.Tensor, Tensors, list[torch.Tensor]]:
    """Compute what enters the head; with `key.verifies`, as for `model.verify`.

    Args:
        call: how each of the functions below is called.
        inputs: one tensor, of `graph_inputs`; with `key.chooses` of `decode_inputs`.
        tensors: the state's, two for each layer that has one; with `key.chooses` before them the tokens chosen last,
            [rows].
        layers_per_graph: how many layers are called together.

    Returns:
        Hidden states [rows, tokens, hidden_size]; positions, lengths and slots; and with `key.verifies` each Mamba
        layer's kept inputs.
    """
    if key.chooses:
        chosen, *tensors = tensors
        inputs = *inputs, chosen
    hidden_states, positions, lengths, slots, *rotary = call(embed, model, GraphKey(0), *inputs)
    where = positions, lengths, slots
    kept_inputs: list[torch.Tensor] = []
    states = [state for _, state in _with_states(model, tensors)]
    for layers, states_of_layers in zip(
        _groups(_layers(model), layers_per_graph), _groups(states, layers_per_graph), strict=True
    ):
        arguments = layers, key, hidden_states, where, states_of_layers, rotary
        # A single layer is a graph by itself, of its own kind.
        called = run_group(call, *arguments) if layers_per_graph == 1 else call(run_group, call_inline, *arguments)
        hidden_states, kept = called
        kept_inputs += kept
    return hidden_states, where, kept_inputs


def run_group(
    call: Call,
    layers: Sequence[DecoderLayer],
    key: GraphKey,
    hidden_states: torch.Tensor,
    where: Tensors,
    states: Sequence[Tensors],
    rotary: Tensors,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute some layers; return the output of the last, and what `through_layers` keeps."""
    # Steps that differ in what a function does not need share its graph.
    mamba_key = key._replace(kv_length=0, all_logits=False, chooses=False)
    attention_key = key._replace(looks_up=False, all_logits=False, chooses=False)

    def compute(
        layer: DecoderLayer, hidden_states: torch.Tensor, state: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer.is_mamba:
            hidden_states, *kept = call(mamba_layer, layer, mamba_key, hidden_states, *where, *state)
            return hidden_states, kept[0] if kept else None
        if not layer.has_mixer:
            return call(feed_forward_layer, layer, GraphKey(0), hidden_states, *where), None
        return call(attention_layer, layer, attention_key, hidden_states, *where, *state, *rotary), None

    return through_layers(compute, layers, states, hidden_states, keep_inputs=key.verifies)


def run_advance(
    call: Call,
    model: HybridForCausalLM,
    key: GraphKey,
    inputs: Tensors,
    tensors: Tensors,
    layers_per_graph: int = 1,
) -> list[torch.Tensor]:
    """Compute `model.advance`; arguments as of `run_layers`, but for `inputs`. What it returns is of no use.

    Args:
        inputs: the tensor of `graph_inputs`; then each Mamba layer's kept inputs.
    """
    where, *kept_inputs = inputs
    mamba = [(layer, state) for layer, state in _with_states(model, tensors) if layer.is_mamba]
    arguments = [(layer, key, kept, where, *state) for (layer, state), kept in zip(mamba, kept_inputs, strict=True)]
    if layers_per_graph == 1:
        return [call(advance_layer, *each) for each in arguments]
    return [call(advance_group, group) for group in _groups(arguments, layers_per_graph)]


def advance_group(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Advance some Mamba layers' states; each has the arguments of `advance_layer`."""
    return [advance_layer(*each) for each in arguments]


Item = TypeVar("Item")


def _groups(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Return the items in groups of a size; the last one may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _layers(model: HybridForCausalLM) -> Sequence[DecoderLayer]:
    stack = model.model.stack
    assert isinstance(stack, OneByOne)  # only the operators of a CPU compute all layers in one call
    return stack.layers


def _with_states(model: HybridForCausalLM, tensors: Tensors) -> list[tuple[DecoderLayer, Tensors]]:
    """Return each layer with its tensors of the state: two, or none where it has no mixer."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(layer, next(pairs) if layer.has_mixer else ()) for layer in _layers(model)]


def embed(
    model: HybridForCausalLM, key: GraphKey, inputs: torch.Tensor, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return what enters the first layer; positions, lengths and slots; and rotary tables, if the model has them.

    Args:
        inputs: of `graph_inputs`; or of `decode_inputs`, with the tokens that were chosen last.
    """
    if chosen is not None:
        inputs = with_chosen(inputs, chosen)
    input_ids, positions, lengths, slots = unpacked(inputs)
    step = _step(key, positions, lengths, slots)
    where = positions, lengths + 0, slots + 0  # a part of an input is no output
    return model.model.embed(input_ids, step), *where, *(model.model.rotary(step) or ())


def mamba_layer(
    layer: DecoderLayer, key: GraphKey, hidden_states: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return a Mamba layer's output; and the inputs of its recurrence, if the step verifies.

    Args:
        tensors: positions, lengths, slots, conv_state and ssm_state.
    """
    *where, conv_state, ssm_state = tensors
    output, inputs = layer(hidden_states, _step(key, *where), MambaState(conv_state, ssm_state), None)
    return (output, inputs) if key.verifies else (output,)


def attention_layer(
    layer: DecoderLayer, key: GraphKey, hidden_states: torch.Tensor, *tensors: torch.Tensor
) -> torch.Tensor:
    """Return an attention layer's output.

    Args:
        tensors: positions, lengths, slots, key and value; and rotary tables, if the model has them.
    """
    where, cache, rotary = tensors[:3], tensors[3:5], tensors[5:]
    output, _ = layer(hidden_states, _step(key, *where), KeyValueState(*cache), rotary or None)
    return output


def feed_forward_layer(
    layer: DecoderLayer, key: GraphKey, hidden_states: torch.Tensor, *where: torch.Tensor
) -> torch.Tensor:
    """Return the output of a layer without a mixer; `where` are positions, lengths and slots."""
    output, _ = layer(hidden_states, _step(key, *where), NoState(), None)
    return output


def advance_layer(
    layer: DecoderLayer,
    key: GraphKey,
    kept_inputs: torch.Tensor,
    inputs: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
) -> torch.Tensor:
    """Advance a Mamba layer's state.

    Args:
        kept_inputs: of this layer.
        inputs: of `graph_inputs`.
    """
    _, *where = unpacked(inputs)
    layer.advance(kept_inputs, _step(key, *where), MambaState(conv_state, ssm_state))
    return where[1] + 0  # a graph for Neuron has to have an output


def head(model: HybridForCausalLM, key: GraphKey, hidden_states: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
    """Return the logits."""
    hidden_states = model.model.norm(hidden_states)
    return model.head(hidden_states if key.all_logits else _step(key, *where).last_tokens(hidden_states))


def choosing_head(
    model: HybridForCausalLM, key: GraphKey, hidden_states: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the likeliest tokens, which it writes to the chosen ones where a row has a token.

    Args:
        tensors: positions, lengths, slots, and the chosen tokens [rows].
    """
    *where, chosen = tensors
    logits = head(model, key, hidden_states, *where)
    tokens = likeliest(logits)
    chosen.copy_(torch.where(where[1] > 0, tokens, chosen))
    return logits, tokens


def draw(draws: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return `drawn` of the same arguments, and write it to the chosen tokens [rows] where a row draws one."""
    tokens = drawn(draws, logits, tokens)
    chosen.copy_(torch.where(draws[:, TEMPERATURE] > 0, tokens, chosen))
    return tokens


def _step(key: GraphKey, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor) -> DenseStep:
    cache_slots = slots.where(lengths > 0, NULL_SLOT)
    sequences = slots - 1 if key.looks_up else None
    options = dict(verifies=key.verifies, in_order=key.in_order)
    return DenseStep(positions, lengths, cache_slots, key.kv_length, sequences, **options)


def call_inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function as a part of a graph."""
    return function(*arguments)


def _kind(argument: Any) -> Any:
    """Return the part of a graph's argument that decides which graph it is."""
    if isinstance(argument, torch.Tensor):
        return argument.shape
    if isinstance(argument, nn.Module):
        return type(argument), getattr(argument, "kind", None)
    if isinstance(argument, GraphKey) or not isinstance(argument, Sequence):
        return argument
    return tuple(map(_kind, argument))
