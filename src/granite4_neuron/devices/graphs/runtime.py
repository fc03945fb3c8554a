"""The common part of runtimes of compiled graphs: which graphs there are, and which of them a step takes.

The set of graphs is fixed: one for each length bucket of prefill, one for decode, and one for verification and one for
commit for each of their length buckets; each of these for every bucket of the cache's length. Prefill takes one
sequence, or several pieces of one bucket where a device has graphs for those (`GraphRuntime.prompts_together`). The
other graphs take all sequences in the order of their slots, or fewer in any order, where a device has graphs for those
(`GraphRuntime.row_counts`). A sequence without a row keeps its state. State stays on the device, and each graph updates
it in place.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from transformers import GenerationConfig

from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.ops import Operators
from granite4_neuron.ops.sampling import Logprobs
from granite4_neuron.runtime.bound_model import BoundModel, digest_of_weights
from granite4_neuron.runtime.interface import (
    FROM_DEVICE,
    MOST_STOPS,
    Row,
    StepInputs,
    Verification,
    accepted_rows,
    check_verification,
)
from granite4_neuron.runtime.prompt_cuts import Pieces, PromptCuts, pieces
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Snapshot, check_chain, cut_keys_and_values, padded_keys_and_values

# Graphs of more tokens have activations that do not fit into a Neuron core's SBUF: see `planning.analysis.live_set`.
PREFILL_BUCKETS = (128, 512)
VERIFY_BUCKETS = (4, 8, 16)
SHORTEST_CACHE = 1024
# The columns of a step's inputs: each row's start, its number of tokens, its slot, and then its tokens; in decode its
# token and its stops.
START, LENGTH, SLOT, TOKENS = range(4)

_NO_STOPS = [FROM_DEVICE] * MOST_STOPS

Tensors = Sequence[torch.Tensor]
_Pending = Callable[[], torch.Tensor]  # waits for an output of a graph, and returns it on the host
_Output = tuple[Sequence[int], _Pending]  # rows' numbers in a step, ascending, and their logits


class DecodedOnDevice(NamedTuple):
    """The `Decoded` of a device.

    by_entry: the logits of each row of the graph, [entries, vocab_size], on the device or the host.
    chosen: waits for the token of each row of the graph and returns them, [entries].
    entries: each row's entry in both.
    to_host: copies a tensor to the host.
    reported: returns the rows' reports; None if there are none.
    """

    by_entry: torch.Tensor
    chosen: Callable[[], torch.Tensor]
    entries: Sequence[int]
    to_host: Callable[[torch.Tensor], torch.Tensor]
    reported: Callable[[], Sequence[Logprobs | None]] | None = None

    def tokens(self) -> Sequence[int]:
        chosen = self.chosen().tolist()
        return [chosen[entry] for entry in self.entries]

    def reports(self) -> Sequence[Logprobs | None]:
        return [None] * len(self.entries) if self.reported is None else self.reported()

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """A single row is copied alone."""
        entries = [self.entries[row] for row in rows]
        if len(entries) == 1:
            return self.to_host(self.by_entry[entries[0]])[None]
        return entries_of(self.to_host(self.by_entry), entries)


class GraphRuntime(BoundModel, ABC):
    """The `Runtime` of a device that runs compiled graphs. Subclasses say how a graph is compiled and run.

    Args:
        model: with weights, which are copied to the device; it is not changed.
        operators: that the model is bound to.
        generation_config: the checkpoint's defaults for generation.
        prefill_buckets: numbers of tokens that prefill graphs take; a prompt is cut into pieces for them, see `pieces`.
    """

    rows_per_step = 1
    tokens_per_verification = VERIFY_BUCKETS[-1]
    state_dtype = torch.float32

    def __init__(
        self,
        model: HybridForCausalLM,
        operators: Operators,
        generation_config: GenerationConfig,
        prefill_buckets: Sequence[int],
        device: torch.device,
    ):
        self.device = device
        if device.type == "cpu":
            self.model = model.bind(operators, device)
            self.weights_digest = partial(digest_of_weights, self.model)
        else:
            # Hash the weights while they are copied: reading them back from a device takes as long as loading them.
            with ThreadPoolExecutor(1) as pool:
                digest = pool.submit(digest_of_weights, model)
                self.model = model.bind(operators, device)
            self.weights_digest = digest.result
        self.generation_config = generation_config
        self.prefill_buckets = sorted(set(prefill_buckets))
        self.prompt_cuts: PromptCuts = Pieces(tuple(self.prefill_buckets))
        self.tokens_per_step = self.prefill_buckets[-1]

    @property
    def tokens_per_long_step(self) -> int:
        return self.prefill_buckets[-1]

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """Allocate on the device. The cache's length is rounded up to a bucket, so that states of different lengths
        share their graphs.
        """
        return self._allocate(num_sequences, cache_length(max_length, self.config.max_position_embeddings))

    def _allocate(self, num_sequences: int, length: int) -> HybridState:
        dtype, degree = self.model.dtype, self.model.parallel.degree
        return HybridState.allocate(
            self.config,
            num_sequences,
            length,
            dtype,
            self.device,
            degree,
            kernel_layout=self.model.kernel_layout,
            has_null_slot=False,
            state_dtype=self.state_dtype,
        )

    @torch.no_grad()
    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Rows with one further token are decoded together; others are prefilled.

        The first token of a sequence is always prefilled, because the decode graph cannot start from zeros. The last
        token of a prompt is prefilled too, so that its numbers do not depend on where the prompt was cut before it.
        """
        decoding = [row for row in rows if _is_decode(row)]
        if len(decoding) == len(rows):
            decoded = self._launch_decode(state, rows)()
            return decoded[:, None] if all_logits else decoded  # not copied: logits are large
        if all_logits:
            of_decoding = iter(self._launch_decode(state, decoding)()[:, None] if decoding else ())
            logits = [next(of_decoding) if _is_decode(row) else self._all_logits(state, row) for row in rows]
            return torch.nn.utils.rnn.pad_sequence(logits, batch_first=True)
        numbers = [number for number, row in enumerate(rows) if _is_decode(row)]
        outputs: list[_Output] = [(numbers, self._launch_decode(state, decoding))] if decoding else []
        prompts = {number: row for number, row in enumerate(rows) if not _is_decode(row)}
        outputs += self._launch_prefill(state, prompts)
        self._begin_snapshots(state, [row for row in prompts.values() if row.is_kept])
        return _joined(outputs, len(rows))

    @torch.no_grad()
    def verify(self, state: HybridState, rows: Sequence[Row]) -> Verification:
        """One graph is for all rows; the kept inputs stay on the device."""
        check_verification(self, rows)
        longest = max(len(row.tokens) for row in rows)
        placed, entries = self._placed(rows, state)
        inputs = graph_inputs(placed, bucket(longest, VERIFY_BUCKETS))
        by_entry, kept_inputs = self._run_verify(state, inputs, bucket_of_cache(rows, state))
        logits = entries_of(by_entry.cpu(), entries)[:, :longest]
        return Verification(rows, logits, kept_inputs)

    @torch.no_grad()
    def commit(self, state: HybridState, verification: Verification, accepted: Sequence[int]) -> None:
        """Nothing passes through the host."""
        tokens = bucket(max(len(row.tokens) for row in verification.rows), VERIFY_BUCKETS)
        placed, _ = self._placed(accepted_rows(verification.rows, accepted), state)
        self._run_advance(state, verification.kept_inputs, graph_inputs(placed, tokens))

    @abstractmethod
    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Copy the whole slot; nothing passes through the host."""

    @torch.no_grad()
    def snapshot(self, state: HybridState, slot: int, length: int, start: int = 0) -> Snapshot:
        """The snapshot is in the host's memory."""
        tensors = {name: tensor.cpu() for name, tensor in self._read_slot(state, slot).items()}
        return Snapshot(start, length, cut_keys_and_values(tensors, start, length), self.dtype, self.fingerprint)

    @torch.no_grad()
    def restore(self, state: HybridState, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Keys and values are padded to the state's length, so that one graph suffices."""
        check_chain(snapshots, self.dtype, self.fingerprint, state.max_length, self.state_dtype)
        tensors = padded_keys_and_values(snapshots, state.max_length)
        self._write_slot(state, {name: tensor.to(self.device) for name, tensor in tensors.items()}, slot)

    @abstractmethod
    def _run_prefill(self, state: HybridState, inputs: torch.Tensor, kv_length: int, all_logits: bool) -> torch.Tensor:
        """Run a graph of the model for a piece of each of some prompts, with all logits of one; return its logits, on
        the device or the host.

        Its shapes depend only on the numbers of prompts and tokens and on the cache's bucket.

        Args:
            inputs: of `graph_inputs`, on the host.
        """

    @abstractmethod
    def _run_decode(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> torch.Tensor:
        """Run a graph of the model for one token of each row; return its logits, on the device or the host.

        Args:
            inputs: of `decode_inputs`, on the host.
        """

    @abstractmethod
    def _run_verify(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> tuple[torch.Tensor, Tensors]:
        """Run a graph of a step that verifies; return its logits, on the device or the host, and the kept inputs."""

    @abstractmethod
    def _run_advance(self, state: HybridState, kept_inputs: Tensors, inputs: torch.Tensor) -> None:
        """Run a graph of `model.advance`; `inputs` are those of `graph_inputs`."""

    @abstractmethod
    def _read_slot(self, state: HybridState, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of a slot's tensors, by the names of `HybridState.slot_tensors`."""

    @abstractmethod
    def _write_slot(self, state: HybridState, tensors: Mapping[str, torch.Tensor], slot: int) -> None:
        """Write tensors from `_read_slot` to a slot."""

    def row_counts(self, num_sequences: int) -> Sequence[int]:
        """Return how many rows graphs of decode, verification and commit have for a state of so many sequences:
        ascending numbers, the last one is all of them. Graphs for fewer rows look up each row's slot.
        """
        return (num_sequences,)

    def _placed(self, rows: Sequence[Row], state: HybridState) -> tuple[list[Row], Sequence[int]]:
        """Return the rows of the graph for a step with these rows, and the entry of each row among them. The graph's
        other rows have no tokens, and slots of their own.
        """
        num_sequences = state.num_sequences
        count = bucket(len(rows), self.row_counts(num_sequences))
        if count == num_sequences:
            return in_slot_order(rows, num_sequences), [row.slot - 1 for row in rows]
        taken = {row.slot for row in rows}
        free = (slot for slot in range(1, num_sequences + 1) if slot not in taken)
        idle = [Row(slot, 0, []) for slot in itertools.islice(free, count - len(rows))]
        return [*rows, *idle], range(len(rows))

    def _start_copy(self, output: torch.Tensor) -> _Pending:
        """Return a function that copies an output to the host. If the output will be overwritten, the copy begins at
        once.
        """
        return output.cpu

    def _launch_decode(self, state: HybridState, rows: Sequence[Row]) -> _Pending:
        """Decode one token of each row to logits [rows, vocab_size]. Slots without a row keep their state."""
        placed, entries = self._placed(rows, state)
        logits = self._start_copy(self._run_decode(state, decode_inputs(placed), bucket_of_cache(rows, state)))
        return lambda: entries_of(logits(), entries)

    def prompts_together(self, tokens: int) -> int:
        """Return the most prompts that a graph takes with a piece of so many tokens, a bucket, of each."""
        return 1

    def _launch_prefill(self, state: HybridState, rows: Mapping[int, Row]) -> list[_Output]:
        """Prefill rows, by their numbers, in pieces. The first pieces of all rows run before the second ones, and so
        on; of these, pieces of one bucket run together. No piece waits until the host has the logits of another.
        """
        outputs: list[_Output] = []
        for together in itertools.zip_longest(*(_pieces_of(row, self.prefill_buckets) for row in rows.values())):
            numbered = {number: piece for number, piece in zip(rows, together, strict=True) if piece is not None}
            for tokens in self.prefill_buckets:
                in_bucket = [number for number, (size, _) in numbered.items() if size == tokens]
                for numbers in _groups(in_bucket, self.prompts_together(tokens)):
                    group = [numbered[number][1] for number in numbers]
                    logits = self._run_prefill(state, graph_inputs(group, tokens), bucket_of_cache(group, state), False)
                    outputs.append((numbers, self._start_copy(logits)))
        return outputs

    def _begin_snapshots(self, state: HybridState, rows: Sequence[Row]) -> None:
        """Begin to copy the states after these rows of a step, which has been launched; a device may do nothing."""

    def _all_logits(self, state: HybridState, row: Row) -> torch.Tensor:
        """Prefill a row's tokens in pieces; return the logits of each token, [tokens, vocab_size]."""
        logits = []
        for tokens, piece in _pieces_of(row, self.prefill_buckets):
            inputs = graph_inputs([piece], tokens)
            output = self._run_prefill(state, inputs, bucket_of_cache([piece], state), True).cpu()
            logits.append(output[0, : len(piece.tokens)])
        return torch.cat(logits)


def _pieces_of(row: Row, buckets: Sequence[int]) -> Iterator[tuple[int, Row]]:
    """Yield the pieces of a prompt's row, each after its bucket."""
    start = 0
    for tokens in pieces(len(row.tokens), buckets):
        yield tokens, Row(row.slot, row.start + start, row.tokens[start : start + tokens])
        start += tokens


def _groups(numbers: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Yield numbers in groups of up to `most`. Their sizes are powers of two, so that there are few graphs."""
    while numbers:
        size = 1 << min(len(numbers), most).bit_length() - 1
        yield numbers[:size]
        numbers = numbers[size:]


def _joined(outputs: Sequence[_Output], rows: int) -> torch.Tensor:
    """Wait for outputs; return the last logits of each row, [rows, vocab_size]. Those of one graph with all rows are
    not copied.
    """
    numbers, pending = outputs[-1]
    if len(numbers) == rows:
        return pending()
    on_host = [(numbers, pending()) for numbers, pending in outputs]
    logits = torch.empty(rows, on_host[-1][1].shape[1])
    for numbers, output in on_host:
        # Not by torch, whose threads would first have to wake: it took 4.6 ms beside a GPU.
        logits.numpy()[numbers] = output.numpy()
    return logits


def cache_buckets(max_length: int) -> list[int]:
    """Return the cache lengths of the graphs: powers of four times the shortest, up to one that holds max_length."""
    buckets = [min(SHORTEST_CACHE, max_length)]
    while buckets[-1] < max_length:
        buckets.append(min(4 * buckets[-1], max_length))
    return buckets


def cache_length(max_length: int, longest: int) -> int:
    """Return the length of a state's cache for max_length tokens, if the model takes sequences of up to `longest`."""
    return bucket(max_length, cache_buckets(max(max_length, longest)))


def bucket(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest of ascending buckets that holds `length`."""
    return buckets[bisect.bisect_left(buckets, length)]


def buckets_up_to(length: int, buckets: Sequence[int]) -> Sequence[int]:
    """Return the ascending buckets for lengths from 1 to `length`; none for 0."""
    return buckets[: bisect.bisect_left(buckets, length) + 1] if length else ()


def graph_inputs(rows: Sequence[Row], tokens: int) -> torch.Tensor:
    """Return a step's inputs as one tensor, [rows, 3 + tokens], so that one transfer copies them to the device.

    Its columns are `START`, `LENGTH`, `SLOT`, and from `TOKENS` on the tokens, padded on the right. It is int32,
    because devices have no 64-bit indices, or slow ones.
    """
    padded = [[*row.tokens, *[0] * (tokens - len(row.tokens))] for row in rows]
    values = [[row.start, len(row.tokens), row.slot, *ids] for row, ids in zip(rows, padded, strict=True)]
    return torch.tensor(values, dtype=torch.int32)


def decode_inputs(rows: Sequence[Row]) -> torch.Tensor:
    """Return a tensor like that of `graph_inputs`, with each row's stops after its token: [rows, 4 + `MOST_STOPS`]."""
    values = [
        [row.start, len(row.tokens), row.slot, *(row.tokens or [0]), *row.stops, *_NO_STOPS[len(row.stops) :]]
        for row in rows
    ]
    return torch.tensor(values, dtype=torch.int32)


def with_chosen(inputs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return `decode_inputs` as `graph_inputs` of one token, with the chosen tokens [rows] filled in. A row whose
    chosen token is one of its stops gets length 0.
    """
    given, stops = inputs[:, TOKENS], inputs[:, TOKENS + 1 :]
    is_chosen = given < 0
    tokens = torch.where(is_chosen, chosen, given)
    is_stop = (tokens[:, None] == stops).float().amax(-1) > 0
    lengths = torch.where(is_chosen & ((tokens < 0) | is_stop), 0, inputs[:, LENGTH])
    return torch.stack([inputs[:, START], lengths, inputs[:, SLOT], tokens.clamp(min=0)], 1)


def unpacked(inputs: torch.Tensor) -> StepInputs:
    """Split `graph_inputs` into the tensors of `interface.step_inputs`; within a graph, on the device."""
    input_ids, start = inputs[:, TOKENS:], inputs[:, START : START + 1]
    positions = start + torch.arange(input_ids.shape[1], dtype=inputs.dtype, device=inputs.device)
    return input_ids, positions, inputs[:, LENGTH], inputs[:, SLOT]


def _is_decode(row: Row) -> bool:
    return row.start > 0 and len(row.tokens) == 1 and not row.is_prompt


def in_slot_order(rows: Sequence[Row], num_sequences: int) -> list[Row]:
    """Return a row for every slot; a slot without a row gets one without tokens."""
    by_slot = {row.slot: row for row in rows}
    return [by_slot.get(slot, Row(slot, 0, [])) for slot in range(1, num_sequences + 1)]


def entries_of(by_entry: torch.Tensor, entries: Sequence[int]) -> torch.Tensor:
    """Return some entries of a tensor. If they are its first ones, they are not copied, because logits are large."""
    return by_entry[: len(entries)] if list(entries) == list(range(len(entries))) else by_entry[list(entries)]


def bucket_of_cache(rows: Sequence[Row], state: HybridState) -> int:
    """Return the length of cache that a step with these rows visits."""
    return bucket(max(row.start + len(row.tokens) for row in rows), cache_buckets(state.max_length))
