"""A runtime without a model: its steps only advance a simulated clock, and always choose the same token."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import cast

import torch
from transformers import GenerationConfig

from granite4_neuron.config import ModelConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.ops.sampling import Choice, Chosen
from granite4_neuron.planning.simulation.step_times import StepTimes
from granite4_neuron.runtime.interface import Ability, Refusals, Row
from granite4_neuron.runtime.prompt_cuts import PromptCuts
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Layout, Snapshot

_FIRST_PART = 16  # steps of decode
_LEAST_SECONDS = 1e-9  # of a step
_LOGIT_BYTES = 4  # float32
_WITHOUT_MODEL = "a simulated runtime has no model."


class _Sized:
    """Stands in for zeros [1, positions] or [vocab_size]. It has a size, and the tensor methods that a prefix cache
    calls."""

    device = torch.device("meta")

    def __init__(self, length: int, itemsize: int):
        self.length, self.itemsize = length, itemsize
        self.nbytes = length * itemsize

    def __getitem__(self, index: int | tuple[slice, slice]) -> float | _Sized:
        """Return a number, or some of the positions."""
        if isinstance(index, tuple):
            return _Sized(len(range(self.length)[index[1]]), self.itemsize)
        return 0.0

    def clone(self) -> _Sized:
        """Return the same tensor, because nothing writes to it."""
        return self

    def numpy(self) -> _Sized:
        """Return the same tensor."""
        return self

    def argmax(self) -> int:
        """Return the first of the equal numbers."""
        return 0


class _FirstToken:
    """Stands in for `ops.sampling`: all logits are equal."""

    @staticmethod
    def choose(logits: Sequence[torch.Tensor], choices: Sequence[Choice]) -> list[Chosen]:
        """Return the first token for each."""
        return [Chosen(0)] * len(choices)


class SimulatedRuntime(Refusals):
    """A `Runtime` that has only times and sizes, and no long steps.

    Attributes:
        clock: the time in seconds, which calls advance.

    Args:
        config: of the model; it determines the bytes of states and the vocabulary.
        steps: the times of calls.
        dtype: of activations and cache. state_dtype: of SSM states.
        tokens_per_step, rows_per_step, prompt_cuts, packs_rows, max_length, own_slots: as in `Runtime`.
    """

    cannot: Mapping[Ability, str] = dict.fromkeys(
        ("all_logits", "verify", "hidden_states", "decode", "adapters"), _WITHOUT_MODEL
    )
    generation_config = GenerationConfig()
    adapters: Mapping[str, Adapter] = {}
    tokens_per_verification = 1
    is_quantized = False
    begins_snapshots = False
    fallbacks = ()
    sampling = cast(ModuleType, _FirstToken)

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
        self.tokens_per_step = self.tokens_per_long_step = tokens_per_step
        self.rows_per_step = rows_per_step
        self.prompt_cuts = prompt_cuts
        self.packs_rows = packs_rows
        self.max_length = max_length
        self.own_slots = own_slots
        self.clock = 0.0
        self.fingerprint = Fingerprint.parse("")
        self._token_bytes = token_bytes(config, dtype.itemsize)
        num_bytes = sequence_bytes(config, dtype.itemsize, state_itemsize=state_dtype.itemsize)
        self._recurrent = cast(torch.Tensor, _Sized(1, num_bytes))
        self.logits = cast(torch.Tensor, _Sized(config.vocab_size, _LOGIT_BYTES))

    def sequences_that_fit(self, max_length: int) -> int | None:
        """A state takes no memory."""
        return self.own_slots or None

    def allocate(self, num_sequences: int, max_length: int) -> HybridState | None:
        """Nothing is needed."""
        return None

    def warm_up(self, state: HybridState | None, verified_tokens: int = 0) -> None:
        """Nothing is compiled."""

    def step(self, state: HybridState | None, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Advance the clock by the time of these rows."""
        self.clock += self.steps.step(rows)
        return cast(torch.Tensor, [self.logits] * len(rows))  # an engine only iterates over them

    def run_decode(self, starts: Sequence[int], most: int, until: float) -> tuple[list[float], list[float]]:
        """Run up to `most` steps of single tokens that begin before `until`, and at least one.

        Returns:
            The seconds of each, and the clock after each.
        """
        seconds: list[float] = []
        ends: list[float] = []
        part = most if until == math.inf else min(most, _FIRST_PART)
        while part:
            times = self.steps.decode([start + len(ends) for start in starts] if ends else starts, part)
            _, *after = itertools.accumulate(times, initial=self.clock)
            needed = bisect.bisect_left(after, until) + 1
            seconds += times[:needed]
            ends += after[:needed]
            self.clock = ends[-1]
            # About as many as are needed, if further steps take as long as the last one.
            time_left, last = max(0.0, until - self.clock), max(times[-1], _LEAST_SECONDS)
            part = math.ceil(min(time_left / last, most - len(ends)))
        return seconds, ends

    def copy(self, state: HybridState | None, source: int, destination: int, length: int) -> None:
        """Advance the clock by its time."""
        self.clock += self.steps.copy(length)

    def snapshot(self, state: HybridState | None, slot: int, length: int, start: int = 0) -> Snapshot:
        """Advance the clock by its time; the tensors have only sizes."""
        self.clock += self.steps.snapshot(length - start)
        key = cast(torch.Tensor, _Sized(length - start, self._token_bytes))
        tensors = {"layers.0.key": key, "layers.0.ssm_state": self._recurrent}
        return Snapshot(start, length, tensors, self.dtype, self.fingerprint)

    def prepare_snapshot(self, is_wanted: bool) -> None:
        """There is nothing to allocate."""

    def slot_layout(self, start: int, length: int) -> Layout:
        """Raise UserError: there is no model."""
        raise UserError(_WITHOUT_MODEL)

    def restore(self, state: HybridState | None, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Advance the clock by its time."""
        self.clock += self.steps.restore(snapshots[-1].length)
