"""Runs steps of the model as compiled XLA graphs, over state that stays on the device.

The set of graphs is fixed: one for each length bucket of prefill and one for decode, each for every bucket of the
cache's length. All use the same state buffers: a step's new state takes the memory of the old one
(`HybridState.input_output_aliases`), and none of it passes through the host. Prefill looks up its one sequence in the
state. Decode takes all sequences in the order of their slots and advances their recurrent state in place.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import torch
from transformers import GenerationConfig

from granite4_neuron.errors import UserError
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.snapshot import (
    Snapshot,
    check_chain,
    cut_keys_and_values,
    fingerprint,
    padded_keys_and_values,
)
from granite4_neuron.model.state import HybridState
from granite4_neuron.ops import select_operators
from granite4_neuron.ops.xla import XLA
from granite4_neuron.runtime.bound_model import BoundModel
from granite4_neuron.runtime.interface import (
    Ability,
    Row,
    Verification,
    accepted_rows,
    check_verification,
    step_inputs,
)

try:
    import torch_xla
except ImportError:
    torch_xla = None

PREFILL_BUCKETS = (128, 512, 2048)
VERIFY_BUCKETS = (4, 8, 16)
SHORTEST_CACHE = 1024


class XLARuntime(BoundModel):
    """The `Runtime` of an XLA device.

    Args:
        model: with weights, which are copied to the device; it is not changed.
        generation_config: the checkpoint's defaults for generation.
        prefill_buckets: numbers of tokens that prefill graphs take; a shorter piece of a prompt is padded to the next
            one, a longer one is cut.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `ops.select_operators`.

    Raises:
        UserError: torch_xla is not installed, or the Mamba kernels cannot run.
    """

    # A prefill graph takes one sequence: a second one would double the graphs for little.
    rows_per_step = 1
    tokens_per_verification = VERIFY_BUCKETS[-1]
    state_dtype = torch.float32
    cannot: Mapping[Ability, str] = {}

    def __init__(
        self,
        model: GraniteMoeHybridForCausalLM,
        generation_config: GenerationConfig,
        prefill_buckets: Sequence[int] = PREFILL_BUCKETS,
        *,
        prefill_scan: str = "chunked",
        decode_kernel: str = "torch",
    ):
        if torch_xla is None:
            raise UserError("the xla backend needs torch_xla; install the release that goes with torch.")
        self.device = torch_xla.device()
        operators = select_operators(XLA, model.config, model.parallel.degree, prefill_scan, decode_kernel)
        self.model = model.bind(operators, self.device)
        self.fingerprint = fingerprint(model.named_weights(), model.dtype, model.config, self.model.kernel_layout)
        self.generation_config = generation_config
        self.prefill_buckets = sorted(prefill_buckets)
        torch_xla.sync()

    @property
    def tokens_per_step(self) -> int:
        return self.prefill_buckets[-1]

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """Implement `Runtime.allocate`, on the device. The cache's length is rounded up to a bucket, so that states of
        different lengths share their graphs.
        """
        dtype, degree = self.model.dtype, self.model.parallel.degree
        length = _bucket(max_length, cache_buckets(max(max_length, self.config.max_position_embeddings)))
        layout = dict(kernel_layout=self.model.kernel_layout, has_null_slot=False)
        state = HybridState.allocate(self.config, num_sequences, length, dtype, self.device, degree, **layout)
        torch_xla.sync()
        return state

    @torch.no_grad()
    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Implement `Runtime.step`. Rows with one further token are decoded together; others are prefilled one by one.

        The first token of a sequence is always a prefill: the decode graph cannot start from zeros.
        """
        decoded = self._decode(state, [row for row in rows if _is_decode(row)])
        logits = [decoded[row.slot] if row.slot in decoded else self._prefill(state, row, all_logits) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(logits, batch_first=True) if all_logits else torch.cat(logits)

    @torch.no_grad()
    def verify(self, state: HybridState, rows: Sequence[Row]) -> Verification:
        """Implement `Runtime.verify`, in one graph for all sequences; the kept inputs stay on the device."""
        check_verification(self, rows)
        longest = max(len(row.tokens) for row in rows)
        *inputs, _ = step_inputs(_in_slot_order(rows, state.num_sequences), _bucket(longest, VERIFY_BUCKETS))
        inputs = [tensor.to(self.device) for tensor in inputs]
        by_slot, kept_inputs = self.model.verify(*inputs, None, state, kv_length=_kv_length(rows, state))
        _run_graph([by_slot, *state.input_output_aliases(first=1), *kept_inputs])
        by_slot = by_slot.cpu()
        logits = torch.stack([by_slot[row.slot - 1, :longest] for row in rows])
        return Verification(rows, logits, kept_inputs)

    @torch.no_grad()
    def commit(self, state: HybridState, verification: Verification, accepted: Sequence[int]) -> None:
        """Implement `Runtime.commit`; the state is donated, and nothing passes through the host."""
        bucket = _bucket(max(len(row.tokens) for row in verification.rows), VERIFY_BUCKETS)
        rows = _in_slot_order(accepted_rows(verification.rows, accepted), state.num_sequences)
        _, positions, lengths, _ = (tensor.to(self.device) for tensor in step_inputs(rows, bucket))
        self.model.advance(verification.kept_inputs, positions, lengths, None, state)
        _run_graph(list(state.input_output_aliases(first=0)))

    @torch.no_grad()
    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Implement `Runtime.copy`, of the whole slot, in a graph of its own; nothing passes through the host."""
        state.copy(self._slot(source), self._slot(destination), state.max_length)
        _run_graph(list(state.input_output_aliases(first=0)))

    @torch.no_grad()
    def snapshot(self, state: HybridState, slot: int, length: int, start: int = 0) -> Snapshot:
        """Implement `Runtime.snapshot`, in the host's memory."""
        tensors = state.slot_tensors(self._slot(slot), 0, state.max_length)
        _run_graph(list(tensors.values()))
        tensors = cut_keys_and_values({name: tensor.cpu() for name, tensor in tensors.items()}, start, length)
        return Snapshot(start, length, tensors, self.dtype, self.fingerprint)

    @torch.no_grad()
    def restore(self, state: HybridState, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Implement `Runtime.restore`. Keys and values are padded to the state's length, so that one graph suffices."""
        check_chain(snapshots, self.dtype, self.fingerprint, state.max_length)
        tensors = padded_keys_and_values(snapshots, state.max_length)
        on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        state.set_slot_tensors(on_device, self._slot(slot), 0, state.max_length)
        _run_graph(list(state.input_output_aliases(first=0)))

    def _decode(self, state: HybridState, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
        """Decode one token of each row: logits [1, vocab_size] by slot. Slots without a row keep their state."""
        if not rows:
            return {}
        *inputs, _ = step_inputs(_in_slot_order(rows, state.num_sequences), 1)
        logits = self._run(state, [*inputs, None], _kv_length(rows, state))
        return {row.slot: logits[row.slot - 1 : row.slot] for row in rows}

    def _prefill(self, state: HybridState, row: Row, all_logits: bool) -> torch.Tensor:
        """Prefill a row's tokens, in pieces of at most the largest bucket: logits [1, vocab_size], or of each token."""
        logits = []
        for start in range(0, len(row.tokens), self.tokens_per_step):
            piece = Row(row.slot, row.start + start, row.tokens[start : start + self.tokens_per_step])
            inputs = step_inputs([piece], _bucket(len(piece.tokens), self.prefill_buckets))
            output = self._run(state, inputs, _kv_length([piece], state), all_logits)
            logits.append(output[0, : len(piece.tokens)] if all_logits else output)
        return torch.cat(logits) if all_logits else logits[-1]

    def _run(
        self, state: HybridState, inputs: Sequence[torch.Tensor | None], kv_length: int, all_logits: bool = False
    ) -> torch.Tensor:
        """Run one graph. Its shapes depend on the number of rows and tokens and on the cache's bucket only.

        Without slots among the inputs it takes all sequences in the order of their slots, with them it looks up one.
        """
        inputs = [None if tensor is None else tensor.to(self.device) for tensor in inputs]
        logits = self.model(*inputs, state, kv_length=kv_length, all_logits=all_logits)
        _run_graph([logits, *state.input_output_aliases(first=1)])
        return logits.cpu()

    def _slot(self, slot: int) -> torch.Tensor:
        """Make a slot an input of a graph: with its number as a constant there would be a graph for each slot."""
        return torch.tensor([slot]).to(self.device)


def cache_buckets(max_length: int) -> list[int]:
    """Return the lengths of cache of graphs: powers of four times the shortest, up to one that holds max_length."""
    buckets = [min(SHORTEST_CACHE, max_length)]
    while buckets[-1] < max_length:
        buckets.append(min(4 * buckets[-1], max_length))
    return buckets


def _is_decode(row: Row) -> bool:
    return row.start > 0 and len(row.tokens) == 1


def _in_slot_order(rows: Sequence[Row], num_sequences: int) -> list[Row]:
    """Return a row for every slot, without tokens where there is none."""
    by_slot = {row.slot: row for row in rows}
    return [by_slot.get(slot, Row(slot, 0, [])) for slot in range(1, num_sequences + 1)]


def _kv_length(rows: Sequence[Row], state: HybridState) -> int:
    return _bucket(max(row.start + len(row.tokens) for row in rows), cache_buckets(state.max_length))


def _run_graph(outputs: list[torch.Tensor]) -> None:
    """Run the graph with these outputs, in this order. Those that are state tensors, written in place, are donated."""
    torch_xla._XLAC._xla_sync_multi(outputs, devices=[], wait=False, sync_xla_data=True)


def _bucket(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest of ascending buckets that holds `length`."""
    return buckets[bisect.bisect_left(buckets, length)]
