"""Runs steps of a model that is split over several devices of this machine, a process for each: tensor parallelism.

Every process has a rank, and with it a part of each layer's weights and state (`model.parallel`). This one is rank 0.
It sends each call to the others, which make the same call; within a step the ranks add up what they have.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed
from transformers import GenerationConfig

from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.sharding import check_memory_of_ranks
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Verification, accepted_rows, check_verification
from granite4_neuron.runtime.ranks import Job, Others, check_devices, listen
from granite4_neuron.runtime.torch_device import TorchRuntime
from granite4_neuron.state.fingerprint import facts_digest
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Layout, Snapshot, check_chain

_SECONDS_TO_END = 10  # ranks need less, unless they wait within a step or still load


class SplitRuntime(TorchRuntime):
    """The `Runtime` of a model that is split over `tp_degree` devices of one kind.

    It lives until it is closed, or until this process ends. If another rank's process ends by itself, this process ends
    too, with a sentence: it may be waiting for that rank within a step, and nothing else would end this. If a call
    fails or is interrupted in this process, the runtime closes: no rank knows how far the others have come.

    Args:
        folder, dtype, progress, remark: as of `load_model`; progress is that of this rank.
        generation_config: the checkpoint's defaults for generation.
        tp_degree: at least 2.
        device: "cpu" or "cuda"; the ranks are on cuda:0, cuda:1 and so on.
        options: of `TorchRuntime`; each can be sent to another process.

    Raises:
        UserError: the model cannot be split so, there are too few devices, this process has such a model already, or
            as `load_model` and `TorchRuntime`.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype | None,
        generation_config: GenerationConfig,
        *,
        tp_degree: int,
        device: str,
        progress: Callable[[int, int], None] | None = None,
        remark: Callable[[str], None] = lambda sentence: None,
        **options: Any,
    ):
        checkpoint = open_checkpoint(folder)
        checkpoint.config.rank_dimensions(tp_degree)
        check_devices(device, tp_degree)
        check_memory_of_ranks(checkpoint, dtype, tp_degree)
        listener = listen()
        job = Job(folder, dtype, tp_degree, device, listener.getsockname()[1], options)
        self._others = Others(job)
        # With a priority, so that it comes before multiprocessing waits for daemons.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        try:
            job.join(0, listener)
            model = job.load(0, progress=progress, remark=remark)
            super().__init__(model, generation_config, device=job.device_of(0), **options)
            _raise_first(self._others.answers())
        except BaseException as error:
            self._others.end_if_one_has_ended(error)
            self._end(_SECONDS_TO_END if isinstance(error, UserError) else 0)
            raise
        self.weights_digest = partial(self._digest_of_all, self.weights_digest)
        self._numbers = itertools.count()
        self._states: weakref.WeakKeyDictionary[HybridState, int] = weakref.WeakKeyDictionary()
        self._verifications: weakref.WeakValueDictionary[int, _Numbered] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """End the other ranks' processes; the runtime is of no use afterwards."""
        try:
            self.release_graphs()
        finally:
            self._end(_SECONDS_TO_END)

    def allocate(self, num_sequences: int, max_length: int) -> HybridState:
        """Implement `Runtime.allocate`, on every rank."""
        alive = list(self._states)  # held until the end, so that all ranks find the same memory free
        number = next(self._numbers)
        numbers = [self._states[each] for each in alive]
        refusals = []
        with self._together("allocate", number, num_sequences, max_length, numbers):
            try:
                state = super().allocate(num_sequences, max_length)
            except UserError as error:
                refusals.append(str(error))
            refusals += self._others.answers()
        _raise_first(refusals)
        self._states[state] = number
        return state

    def warm_up(self, state: HybridState, verifies: bool = False) -> None:
        """Implement `Runtime.warm_up`, on every rank."""
        with self._together("warm_up", self._states[state], verifies):
            super().warm_up(state, verifies)

    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Implement `Runtime.step`; every rank has the logits."""
        with self._together("step", self._states[state], rows, all_logits):
            return super().step(state, rows, all_logits)

    def verify(self, state: HybridState, rows: Sequence[Row]) -> Verification:
        """Implement `Runtime.verify`; each rank keeps its own inputs."""
        check_verification(self, rows)
        number, alive = next(self._numbers), list(self._verifications)
        with self._together("verify", self._states[state], rows, number, alive):
            verification = _Numbered(number=number, **vars(super().verify(state, rows)))
        self._verifications[number] = verification
        return verification

    def commit(self, state: HybridState, verification: Verification, accepted: Sequence[int]) -> None:
        """Implement `Runtime.commit`, on every rank."""
        accepted_rows(verification.rows, accepted)
        with self._together("commit", self._states[state], verification.number, accepted):
            super().commit(state, verification, accepted)

    def copy(self, state: HybridState, source: int, destination: int, length: int) -> None:
        """Implement `Runtime.copy`, on every rank."""
        with self._together("copy", self._states[state], source, destination, length):
            super().copy(state, source, destination, length)

    def snapshot(self, state: HybridState, slot: int, length: int, start: int = 0) -> Snapshot:
        """Implement `Runtime.snapshot`, of every rank's part: "rank1.layers.0.ssm_state"."""
        with self._together("snapshot", self._states[state], slot, length, start):
            own = super().snapshot(state, slot, length, start)
            parts = [own.tensors, *map(safetensors.torch.load, self._others.answers())]
        return replace(own, tensors=_joined(parts))

    def restore(self, state: HybridState, snapshots: Sequence[Snapshot], slot: int) -> None:
        """Implement `Runtime.restore`, on every rank."""
        check_chain(snapshots, self.dtype, self.fingerprint, state.max_length)
        own, *others = (
            [replace(each, tensors=_part(each.tensors, rank)) for each in snapshots]
            for rank in range(self.model.parallel.degree)
        )
        spans = [(each.start, each.length) for each in snapshots]
        stored = [[safetensors.torch.save(dict(each.tensors)) for each in part] for part in others]
        with self._together("restore", self._states[state], spans, slot, of_rank=stored):
            super().restore(state, own, slot)

    def slot_layout(self, start: int, length: int) -> Layout:
        """Implement `Runtime.slot_layout`; the ranks' parts have the same shapes."""
        return _joined([super().slot_layout(start, length)] * self.model.parallel.degree)

    def _digest_of_all(self, own: Callable[[], str]) -> str:
        """Return a digest of all ranks' weights; `own` returns that of this one's."""
        with self._together("weights_digest"):
            return facts_digest(own(), *self._others.answers())

    @contextmanager
    def _together(self, name: str, *arguments: Any, of_rank: Sequence[Any] | None = None) -> Iterator[None]:
        """Have the other ranks make a call while the body makes it here.

        Args:
            of_rank: a last argument for each of them.
        """
        try:
            self._others.call(name, *arguments, of_rank=of_rank)
            yield
        except BaseException as error:
            self._others.end_if_one_has_ended(error)
            self.release_graphs()
            self._end(0)
            raise

    def _end(self, seconds: float) -> None:
        """End the other ranks; kill those that do not end by themselves within some seconds."""
        self._at_exit.cancel()
        # The group of ranks that were killed would wait for them.
        if self._others.end(seconds) and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all ranks' tensors of a slot, each with its rank in its name."""
    return {f"rank{rank}.{name}": tensor for rank, part in enumerate(parts) for name, tensor in part.items()}


def _part(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return one rank's of `_joined` tensors."""
    prefix = f"rank{rank}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _raise_first(refusals: Sequence[str | None]) -> None:
    """Raise UserError with the first refusal, if there is one."""
    for refusal in filter(None, refusals):
        raise UserError(refusal)


@dataclass(frozen=True, eq=False)
class _Numbered(Verification):
    """A verification, with the number by which other ranks know it."""

    number: int = field(kw_only=True)
