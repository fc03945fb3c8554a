"""A runtime without a model: its steps take time of a clock of their own, and choose the same token always."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig

from granite4_neuron.config import ModelConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.runtime.interface import Ability, Decoded, Row, Verification
from granite4_neuron.runtime.prompt_cuts import PromptCuts
from granite4_neuron.simulation.step_times import StepTimes
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Layout, Snapshot

_FIRST_PART = 16
_WITHOUT_MODEL = "a simulated runtime has no model."


class _Logits(torch.Tensor):
    """Logits [1] by which token 0 is chosen, and which count as many bytes as a model's."""

    vocab_size: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # its results are plain

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch declares it as an attribute
        return self.vocab_size * self.itemsize

    def clone(self, **options: Any) -> _Logits:
        """Return the same tensor: nobody writes to it."""
        return self


class SimulatedRuntime:
    """A `Runtime` of which only times and sizes are real.

    Attributes:
        clock: the time in seconds, which calls advance.

    Args:
        config: of the model; it decides the bytes of states, and the vocabulary.
        steps: the times of calls.
        dtype: of activations and cache. state_dtype: of SSM states.
        tokens_per_step, rows_per_step, prompt_cuts, packs_rows, max_length, own_slots: as of `Runtime`.
    """

    cannot: Mapping[Ability, str] = dict.fromkeys(("all_logits", "verify", "decode", "adapters"), _WITHOUT_MODEL)
    generation_config = GenerationConfig()
    adapters: Mapping[str, Adapter] = {}
    tokens_per_verification = 1
    is_quantized = False
    fallbacks = ()

    def __init__(
        self,
        config: ModelConfig,
        steps: StepTimes,
        *,
        dtype: torch.dtype,
        tokens_per_step: int,
        rows_per_step: int,
        prompt_cuts: PromptCuts,
        packs_rows: bool = False,
        max_length: int,
        state_dtype: torch.dtype = torch.float32,
        own_slots: int = 0,
    ):
        self.config = config
        self.steps = steps
        self.dtype = dtype
        self.state_dtype = state_dtype
        self.tokens_per_step = tokens_per_step
        self.rows_per_step = rows_per_step
        self.prompt_cuts = prompt_cuts
        self.packs_rows = packs_rows
        self.max_length = max_length
        self.own_slots = own_slots
        self.clock = 0.0
        self.fingerprint = Fingerprint.parse("")
        self._token_bytes = token_bytes(config, dtype.itemsize)
        num_bytes = sequence_bytes(config, dtype.itemsize, state_itemsize=state_dtype.itemsize)
        self._recurrent = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        self.logits = torch.zeros(1).as_subclass(_Logits)
        self.logits.vocab_size = config.vocab_size

    def allocate(self, num_sequences: int, max_length: int) -> HybridState | None:
        """Implement `Runtime.allocate`: nothing is needed."""
        return None

    def warm_up(self, state: HybridState | None, verified_tokens: int = 0) -> None:
        """Implement `Runtime.warm_up`: nothing is compiled."""

    def step(self, state: HybridState | None, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Implement `Runtime.step`, in the time of these rows."""
        self.clock += self.steps.step(rows)
        return cast(torch.Tensor, [self.logits] * len(rows))  # an engine only iterates over them

    def run_decode(self, starts: Sequence[int], most: int, until: float) -> list[float]:
        """Run up to `most` steps of single tokens, those that begin before `until`, and at least one.

        Returns:
            the clock after each.
        """
        ends: list[float] = []
        now = self.clock
        for seconds in self._decode_seconds(starts, most):
            now += seconds
            ends.append(now)
            if now >= until:
                break
        self.clock = now
        return ends

    def _decode_seconds(self, starts: Sequence[int], most: int) -> Iterator[float]:
        """Yield the seconds of up to `most` steps. They are asked for in parts, of which few are needed mostly."""
        done, part = 0, _FIRST_PART
        while done < most:
            part = min(part, most - done)
            yield from self.steps.decode([start + done for start in starts] if done else starts, part)
            done, part = done + part, 4 * part

    def decode(self, state: HybridState | None, rows: Sequence[Row]) -> Decoded:
        """Implement `Runtime.decode`.

        Raises:
            UserError: always.
        """
        raise UserError(_WITHOUT_MODEL)

    def verify(self, state: HybridState | None, rows: Sequence[Row]) -> Verification:
        """Implement `Runtime.verify`.

        Raises:
            UserError: always.
        """
        raise UserError(_WITHOUT_MODEL)

    def commit(self, state: HybridState | None, verification: Verification, accepted: Sequence[int]) -> None:
        """Implement `Runtime.commit`.

        Raises:
            UserError: always.
        """
        raise UserError(_WITHOUT_MODEL)

    def copy(self, state: HybridState | None, source: int, destination: int, length: int) -> None:
        """Implement `Runtime.copy`, in its time."""
        self.clock += self.steps.copy(length)

    def snapshot(self, state: HybridState | None, slot: int, length: int, start: int = 0) -> Snapshot:
        """Implement `Runtime.snapshot`, in its time, with tensors that have sizes only."""
        self.clock += self.steps.snapshot(length - start)
        key = torch.empty(1, length - start, self._token_bytes, dtype=torch.uint8, device="meta")
        tensors = {"layers.0.key": key, "layers.0.ssm_state": self._recurrent}
        return Snapshot(start, length, tensors, self.dtype, self.fingerprint)

    def prepare_snapshot(self, is_wanted: bool) -> None:
        """Implement `Runtime.prepare_snapshot`: there is no memory to hold."""

    def slot_layout(self, start: int, length: int) -> Layout:
        """Implement `Runtime.slot_layout`.

        Raises:
            UserError: always.
        """
        raise UserError(_WITHOUT_MODEL)

    def restore(self, state: HybridState | None, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Implement `Runtime.restore`, in its time."""
        self.clock += self.steps.restore(snapshots[-1].length)

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Implement `Runtime.load_adapter`.

        Raises:
            UserError: always.
        """
        raise UserError(_WITHOUT_MODEL)

    def unload_adapter(self, name: str) -> None:
        """Implement `Runtime.unload_adapter`.

        Raises:
            UserError: always.
        """
        raise UserError(_WITHOUT_MODEL)
