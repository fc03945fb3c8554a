"""Faults at random places of an engine: whatever fails, all other texts are those of the sequence alone, bit by bit.

    python -m benchmarks.engine.faults
    python -m benchmarks.engine.faults --requests 100000 --seed 7
    python -m benchmarks.engine.faults --on-device
    python -m benchmarks.engine.faults --mtp

Requests of many kinds (greedy and sampled, with stop strings, log-probabilities, grammars and adapters, and with every
pair of sampling options) run on the bundled model in float32, with drafts, a prefix cache and its folder. Some bring
code that fails. Others run while a call of the runtime, the drafter, the sampler, the tokenizer or the writer of the
folder raises, before or after its work, or while an interrupt comes at a random line of the engine. Sometimes an engine
is dropped as it is, and another one goes on with its prefix cache and its drafter.

With --mtp the model is a small Nemotron model with random weights, which drafts with its own layers for multi-token
prediction.

It counts texts that differ, texts with a token that the options forbid, errors of sequences without a fault, and
resources in use at the end. Then all kinds run once more from the same prefix cache.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.progress import track
from transformers import GenerationConfig, PreTrainedTokenizerFast

import granite4_neuron.engine
from benchmarks.engine.adapters import random_adapter
from benchmarks.engine.decoding_stand_in import ChoosingRuntime
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.config import published_config
from granite4_neuron.config.json_files import read_object
from granite4_neuron.devices.cpu.runtime import CPUMTPLayers, CPURuntime
from granite4_neuron.engine import Constraint, DraftModel, Engine, MTPDrafter, Output, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import Drafter, DraftRequest, NgramDrafter, SeenTokens, StatefulDrafter
from granite4_neuron.engine.prefix.folder import PrefixFolder
from granite4_neuron.engine.sampling import NoTokenLeft, Sampler
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import Grammars
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Snapshot

MAX_LENGTH, NUM_SEQUENCES, NEW_TOKENS = 160, 4, 10
_CACHE_BYTES, _FOLDER_BYTES = 2**24, 2**25
_STARTS = ("An assignment statement", "The import", "Lambda expressions (sometimes", "A class definition", "\u00e9")
_SHARED = "The standard type hierarchy, as far as it is described in this reference and not elsewhere. "
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_LONG_NAMES = {  # most tokens of these names are forced
    "type": "object",
    "properties": {"assignment": {"enum": ["a", "b"]}, "expression": {"const": "else"}},
    "required": ["assignment", "expression"],
}
_ENGINE_FILES = str(Path(granite4_neuron.engine.__file__).parent)
_MOST_LINES = 5000  # an interrupt comes within this many lines of the engine's files
# A trace can raise where Python handles no signal: between the last two lines of `Engine.step`, and where the wrapper
# that `Engine.add` and other methods share releases the engine's lock.
_WITHOUT_SIGNALS = (Engine.step.__code__, Engine.add.__code__)


class TargetRuntime(CPURuntime):
    """The model's runtime. It cuts prompts every 16 tokens.

    mixed: the number of steps with both a piece of a prompt and a single token.
    """

    tokens_per_step = 16
    mixed = 0

    def step(self, state: HybridState, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Count mixed steps."""
        self.mixed += len({len(row.tokens) > 1 for row in rows}) > 1
        return super().step(state, rows, all_logits)


class TargetOnDevice(ChoosingRuntime):
    """The model's runtime on a device that chooses tokens itself, and on which the engine runs ahead."""

    tokens_per_step = 16


class DraftRuntime(CPURuntime):
    """The draft model's runtime."""

    tokens_per_step = 16


@dataclass
class Report:
    """faults: the faults that occurred, by place.
    compared: texts compared with the sequence alone.
    failed: sequences that ended with an error.
    mixed: steps with both a piece of a prompt and a single token.
    ahead: tokens that ran before the engine knew them. stopped: stop tokens that a device did not run.
    drawn: tokens that a device has drawn. undecided: draws that it left to the host.
    drafted, accepted: tokens that the drafters proposed, and those that became part of texts.
    wrong: a message for each failed check.
    """

    faults: Counter = field(default_factory=Counter)
    compared: int = 0
    failed: int = 0
    mixed: int = 0
    ahead: int = 0
    stopped: int = 0
    drawn: int = 0
    undecided: int = 0
    drafted: int = 0
    accepted: int = 0
    wrong: list[str] = field(default_factory=list)


def _new_error(chance: random.Random) -> BaseException:
    kinds = (RuntimeError("planted"), MemoryError(), UserError("planted."), OSError("planted"), KeyboardInterrupt())
    return chance.choice(kinds)


class Faults:
    """Makes the next call of a method fail, before or after its work.

    may_end: the number of sequences that faults may have ended since this was last set.
    """

    def __init__(self, chance: random.Random, count: Counter):
        self._chance = chance
        self._count = count
        self._places: dict[str, int] = {}
        self._armed: str | None = None
        self.may_end = 0

    @contextmanager
    def watching(self, most: int, owner: type, *names: str) -> Iterator[None]:
        """Make methods of a class able to fail. A failure of one may end `most` sequences."""
        methods = {name: getattr(owner, name) for name in names}
        for name, method in methods.items():
            place = f"{owner.__name__}.{name}"
            self._places[place] = most
            setattr(owner, name, self._failing(place, method))
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(owner, name, method)

    def _failing(self, place: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._armed != place:
                return method(*arguments, **options)
            self._armed = None
            error = _new_error(self._chance)
            is_main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt) and not is_main:
                error = OSError("planted")  # interrupts come to the main thread only
            self.note(place, NUM_SEQUENCES if isinstance(error, KeyboardInterrupt) else self._places[place])
            if self._chance.random() < 0.5:
                method(*arguments, **options)
            raise error

        return call

    def arm(self) -> None:
        """Make the next call of one of the methods fail."""
        self._armed = self._chance.choice(list(self._places))

    def note(self, place: str, most: int) -> None:
        """Record a fault that may end `most` sequences."""
        self._count[place] += 1
        self.may_end += most

    def disarm(self) -> None:
        """Make no method fail."""
        self._armed = None

    @contextmanager
    def interrupt(self) -> Iterator[None]:
        """Interrupt this thread at one of the next lines of the engine's files, if so many are run."""
        lines = int(_MOST_LINES ** self._chance.random())

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.startswith(_ENGINE_FILES) or frame.f_code in _WITHOUT_SIGNALS:
                return None
            lines -= event == "line"
            if lines == 0:
                sys.settrace(None)
                self.note("a line of the engine", NUM_SEQUENCES)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            yield
        except KeyboardInterrupt as interrupt:
            # CPython 3.11 may lose a reference where a trace raises. The frames would then keep the engine for ever.
            error: BaseException | None = interrupt
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            raise
        finally:
            sys.settrace(None)


@dataclass
class Failing:
    """Passes on `calls` results, and then returns a wrong one or raises."""

    calls: int
    wrong: Any

    def __call__(self, right: Any) -> Any:
        self.calls -= 1
        if self.calls >= 0:
            return right
        return self.wrong() if callable(self.wrong) else self.wrong


@dataclass
class FailingConstraint:
    """Forbids nothing. One of its methods fails."""

    place: str
    failing: Failing

    def fork(self) -> Any:
        """See `Constraint.fork`."""
        return self._result("fork", replace(self, failing=replace(self.failing)))

    def mask(self, logits: torch.Tensor) -> Any:
        """See `Constraint.mask`."""
        return self._result("mask", logits.clone())

    def accept(self, token: int) -> None:
        """See `Constraint.accept`."""
        self._result("accept", None)

    def count_allowed(self, tokens: Sequence[int]) -> Any:
        """See `Constraint.count_allowed`."""
        return self._result("count_allowed", len(tokens))

    def forced(self, most: int) -> Any:
        """See `Constraint.forced`."""
        return self._result("forced", ())

    def _result(self, place: str, right: Any) -> Any:
        return self.failing(right) if place == self.place else right


@dataclass
class ByMasks:
    """A constraint that forces no tokens and has another one's masks."""

    inner: Constraint

    def __post_init__(self) -> None:
        self.mask, self.accept, self.count_allowed = self.inner.mask, self.inner.accept, self.inner.count_allowed

    def fork(self) -> ByMasks:
        """See `Constraint.fork`."""
        return ByMasks(self.inner.fork())

    def forced(self, most: int) -> Sequence[int]:
        """See `Constraint.forced`."""
        return ()


class UnreliableDrafter:
    """Proposes another drafter's drafts, and now and then drafts that no drafter may propose."""

    def __init__(self, drafter: Drafter, chance: random.Random, faults: Faults):
        self._drafter = drafter
        self._chance = chance
        self._faults = faults

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        """See `Drafter.propose`."""
        drafts = self._drafter.propose(requests)
        if self._chance.random() < 0.95:
            return drafts
        self._faults.note("what a drafter returns", 0)
        wrong = (None, -1, 10**9, "a", [-1], [10**9], ["a"], [True], [0] * 99, torch.tensor([1]))
        return self._chance.choice((None, 5, drafts[1:], *([each] * len(requests) for each in wrong)))

    def end(self, id: int) -> None:
        """See `Drafter.end`."""
        self._drafter.end(id)


class UnreliableStatefulDrafter(UnreliableDrafter):
    """The same of a drafter with a state."""

    _drafter: StatefulDrafter

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """See `StatefulDrafter.allocate`."""
        self._drafter.allocate(num_sequences, max_length)

    def warm_up(self) -> None:
        """See `StatefulDrafter.warm_up`."""
        self._drafter.warm_up()


class UnreliableMTPDrafter(UnreliableStatefulDrafter):
    """The same of a drafter that reads hidden states too."""

    _drafter: MTPDrafter

    def see(self, steps: Sequence[SeenTokens]) -> None:
        """See `HiddenStateDrafter.see`."""
        self._drafter.see(steps)


def _raise(error: BaseException) -> None:
    raise error


@dataclass(frozen=True)
class Expected:
    """The outputs of a sequence alone."""

    tokens: Sequence[int]
    text: str
    reason: str
    error: str | None
    logprobs: Sequence[Any]

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> Expected:
        tokens, logprobs = [each.token for each in outputs], [each.logprob for each in outputs]
        last = outputs[-1]
        return cls(tokens, "".join(each.text for each in outputs), last.finish_reason, last.error, logprobs)


class Fuzz:
    """Runs requests on one engine after another, with a prefix cache and a drafter that outlive them.

    Args:
        folder: the folder of the prefix cache.
        on_device: run on a device that chooses tokens itself, without drafts.
        mtp: run a model with layers for multi-token prediction, which draft.
    """

    def __init__(self, folder: Path, seed: int, on_device: bool = False, mtp: bool = False):
        self.report = Report()
        self._ended: set[int] = set()  # ids of sequences that have had their last output
        self._chance = random.Random(seed)
        self._faults = Faults(self._chance, self.report.faults)
        checkpoint = bundled_checkpoint()
        model = _model_with_mtp() if mtp else load_model(checkpoint, torch.float32)
        adapters = {name: random_adapter(model.config, 4, number) for number, name in enumerate(("plain", "activated"))}
        self._tokenizer = open_checkpoint(checkpoint).load_tokenizer()
        invocation = tuple(self._tokenizer.encode("statement"))
        adapters["activated"] = replace(adapters["activated"], invocation=invocation)
        defaults = GenerationConfig.from_dict(read_object(checkpoint / "generation_config.json"))
        self._on_device, self._may_end_later = on_device, 0
        self._target: type[CPURuntime] = TargetOnDevice if on_device else TargetRuntime
        self._runtime = self._target(model, defaults, adapters=adapters)
        self._host = TargetRuntime(model, defaults, adapters=adapters)
        self._drafters: list[UnreliableDrafter | None] = []
        if mtp:
            layers = MTPDrafter(self._runtime, NUM_SEQUENCES, MAX_LENGTH)
            self._drafters.append(UnreliableMTPDrafter(layers, self._chance, self._faults))
        else:
            draft_model = DraftModel(DraftRuntime(model, defaults), model.config.vocab_size, NUM_SEQUENCES, MAX_LENGTH)
            self._drafters.append(UnreliableDrafter(NgramDrafter(1, 3), self._chance, self._faults))
            self._drafters.append(UnreliableStatefulDrafter(draft_model, self._chance, self._faults))
            self._drafters.append(None)  # without one, pieces of prompts and single tokens share steps
        self._folder = PrefixFolder(folder, _FOLDER_BYTES, self._runtime)
        self._cache = PrefixCache(self._runtime, _CACHE_BYTES, 16, at_branches=True, folder=self._folder)
        vocab_size = model.config.vocab_size
        self._requests = list(_requests(self._tokenizer, vocab_size, self._chance))
        self._expected = [self._alone(request) for request in self._requests]
        for request, expected in zip(self._requests, self._expected, strict=True):
            self._check(_follows_rules(request, expected, vocab_size), f"{expected} breaks the rules of {request}")
        if on_device:
            self._add_kinds_that_run_ahead()
        self._engine = self._new_engine()

    def run(
        self, num_requests: int, progress: Callable[[Sequence[int]], Sequence[int]] = lambda numbers: numbers
    ) -> Report:
        """Run `num_requests` requests with faults, and then each kind of request without."""
        with ExitStack() as stack:
            for most, owner, *names in (
                (NUM_SEQUENCES, self._target, "step", "step_with_hidden_states", "decode", "verify", "commit"),
                (1, self._target, "allocate"),
                (1, Sampler, "ask", "answer", "allowed", "forced", "take_forced"),
                (1, TextStream, "add", "finish"),
                (1, RunningSequence, "append", "record_prompt_logprobs", "give_forced"),
                # These only save time, so their failure ends no sequence.
                (0, self._target, "snapshot", "restore", "prepare_snapshot"),
                (0, DraftRuntime, "step", "verify", "commit"),
                (0, MTPDrafter, "see", "propose", "end"),
                (0, CPUMTPLayers, "step", "logits"),
                (0, Snapshot, "save", "load"),
            ):
                stack.enter_context(self._faults.watching(most, owner, *names))
            self._run_with_faults(progress(range(num_requests)))
        self._run_all_kinds()
        self._folder.close()
        if isinstance(self._runtime, TargetOnDevice):
            self.report.ahead, self.report.stopped = self._runtime.ahead, self._runtime.stopped
            self.report.drawn, self.report.undecided = self._runtime.drawn, self._runtime.undecided
        else:
            self.report.mixed = self._runtime.mixed
        return self.report

    def _add_kinds_that_run_ahead(self) -> None:
        """Add kinds of requests whose tokens a device chooses.

        Some end at a token or a string. For each, another request continues its text, from a snapshot of its end or of
        a place within it.
        """
        plain = [number for number, each in enumerate(self._requests) if _is_plain(each)]
        for number in plain:
            request, tokens = self._requests[number], self._expected[number].tokens
            middle = tokens[len(tokens) // 2]
            ended = (
                request,
                replace(request, stop_token_ids=[middle, self._tokenizer.eos_token_id]),
                replace(request, stop=[self._tokenizer.decode([middle])]),
            )
            # One of each kind that is drawn, because all would take long.
            for each in ended if request.temperature is None else ended[number % 3 :][:1]:
                answer = self._alone(each).tokens
                further = self._tokenizer.encode(" and")
                goes_on = replace(request, tokens=[*request.tokens, *answer[:-1], *further], snapshots_at=None)
                for kind in (each, replace(goes_on, tokens=[*request.tokens, *answer, *further]), goes_on):
                    self._requests.append(kind)
                    self._expected.append(self._alone(kind))

    def _new_engine(self) -> Engine:
        return Engine(
            self._runtime,
            NUM_SEQUENCES,
            max_length=MAX_LENGTH,
            tokenizer=self._tokenizer,
            prefix_cache=self._cache,
            drafter=None if self._on_device else self._chance.choice(self._drafters),
            draft_tokens=self._chance.randrange(1, 6),
        )

    def _alone(self, request: Request) -> Expected:
        """Run a request alone, each of its tokens in a step of its own."""
        engine = Engine(self._host, 1, max_length=MAX_LENGTH, tokenizer=self._tokenizer)
        if request.constraint is not None:
            request = replace(request, constraint=ByMasks(request.constraint))
        engine.add(request)
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
        return Expected.of(outputs)

    def _run_with_faults(self, numbers: Sequence[int]) -> None:
        running: dict[int, _Run] = {}
        for _ in numbers:
            self._add(running)
            while self._engine.num_running + self._engine.num_waiting > NUM_SEQUENCES:
                self._step(running)
                if running and self._chance.random() < 0.02:
                    self._cancel(running)
                if self._chance.random() < 0.005:
                    running.clear()
                    self._count_drafts(self._engine)
                    self._engine, self._faults.may_end = self._new_engine(), 0
                    self._check(self._are_snapshots_free(), "a deleted engine holds snapshots")
        while self._engine.has_work:
            self._step(running)
        self._count_drafts(self._engine)
        self._check(not running, f"{len(running)} sequences never ended")
        self._check(self._cache.stats.in_use == 0, "snapshots are in use, and no sequence runs")

    def _are_snapshots_free(self) -> bool:
        """Return whether no snapshot is in use once garbage has been collected: some requests bring code that refers to
        their engine. While the folder's thread collects, `gc.collect` does nothing.
        """
        for _ in range(20):
            gc.collect()
            if self._cache.stats.in_use == 0:
                return True
            time.sleep(0.05)
        return False

    def _count_drafts(self, engine: Engine) -> None:
        self.report.drafted += engine.stats.drafted_tokens
        self.report.accepted += engine.stats.accepted_tokens

    def _add(self, running: dict[int, _Run]) -> None:
        kind = self._chance.randrange(len(self._requests))
        request, fails = self._with_a_fault(self._requests[kind])
        with suppress(KeyboardInterrupt, UserError), self._sometimes_interrupted(0.02):
            running[self._engine.add(request)] = _Run(kind, fails)

    def _cancel(self, running: dict[int, _Run]) -> None:
        id = self._chance.choice(list(running))
        with suppress(KeyboardInterrupt), self._sometimes_interrupted(0.2):
            self._engine.cancel(id)
            del running[id]
            return
        # The interrupt may have come before the sequence ended or after, so the caller repeats the call.
        self._engine.cancel(id)
        del running[id]

    def _step(self, running: dict[int, _Run]) -> None:
        """Run a step in which something may fail, and compare the texts that have ended."""
        if self._chance.random() < 0.3:
            self._faults.arm()
        outputs: Sequence[Output] | None = None
        with suppress(KeyboardInterrupt), self._sometimes_interrupted(0.1):
            outputs = self._engine.step()
        self._faults.disarm()
        if outputs is None:  # the next step reports the sequences that have ended
            return
        errors = []
        for output in outputs:
            run = running.get(output.id)
            self._check(output.id not in self._ended, "a sequence has an output after its last one")
            if output.finish_reason is not None:
                self._ended.add(output.id)
            if run is None:  # an interrupted `add` may have added it without returning
                continue
            run.outputs.append(output)
            if output.finish_reason is not None:
                self._compare(running.pop(output.id))
                is_due = run.fails or output.error == self._expected[run.kind].error
                errors += [] if is_due else [output.error]
        failed, self._faults.may_end = self._faults.may_end, 0
        most = self._may_end_later + failed
        self._check(len(errors) <= most, f"{len(errors)} sequences ended, and {most} may: {errors}")
        # On a device the failed step may be the one that runs ahead. Its sequences end with the next call.
        self._may_end_later = min(failed, max(0, most - len(errors))) if self._on_device else 0

    def _compare(self, run: _Run) -> None:
        expected, last = self._expected[run.kind], run.outputs[-1]
        if last.error == expected.error:
            self.report.compared += 1
            self._check(Expected.of(run.outputs) == expected, f"{Expected.of(run.outputs)} and not {expected}")
            return
        self.report.failed += 1
        tokens = [output.token for output in run.outputs[:-1]]
        self._check(tokens == expected.tokens[: len(tokens)], f"{tokens} and not {expected.tokens}")

    def _run_all_kinds(self) -> None:
        """Run all kinds of requests once more: no fault has left a wrong state in the prefix cache."""
        engine = self._new_engine()
        ids = {engine.add(request): expected for request, expected in zip(self._requests, self._expected, strict=True)}
        outputs: dict[int, list[Output]] = {id: [] for id in ids}
        while engine.has_work:
            for output in engine.step():
                outputs[output.id].append(output)
        self._count_drafts(engine)
        for id, expected in ids.items():
            self.report.compared += 1
            self._check(Expected.of(outputs[id]) == expected, f"{Expected.of(outputs[id])} at the end, not {expected}")

    @contextmanager
    def _sometimes_interrupted(self, probability: float) -> Iterator[None]:
        if self._chance.random() >= probability:
            yield
        else:
            with self._faults.interrupt():
                yield

    def _check(self, is_right: bool, wrong: str) -> None:
        if not is_right:
            self.report.wrong.append(wrong)

    def _with_a_fault(self, request: Request) -> tuple[Request, bool]:
        """Return the request, now and then with code that fails, and whether it has such code."""
        if self._chance.random() < 0.8:
            return request, False
        failing = Failing(self._chance.randrange(NEW_TOKENS), self._chance.choice(self._wrong_results()))
        if request.constraint is not None or self._chance.random() < 0.5:
            processors = [*(request.logits_processors or ()), lambda tokens, scores: failing(scores)]
            return replace(request, logits_processors=processors), True
        place = self._chance.choice(("fork", "mask", "accept", "count_allowed", "forced"))
        return replace(request, constraint=FailingConstraint(place, failing)), True

    def _wrong_results(self) -> Sequence[Any]:
        engine = self._engine
        calls = (engine.step, lambda: engine.cancel(0), lambda: engine.add(self._requests[0]), lambda: engine.finish(0))
        errors = (ValueError("planted"), MemoryError(), UserError("planted."), ZeroDivisionError())
        wrong = (None, -1, 10**9, "a", torch.zeros(3), torch.zeros(1, 7), torch.zeros(1, 10**5), [0.0], torch.tensor(1))
        raising = (lambda error=error: _raise(type(error)(*error.args)) for error in errors)
        return [*calls, *raising, self._interrupt, *wrong]

    def _interrupt(self) -> None:
        self._faults.note("an interrupt in what a request brings", NUM_SEQUENCES)
        raise KeyboardInterrupt


@dataclass
class _Run:
    """A request of a kind, what it has given, and whether something that it brings fails."""

    kind: int
    fails: bool
    outputs: list[Output] = field(default_factory=list)


def _requests(tokenizer: PreTrainedTokenizerFast, vocab_size: int, chance: random.Random) -> Iterator[Request]:
    """Return requests of all kinds."""
    grammars = Grammars(tokenizer, vocab_size)
    options: list[dict[str, Any]] = [
        {},
        dict(temperature=0.8, seed=3),
        dict(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, seed=4),
        dict(frequency_penalty=0.7, presence_penalty=0.5, repetition_penalty=1.2),
        dict(stop=["the", "\n\n"], min_tokens=3),
        dict(logprobs=2),
        dict(prompt_logprobs=1, logprobs=0, temperature=0.7, seed=5),
        dict(constraint=grammars.constraint("json", _SCHEMA), stop_token_ids=[tokenizer.eos_token_id]),
        dict(constraint=grammars.constraint("json", _LONG_NAMES), logprobs=2, stop_token_ids=[tokenizer.eos_token_id]),
        dict(constraint=grammars.constraint("json", _LONG_NAMES), stop=['ent": '], temperature=1.0, seed=8),
        dict(constraint=grammars.constraint("regex", "[a-z ]+x"), temperature=0.9, seed=6),
        dict(adapter="plain"),
        dict(adapter="activated", temperature=0.5, seed=7),
        dict(snapshots_at=[3]),
    ]
    for number, option in enumerate(options):
        for place, start in enumerate(_STARTS):
            text = (_SHARED if (number + place) % 2 else "") + start
            yield Request(tokenizer.encode(text), NEW_TOKENS + place, **option)
    for option in _pairs(tokenizer, vocab_size, grammars, chance):
        yield Request(tokenizer.encode(chance.choice(_STARTS)), NEW_TOKENS, **option)
    grammars.close()


def _pairs(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, grammars: Grammars, chance: random.Random
) -> Iterator[dict[str, Any]]:
    """Return options with which every pair of options occurs, and some others beside it. Most of their tokens are of
    texts that the grammars force.
    """
    end = tokenizer.eos_token_id
    forced = tokenizer.encode(" assignment statement")
    one, other = forced[0], forced[-1]
    regex = "( assignment| the)( statement){2}s?"
    values: dict[str, Sequence[Any]] = {
        "temperature": (0, 0.8, 1e-40, 1e-300, 1e300),
        "top_k": (1, 20),
        "top_p": (1e-9, 0.6),
        "min_p": (0.1, 1.0),
        "typical_p": (1e-9, 0.7),
        "repetition_penalty": (1.3, 1e-300, 1e300),
        "frequency_penalty": (2, -2),
        "presence_penalty": (2, -2),
        "logit_bias": ({one: 100}, {other: -100, end: 100}),
        "allowed_token_ids": ([end], [*forced, end], forced, range(vocab_size - 300)),
        "bad_words_ids": ([[one]], [[one, other]], [[other, other], [end]]),
        "suppress_tokens": ([one], [other, end]),
        "begin_suppress_tokens": ([one], [end]),
        "no_repeat_ngram_size": (1, 2, 3),
        "stop": (" statement", ["the", "ss"]),
        "stop_token_ids": ([end], [end, other], []),
        "min_tokens": (2, 9),
        "logprobs": (0, 2),
        "prompt_logprobs": (1,),
        "logits_processors": ([_no_even_token], [_half]),
        "constraint": (
            grammars.constraint("regex", regex),
            grammars.constraint("json", _LONG_NAMES),
            grammars.constraint("lark", 'start: " assignment" " statement"? <|end_of_text|>'),
        ),
    }
    for pair in itertools.combinations(values, 2):
        names = {*pair, *(name for name in values if chance.random() < 0.15)}
        yield {name: chance.choice(values[name]) for name in values if name in names} | {"seed": chance.randrange(99)}


def _no_even_token(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, ::2] = -math.inf
    return scores


def _half(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores / 2


def _follows_rules(request: Request, expected: Expected, vocab_size: int) -> bool:
    """Return whether every token of a text is one that `engine.token_rules` describes, and whether an error means that
    there is none.
    """
    new: list[int] = []
    for token in expected.tokens:
        allowed = _allowed(request, new, vocab_size)
        if token not in allowed if token is not None else allowed:
            return False
        new.append(token)
    return True


def _allowed(request: Request, new: Sequence[int], vocab_size: int) -> set[int]:
    by_constraint = _allowed_by_constraint(request, new, vocab_size)
    early = set(request.stop_token_ids or ()) if len(new) < (request.min_tokens or 0) else set()
    if request.constraint is not None and by_constraint <= early:
        early = set()
    allowed = by_constraint - early - _forbidden(request, new)
    if request.allowed_token_ids is not None:
        allowed &= set(request.allowed_token_ids)
    if _no_even_token in (request.logits_processors or ()):
        allowed = {token for token in allowed if token % 2}
    return allowed


def _allowed_by_constraint(request: Request, new: Sequence[int], vocab_size: int) -> set[int]:
    if request.constraint is None:
        return set(range(vocab_size))
    constraint = request.constraint.fork()
    for token in new:
        constraint.accept(token)
    try:
        return set(constraint.mask(torch.zeros(vocab_size)).isfinite().nonzero().flatten().tolist())
    except NoTokenLeft:
        return set()


def _forbidden(request: Request, new: Sequence[int]) -> set[int]:
    """Return the tokens that are forbidden by name, or because of those before them."""
    tokens = [*request.tokens, *new]
    size = request.no_repeat_ngram_size
    seen = [tokens[end - size : end] for end in range(size, len(tokens) + 1)] if size else []
    ends = [*(request.bad_words_ids or ()), *seen]
    forbidden = {last for *before, last in ends if tokens[len(tokens) - len(before) :] == before}
    return forbidden | {*(request.suppress_tokens or ()), *(() if new else request.begin_suppress_tokens or ())}


def _is_plain(request: Request) -> bool:
    """Return whether the request only draws tokens: no other option changes their choice or where they end."""
    drawing = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed"))
    options = replace(request, tokens=[0], max_tokens=1, adapter=None, snapshots_at=None, **drawing)
    return options == Request([0], 1)


def _model_with_mtp() -> HybridForCausalLM:
    """Return a small Nemotron model with layers for multi-token prediction and the bundled model's vocabulary. Its
    probabilities differ little, so that the random numbers choose most drawn tokens, and drafts are often accepted.
    """
    bundled = open_checkpoint(bundled_checkpoint()).config
    config = replace(
        published_config("nemotron-3-nano-30b-a3b"),
        **{name: getattr(bundled, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        **dict(layer_types=("mamba", "moe", "attention", "moe"), num_hidden_layers=4, hidden_size=32, head_dim=16),
        **dict(num_attention_heads=4, mamba_n_heads=4, mamba_n_groups=2, mamba_d_head=16, mamba_d_state=16),
        **dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=24, shared_intermediate_size=24),
        mtp_layer_types=("attention", "moe"),
    )
    model = random_model(config)
    model.lm_head.weight.data *= 0.2
    return model


def fuzz(num_requests: int, seed: int = 0, on_device: bool = False, mtp: bool = False, **options: Any) -> Report:
    """Run the fuzz; see `Fuzz` and, for options, `Fuzz.run`."""
    logging.disable()  # log records would keep frames of failed calls alive, and with them snapshots
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Fuzz(Path(folder) / "prefixes", seed, on_device, mtp).run(num_requests, **options)
    finally:
        logging.disable(logging.NOTSET)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=at_least(1), default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--on-device", action="store_true", help="on a stand-in for a device that chooses tokens itself")
    kind.add_argument("--mtp", action="store_true", help="a model that drafts with multi-token prediction")
    options = parser.parse_args(arguments)
    report = fuzz(
        *(options.requests, options.seed, options.on_device, options.mtp),
        progress=lambda numbers: track(numbers, "requests"),
    )
    print(f"{options.requests} requests, {report.failed} of which failed, and {report.compared} texts compared")
    print(f"faults: {dict(report.faults.most_common())}")
    if options.on_device:
        print(
            f"tokens that ran before the engine knew them: {report.ahead}, and {report.stopped} that ended a sequence; "
            f"drawn there: {report.drawn}, and {report.undecided} left to the host"
        )
    else:
        print(f"steps of pieces of prompts and of single tokens: {report.mixed}")
        print(f"tokens drafted: {report.drafted}, and {report.accepted} of them accepted")
    print(f"wrong: {len(report.wrong)}")
    for wrong in report.wrong[:5]:
        print(wrong)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
