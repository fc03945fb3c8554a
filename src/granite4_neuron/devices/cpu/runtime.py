"""Runs steps of the model on this machine's processor."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.build import library_key
from granite4_neuron.devices.cpu.fork import survive_forks
from granite4_neuron.devices.cpu.options import OPTIONS
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.mtp import MultiTokenPrediction
from granite4_neuron.model.step import PackedStep, Step, step_of
from granite4_neuron.ops import sampling
from granite4_neuron.ops.launch_parameters import find_launch_parameters, tuned_config_folder
from granite4_neuron.runtime.bound_model import BoundModel, digest_of_weights
from granite4_neuron.runtime.declaration import numbers_of
from granite4_neuron.runtime.interface import (
    Ability,
    Row,
    Verification,
    accepted_rows,
    adapters_of,
    check_verification,
    step_inputs,
)
from granite4_neuron.runtime.prompt_cuts import Anywhere
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Snapshot, check_chain, recurrent_state
from granite4_neuron.state.snapshot_memory import SnapshotMemory
from granite4_neuron.system import available_memory


class CPURuntime(BoundModel):
    """The `Runtime` of this machine's processor: plain torch, or fused kernels.

    Args:
        model: with weights. It stays as it is: the runtime has a model of its own over the same weights.
        generation_config: the checkpoint's defaults for generation.
        cpu_kernels: "fused" for compiled kernels, "torch" for plain torch; see `choose_operators`.
        tuned_configs: a folder of tuned launch parameters; None for the one that GRANITE4_TUNED_CONFIG_FOLDER names, if
            anything. See `ops.launch_parameters`.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `devices.selection`.
        state_dtype: of SSM states; None for float32. To float16 and bfloat16 they are rounded stochastically.
        adapters: of this model, by name.

    Raises:
        UserError: an option has no such choice, there is no such folder, the file in it for this model is broken, the
            Mamba kernels cannot run, or there are adapters without fused layers.
    """

    cannot: Mapping[Ability, str] = {
        ability: why for ability, why in BoundModel.cannot.items() if ability != "hidden_states"
    }
    # Beyond this a step gains no speed, and its activations would fall out of the processor's caches.
    tokens_per_step = 512
    # They share a step's tokens; with fewer than 64 of each the scan would become a loop over tokens.
    rows_per_step = 8
    tokens_per_verification = 64

    def __init__(
        self,
        model: HybridForCausalLM,
        generation_config: GenerationConfig,
        *,
        cpu_kernels: str = "fused",
        tuned_configs: str | Path | None = None,
        prefill_scan: str = "chunked",
        decode_kernel: str = "torch",
        state_dtype: torch.dtype | None = None,
        adapters: Mapping[str, Adapter] = {},
    ):
        chosen = numbers_of(OPTIONS, locals())
        survive_forks()
        if decode_kernel == "nki" and state_dtype == torch.float16:
            raise UserError("the NKI kernel for decode has SSM states in float32 or bfloat16, and not in float16.")
        degree = model.parallel.degree
        operators = cpu.choose_operators(cpu_kernels)
        operators = select_operators(operators, model.config, degree, prefill_scan, decode_kernel)
        self.generation_config = generation_config
        self.state_dtype = state_dtype or torch.float32
        launch_parameters = find_launch_parameters(
            model.config.mamba_d_head,
            model.config.mamba_d_state,
            self.state_dtype,
            tuned_config_folder(tuned_configs),
        )
        self._numbers = itertools.count(1)
        self.adapters = {name: replace(each, number=next(self._numbers)) for name, each in adapters.items()}
        operators = replace(operators, launch_parameters=launch_parameters)
        self.model = model.bind(operators, adapters=list(self.adapters.values()))
        self._snapshot_memory = SnapshotMemory()
        self.prompt_cuts = Anywhere(is_exact=self.model.is_fused)
        if self.model.is_fused:
            self.cannot = {ability: why for ability, why in self.cannot.items() if ability != "adapters"}
        # Without adapters that are loaded later: no state in a file depends on them, and this must not keep them alive.
        self.weights_digest = partial(digest_of_weights, self.model.weights_of_states(), self.adapters)
        # Results of the fused layers do not depend on the launch parameters.
        chunk = None if self.model.is_fused else launch_parameters.torch_chunk_size
        if cpu_kernels == "torch":
            self.sampling = sampling
        self.numerics = "cpu", None if operators.pack is None else library_key(), chunk, chosen

    @property
    def packs_rows(self) -> bool:
        return self.model.is_fused

    @property
    def mtp(self) -> CPUMTPLayers | None:
        return None if self.model.mtp is None else CPUMTPLayers(self)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Add an adapter; raise UserError if the layers are not fused."""
        self._bind({**self.adapters, name: replace(adapter, number=next(self._numbers))})

    def unload_adapter(self, name: str) -> None:
        self._bind({each: adapter for each, adapter in self.adapters.items() if each != name})

    def _bind(self, adapters: Mapping[str, Adapter]) -> None:
        """Bind the model to these adapters. Its weights are shared, and states stay valid."""
        self.model = self.model.bind(self.model.operators, adapters=list(adapters.values()))
        self.adapters = dict(adapters)

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """The cache takes memory only as it is written."""
        dtype, degree = self.model.dtype, self.model.parallel.degree
        with available_memory.enough_for(f"the state of {num_sequences:,} sequences of up to {max_length:,} tokens"):
            return HybridState.allocate(
                self.config,
                num_sequences,
                max_length,
                dtype,
                tp_degree=degree,
                kernel_layout=self.model.kernel_layout,
                state_dtype=self.state_dtype,
            )

    @torch.inference_mode()
    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        if all_logits:
            longest = max(len(row.tokens) for row in rows)
            return self.model(*_padded(rows, longest, state), state, all_logits=True)
        return self.model(*self.inputs(rows, state), state)

    @torch.inference_mode()
    def step_with_hidden_states(
        self, state: HybridState, rows: Sequence[Row], all_logits: bool = False
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        lengths = [len(row.tokens) for row in rows]
        ids, step = _padded(rows, max(lengths), state) if all_logits else self.inputs(rows, state)
        hidden_states, _ = self.model.hidden_states(ids, step, state)
        if isinstance(step, PackedStep):
            of_rows = hidden_states[0].split(lengths)
        else:
            of_rows = tuple(each[:length] for each, length in zip(hidden_states, lengths, strict=True))
        logits = self.model.head(hidden_states if all_logits else torch.stack([each[-1] for each in of_rows]))
        return logits, of_rows

    @torch.inference_mode()
    def verify(self, state: HybridState, rows: Sequence[Row]) -> Verification:
        check_verification(self, rows)
        longest = max(len(row.tokens) for row in rows)
        # At least 2: a step of one token advances the state while it reads it, so it cannot leave the state unchanged.
        ids, step = _padded(rows, max(2, longest), state, verifies=True)
        hidden_states, kept_inputs = self.model.hidden_states(ids, step, state)
        logits = self.model.head(hidden_states)
        return Verification(rows, logits[:, :longest], kept_inputs, hidden_states[:, :longest])

    @torch.inference_mode()
    def commit(self, state: HybridState, verification: Verification, accepted: Sequence[int]) -> None:
        rows = accepted_rows(verification.rows, accepted)
        _, step = _padded(rows, max(2, *(len(row.tokens) for row in verification.rows)), state)
        self.model.advance(verification.kept_inputs, step, state)

    def inputs(self, rows: Sequence[Row], state: HybridState) -> tuple[torch.Tensor, Step]:
        """Return the ids and the step of rows: without padding, if the layers are fused."""
        if not self.packs_rows:
            return _padded(rows, max(len(row.tokens) for row in rows), state)
        starts, lengths, slots = zip(*((row.start, len(row.tokens), row.slot) for row in rows), strict=True)
        # Twice as fast as torch.tensor, which shows in the time of a small model's token.
        ids = torch.frombuffer(array("q", [token for row in rows for token in row.tokens]), dtype=torch.int64)
        return ids[None], PackedStep(starts, lengths, slots, state.max_length, adapters=adapters_of(rows))

    @torch.inference_mode()
    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        state.copy(torch.tensor([source]), torch.tensor([destination]), length)

    @torch.inference_mode()
    def snapshot(self, state: HybridState, slot: int, length: int, start: int = 0) -> Snapshot:
        memory = self._snapshot_memory.take(recurrent_state(state.slot_views(slot)))
        tensors = state.slot_tensors(torch.tensor([slot]), start, length, memory)
        return Snapshot(start, length, tensors, self.dtype, self.fingerprint)

    @torch.inference_mode()
    def prepare_snapshot(self, is_wanted: bool) -> None:
        if is_wanted:
            self._snapshot_memory.make_ready()
        else:
            self._snapshot_memory.give_back()

    @torch.inference_mode()
    def restore(self, state: HybridState, snapshots: Sequence[Snapshot], slot: int) -> None:
        check_chain(snapshots, self.dtype, self.fingerprint, state.max_length, self.state_dtype)
        for snapshot in snapshots:
            state.set_slot_tensors(snapshot.tensors, torch.tensor([slot]), snapshot.start, snapshot.length)


class CPUMTPLayers:
    """The `MTPLayers` of a runtime's model, on the same kernels."""

    def __init__(self, runtime: CPURuntime):
        self._runtime = runtime

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        what = f"the cache for multi-token prediction of {num_sequences:,} sequences of up to {max_length:,} tokens"
        with available_memory.enough_for(what):
            return HybridState.allocate(self._layers.config, num_sequences, max_length, self._runtime.dtype)

    @torch.inference_mode()
    def step(self, state: HybridState, rows: Sequence[Row], hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        ids, step = self._runtime.inputs(rows, state)
        if self._runtime.packs_rows:
            hidden = torch.cat(list(hidden_states))[None]
        else:
            hidden = pad_sequence(list(hidden_states), batch_first=True)
        embedded = self._runtime.model.model.embed(ids, step)
        return self._layers(embedded, hidden, step, state)

    @torch.inference_mode()
    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._runtime.model.head(hidden_states)

    @property
    def _layers(self) -> MultiTokenPrediction:
        assert self._runtime.model.mtp is not None  # `CPURuntime.mtp`
        return self._runtime.model.mtp


def _padded(
    rows: Sequence[Row], tokens: int, state: HybridState, *, verifies: bool = False
) -> tuple[torch.Tensor, Step]:
    """Return the ids and the step of rows, each padded to `tokens`."""
    ids, positions, lengths, slots = step_inputs(rows, tokens)
    kv_length = max(row.start + len(row.tokens) for row in rows)
    step = step_of(positions, lengths, slots, state, kv_length=kv_length, adapters=adapters_of(rows), verifies=verifies)
    return ids, step
