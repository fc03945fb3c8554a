"""Continuous batching: sequences start when there is room, and leave when they end, while others run.

Each step of the engine is one step of the runtime. It is either a chunk of prompts, or decode for every sequence whose
prompt is done: one token each, or several if drafts are accepted. The two take turns, so that a long prompt delays
other sequences by at most one chunk. They are not mixed, because a chunk beside single tokens would be padded to a
rectangle.
"""

from __future__ import annotations

import functools
import itertools
import logging
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.drafters import Drafter, DraftRequest, check_drafts
from granite4_neuron.engine.prefix_cache import PrefixCache, common_length
from granite4_neuron.engine.request import GenerationStats, Output, Request, check_count, check_has
from granite4_neuron.engine.sampling import RequestFault, are_finite
from granite4_neuron.engine.sampling_params import is_whole
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slot_prefix_cache import SlotPrefixCache
from granite4_neuron.engine.slots import Slots
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError, sentence_of
from granite4_neuron.runtime.interface import Row, Runtime, require

_LOGGER = logging.getLogger(__name__)
# Of all engines: a drafter that outlives its engine must not take a new sequence for an old one.
_IDS = itertools.count()


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an engine wait while another thread is in such a method, and begin with the end of what an
    earlier call has left unfinished.
    """

    @functools.wraps(method)
    def locked(self: Engine, *arguments: Any, **options: Any) -> Any:
        if self._lock._is_owned():
            raise UserError("an engine cannot be called by what it calls itself, such as a logits processor.")
        with self._lock:
            self._fail(list(self._unfinished.values()), "it was interrupted in the middle of a step.")
            return method(self, *arguments, **options)

    return locked


class _For:
    """A context in which an engine does something for sequences; see `Engine._for`. It is no generator because it is
    entered for each token.
    """

    def __init__(self, engine: Engine, sequences: Sequence[RunningSequence]):
        self._engine = engine
        self._sequences = sequences

    def __enter__(self) -> None:
        unfinished = self._engine._unfinished
        self._new = [sequence.id for sequence in self._sequences if sequence.id not in unfinished]
        for sequence in self._sequences:
            unfinished[sequence.id] = sequence

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            if not isinstance(error, Exception):  # an interrupt: see `_one_at_a_time`
                return False
            if not isinstance(error, UserError):
                _LOGGER.error("A step of the engine failed.", exc_info=error)
            failed = [sequence for sequence in self._sequences if sequence.id in self._engine._unfinished]
            self._engine._fail(failed, sentence_of(error), isinstance(error, RequestFault))
        for id in self._new:
            self._engine._unfinished.pop(id, None)
        return True


class Engine:
    """Runs many requests at a time on a runtime.

    An engine belongs to one thread at a time, and with it its runtime's state, its prefix cache and its drafter: a call
    from another thread waits until the step that runs has ended.

    The output of a sequence does not depend on other sequences: when they start and end, how long they are, or whether
    they fail.

    What fails ends the sequences that it was done for, each with an error output, and no others. What a request brings,
    such as a logits processor, is called for its sequence alone, and the runtime for all sequences of a step. A step
    counts for a sequence when its outputs are among those that `step` is to return. If an exception leaves a call, as
    an interrupt does, the next call first ends the sequences of a step that has begun and does not count. Drafts and
    snapshots only save time: if one fails, that is logged, and the sequences go on without.

    Args:
        runtime: what runs the steps.
        num_sequences: how many sequences run at a time; the others wait in order of arrival.
        max_length: the most tokens of a sequence, prompt and continuation; None for the runtime's longest.
        memory_bytes: limit in bytes for the state and cache of running sequences, and of free slots that keep the
            memory of earlier ones; None for no limit other than `num_sequences` times `max_length`.
        tokenizer: turns tokens into text; None for outputs without text.
        prompts_first: run all prompts before the first decode, for a batch whose tokens are not streamed. A prompt that
            arrives later then delays all other sequences.
        prefix_cache: states of earlier sequences for new ones with the same beginning. It belongs to this runtime and
            can be used by several engines one after another. Its memory and slots do not count towards `memory_bytes`
            and `num_sequences`.
        drafter: proposes tokens, which makes sequences faster and does not change them. A sequence whose drafts keep
            being rejected pauses drafting.
        draft_tokens: the most tokens it proposes for a sequence.

    Attributes:
        failed_steps: of the runtime, in a row, up to the last one.

    Raises:
        UserError: an argument is not what it must be, or the runtime has no room for so many or such long sequences or
            cannot verify drafts.
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
    ):
        check_count("num_sequences", num_sequences, 1)
        check_count("draft_tokens", draft_tokens, 1)
        if max_length is not None:
            check_count("max_length", max_length, 2)  # a token of the prompt, and a new one
        if memory_bytes is not None:
            check_count("memory_bytes", memory_bytes, 0)
        check_has("tokenizer", tokenizer, "backend_tokenizer")
        check_has("prefix_cache", prefix_cache, "find", "keep")
        check_has("drafter", drafter, "propose", "end")
        if drafter is not None:
            require(runtime, "verify")
        longest = runtime.max_length
        self.runtime = runtime
        self.max_length = longest if max_length is None else min(max_length, longest)
        self.stats = GenerationStats()
        set_aside = () if prefix_cache is None else prefix_cache.slots
        self._slots = Slots(runtime, num_sequences, self.max_length, memory_bytes, set_aside)
        self._tokenizer = tokenizer
        self._prompts_first = prompts_first
        self._cache = prefix_cache
        self._drafter = drafter
        self._draft_tokens = draft_tokens
        self._waiting: deque[RunningSequence] = deque()
        self._running: dict[int, RunningSequence] = {}  # by id, in the order in which they started
        self._unfinished: dict[int, RunningSequence] = {}  # by id, for which something is done that does not count yet
        self._outputs: list[Output] = []  # that count, and that no step has returned yet
        self._logged: set[str] = set()  # what failed that only saves time
        self.failed_steps = 0
        self._prompts_are_next = True
        self._lock = threading.RLock()

    def warm_up(self) -> None:
        """Have the runtime compile what steps need, so that no step waits for it; see `Runtime.warm_up`."""
        self.runtime.warm_up(self._slots.state, verifies=self._drafter is not None)

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits, or has outputs that no step has returned yet."""
        return bool(self._waiting or self._running or self._outputs)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @_one_at_a_time
    def add(self, request: Request) -> int:
        """Queue a request; it starts in a later step.

        Returns:
            The id of its outputs.

        Raises:
            UserError: the request is invalid, its adapter is not there, or it could never run because it is longer than
                `max_length` or needs more memory than `memory_bytes`.
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
        text = TextStream(self._tokenizer, request.stop, request.tokens, request.skip_special_tokens)
        adapter = AppliedAdapter.of(request.adapter, request.tokens, self.runtime.adapters)
        sequence = RunningSequence(next(_IDS), request, limit, text, adapter)
        self._waiting.append(sequence)
        return sequence.id

    @_one_at_a_time
    def cancel(self, id: int) -> bool:
        """End a sequence at once, without further output; false if it has already ended.

        Raises:
            UserError: `id` cannot be that of a sequence.
        """
        if not is_whole(id):
            raise UserError(f"id is {reprlib.repr(id)}, and must be the number that `Engine.add` returned.")
        found = [self._running[id]] if id in self._running else [each for each in self._waiting if each.id == id]
        for sequence in found:
            self._end(sequence)
        outputs = [output for output in self._outputs if output.id == id]
        if outputs:
            self._outputs = [output for output in self._outputs if output.id != id]
        return bool(found or outputs)

    @_one_at_a_time
    def finish(self, id: int) -> str:
        """End a running sequence as if it had reached its limit; return the text that was held back.

        Unlike `cancel`, this keeps its state in the prefix cache. Read the outputs of the last step before.

        Raises:
            UserError: no sequence of that id runs.
        """
        if not is_whole(id) or id not in self._running:
            raise UserError(f"id is {reprlib.repr(id)}, and must be that of a sequence that runs.")
        sequence = self._running[id]
        if sequence.logits is not None:
            self._keep(sequence)
        self._end(sequence)
        return sequence.text.finish()

    def step(self) -> list[Output]:
        """Run one step; return the new tokens, in order for each sequence: with a drafter perhaps several."""
        self._run_step()
        # Python handles no signal between these two: an interrupt leaves the outputs to the next step or to the caller.
        outputs, self._outputs = self._outputs, []
        return outputs

    @_one_at_a_time
    def _run_step(self) -> None:
        self._keep_what_is_due()
        self._start_waiting()
        prompts = [sequence for sequence in self._running.values() if sequence.is_prompt]
        others = [sequence for sequence in self._running.values() if not sequence.is_prompt]
        if prompts and (self._prompts_first or self._prompts_are_next or not others):
            self._prompts_are_next = False
            self._run_prompts(prompts)
        else:
            self._prompts_are_next = True
            self._decode(others)

    def _start_waiting(self) -> None:
        """Start waiting sequences in order: one that does not fit yet holds back those after it."""
        if self.failed_steps and not self._running:  # a device's state may be lost with a step that failed
            if self._cache is not None:
                self._cache.detach()
            self._slots.renew()
        while self._waiting:
            sequence = self._waiting[0]
            with self._for(sequence):
                self.failed_steps += 1  # unless there is a state
                slot = self._slots.take(sequence.limit, [each.slot for each in self._running.values()])
                self.failed_steps -= 1
                if slot is None:
                    return
                sequence.slot = slot
                self._running[sequence.id] = sequence
                self._waiting.popleft()
            if sequence.id not in self._running:
                return

    def _run_prompts(self, sequences: Sequence[RunningSequence]) -> None:
        """Run one chunk of the first prompt, together with those of others that fit into the padded step."""
        started = time.perf_counter()
        chosen, rows = [], []
        for sequence in sequences:
            # Not one more token fits. Later sequences wait: they may find more in the prefix cache by then.
            if len(rows) == self.runtime.rows_per_step or not self._fits(rows):
                break
            if self._waits_for_prefix(sequence, chosen):
                continue
            with self._for(sequence):
                self._begin(sequence)
            if sequence.id not in self._running or not sequence.is_prompt:
                continue
            stop = sequence.next_cut(self.runtime.tokens_per_step, self.runtime.is_exact_at_any_cut)
            row = sequence.next_row(stop)
            if not self._fits(rows, len(row.tokens)):
                break
            chosen.append(sequence)
            rows.append(row)
        if rows:
            self._advance(chosen, rows)
        self.stats.prompt_tokens += sum(len(row.tokens) for row in rows)
        self.stats.prompt_seconds += time.perf_counter() - started

    def _fits(self, rows: Sequence[Row], tokens: int = 1) -> bool:
        """Return whether a step of these rows has room for another row of so many tokens; an empty step always has."""
        longest = max(tokens, *(len(row.tokens) for row in rows), 0)
        return not rows or (len(rows) + 1) * longest <= self.runtime.tokens_per_step

    def _waits_for_prefix(self, sequence: RunningSequence, others: Sequence[RunningSequence]) -> bool:
        """Return whether one of the others, which run in this step, will put a shared prefix into the cache."""
        if self._cache is None or sequence.has_begun:
            return False
        lengths = (common_length(sequence.keys, other.keys) for other in others)
        chunk, is_exact = self.runtime.tokens_per_step, self.runtime.is_exact_at_any_cut
        kept = (other.next_kept(self._cache.interval, chunk, is_exact) for other in others)
        return any(its_kept <= length for its_kept, length in zip(kept, lengths, strict=True))

    def _begin(self, sequence: RunningSequence) -> None:
        """Start from the cached prefix of a prompt. If it is the whole prompt, choose the first token at once."""
        if self._cache is None or sequence.has_begun:
            return
        sequence.has_begun = True
        with self._saving_time("The prefix cache"):
            self._restore_prefix(sequence)
        if not sequence.is_prompt:
            logits = sequence.prefix.logits
            self._count(sequence, 0, logits, sequence.choose([logits]))

    def _restore_prefix(self, sequence: RunningSequence) -> None:
        self._cache.attach(self._slots.state)
        sequence.prefix = self._cache.find(sequence.keys)
        sequence.cuts |= self._cache.new_branches(sequence.keys)
        if sequence.prefix is not None:
            self._cache.restore(sequence.prefix, self._slots.state, sequence.slot)
            sequence.stored = sequence.cached_tokens = sequence.prefix.length
            self.stats.cached_tokens += sequence.stored

    def _decode(self, sequences: Sequence[RunningSequence]) -> None:
        """Compute one more token of each sequence, and accept the drafts after it that agree."""
        started, generated = time.perf_counter(), self.stats.generated_tokens
        drafts = self._draft(sequences)
        sequences = [sequence for sequence in sequences if sequence.id in self._running]
        rows = [sequence.next_row(len(sequence.tokens), drafts.get(sequence.id, ())) for sequence in sequences]
        if any(drafts.values()):
            self._verify(sequences, rows)
        elif rows:
            self._advance(sequences, rows)
        self.stats.decode_tokens += self.stats.generated_tokens - generated
        self.stats.decode_rows += len(rows)
        self.stats.decode_seconds += time.perf_counter() - started

    def _draft(self, sequences: Sequence[RunningSequence]) -> dict[int, Sequence[int]]:
        """Return the drafts of sequences that have some, by id, as far as their constraints allow them."""
        if self._drafter is None:
            return {}
        most = min(self._draft_tokens, self.runtime.tokens_per_verification - 1)
        interval = None if self._cache is None else self._cache.interval
        requests = [
            DraftRequest(each.id, each.tokens, each.most_drafts(most, interval), each.sampler) for each in sequences
        ]
        proposed: Sequence[Sequence[int]] = []
        with self._saving_time("The drafter"):
            proposed = check_drafts(self._drafter.propose(requests), requests, self.runtime.config.vocab_size)
        drafts = {}
        for sequence, its_drafts in zip(sequences, proposed, strict=False):
            if its_drafts:
                with self._for(sequence):
                    drafts[sequence.id] = sequence.sampler.allowed(its_drafts)
        return drafts

    def _advance(self, sequences: Sequence[RunningSequence], rows: Sequence[Row]) -> None:
        """Run a step, and choose the next token of each sequence whose tokens have all been run."""
        all_logits = any(sequence.reports_prompt for sequence in sequences)
        with self._for(*sequences):
            self.failed_steps += 1
            logits = self.runtime.step(self._slots.state, rows, all_logits)
            self.failed_steps = 0
            for sequence, row, row_logits in zip(sequences, rows, logits, strict=True):
                with self._for(sequence):
                    if sequence.reports_prompt:
                        sequence.record_prompt_logprobs(row, row_logits)
                    last = row_logits[len(row.tokens) - 1] if all_logits else row_logits
                    is_run = row.start + len(row.tokens) == len(sequence.tokens)
                    self._count(sequence, len(row.tokens), last, sequence.choose([last]) if is_run else [])

    def _verify(self, sequences: Sequence[RunningSequence], rows: Sequence[Row]) -> None:
        """Verify drafts, and accept those that are the tokens chosen."""
        with self._for(*sequences):
            self.failed_steps += 1
            verification = self.runtime.verify(self._slots.state, rows)
            chosen: list[Sequence[Output]] = [[] for _ in rows]
            for at, (sequence, row, logits) in enumerate(zip(sequences, rows, verification.logits, strict=True)):
                with self._for(sequence):
                    chosen[at] = sequence.choose(logits, row.tokens[1:])
            accepted = [sum(output.error is None for output in outputs) for outputs in chosen]
            self.runtime.commit(self._slots.state, verification, accepted)
            self.failed_steps = 0
            for sequence, row, logits, count, outputs in zip(
                sequences, rows, verification.logits, accepted, chosen, strict=True
            ):
                if sequence.id in self._running:
                    with self._for(sequence):
                        self._record_drafts(sequence, len(row.tokens) - 1, max(0, count - 1))
                        self._count(sequence, count, logits[count - 1], outputs)

    def _record_drafts(self, sequence: RunningSequence, drafted: int, accepted: int) -> None:
        if drafted:
            sequence.backoff.note(len(sequence.tokens), accepted)
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += accepted

    def _count(
        self, sequence: RunningSequence, num_tokens: int, logits: torch.Tensor, outputs: Sequence[Output]
    ) -> None:
        """Have a step count for a sequence: its state has seen so many more tokens, and these are its outputs. If they
        end it, keep a snapshot of it; else take note of one that is due.

        Args:
            logits: [vocab_size], after the last of those tokens.
        """
        sequence.stored += num_tokens
        sequence.logits = logits
        self._outputs += outputs
        self.stats.generated_tokens += sum(output.error is None for output in outputs)
        reason = outputs[-1].finish_reason if outputs else None
        if reason is None:
            sequence.is_due = self._cache is not None and sequence.is_kept(self._cache.interval)
        else:
            if reason != "error":
                self._keep(sequence)
            self._end(sequence)
        self._unfinished.pop(sequence.id, None)

    def _keep_what_is_due(self) -> None:
        """Keep the snapshots of the last step; its new tokens have not waited for them."""
        for sequence in self._running.values():
            if sequence.is_due:
                sequence.is_due = False
                self._keep(sequence)

    def _keep(self, sequence: RunningSequence) -> None:
        """Have the prefix cache, if there is one, keep a snapshot of a sequence whose logits are finite."""
        if self._cache is None or not are_finite(sequence.logits):
            return
        with self._saving_time("The prefix cache"):
            keys = sequence.keys[: sequence.stored]
            self._cache.keep(keys, self._slots.state, sequence.slot, sequence.logits)
            if not sequence.is_prompt:
                self._cache.make_ready()

    def _for(self, *sequences: RunningSequence) -> _For:
        """Do something for sequences. If it fails, end those of them that have not ended."""
        return _For(self, sequences)

    @contextmanager
    def _saving_time(self, what: str) -> Iterator[None]:
        """Do what only saves time. If it fails, go on without."""
        try:
            yield
        except Exception as error:
            if what not in self._logged:
                self._logged.add(what)
                _LOGGER.warning("%s failed, and texts go on without it: %s", what, sentence_of(error), exc_info=error)

    def _fail(self, sequences: Sequence[RunningSequence], error: str, is_requests_fault: bool = False) -> None:
        """End sequences, with an error output where no output has ended them. It may be interrupted and done again."""
        ended = {output.id for output in self._outputs if output.finish_reason is not None}
        for sequence in sequences:
            if sequence.id in self._running or sequence in self._waiting:
                if sequence.id not in ended:
                    self._outputs.append(Output(sequence.id, None, "", "error", error, is_requests_fault))
                self._end(sequence)
            self._unfinished.pop(sequence.id, None)

    def _end(self, sequence: RunningSequence) -> None:
        """Forget a sequence. It may be interrupted and done again."""
        if sequence.prefix is not None:
            with self._saving_time("The prefix cache"):
                self._cache.release(sequence.prefix)
        if self._drafter is not None:
            with self._saving_time("The drafter"):
                self._drafter.end(sequence.id)
        if sequence.id not in self._running or (self._waiting and self._waiting[0] is sequence):
            self._waiting.remove(sequence)
        self._running.pop(sequence.id, None)
