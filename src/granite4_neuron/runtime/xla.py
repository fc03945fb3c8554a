"""Runs steps of the model as compiled XLA graphs, over state that stays on the device.

There is a fixed set of graphs: one for each length bucket of prefill and one for decode, each for every bucket of the
cache's length. All work on the same state buffers: a step's new state takes the memory of the old one
(`HybridState.input_output_aliases`), and nothing of it passes through the host. Prefill looks its one sequence up in
the state. Decode takes all sequences in the order of their slots, and advances their recurrent state where it lies.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import select_operators
from granite4_neuron.ops.xla import XLA
from granite4_neuron.runtime.cpu import Row, step_inputs
from granite4_neuron.state import HybridState

try:
    import torch_xla
except ImportError:
    torch_xla = None

PREFILL_BUCKETS = (128, 512, 2048)
SHORTEST_CACHE = 1024


class XLARuntime:
    """A model on an XLA device, with the interface of `runtime.cpu.CPURuntime`.

    Args:
        model: with weights, which are copied to the device; it stays as it is.
        generation_config: the checkpoint's defaults for generation.
        prefill_buckets: numbers of tokens that prefill graphs take; a shorter piece of a prompt is padded to the next
            one, a longer one is cut.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `ops.select_operators`.

    Raises:
        UserError: torch_xla is not installed, or the Mamba kernels cannot run.
    """

    # A prefill graph takes one sequence: a second one would double the graphs for little.
    prompts_per_step = 1

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
        self.generation_config = generation_config
        self.prefill_buckets = sorted(prefill_buckets)
        torch_xla.sync()

    @property
    def config(self) -> GraniteMoeHybridConfig:
        return self.model.config

    @property
    def refusals(self) -> tuple[str, ...]:
        """As `CPURuntime.refusals`."""
        return self.model.operators.refusals

    @property
    def tokens_per_step(self) -> int:
        return self.prefill_buckets[-1]

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """State on the device for slots 1 to `num_sequences`; the cache is as long as the next bucket of its length.

        So states for texts of different lengths share their graphs.
        """
        dtype, degree = self.model.dtype, self.model.parallel.degree
        length = _bucket(max_length, cache_buckets(max(max_length, self.config.max_position_embeddings)))
        layout = dict(kernel_layout=self.model.kernel_layout, has_null_slot=False)
        state = HybridState.allocate(self.config, num_sequences, length, dtype, self.device, degree, **layout)
        torch_xla.sync()
        return state

    @torch.no_grad()
    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """As `CPURuntime.step`. Rows that go on by one token are decoded together; others are prefilled one by one.

        The first token of a sequence is a prefill, also if it comes alone: the decode graph starts nothing from zeros.
        """
        decoded = self._decode(state, [row for row in rows if row.start > 0 and len(row.tokens) == 1])
        logits = [decoded[row.slot] if row.slot in decoded else self._prefill(state, row, all_logits) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(logits, batch_first=True) if all_logits else torch.cat(logits)

    def _decode(self, state: HybridState, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
        """One token of each row: logits [1, vocab_size] by slot. Slots without a row keep their state."""
        if not rows:
            return {}
        by_slot = {row.slot: row for row in rows}
        in_order = [by_slot.get(slot, Row(slot, 0, [])) for slot in range(1, state.num_sequences + 1)]
        logits = self._run(state, in_order, 1, all_logits=False, in_slot_order=True)
        return {slot: logits[slot - 1 : slot] for slot in by_slot}

    def _prefill(self, state: HybridState, row: Row, all_logits: bool) -> torch.Tensor:
        """A row's tokens, in pieces of at most the largest bucket: logits [1, vocab_size], or of each token."""
        logits = []
        for start in range(0, len(row.tokens), self.tokens_per_step):
            piece = row.tokens[start : start + self.tokens_per_step]
            bucket = _bucket(len(piece), self.prefill_buckets)
            output = self._run(state, [Row(row.slot, row.start + start, piece)], bucket, all_logits)
            logits.append(output[0, : len(piece)] if all_logits else output)
        return torch.cat(logits) if all_logits else logits[-1]

    def _run(
        self, state: HybridState, rows: Sequence[Row], tokens: int, all_logits: bool, in_slot_order: bool = False
    ) -> torch.Tensor:
        """One graph. Its shapes depend on the number of rows, on `tokens` and on the cache's bucket only."""
        longest = max(row.start + len(row.tokens) for row in rows)
        kv_length = _bucket(longest, cache_buckets(state.max_length))
        *inputs, slots = (tensor.to(self.device) for tensor in step_inputs(rows, tokens))
        slots = None if in_slot_order else slots

        logits = self.model(*inputs, slots, state, kv_length=kv_length, all_logits=all_logits)
        outputs = [logits, *state.input_output_aliases(first=1)]
        # These, in this order, are the graph's outputs; each state tensor was written in place and is donated.
        torch_xla._XLAC._xla_sync_multi(outputs, devices=[], wait=False, sync_xla_data=True)
        return logits.cpu()


def cache_buckets(max_length: int) -> list[int]:
    """Lengths of cache that graphs are made for: powers of four times the shortest, up to one that holds max_length."""
    buckets = [min(SHORTEST_CACHE, max_length)]
    while buckets[-1] < max_length:
        buckets.append(min(4 * buckets[-1], max_length))
    return buckets


def _bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest of ascending buckets that holds `length`."""
    return buckets[bisect.bisect_left(buckets, length)]
