"""Runs steps of the model as XLA graphs of torch_xla, over state that stays on the device.

All graphs use the same state buffers: new state takes the memory of the old one (`input_output_aliases`). torch_xla
donates the buffer of each tensor that a graph writes in place, and XLA's compiler pairs donated buffers with outputs. A
test compares the pairs in the compiled graphs with the intended ones.

Prefill looks up its one sequence in the state. Decode advances the recurrent state of all sequences in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from transformers import GenerationConfig

from granite4_neuron.devices.graphs.operators import XLA
from granite4_neuron.devices.graphs.runtime import PREFILL_BUCKETS, TOKENS, GraphRuntime, Tensors, unpacked
from granite4_neuron.devices.neuron.sdk import NEEDS_TORCH_XLA
from granite4_neuron.devices.options import COMPILED
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.step import Step, step_of
from granite4_neuron.runtime.declaration import numbers_of
from granite4_neuron.state.hybrid_state import HybridState, KeyValueState, MambaState, input_output_aliases

try:
    import torch_xla
except ImportError:
    torch_xla = None


class XLARuntime(GraphRuntime):
    """The `Runtime` of an XLA device.

    Args:
        model: with weights, which are copied to the device; it is not changed.
        generation_config, prefill_buckets: as `GraphRuntime` takes them; None for `PREFILL_BUCKETS`.
        prefill_scan, decode_kernel, experts_decode: see `devices.selection`; None for the choice for Neuron devices.

    Raises:
        UserError: torch_xla is not installed, or the Mamba kernels cannot run.
    """

    def __init__(
        self,
        model: HybridForCausalLM,
        generation_config: GenerationConfig,
        prefill_buckets: Sequence[int] | None = None,
        *,
        prefill_scan: str = "chunked",
        decode_kernel: str = "torch",
        experts_decode: str | None = None,
    ):
        if torch_xla is None:
            raise UserError(NEEDS_TORCH_XLA)
        device = torch_xla.device()
        if decode_kernel == "nki":
            experts_decode = experts_decode or "kernel"
        degree = model.parallel.degree
        operators = select_operators(XLA, model.config, degree, prefill_scan, decode_kernel, experts_decode)
        super().__init__(model, operators, generation_config, prefill_buckets or PREFILL_BUCKETS, device)
        self.numerics = "xla", torch_xla.runtime.device_type(), numbers_of(COMPILED, locals())
        torch_xla.sync()

    def _allocate(self, num_sequences: int, length: int) -> HybridState:
        state = super()._allocate(num_sequences, length)
        torch_xla.sync()
        return state

    @torch.no_grad()
    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Copy the whole slot, in a graph of its own; nothing passes through the host."""
        state.copy(self._slot(source), self._slot(destination), state.max_length)
        _run_graph([], state.tensors())

    def _run_prefill(self, state: HybridState, inputs: torch.Tensor, kv_length: int, all_logits: bool) -> torch.Tensor:
        logits = self.model(*self._step(inputs, False, state, kv_length), state, all_logits=all_logits)
        _run_graph([logits], state.tensors())
        return logits

    def _run_decode(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> torch.Tensor:
        logits = self.model(*self._step(inputs[:, : TOKENS + 1], True, state, kv_length), state)
        _run_graph([logits], state.tensors())
        return logits

    def _run_verify(self, state: HybridState, inputs: torch.Tensor, kv_length: int) -> tuple[torch.Tensor, Tensors]:
        ids, step = self._step(inputs, True, state, kv_length, verifies=True)
        hidden_states, kept_inputs = self.model.hidden_states(ids, step, state)
        logits = self.model.head(hidden_states)
        # Clone them, because views keep their base alive. The base is not an output of this graph, so a later sync
        # would compute it, from state whose memory has been donated by then.
        kept_inputs = [kept.clone() for kept in kept_inputs]
        _run_graph([logits, *kept_inputs], state.tensors(KeyValueState))
        return logits, kept_inputs

    def _run_advance(self, state: HybridState, kept_inputs: Tensors, inputs: torch.Tensor) -> None:
        _, step = self._step(inputs, True, state)
        self.model.advance(kept_inputs, step, state)
        _run_graph([], state.tensors(MambaState))

    def _read_slot(self, state: HybridState, slot: int) -> Mapping[str, torch.Tensor]:
        tensors = state.slot_tensors(self._slot(slot), 0, state.max_length)
        _run_graph(list(tensors.values()), [])
        return tensors

    def _write_slot(self, state: HybridState, tensors: Mapping[str, torch.Tensor], slot: int) -> None:
        state.set_slot_tensors(tensors, self._slot(slot), 0, state.max_length)
        _run_graph([], state.tensors())

    def _step(
        self,
        inputs: torch.Tensor,
        in_order: bool,
        state: HybridState,
        kv_length: int = 0,
        *,
        verifies: bool = False,
    ) -> tuple[torch.Tensor, Step]:
        """Return the ids and the step on the device; in order, without slots, the model takes all sequences."""
        ids, positions, lengths, slots = unpacked(inputs.to(self.device))
        index = positions, lengths, None if in_order else slots
        return ids, step_of(*index, state, kv_length=kv_length, verifies=verifies)

    def _slot(self, slot: int) -> torch.Tensor:
        """Make a slot an input of a graph: as a constant, its number would need a graph for each slot."""
        return torch.tensor([slot]).to(self.device)


def _run_graph(results: Sequence[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
    """Run the graph with these results. `written` are the state tensors that it writes in place; they are donated."""
    outputs = [*results, *input_output_aliases(written, len(results))]
    torch_xla._XLAC._xla_sync_multi(outputs, devices=[], wait=False, sync_xla_data=True)
