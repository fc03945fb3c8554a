"""Continuous batching: sequences start when there is room, and leave when they end, while others run.

Each step of the engine is one step of the runtime: schedule, run, postprocess. `engine.scheduler` decides
what it runs; `engine.live_sequences` decides what a failure ends.
"""

from __future__ import annotations

import functools
import itertools
import reprlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.devices.cpu import sampling as host
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.drafting.drafters import Drafter
from granite4_neuron.engine.drafting.drafting import Drafting
from granite4_neuron.engine.live_sequences import LiveSequences
from granite4_neuron.engine.prefix.cache import PrefixCache
from granite4_neuron.engine.prefix.reuse import PrefixReuse
from granite4_neuron.engine.prefix.slot_cache import SlotPrefixCache
from granite4_neuron.engine.request import GenerationStats, Output, Request, check_count, check_has
from granite4_neuron.engine.sampling import Question, choose
from granite4_neuron.engine.sampling_params import is_number, is_whole
from granite4_neuron.engine.scheduler import ScheduledStep, Scheduler
from granite4_neuron.engine.sequence import LogitsOnDevice, RunningSequence
from granite4_neuron.engine.slots import Slots
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.ops.sampling import Chosen
from granite4_neuron.runtime.interface import UNDECIDED, Decoded, Row, Runtime, Verification, require

# One count for all engines: a drafter that outlives its engine must not take a new sequence for an old one.
_IDS = itertools.count()


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an engine wait while another thread runs one. Before the method runs, end the sequences that an
    earlier call left unfinished.
    """

    @functools.wraps(method)
    def locked(self: Engine, *arguments: Any, **options: Any) -> Any:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # threading.Condition calls it too
            raise UserError("an engine cannot be called by code that it calls itself, such as a logits processor.")
        with self._lock:
            self._live.end_unfinished()
            return method(self, *arguments, **options)

    return locked


class _Launched(NamedTuple):
    """A step of decode that the device runs.

    idle: ids of sequences to which it adds nothing, because the device left their tokens to the host.
    """

    step: ScheduledStep
    decoded: Decoded
    idle: frozenset[int] = frozenset()

    def row_of(self, sequence: RunningSequence) -> int | None:
        """Return the number of the row that adds something to a sequence, if there is one."""
        rows = (row for row, each in enumerate(self.step.sequences) if each is sequence and each.id not in self.idle)
        return next(rows, None)

    def is_left(self, sequence: RunningSequence, row: int) -> bool:
        """Return whether the host is to choose the token of a sequence, which has this row."""
        return not sequence.takes_likeliest and self.step.rows[row].draw is None

    def rows(self) -> dict[int, int]:
        """Return the numbers of all rows, by the ids of their sequences."""
        return {sequence.id: row for row, sequence in enumerate(self.step.sequences)}

    def last_logits(self, sequences: Sequence[RunningSequence]) -> dict[int, list[torch.Tensor]]:
        """Return the logits [vocab_size] after the last token of some of its sequences, each alone in a list, by id."""
        rows = self.rows()
        logits = self.decoded.logits([rows[each.id] for each in sequences]) if sequences else ()
        return {each.id: [last] for each, last in zip(sequences, logits, strict=True)}


class _Verified(NamedTuple):
    """A verified row.

    logits: after each of its tokens, [longest row, vocab_size].
    known: how many of its tokens are no drafts.
    has_ended: whether the sequence ends with these, so that none follows.
    """

    sequence: RunningSequence
    row: Row
    logits: torch.Tensor
    known: int
    has_ended: bool

    @classmethod
    def of(cls, sequence: RunningSequence, row: Row, logits: torch.Tensor) -> _Verified:
        return cls(sequence, row, logits, sequence.num_unrun - sequence.has_ended, sequence.has_ended)

    @property
    def drafts(self) -> Sequence[int]:
        return self.row.tokens[self.known :]

    @property
    def question(self) -> tuple[RunningSequence, Sequence[torch.Tensor], Sequence[int]]:
        """The sequence, and the arguments of `RunningSequence.ask` for the tokens after those that are known."""
        return self.sequence, self.logits[self.known - 1 : len(self.row.tokens)].unbind(), self.drafts

    def num_accepted(self, outputs: Sequence[Output]) -> int:
        """Return how many of the row's tokens are the sequence's: the last output's token has not run."""
        return self.known - (not self.has_ended) + sum(output.error is None for output in outputs)


class Engine:
    """Runs many requests at a time on a runtime.

    An engine belongs to one thread at a time, and so do its runtime's state, its prefix cache and its drafter: a call
    from another thread waits until the step that runs has ended.

    The output of a sequence does not depend on other sequences: when they start and end, how long they are, or whether
    they fail.

    A failed operation ends the sequences that it was for, each with an error output, and no others. A request's own
    code, such as a logits processor, runs for its sequence alone; the runtime runs for all sequences of a step. A step
    counts for a sequence when its outputs are among those that `step` is to return. If an exception leaves a call, as
    an interrupt does, the next call first ends the sequences of a step that began and does not count. Drafts and
    snapshots only save time: if one fails, that is logged, and the sequences continue without it.

    Args:
        runtime: runs the steps.
        num_sequences: how many sequences run at a time; the others wait, by priority and then in order of arrival.
        max_length: the most tokens of a sequence, prompt and continuation; None for the runtime's longest.
        memory_bytes: limit in bytes for the state and cache of running sequences, and of free slots that keep the
            memory of earlier ones; None for no limit other than `num_sequences` times `max_length`.
        tokenizer: turns tokens into text; None for outputs without text.
        prompts_first: run all prompts before the first decode, for a batch whose tokens are not streamed. A prompt that
            arrives later then delays all other sequences.
        prefix_cache: states of earlier sequences for new ones with the same beginning. It belongs to this runtime and
            can be used by several engines one after another. Its memory and slots do not count towards `memory_bytes`
            and `num_sequences`.
        drafter: proposes tokens, which makes sequences faster and does not change them. Drafting pauses for a sequence
            whose drafts keep being rejected.
        draft_tokens: the most tokens that the drafter proposes for a sequence.
        max_gap: the longest time in seconds that a sequence should wait for its next token while other prompts run; two
            steps of decode if they take longer. Measured step times then set the sizes of a prompt's pieces. A runtime
            whose prompts have fixed cut points runs at least a chunk between two steps of decode. None for whole
            chunks: one runs between two steps of decode or shares a step with decode.
        clock: tells the time in seconds.

    Attributes:
        runtime, num_sequences: as given. max_length: as given, or the runtime's longest.
        stats: totals over all sequences.

    Raises:
        UserError: an argument is invalid, or the runtime or the drafter has no room for so many or such long sequences,
            or the runtime cannot verify drafts, or has no hidden states for a drafter that reads them.
    """

    def __init__(
        self,
        runtime: Runtime,
        num_sequences: int,
        *,
        max_length: int | None = None,
        memory_bytes: int | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        prompts_first: bool = False,
        prefix_cache: PrefixCache | SlotPrefixCache | None = None,
        drafter: Drafter | None = None,
        draft_tokens: int = 4,
        max_gap: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        check_count("num_sequences", num_sequences, 1)
        check_count("draft_tokens", draft_tokens, 1)
        if max_length is not None:
            check_count("max_length", max_length, 2)  # a token of the prompt, and a new one
        if memory_bytes is not None:
            check_count("memory_bytes", memory_bytes, 0)
        if max_gap is not None and not (is_number(max_gap) and max_gap > 0):
            raise UserError(f"max_gap is {reprlib.repr(max_gap)}, and must be a number of seconds above 0.")
        check_has("tokenizer", tokenizer, "backend_tokenizer")
        check_has("prefix_cache", prefix_cache, "match_prefix", "insert")
        check_has("drafter", drafter, "propose", "end")
        drafting = Drafting(drafter, runtime, draft_tokens)
        longest = runtime.max_length
        self.runtime = runtime
        self._form = runtime.sampling or host.form()  # it may compile kernels: not while a request waits
        self.num_sequences = num_sequences
        self.max_length = longest if max_length is None else min(max_length, longest)
        self.stats = GenerationStats()
        self._tokenizer = tokenizer
        self._verified_tokens = 0 if drafter is None else min(draft_tokens + 1, runtime.tokens_per_verification)
        set_aside = () if prefix_cache is None else prefix_cache.slots
        self._slots = Slots(runtime, num_sequences, self.max_length, memory_bytes, set_aside)
        drafting.allocate(num_sequences, self.max_length)
        self._prefixes = PrefixReuse(prefix_cache, runtime, self._slots, self.stats)
        self._drafting = drafting
        self._live = LiveSequences(self._prefixes, drafting, self.stats)
        parts = self._slots, self._live, self._prefixes, drafting
        self._scheduler = Scheduler(runtime, *parts, prompts_first, max_gap, clock)
        self._clock = clock
        self._ahead: _Launched | None = None  # launched before the tokens that it runs were known
        self._lock = threading.RLock()

    def warm_up(self) -> None:
        """Have the runtime compile everything that steps need, and the drafter what its proposals need, so that no step
        waits for a compiler; see `Runtime.warm_up`.
        """
        self.runtime.warm_up(self._slots.state, verified_tokens=self._verified_tokens)
        self._drafting.warm_up()

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs, waits, or has outputs that no step has returned yet."""
        return self._live.has_work

    @property
    def failed_steps(self) -> int:
        """Steps of the runtime, and allocations of its state, that have failed since the last step that succeeded."""
        return self._slots.failed_steps

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._live.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._live.waiting)

    @_one_at_a_time
    def add(self, request: Request) -> int:
        """Queue a request; it starts in a later step.

        Returns:
            The id of its outputs.

        Raises:
            UserError: the request is invalid, its adapter is not loaded, or it could never run because it is longer
                than `max_length` or needs more memory than `memory_bytes`.
        """
        request.check(self.runtime.config.vocab_size)
        if request.prompt_logprobs is not None:
            require(self.runtime, "all_logits")
        if request.stop and self._tokenizer is None:
            raise UserError("stop strings need an engine with a tokenizer; give stop tokens.")
        if len(request.tokens) >= self.max_length:
            raise UserError(
                f"the prompt has {len(request.tokens)} tokens; sequences here have at most {self.max_length}, of which "
                "at least one is new."
            )
        limit = min(len(request.tokens) + request.max_tokens, self.max_length)
        self._slots.check(limit)
        request = request.with_defaults(self.runtime.generation_config)
        text = TextStream(self._tokenizer, request.stop or (), request.tokens, request.skip_special_tokens)
        adapter = AppliedAdapter.of(request.adapter, request.tokens, self.runtime.adapters)
        cuts, form = self.runtime.prompt_cuts, self._form
        by_device = self.runtime.cannot.keys().isdisjoint({"decode", "choices"})
        sequence = RunningSequence(next(_IDS), request, limit, text, adapter, cuts, form, by_device)
        self._live.add(sequence)
        return sequence.id

    @_one_at_a_time
    def cancel(self, id: int) -> bool:
        """End a sequence at once, without further output. Return false if it has already ended.

        Raises:
            UserError: `id` cannot be the id of a sequence.
        """
        if not is_whole(id):
            raise UserError(f"id is {reprlib.repr(id)}, and must be the number that `Engine.add` returned.")
        return self._live.cancel(id)

    @_one_at_a_time
    def finish(self, id: int) -> str:
        """End a running sequence as if it had reached its limit; return the text that was held back.

        Unlike `cancel`, this keeps its state in the prefix cache. Before calling it, read the outputs of the last step.

        Raises:
            UserError: no sequence of that id runs.
        """
        if not is_whole(id) or id not in self._live.running:
            raise UserError(f"id is {reprlib.repr(id)}, and must be that of a sequence that runs.")
        sequence = self._live.running[id]
        row = None if self._ahead is None else self._ahead.row_of(sequence)
        if self._ahead is not None and row is not None:  # the state has seen the last token too
            sequence.stored += 1
            sequence.logits = LogitsOnDevice(self._ahead.decoded, row)
        self._prefixes.keep(sequence)
        self._live.end(sequence)
        return sequence.text.finish()

    def step(self) -> list[Output]:
        """Run one step; return the new tokens, in order for each sequence. With a drafter it may have several."""
        self._run_step()
        # Python handles no signal between these two, so an interrupt leaves the outputs to the next step or to the
        # caller.
        outputs, self._live.outputs = self._live.outputs, []
        return outputs

    @_one_at_a_time
    def _run_step(self) -> None:
        """Schedule, run, postprocess."""
        self._live.keep_due()  # only now: the last step's new tokens do not wait for it
        self._scheduler.admit()
        started = self._clock()
        step = None if self._ahead is None else self._live_part(self._ahead)
        if step is None or not step.rows:
            self._ahead, step = None, self._scheduler.schedule()
        generated = self.stats.generated_tokens
        with self._live.guard(*step.sequences):
            if step.has_drafts:
                self._accept(step, self._verify(step))
            elif self._leaves_logits(step):
                self._decode(step)
            elif step.rows:
                logits, hidden_states = self._run(step)
                self._choose(step, logits)
                self._show_drafter(step, hidden_states)
        self._record(step, self.stats.generated_tokens - generated, self._clock() - started)

    def _run(self, step: ScheduledStep) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Run a step; return logits as `Runtime.step` does, and each row's hidden states if the drafter reads them."""
        self._slots.failed_steps += 1
        arguments = self._slots.state, step.rows, step.all_logits
        hidden_states: Sequence[torch.Tensor] = ()
        if self._drafting.reads_hidden_states:
            logits, hidden_states = self.runtime.step_with_hidden_states(*arguments)
        else:
            logits = self.runtime.step(*arguments)
        self._slots.failed_steps = 0
        return logits, hidden_states

    def _choose(self, step: ScheduledStep, logits: torch.Tensor) -> None:
        """Choose the next token of each sequence whose tokens have all been run."""
        lasts = [
            row_logits[len(row.tokens) - 1] if step.all_logits else row_logits
            for row, row_logits in zip(step.rows, logits, strict=True)
        ]
        are_run = [
            row.start + len(row.tokens) == len(sequence.tokens)
            for sequence, row in zip(step.sequences, step.rows, strict=True)
        ]
        answers = self._answers(
            [(each, [last], ()) for each, last, is_run in zip(step.sequences, lasts, are_run, strict=True) if is_run]
        )
        for sequence, row, row_logits, last, is_run in zip(
            step.sequences, step.rows, logits, lasts, are_run, strict=True
        ):
            if is_run and sequence.id not in answers:  # it has failed
                continue
            with self._live.guard(sequence):
                if step.all_logits:
                    sequence.record_prompt_logprobs(row, row_logits)
                outputs = sequence.choose([last], (), answers[sequence.id]) if is_run else []
                self._live.count(sequence, len(row.tokens), last, [*sequence.give_forced(), *outputs])

    def _answers(
        self, questions: Sequence[tuple[RunningSequence, Sequence[torch.Tensor], Sequence[int]]]
    ) -> dict[int, list[Chosen | UserError]]:
        """Choose tokens of all sequences in one call, as far as that is possible.

        Args:
            questions: sequences with the arguments of `RunningSequence.ask`.

        Returns:
            The argument `answers` of `RunningSequence.choose`, by sequence id; none for a sequence that fails.
        """
        asked: dict[int, list[Question | Chosen | UserError]] = {}
        for sequence, logits, drafts in questions:
            with self._live.guard(sequence):
                asked[sequence.id] = sequence.ask(logits, drafts)
        flat = [each for of_sequence in asked.values() for each in of_sequence if not isinstance(each, UserError)]
        found = iter(choose(flat, self._form))
        return {
            id: [each if isinstance(each, UserError) else next(found) for each in of_sequence]
            for id, of_sequence in asked.items()
        }

    def _show_drafter(self, step: ScheduledStep, hidden_states: Sequence[torch.Tensor]) -> None:
        """Show the drafter each row's hidden states, except those of sequences that have ended."""
        if self._drafting.reads_hidden_states:
            seen = zip(step.sequences, step.rows, hidden_states, strict=True)
            self._drafting.see([each for each in seen if each[0].id in self._live.running])

    def _leaves_logits(self, step: ScheduledStep) -> bool:
        """Return whether a step's logits stay on the device, and only the rows that are needed come to the host."""
        if step.prompt_rows or "decode" in self.runtime.cannot or self._drafting.reads_hidden_states:
            return False
        if any(each.forced for each in step.sequences):  # a row has several tokens, or nothing follows
            return False
        return any(each.takes_chosen for each in step.sequences)

    def _live_part(self, launched: _Launched) -> ScheduledStep:
        """Return a step without the sequences that have ended and without those to which it adds nothing."""
        step, live = launched.step, self._live.running.keys() - launched.idle
        numbers = [number for number, each in enumerate(step.sequences) if each.id in live]
        sequences = [step.sequences[number] for number in numbers]
        return step._replace(sequences=sequences, rows=[step.rows[number] for number in numbers])

    def _decode(self, step: ScheduledStep) -> None:
        """Run a step of decode, or continue one that has been launched; choose the next token of each sequence.

        Before waiting for the tokens, launch the step that runs them, if there may be one.
        """
        launched = self._ahead or self._launch(self._with_draws(step))
        is_sound = self._launch_following(step)
        self._prefixes.add_taken()  # while the device runs
        tokens, reports, rows = launched.decoded.tokens(), launched.decoded.reports(), launched.rows()
        undecided = frozenset(each.id for each in step.sequences if tokens[rows[each.id]] == UNDECIDED)
        if self._ahead is not None:
            self._ahead = self._ahead._replace(idle=undecided)
        on_host = [each for each in step.sequences if each.id in undecided or launched.is_left(each, rows[each.id])]
        lasts = launched.last_logits(on_host)
        if is_sound:
            self._slots.failed_steps = 0
        answers = self._answers([(each, lasts[each.id], ()) for each in on_host])
        for sequence in step.sequences:
            last, row = lasts.get(sequence.id), rows[sequence.id]
            if last is not None and sequence.id not in answers:  # it has failed
                continue
            with self._live.guard(sequence):
                if last is None:
                    outputs = [sequence.take(Chosen(tokens[row], reports[row]))]
                else:
                    outputs = sequence.choose(last, (), answers[sequence.id])
                if self._ahead is not None and sequence.takes_drawn:
                    sequence.backoff.note(len(sequence.tokens), int(sequence.id not in undecided))
                self._live.count(sequence, 1, LogitsOnDevice(launched.decoded, row), outputs)

    def _launch_following(self, step: ScheduledStep) -> bool:
        """Launch the step after one of decode, if it may run before the host knows its tokens; return false if it
        fails.
        """
        self._ahead = None
        following = self._scheduler.following(step)
        if following is None:
            return True
        with self._live.guard_ahead(*following.sequences):
            self._ahead = self._launch(following)
        return self._ahead is not None

    def _with_draws(self, step: ScheduledStep) -> ScheduledStep:
        """Return a step of decode with the descriptions of how a device chooses its tokens."""
        vocab_size, pairs = self.runtime.config.vocab_size, zip(step.sequences, step.rows, strict=True)
        return step._replace(rows=[sequence.with_draw(row, vocab_size) for sequence, row in pairs])

    def _launch(self, step: ScheduledStep) -> _Launched:
        """Launch a step of decode on the device."""
        self._slots.failed_steps += 1
        return _Launched(step, self.runtime.decode(self._slots.state, step.rows))

    def _verify(self, step: ScheduledStep) -> Verification:
        """Run a step with drafts. It ends when `_accept` has committed the chosen tokens."""
        self._slots.failed_steps += 1
        return self.runtime.verify(self._slots.state, step.rows)

    def _accept(self, step: ScheduledStep, verification: Verification) -> None:
        """Choose the next token of each sequence, and further ones as long as they equal its drafts."""
        verified = [_Verified.of(*each) for each in zip(step.sequences, step.rows, verification.logits, strict=True)]
        answers = self._answers([each.question for each in verified if not each.has_ended])
        chosen = [self._chosen(each, answers) for each in verified]
        accepted = [each.num_accepted(outputs) for each, outputs in zip(verified, chosen, strict=True)]
        self.runtime.commit(self._slots.state, verification, accepted)
        self._slots.failed_steps = 0
        for each, outputs, count in zip(verified, chosen, accepted, strict=True):
            sequence = each.sequence
            if sequence.id in self._live.running:
                with self._live.guard(sequence):
                    self._record_drafts(sequence, len(each.drafts), max(0, count - each.known))
                    self._live.count(sequence, count, each.logits[count - 1], [*sequence.give_forced(), *outputs])
        if verification.hidden_states is not None:
            seen = zip(verification.hidden_states, accepted, strict=True)
            self._show_drafter(step, [states[:count] for states, count in seen])

    def _chosen(self, verified: _Verified, answers: Mapping[int, list[Chosen | UserError]]) -> Sequence[Output]:
        """Return the outputs of a verified row; none if it has no answers, or fails."""
        sequence, logits, drafts = verified.question
        outputs: Sequence[Output] = []
        if sequence.id in answers:
            with self._live.guard(sequence):
                outputs = sequence.choose(logits, drafts, answers[sequence.id])
        return outputs

    def _record_drafts(self, sequence: RunningSequence, drafted: int, accepted: int) -> None:
        if drafted:
            sequence.backoff.note(len(sequence.tokens), accepted)
            self.stats.drafts += 1
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += accepted

    def _record(self, step: ScheduledStep, generated_tokens: int, seconds: float) -> None:
        self._scheduler.record(step, seconds)
        decode_rows, prompt_tokens = len(step.rows) - step.prompt_rows, step.prompt_tokens
        first_tokens = sum(len(each.tokens) > len(each.request.tokens) for each in step.sequences[decode_rows:])
        # The time of a step with prompts and decode is divided in proportion to their tokens.
        prompt_part = prompt_tokens / (prompt_tokens + decode_rows) if prompt_tokens else 0.0
        self.stats.prompt_tokens += prompt_tokens
        self.stats.prompt_seconds += prompt_part * seconds
        self.stats.decode_tokens += generated_tokens - first_tokens
        self.stats.decode_rows += decode_rows
        self.stats.decode_seconds += (1 - prompt_part) * seconds
