"""Runs steps of a model that is split over several devices of this machine, a process for each: tensor parallelism.

Every process has a rank, with its part of each layer's weights and state (`model.parallel`). This process is rank 0. It
sends each call to the others, which run the same call. Within a step the ranks add up their results after each mixer,
and after each layer's MLP and experts. No graph knows its rank, so all ranks compile the same graphs, and each waits
until the others have compiled a graph too.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed
from transformers import GenerationConfig

from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.sharding import check_memory_of_ranks
from granite4_neuron.config.choices import NO_CHOICES
from granite4_neuron.devices.torch.rank_calls import (
    NUMBERED,
    Call,
    OfRank,
    Refusal,
    from_bytes,
    result_or_refusal,
    to_bytes,
)
from granite4_neuron.devices.torch.ranks import RankProcesses, ShardSpec, check_devices, listen
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.runtime.interface import Row, Verification, accepted_rows, check_verification
from granite4_neuron.state.fingerprint import facts_digest
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Layout, Snapshot, check_chain

_SECONDS_TO_END = 10  # ranks need less, unless they wait within a step or still load


Method = TypeVar("Method", bound=Callable[..., Any])


def _on_every_rank(method: Method, answers: bool = False) -> Method:
    """Return a method of `SplitRuntime` that calls this one of `TorchRuntime` on every rank, and has rank 0's result.

    Args:
        answers: see `SplitRuntime._run`.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: SplitRuntime, *arguments: Any, **options: Any) -> Any:
        if options:
            arguments = signature.bind(self, *arguments, **options).args[1:]
        return self._run(method.__name__, partial(method, self), *arguments, answers=answers)[0]

    return cast(Method, run)


class SplitRuntime(TorchRuntime):
    """The `Runtime` of a model that is split over `tp_degree` devices of one kind.

    It lives until it is closed or this process ends. If another rank's process ends unexpectedly, this process prints a
    sentence and ends too, because it may be waiting for that rank within a step, and nothing else would end the wait.
    If a call fails or is interrupted in this process, the runtime closes, because no rank knows how far the others are.

    Args:
        folder, dtype, progress, remark: as for `load_model`; progress is this rank's.
        generation_config: the checkpoint's defaults for generation.
        tp_degree: at least 2.
        device: "cpu", "cuda" or "neuron"; the ranks are on cuda:0, cuda:1 and so on, or on logical cores 0, 1 and so on
            of those that NEURON_RT_VISIBLE_CORES names.
        options: of `TorchRuntime`; they must be picklable.

    Raises:
        UserError: the model cannot be split like this, there are too few devices, or this process already has such a
            model; also as in `load_model` and `TorchRuntime`.
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
        spec = ShardSpec.at(listener, tp_degree, device, folder=folder, dtype=dtype, options=options)
        self._ranks = RankProcesses(spec)
        # With a priority, so that it runs before multiprocessing waits for daemons.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        try:
            spec.join(0, listener)
            model = spec.load(0, progress=progress, remark=remark)
            super().__init__(model, generation_config, device=spec.device_of(0), **options)
            _check_refusals([from_bytes(answer, {}, self) for answer in self._ranks.answers()])
        except BaseException as error:
            self._ranks.end_if_one_has_ended(error)
            self._end(_SECONDS_TO_END if isinstance(error, UserError) else 0)
            raise
        self.cannot = {**self.cannot, "choices": NO_CHOICES}
        self.weights_digest = partial(self._digest_of_all, self.weights_digest)
        self._numbers = itertools.count()
        # The states and verifications that are still in use, by the numbers that other ranks have for theirs.
        self._numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    allocate = _on_every_rank(TorchRuntime.allocate, answers=True)
    warm_up = _on_every_rank(TorchRuntime.warm_up)
    step = _on_every_rank(TorchRuntime.step)
    decode = _on_every_rank(TorchRuntime.decode)
    copy = _on_every_rank(TorchRuntime.copy)

    def with_model(self, model: HybridForCausalLM) -> NoReturn:
        """Refuse, because other ranks have no part of another model."""
        raise UserError("a model that is split over processes cannot be replaced by a part of it.")

    def close(self) -> None:
        """End the other ranks' processes. The runtime cannot be used afterwards."""
        try:
            self.release_graphs()
        finally:
            self._end(_SECONDS_TO_END)

    def verify(self, state: HybridState, rows: Sequence[Row]) -> Verification:
        """Each rank keeps its own inputs."""
        check_verification(self, rows)
        [verification] = self._run("verify", super().verify, state, rows)
        return verification

    def commit(self, state: HybridState, verification: Verification, accepted: Sequence[int]) -> None:
        """It runs on every rank."""
        accepted_rows(verification.rows, accepted)
        self._run("commit", super().commit, state, verification, accepted)

    def snapshot(self, state: HybridState, slot: int, length: int, start: int = 0) -> Snapshot:
        """The snapshot has every rank's part: "rank1.layers.0.ssm_state"."""
        parts = self._run("snapshot", super().snapshot, state, slot, length, start, answers=True)
        return replace(parts[0], tensors=_joined([each.tensors for each in parts]))

    def restore(self, state: HybridState, snapshots: Sequence[Snapshot], slot: int) -> None:
        """It runs on every rank."""
        check_chain(snapshots, self.dtype, self.fingerprint, state.max_length, self.state_dtype)
        parts = OfRank(
            [replace(each, tensors=_part(each.tensors, rank)) for each in snapshots]
            for rank in range(self.model.parallel.degree)
        )
        self._run("restore", super().restore, state, parts, slot)

    def slot_layout(self, start: int, length: int) -> Layout:
        """The ranks' parts have the same shapes."""
        return _joined([super().slot_layout(start, length)] * self.model.parallel.degree)

    def _digest_of_all(self, own: Callable[[], str]) -> str:
        """Return a digest of all ranks' weights; `own` returns the digest of this rank's weights."""
        return facts_digest(*self._run("weights_digest", own, answers=True))

    def _run(self, name: str, own: Callable[..., Any], *arguments: Any, answers: bool = False) -> list[Any]:
        """Run a method of `TorchRuntime` on every rank.

        Args:
            name, own: the method's name, and the method of this rank.
            answers: whether to wait for the results of the other ranks.

        Returns:
            The result here, followed by those of the other ranks if they answer.

        Raises:
            UserError: the ranks answer, and one refuses the call; the ranks stay in step. After any other error the
                runtime is closed.
        """
        # Keeps them alive, so that all ranks free the same memory.
        number, alive = next(self._numbers), dict(self._numbered)
        of_ranks = [_of_rank(arguments, rank) for rank in range(self.model.parallel.degree)]
        calls = [Call(name, each, number, list(alive), answers) for each in of_ranks[1:]]
        messages = [to_bytes(call, alive) for call in calls]
        try:
            self._ranks.send(messages)
            results = [result_or_refusal(own, of_ranks[0]) if answers else own(*of_ranks[0])]
            if answers:
                results += [from_bytes(answer, {}, self) for answer in self._ranks.answers()]
        except BaseException as error:
            self._ranks.end_if_one_has_ended(error)
            self.release_graphs()
            self._end(0)
            raise
        _check_refusals(results)
        if isinstance(results[0], NUMBERED):
            self._numbered[number] = results[0]
        return results

    def _end(self, seconds: float) -> None:
        """End the other ranks; kill those that do not end within `seconds`."""
        self._at_exit.cancel()
        # A process group would wait for ranks that were killed.
        if self._ranks.end(seconds) and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all ranks' tensors of a slot, each with its rank in its name."""
    return {f"rank{rank}.{name}": tensor for rank, part in enumerate(parts) for name, tensor in part.items()}


def _part(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors of `_joined`."""
    prefix = f"rank{rank}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _of_rank(arguments: Sequence[Any], rank: int) -> list[Any]:
    """Return the arguments of a call on one rank."""
    return [each[rank] if isinstance(each, OfRank) else each for each in arguments]


def _check_refusals(answers: Sequence[Any]) -> None:
    """Raise UserError with the first refusal, if there is one."""
    for answer in answers:
        if isinstance(answer, Refusal):
            raise UserError(answer.sentence)
