"""Runs steps of the model as graphs of torch.compile, on a PyTorch device, over state that stays there.

`devices.torch.step_functions` has the functions that are compiled.
"""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from transformers import GenerationConfig

from granite4_neuron.config.choices import NO_ADAPTERS, NO_CHOICES, NO_HIDDEN_STATES
from granite4_neuron.devices.cpu import sampling
from granite4_neuron.devices.cpu.torch_device import CPU
from granite4_neuron.devices.cuda.choices import FOUND, IS_CHOSEN, ChoiceTables, reports_of
from granite4_neuron.devices.cuda.cuda_graph import CudaGraph, start_copy, tensor_cores
from granite4_neuron.devices.cuda.operators import GPU, GPU_BATCH_INVARIANT
from granite4_neuron.devices.cuda.weights import WHOLE_COLUMNS, loses_digits
from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE
from granite4_neuron.devices.graphs.operators import INPUT_FIRST, LOOPS, write_cache_as
from granite4_neuron.devices.graphs.runtime import (
    LENGTH,
    PREFILL_BUCKETS,
    SLOT,
    VERIFY_BUCKETS,
    DecodedOnDevice,
    GraphRuntime,
    Tensors,
    bucket,
    bucket_of_cache,
    buckets_up_to,
    cache_buckets,
    cache_length,
    decode_inputs,
    graph_inputs,
)
from granite4_neuron.devices.graphs.topk import draws_of
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.devices.torch.devices import Compiler, compile_apart, find_compiler, use_device
from granite4_neuron.devices.torch.options import (
    DEVICES,
    GRAPHS,
    OPTIONS,
    check_format,
    graphs_of,
    kind_of_device,
    kv_write_of,
)
from granite4_neuron.devices.torch.step_functions import (
    GraphKey,
    call_inline,
    draw,
    head,
    run_advance,
    run_layers,
    run_step,
    state_tensors,
)
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.linear import Matrix
from granite4_neuron.model.moe import StackedWeights
from granite4_neuron.ops import Operators, format_of
from granite4_neuron.ops.sampling import Choice, Logprobs
from granite4_neuron.runtime.declaration import numbers_of
from granite4_neuron.runtime.interface import Ability, Decoded, Row
from granite4_neuron.runtime.prompt_cuts import Multiples, used_buckets
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Snapshot, check_chain, views_of_positions

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

# Rows of the smallest graph of decode on a GPU: the fewest columns that its tensor cores multiply.
_FEWEST_ROWS = 8
# The longest pieces of prompts that share a graph on a GPU, and the most tokens of that graph: more tokens keep an H200
# busy by themselves.
_LONGEST_TOGETHER, _MOST_TOGETHER = 512, 2048
# A step on a GPU that is not long takes the shortest pieces of prompts with at least so many tokens, which nearly fill
# it.
_SHORT_STEP = 2048
# Tokens of a piece of a prompt on a GPU, whose kernels count the numbers of some tensors in 32 bits.
_LONGEST_PIECE = 2**15


class TorchRuntime(GraphRuntime):
    """The `Runtime` of a PyTorch device, through torch.compile. On a GPU each step is also captured as a CUDA graph.

    Args:
        model: with weights, which are copied to the device; it is not changed.
        generation_config, prefill_buckets: as `GraphRuntime` takes them; None for the device's buckets.
        device: "cpu", "cuda" or "neuron"; also with an index: "cuda:1".
        graphs: of decode, verification and commit. "layer" for one graph for each kind of layer, shared by all layers
            of that kind, one before and one after them; "model" for a single graph, which takes much longer to compile;
            a number, such as 8, for graphs of that many layers, shared by groups that have the same kinds in the same
            order. None for the device's default: "model" on neuron, "layer" elsewhere. Prompts always have a graph for
            each kind of layer, because they compute long enough between two launches.
        compiler: a backend of torch.compile, or its name; None for the device's.
        kv_write: how keys and values are written to their cache, see `devices.graphs.operators.write_cache_as`; None
            for the device's choice: "select" on neuron, where an index is one of each element, elsewhere "index".
        prefill_by_view: give prefill a view of its slot's recurrent state, and with kv_write "select" of its cache, in
            place of the slot's number; None for the device's choice. Not on a GPU: a CUDA graph has the addresses of
            its inputs.
        batch_invariant: on a GPU, decode any number of sequences with the same kernels, so that a token has the same
            bits alone, beside others and in a verification. Otherwise a state of one sequence and steps of more than 32
            have kernels of their own, which are faster and add up in another order. None for the device's default,
            which is the latter.
        state_dtype: of SSM states; None for float32. To float16 and bfloat16 they are rounded stochastically: after
            every token of decode and verification, and after every piece of a prompt. Not on neuron.
        prefill_scan, decode_kernel, experts_decode: see `devices.selection`; None for the device's own.

    Raises:
        UserError: there is no such device here, or no such choice; or batch_invariant is not for the model.
    """

    cannot: Mapping[Ability, str] = {"adapters": NO_ADAPTERS, "hidden_states": NO_HIDDEN_STATES}

    def __init__(
        self,
        model: HybridForCausalLM,
        generation_config: GenerationConfig,
        prefill_buckets: Sequence[int] | None = None,
        *,
        device: str = CPU.name,
        graphs: str | int | None = None,
        compiler: str | Compiler | None = None,
        kv_write: str | None = None,
        prefill_by_view: bool | None = None,
        batch_invariant: bool | None = None,
        state_dtype: torch.dtype | None = None,
        prefill_scan: str = "chunked",
        decode_kernel: str = "torch",
        experts_decode: str | None = None,
    ):
        graphs = graphs_of(graphs, device)
        torch_device, kind = use_device(device), kind_of_device(device)
        kv_write = kv_write_of(kv_write, device)
        if kind == "neuron" and state_dtype not in (None, torch.float32):
            raise UserError("SSM states in 16 bits are not for the device neuron of the backend torch.")
        self.state_dtype = state_dtype or torch.float32
        self._is_quantized = model.is_quantized
        _check_formats(model, device)
        if torch_device.type == "cuda":
            _check_pieces(prefill_buckets or ())
            _check_memory(model, torch_device)
        if kind == "neuron" and decode_kernel == "nki":
            experts_decode = experts_decode or "kernel"
        operators = _operators(model, kind, prefill_scan, decode_kernel, experts_decode, batch_invariant)
        operators = replace(operators, write_cache=write_cache_as(kv_write))
        self._draw, self._choose = operators.draw, operators.choose
        if self._choose is None:
            self.cannot = {**self.cannot, "choices": NO_CHOICES}
        is_rounded = self.state_dtype != torch.float32
        prefill_buckets = prefill_buckets or default_buckets(kind, is_rounded)
        super().__init__(model, operators, generation_config, prefill_buckets, torch_device)
        if batch_invariant and self.fallbacks:
            raise UserError(f"batch_invariant is not for this model: {self.fallbacks[0]}")
        # States that are rounded at each cut need the same cuts in all prompts.
        if torch_device.type == "cuda" and not (is_rounded or any(n % CHUNK_SIZE for n in self.prefill_buckets)):
            self.prompt_cuts = Multiples(CHUNK_SIZE)
            self.tokens_per_step = bucket(min(_SHORT_STEP, self.tokens_per_step), self.prefill_buckets)
        compiler = compiler or DEVICES[kind].compiler
        self._compiler = find_compiler(compiler)
        name = torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else torch_device.type
        compiler, batch_invariant = getattr(compiler, "__name__", compiler), bool(batch_invariant)
        self.numerics = "torch", name, numbers_of(OPTIONS, locals())
        self.num_compilations = 0
        self._layers_per_graph = {"layer": 1, "model": None}[graphs] if graphs in GRAPHS else int(graphs)
        self._captures = torch_device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._keeps_snapshots = DEVICES[kind].keeps_snapshots
        self._has_row_counts = DEVICES[kind].has_row_counts
        # Other scans, and sums over ranks, may add up in another order for several prompts.
        has_one_order = prefill_scan == "chunked" and model.parallel.degree == 1
        self._prompts_per_graph = DEVICES[kind].prompts_per_graph if has_one_order else 1
        if self._captures and prefill_by_view:
            raise UserError("prefill_by_view is not for a GPU: its graphs have the addresses of their inputs.")
        self._prefill_by_view = not self._captures if prefill_by_view is None else prefill_by_view
        # The other forms write padding to the null slot, which a view of a cache does not have.
        self._views_caches = self._prefill_by_view and kv_write == "select"
        self._graphs: dict[tuple, Callable[..., Any]] = {}
        self._is_warm = False
        self._memories: list[_Memory] = []

    def sequences_that_fit(self, max_length: int) -> int | None:
        """On a GPU each rank's state takes its memory when it is allocated, with a null slot of the cache."""
        if self.device.type != "cuda":
            return super().sequences_that_fit(max_length)
        free, _ = torch.cuda.mem_get_info(self.device)
        # The next state gets the memory that torch keeps, and that of states which are no longer in use.
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        spare = [memory.state for memory in self._memories if memory.user() is None]
        free += sum(each.nbytes for state in spare for each in state.tensors())
        itemsize, degree = self.dtype.itemsize, self.model.parallel.degree
        length = cache_length(max_length, self.config.max_position_embeddings)
        cache = length * token_bytes(self.config, itemsize, degree)
        state = sequence_bytes(self.config, itemsize, degree, self.state_dtype.itemsize)
        return max(0, free // 2 - cache) // (state + cache)

    def warm_up(self, state: HybridState, verified_tokens: int = 0) -> None:
        """Afterwards a step that needs another graph raises a RuntimeError. Prompts share a graph only after a call,
        because their graphs take seconds to compile.

        With graphs "model" it compiles, for a model with Mamba and attention layers:

        * for each bucket of prefill that prompts of the state's length have 3: embedding, Mamba layer, attention layer;
          and the attention layer again for each further length of the cache, because it reads all entries, but not on
          a GPU;
        * on a GPU those and a head for each bucket, also for 2 and for 4 prompts of up to `_LONGEST_TOGETHER` tokens;
        * 2 heads for all pieces, of the last token and of all, for log-probabilities of prompts;
        * decode for each length of the cache, so that a short text does not pay for a long cache; with graphs "layer" 4
          for the first length, and 1 for each further one;
        * 1 that draws sampled tokens;
        * for each bucket of verification that `verified_tokens` needs a verification for each length of the cache, and
          a commit.

        Those of decode, draws, verification and commit it compiles for each of `row_counts`.
        """
        nothing = [Row(slot, 0, []) for slot in range(1, state.num_sequences + 1)]
        self.rows_per_step = min(self._prompts_per_graph, state.num_sequences)
        # All steps share the head of all logits.
        lengths = cache_buckets(state.max_length)
        self._run_prefill(state, graph_inputs(nothing[:1], self.prefill_buckets[0]), lengths[0], all_logits=True)
        buckets = used_buckets(state.max_length, self.prefill_buckets)
        for kv_length in lengths:  # the largest graphs come first, because they reserve memory for all
            for tokens in reversed(buckets):
                for power in range(self.prompts_together(tokens).bit_length()):
                    inputs = graph_inputs(nothing[: 1 << power], tokens)
                    self._run_prefill(state, inputs, kv_length, all_logits=False)
            for count in reversed(self.row_counts(state.num_sequences)):
                rows = nothing[:count]
                decoded = self._run_decode_and_choose(state, decode_inputs(rows), kv_length)
                if self._choose:
                    self._run_choose(state, rows, *decoded[:2])
                elif self._draw:
                    self._run_draw(state, [None] * count, *decoded)
                for tokens in buckets_up_to(verified_tokens, VERIFY_BUCKETS):
                    inputs = graph_inputs(rows, tokens)
                    _, kept_inputs = self._run_verify(state, inputs, kv_length)
                    self._run_advance(state, kept_inputs, inputs)
        self._is_warm = True

    def with_model(self, model: HybridForCausalLM) -> Self:
        """The new runtime has compiled no graphs."""
        other = super().with_model(model)
        other._graphs, other._memories, other._is_warm, other.rows_per_step = {}, [], False, 1
        return other

    def release_graphs(self) -> None:
        """Release all graphs: what they hold, such as a connection between GPUs, cannot end before them."""
        self._memories.clear()
        self._graphs.clear()

    @property
    def begins_snapshots(self) -> bool:
        """On a GPU, which runs behind the host. On a CPU the first token would wait for the copy."""
        return self._captures

    @torch.no_grad()
    def snapshot(self, state: HybridState, slot: int, length: int, start: int = 0) -> Snapshot:
        """The call does not wait for the copies of a snapshot that stays on the device, nor make them if the last step
        did.
        """
        if not self._keeps_snapshots:
            return super().snapshot(state, slot, length, start)
        memory = self._memory(state)
        begun = memory.begun.pop(slot, None)
        if begun is None or begun.length != length or begun.start > start:
            return self._copy_slot(memory, slot, length, start)
        return begun.starting_at(start)

    @torch.no_grad()
    def _begin_snapshots(self, state: HybridState, rows: Sequence[Row]) -> None:
        if not self.begins_snapshots:
            return
        memory = self._memory(state)
        # Without room `snapshot` will fail, and the step must not.
        with suppress(torch.OutOfMemoryError):
            for row in rows:
                memory.begun[row.slot] = self._copy_slot(memory, row.slot, row.start + len(row.tokens), row.start)

    def _copy_slot(self, memory: _Memory, slot: int, length: int, start: int) -> Snapshot:
        views = views_of_positions(memory.slot_views(slot), start, length)
        tensors: dict[str, torch.Tensor] = {}
        for names in memory.alike:  # an allocation and a launch each
            tensors.update(zip(names, torch.stack([views[name] for name in names]).unbind(), strict=True))
        return Snapshot(start, length, tensors, self.dtype, self.fingerprint)

    @torch.no_grad()
    def restore(self, state: HybridState, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Only the snapshots' own positions are written, unless a graph writes them."""
        if not self._keeps_snapshots:
            return super().restore(state, snapshots, slot)
        check_chain(snapshots, self.dtype, self.fingerprint, state.max_length, self.state_dtype)
        memory = self._memory(state)
        memory.begun.pop(slot, None)
        slot_views = memory.slot_views(slot)
        for one in snapshots:
            views = views_of_positions(slot_views, one.start, one.length)
            for names in _alike(one.tensors):
                torch._foreach_copy_([views[name] for name in names], [one.tensors[name] for name in names])

    @torch.no_grad()
    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Copy the whole slot, because the slot's part of a tensor is contiguous."""
        self._write_slot(state, state.slot_views(source), destination)

    def _allocate(self, num_sequences: int, length: int) -> HybridState:
        """Allocate a state, or reuse one that is no longer in use, because captured graphs have its addresses.

        Raises:
            UserError: the device has no room for it.
        """
        spare = [memory for memory in self._memories if memory.user() is None]
        fitting = [memory for memory in spare if memory.shape == (num_sequences, length)][:1]
        self._memories = [memory for memory in self._memories if memory not in spare] + fitting
        if not fitting:
            try:
                state = super()._allocate(num_sequences, length)
                tables = ChoiceTables(num_sequences, self.config.vocab_size, self.device) if self._choose else None
            except torch.OutOfMemoryError:
                raise UserError(
                    f"{self.device} has no room for the state of {num_sequences:,} sequences of up to {length:,} "
                    "tokens; take fewer or shorter ones."
                ) from None
            chosen = torch.zeros(num_sequences, dtype=torch.int32, device=self.device)
            fitting = [_Memory(state, chosen, tables)]
            self._memories += fitting
        return fitting[0].acquire()

    @torch.no_grad()
    def decode(self, state: HybridState, rows: Sequence[Row]) -> Decoded:
        placed, entries = self._placed(rows, state)
        logits, tokens, slots = self._run_decode_and_choose(state, decode_inputs(placed), bucket_of_cache(rows, state))
        reported = None
        if not any(row.draw is not None for row in rows):
            chosen = self._start_copy(tokens)
        elif self._choose:
            answers = self._start_copy(self._run_choose(state, placed, logits, tokens))
            chosen, reported = partial(_tokens_of, answers), partial(_reports_of, answers, rows, entries)
        else:
            draws = [row.draw and replace(row.draw, place=row.start + 1) for row in placed]
            draw = self._run_draw if self._draw else self._draw_on_host
            chosen = self._start_copy(draw(state, draws, logits, tokens, slots))
        if self._captures:  # the outputs do not outlive the next step
            logits = logits.clone()
        return DecodedOnDevice(logits, chosen, entries, self._to_host, reported)

    @torch.no_grad()
    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        if (tables := self._memory(state).tables) is not None:
            tables.forget([row.slot for row in rows])
        return super().step(state, rows, all_logits)

    def _run_decode(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> torch.Tensor:
        logits, *_ = self._run_decode_and_choose(state, inputs, kv_length)
        return logits

    def _run_decode_and_choose(
        self, state: HybridState, inputs: torch.Tensor, kv_length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the graph of decode; return each row's logits, likeliest token and slot.

        Args:
            inputs: of `decode_inputs`, on the host.
        """
        key = self._key_of_rows(state, inputs, GraphKey(kv_length, chooses=True))
        logits, tokens, slots, _ = self._execute(run_step, state, key, inputs)
        return logits, tokens, slots

    def _key_of_rows(self, state: HybridState, inputs: torch.Tensor, key: GraphKey) -> GraphKey:
        looks_up = len(inputs) < state.num_sequences
        return key._replace(in_order=not looks_up, looks_up=looks_up)

    def row_counts(self, num_sequences: int) -> Sequence[int]:
        if not self._has_row_counts:
            return super().row_counts(num_sequences)
        counts = itertools.takewhile(
            lambda count: count < num_sequences, (_FEWEST_ROWS << n for n in itertools.count())
        )
        return [*counts, num_sequences]

    @torch.no_grad()
    def _run_draw(
        self,
        state: HybridState,
        draws: Sequence[Choice | None],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run the graph that draws tokens; return each row's token.

        Args:
            draws: of each row; None for a likeliest token.
            logits, tokens, slots: of `_run_decode_and_choose`.
        """
        memory = self._memory(state)
        inputs = self._to_device(draws_of(draws).float())
        looked_up = slots if len(slots) < state.num_sequences else None
        return self._call(draw, self._draw, inputs, logits, tokens, memory.chosen, looked_up)

    @torch.no_grad()
    def _run_choose(
        self, state: HybridState, rows: Sequence[Row], logits: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run the operator that chooses tokens by all options; return the answers of `devices.cuda.choices`.

        Args:
            rows: of the graph of decode.
            logits, tokens: of `_run_decode_and_choose`.
        """
        memory, choose = self._memory(state), self._choose
        assert choose is not None and memory.tables is not None
        tables = *memory.tables.tables, memory.chosen
        options = memory.tables.options_of(rows)
        if not self._captures:
            return choose(self._to_device(options), logits, tokens, *tables)

        def run(options: torch.Tensor) -> torch.Tensor:
            return choose(options, logits, tokens, *tables)

        # It reads the outputs of the graph of decode, which keep their addresses, without a copy.
        addresses = logits.data_ptr(), tokens.data_ptr()
        return self._run_captured(memory, (choose, *addresses), run, options, (), IS_CHOSEN)

    def _draw_on_host(
        self,
        state: HybridState,
        draws: Sequence[Choice | None],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Do the same as `_run_draw` on a CPU."""
        drawn = {row: choice for row, choice in enumerate(draws) if choice is not None and tokens[row] >= 0}
        found = sampling.form().choose([logits[row] for row in drawn], list(drawn.values()))
        tokens = tokens.clone()
        for row, each in zip(drawn, found, strict=True):
            tokens[row] = self._memory(state).chosen[slots[row] - 1] = each.token
        return tokens

    def prompts_together(self, tokens: int) -> int:
        return min(self.rows_per_step, _MOST_TOGETHER // tokens) if tokens <= _LONGEST_TOGETHER else 1

    def _run_prefill(self, state: HybridState, inputs: torch.Tensor, kv_length: int, all_logits: bool) -> torch.Tensor:
        by_view, in_order = self._prefill_by_view, self._views_caches
        if self._captures:  # a GPU's kernel reads only what each token sees: one graph for all lengths
            kv_length = state.max_length
        key = GraphKey(kv_length, in_order=in_order, looks_up=not by_view, all_logits=all_logits)
        if self._captures and not all_logits:
            logits, _ = self._execute(run_step, state, key, inputs)
            return logits
        slot = int(inputs[0, SLOT]) if by_view else None
        if in_order:
            inputs = inputs.clone()
            inputs[0, SLOT] = 1  # the only one of the views
        hidden_states, *_ = self._execute(run_layers, state, key, inputs, slot=slot)
        # Parts of one size, cut outside of the graphs, so that prompts of all lengths share the graph of the head.
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
        key = self._key_of_rows(state, inputs, GraphKey(kv_length, all_logits=True, verifies=True))
        logits, kept_inputs = self._execute(run_step, state, key, inputs)
        # A verification outlives the next step, and the outputs of a captured graph do not.
        return self._to_host(logits), [kept.clone() for kept in kept_inputs] if self._captures else kept_inputs

    def _run_advance(self, state: HybridState, kept_inputs: Tensors, inputs: torch.Tensor) -> None:
        self._execute(run_advance, state, self._key_of_rows(state, inputs, GraphKey(0)), inputs, kept_inputs)

    def _read_slot(self, state: HybridState, slot: int) -> Mapping[str, torch.Tensor]:
        return {name: view.clone() for name, view in state.slot_views(slot).items()}

    def _write_slot(self, state: HybridState, tensors: Mapping[str, torch.Tensor], slot: int) -> None:
        self._memory(state).begun.pop(slot, None)
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
        """Run `run_step`, `run_layers` or `run_advance`; with a slot, on views of its state.

        Args:
            inputs: of `graph_inputs`, on the host.
            kept_inputs: for `run_advance`.
        """
        memory = self._memory(state)
        memory.begun.clear()
        chosen = memory.chosen
        joins_layers = key.chooses or key.verifies or function is run_advance  # a prompt's graphs are of single layers

        def run(*inputs: torch.Tensor) -> Any:
            tensors = [*([chosen] if key.chooses else ()), *state_tensors(state, slot, self._views_caches)]
            with tensor_cores(self.device, self.model.dtype):
                if joins_layers and self._layers_per_graph is None:
                    return self._call(function, call_inline, self.model, key, inputs, tensors)
                size = self._layers_per_graph if joins_layers and self._layers_per_graph else 1
                return function(self._call, self.model, key, inputs, tensors, size)

        if not self._captures or (key.all_logits and not key.verifies):
            # Not captured: a prompt's logits are too large to keep memory for them.
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
        """Replay `run` with inputs on the host and others on the device; capture it first if it is new.

        Args:
            column: of the inputs; a row with 0 there changes nothing, so that capturing does no harm.
        """
        capture = (*what, inputs.shape)
        if capture not in memory.captured:
            idle = inputs.clone()
            idle[:, column] = 0
            memory.captured[capture] = CudaGraph(run, idle, others, self.device, self._pool)
        return self._replay(memory.captured[capture], inputs, others)

    def _replay(self, graph: CudaGraph, inputs: torch.Tensor, kept_inputs: Tensors) -> Any:
        return graph.replay(inputs, kept_inputs)

    def _to_device(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.device)

    def _to_host(self, output: torch.Tensor) -> torch.Tensor:
        return self._start_copy(output)()

    def _start_copy(self, output: torch.Tensor) -> Callable[[], torch.Tensor]:
        return start_copy(output) if self._captures else output.cpu

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function as a graph, which is compiled if there is none yet for such arguments."""
        graph = (function, *map(_kind, arguments))
        if self._is_quantized:
            graph += _formats(arguments)
        if graph not in self._graphs:
            self._graphs[graph] = self._compile(function)
        return self._graphs[graph](*arguments)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        is_new = True
        itself = weakref.ref(self)  # torch never frees a compiler, nor what it holds

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
        """Wait until every rank has compiled a graph. A rank that ran it earlier would wait within it for the others,
        and a device does not wait as long as a compiler may take.
        """
        if self.model.parallel.group is not None:
            torch.distributed.barrier()


@dataclass(eq=False)
class _Memory:
    """A state's tensors, with the CUDA graphs that have their addresses.

    chosen: [num_sequences] in int32, the token that was last chosen for each slot.
    tables: of how tokens are chosen, if the device does that.
    user: returns the state that has the tensors now, or None.
    begun: by slot, snapshots that the last call made, if it was a step.
    """

    state: HybridState
    chosen: torch.Tensor
    tables: ChoiceTables | None
    user: Callable[[], HybridState | None] = lambda: None
    captured: dict[tuple, CudaGraph] = field(default_factory=dict)
    views: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)  # `slot_views` by slot
    begun: dict[int, Snapshot] = field(default_factory=dict)

    def slot_views(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return the state's `slot_views`, which are made once."""
        if slot not in self.views:
            self.views[slot] = self.state.slot_views(slot)
        return self.views[slot]

    @cached_property
    def alike(self) -> Sequence[Sequence[str]]:
        """The names of those that are alike."""
        return _alike(self.slot_views(1))

    @property
    def shape(self) -> tuple[int, int]:
        return self.state.num_sequences, self.state.max_length

    def acquire(self) -> HybridState:
        self.begun.clear()
        state = copy.copy(self.state)
        self.user = weakref.ref(state)
        return state


def _tokens_of(answers: Callable[[], torch.Tensor]) -> torch.Tensor:
    return answers()[:, FOUND]


def _reports_of(
    answers: Callable[[], torch.Tensor], rows: Sequence[Row], entries: Sequence[int]
) -> Sequence[Logprobs | None]:
    nums = [None if row.draw is None else row.draw.num_logprobs for row in rows]
    return reports_of(answers()[list(entries)], nums) if any(num is not None for num in nums) else [None] * len(rows)


def _alike(tensors: Mapping[str, torch.Tensor]) -> Sequence[Sequence[str]]:
    """Return the names of tensors in groups of the same device, dtype, shape and strides, which few launches copy."""
    groups: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype, tensor.shape, tensor.stride()), []).append(name)
    return list(groups.values())


def _operators(
    model: HybridForCausalLM,
    device: str,
    prefill_scan: str,
    decode_kernel: str,
    experts_decode: str | None,
    batch_invariant: bool | None,
) -> Operators:
    """Return the operators for a model on a kind of device; choices as for `TorchRuntime`."""
    is_gpu, degree = device == "cuda", model.parallel.degree
    if is_gpu and experts_decode is not None:
        raise UserError(
            f"experts_decode is {experts_decode}; on a GPU a Triton kernel reads the chosen experts, and nothing "
            "else is to be chosen."
        )
    if not is_gpu and batch_invariant is not None:
        raise UserError("batch_invariant is for a GPU, whose kernels for one sequence are others than for several.")
    gpu = GPU_BATCH_INVARIANT if batch_invariant else GPU
    base = {"cpu": LOOPS, "cuda": gpu, "neuron": INPUT_FIRST}[device]
    return select_operators(base, model.config, degree, prefill_scan, decode_kernel, experts_decode)


def _check_formats(model: HybridForCausalLM, device: str) -> None:
    """Check that a device has kernels for a model's quantized weights; raise UserError if not."""
    for name, matrix in model.matrices().items():
        weight = matrix.weight
        if (format := format_of(weight)) is not None:
            check_format(format.name, device)
            if (columns := weight.shape[-1]) % WHOLE_COLUMNS:
                raise UserError(
                    f"{name} has {columns} columns; in {format.name} a GPU takes multiples of {WHOLE_COLUMNS}."
                )
            if isinstance(matrix, StackedWeights) and model.dtype == torch.bfloat16 and loses_digits(weight):
                raise UserError(
                    f"{name} has scales below 2^-61 or above 2^63, with which experts in {format.name} lose digits in "
                    "bfloat16 on a GPU; --dtype float32 keeps them."
                )


def default_buckets(kind: str, is_rounded: bool) -> list[int]:
    """Return the buckets of prompts on a kind of device.

    Args:
        is_rounded: whether states are rounded at each cut. Then prompts have no other cuts, and a prefix cache would
            find little of those that have longer pieces than `_SHORT_STEP`.
    """
    long = [tokens for tokens in DEVICES[kind].long_prompts if tokens <= _SHORT_STEP or not is_rounded]
    return [*PREFILL_BUCKETS, *long]


def _check_pieces(buckets: Sequence[int]) -> None:
    """Check that a GPU has kernels for pieces of these sizes; raise UserError if not."""
    if buckets and (longest := max(buckets)) > _LONGEST_PIECE:
        raise UserError(
            f"prefill_buckets has {longest:,}; on a GPU a piece of a prompt has at most {_LONGEST_PIECE:,} tokens."
        )


def _check_memory(model: HybridForCausalLM, device: torch.device) -> None:
    """Check that a GPU has room for a model's weights; raise UserError if not."""
    weights = [weight for _, weight in model.named_weights()]
    needed = sum(each.nbytes if isinstance(each, torch.Tensor) else each.num_bytes for each in weights)
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise UserError(
            f"the weights need {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB free; --quantize int8 "
            "takes half of bfloat16, int4 a third, and --tp-degree splits a model that is not quantized over GPUs."
        )


def _formats(argument: Any) -> Any:
    """Return the formats of the matrices of an argument, which decide which graph takes it too."""
    if isinstance(argument, nn.Module):
        return tuple(format_of(each.weight) for each in argument.modules() if isinstance(each, Matrix))
    return tuple(map(_formats, argument)) if isinstance(argument, list | tuple) else None


def _kind(argument: Any) -> Any:
    """Return the part of an argument that decides which graph takes it."""
    if isinstance(argument, torch.Tensor):
        return argument.shape
    if isinstance(argument, nn.Module):
        return type(argument), getattr(argument, "kind", None)
    if isinstance(argument, GraphKey) or not isinstance(argument, Sequence):
        return argument
    return tuple(map(_kind, argument))
