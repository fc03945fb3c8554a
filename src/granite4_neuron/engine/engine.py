"""Continuous batching: sequences start when there is room, and leave when they end, while others run.

Each step of the engine is one step of the runtime. It is either a chunk of prompts, or decode for every sequence whose
prompt is done: one token each, or several if drafts are accepted. The two take turns, so that a long prompt delays
other sequences by at most one chunk. They are not mixed, because a chunk beside single tokens would be padded to a
rectangle.
"""

from __future__ import annotations

import functools
import itertools
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.drafters import Drafter, DraftRequest
from granite4_neuron.engine.prefix_cache import PrefixCache, common_length
from granite4_neuron.engine.request import GenerationStats, Output, Request, check_count, check_has
from granite4_neuron.engine.sampling_params import is_whole
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.slot_prefix_cache import SlotPrefixCache
from granite4_neuron.engine.slots import Slots
from granite4_neuron.engine.text import TextStream
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Runtime, require


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an engine wait while another thread is in such a method."""

    @functools.wraps(method)
    def locked(self: Engine, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **options)

    return locked


class Engine:
    """Runs many requests at a time on a runtime.

    An engine belongs to one thread at a time, and with it its runtime's state, its prefix cache and its drafter: a call
    from another thread waits until the step that runs has ended.

    The output of a sequence does not depend on other sequences: when they start and end, how long they are, or whether
    they fail.

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
        self._ids = itertools.count()
        self._waiting: deque[RunningSequence] = deque()
        self._running: dict[int, RunningSequence] = {}  # by id, in the order in which they started
        self._prompts_are_next = True
        self._lock = threading.RLock()

    def warm_up(self) -> None:
        """Have the runtime compile what steps need, so that no step waits for it; see `Runtime.warm_up`."""
        self.runtime.warm_up(self._slots.state, verifies=self._drafter is not None)

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self._waiting or self._running)

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
        sequence = RunningSequence(next(self._ids), request, limit, text, adapter)
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
        if id in self._running:
            self._end(self._running[id])
            return True
        for sequence in self._waiting:
            if sequence.id == id:
                self._waiting.remove(sequence)
                return True
        return False

    @_one_at_a_time
    def finish(self, id: int) -> str:
        """End a running sequence as if it had reached its limit; return the text that was held back.

        Unlike `cancel`, this keeps its state in the prefix cache.

        Raises:
            UserError: no sequence of that id runs.
        """
        if not is_whole(id) or id not in self._running:
            raise UserError(f"id is {reprlib.repr(id)}, and must be that of a sequence that runs.")
        sequence = self._running[id]
        if self._cache is not None and sequence.logits is not None:
            self._keep(sequence)
        self._end(sequence)
        return sequence.text.finish()

    @_one_at_a_time
    def step(self) -> list[Output]:
        """Run one step; return the new tokens, in order for each sequence: with a drafter perhaps several."""
        self._keep_what_is_due()
        self._start_waiting()
        prompts = [sequence for sequence in self._running.values() if sequence.is_prompt]
        others = [sequence for sequence in self._running.values() if not sequence.is_prompt]
        if prompts and (self._prompts_first or self._prompts_are_next or not others):
            self._prompts_are_next = False
            return self._run_prompts(prompts)
        self._prompts_are_next = True
        return self._decode(others) if others else []

    def _start_waiting(self) -> None:
        """Start waiting sequences in order: one that does not fit yet holds back those after it."""
        while self._waiting:
            slot = self._slots.take(self._waiting[0].limit)
            if slot is None:
                return
            sequence = self._waiting.popleft()
            sequence.slot = slot
            self._running[sequence.id] = sequence

    def _run_prompts(self, sequences: Sequence[RunningSequence]) -> list[Output]:
        """Run one chunk of the first prompt, together with those of others that fit into the padded step."""
        started = time.perf_counter()
        outputs, chosen, rows = [], [], []
        for sequence in sequences:
            # Not one more token fits. Later sequences wait: they may find more in the prefix cache by then.
            if len(rows) == self.runtime.rows_per_step or not self._fits(rows):
                break
            if self._waits_for_prefix(sequence, chosen):
                continue
            outputs += self._begin(sequence)
            if not sequence.is_prompt:
                continue
            stop = sequence.next_cut(self.runtime.tokens_per_step, self.runtime.is_exact_at_any_cut)
            row = sequence.next_row(stop)
            if not self._fits(rows, len(row.tokens)):
                break
            chosen.append(sequence)
            rows.append(row)
        if rows:
            outputs += self._advance(chosen, rows, self._prompt_logits(chosen, rows))
        self.stats.prompt_tokens += sum(len(row.tokens) for row in rows)
        self.stats.prompt_seconds += time.perf_counter() - started
        return outputs

    def _fits(self, rows: Sequence[Row], tokens: int = 1) -> bool:
        """Return whether a step of these rows has room for another row of so many tokens; an empty step always has."""
        longest = max(tokens, *(len(row.tokens) for row in rows), 0)
        return not rows or (len(rows) + 1) * longest <= self.runtime.tokens_per_step

    def _prompt_logits(self, sequences: Sequence[RunningSequence], rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """Run rows of prompts; return the logits [vocab_size] after the last token of each."""
        if all(sequence.request.prompt_logprobs is None for sequence in sequences):
            return self.runtime.step(self._slots.state, rows)
        logits = self.runtime.step(self._slots.state, rows, all_logits=True)
        for sequence, row, row_logits in zip(sequences, rows, logits, strict=True):
            if sequence.request.prompt_logprobs is not None:
                sequence.record_prompt_logprobs(row, row_logits)
        return [row_logits[len(row.tokens) - 1] for row, row_logits in zip(rows, logits, strict=True)]

    def _waits_for_prefix(self, sequence: RunningSequence, others: Sequence[RunningSequence]) -> bool:
        """Return whether one of the others, which run in this step, will put a shared prefix into the cache."""
        if self._cache is None or sequence.has_begun:
            return False
        lengths = (common_length(sequence.keys, other.keys) for other in others)
        chunk, is_exact = self.runtime.tokens_per_step, self.runtime.is_exact_at_any_cut
        kept = (other.next_kept(self._cache.interval, chunk, is_exact) for other in others)
        return any(its_kept <= length for its_kept, length in zip(kept, lengths, strict=True))

    def _begin(self, sequence: RunningSequence) -> list[Output]:
        """Start from the cached prefix of a prompt. If it is the whole prompt, choose the first token at once."""
        if self._cache is None or sequence.has_begun:
            return []
        sequence.has_begun = True
        self._cache.attach(self._slots.state)
        sequence.prefix = self._cache.find(sequence.keys)
        sequence.cuts |= self._cache.new_branches(sequence.keys)
        if sequence.prefix is None:
            return []
        self._cache.restore(sequence.prefix, self._slots.state, sequence.slot)
        sequence.stored = sequence.prefix.length
        self.stats.cached_tokens += sequence.stored
        if sequence.is_prompt:
            return []
        outputs = self._choose(sequence, [sequence.prefix.logits])
        self._end_or_keep(sequence, outputs, sequence.prefix.logits)
        return outputs

    def _decode(self, sequences: Sequence[RunningSequence]) -> list[Output]:
        """Compute one more token of each sequence, and accept the drafts after it that agree."""
        started = time.perf_counter()
        drafts = self._draft(sequences)
        rows = [
            sequence.next_row(len(sequence.tokens), its_drafts)
            for sequence, its_drafts in zip(sequences, drafts, strict=True)
        ]
        if any(drafts):
            outputs = self._verify(sequences, rows)
        else:
            outputs = self._advance(sequences, rows, self.runtime.step(self._slots.state, rows))
        self.stats.decode_tokens += len(outputs)
        self.stats.decode_rows += len(rows)
        self.stats.decode_seconds += time.perf_counter() - started
        return outputs

    def _draft(self, sequences: Sequence[RunningSequence]) -> list[list[int]]:
        if self._drafter is None:
            return [[] for _ in sequences]
        most = min(self._draft_tokens, self.runtime.tokens_per_verification - 1)
        interval = None if self._cache is None else self._cache.interval
        requests = [
            DraftRequest(each.id, each.tokens, each.most_drafts(most, interval), each.sampler) for each in sequences
        ]
        drafts = self._drafter.propose(requests)
        return [each.sampler.allowed(its_drafts) for each, its_drafts in zip(sequences, drafts, strict=True)]

    def _verify(self, sequences: Sequence[RunningSequence], rows: Sequence[Row]) -> list[Output]:
        verification = self.runtime.verify(self._slots.state, rows)
        outputs, accepted = [], []
        for sequence, row, logits in zip(sequences, rows, verification.logits, strict=True):
            chosen = self._choose(sequence, logits, row.tokens[1:])
            outputs.append(chosen)
            accepted.append(sum(output.error is None for output in chosen))
            if len(row.tokens) > 1:
                self._record_drafts(sequence, len(row.tokens) - 1, max(0, accepted[-1] - 1))
        self.runtime.commit(self._slots.state, verification, accepted)
        for sequence, chosen, count, logits in zip(sequences, outputs, accepted, verification.logits, strict=True):
            sequence.stored += count
            self._end_or_keep(sequence, chosen, logits[count - 1])
        return list(itertools.chain(*outputs))

    def _record_drafts(self, sequence: RunningSequence, drafted: int, accepted: int) -> None:
        sequence.backoff.note(len(sequence.tokens), accepted)
        self.stats.drafted_tokens += drafted
        self.stats.accepted_tokens += accepted

    def _advance(self, sequences: Sequence[RunningSequence], rows: Sequence[Row], logits: torch.Tensor) -> list[Output]:
        """Choose the next token of each sequence whose tokens have all been run."""
        outputs = []
        for sequence, row, row_logits in zip(sequences, rows, logits, strict=True):
            sequence.stored += len(row.tokens)
            chosen = self._choose(sequence, [row_logits]) if sequence.stored == len(sequence.tokens) else []
            self._end_or_keep(sequence, chosen, row_logits)
            outputs += chosen
        return outputs

    def _choose(
        self, sequence: RunningSequence, logits: Sequence[torch.Tensor], drafts: Sequence[int] = ()
    ) -> list[Output]:
        """Choose further tokens of a sequence; see `RunningSequence.choose`."""
        outputs = sequence.choose(logits, drafts)
        self.stats.generated_tokens += sum(output.error is None for output in outputs)
        return outputs

    def _end_or_keep(self, sequence: RunningSequence, outputs: Sequence[Output], logits: torch.Tensor) -> None:
        """End the sequence if it is done, with a snapshot; else take note of a snapshot that is due.

        Args:
            logits: [vocab_size], after the last stored token.
        """
        reason = outputs[-1].finish_reason if outputs else None
        sequence.logits = logits
        if self._cache is not None and reason != "error":
            if reason is not None:
                self._keep(sequence)
            elif sequence.is_kept(self._cache.interval):
                sequence.is_due = True
        if reason is not None:
            self._end(sequence)

    def _keep_what_is_due(self) -> None:
        """Keep the snapshots of the last step; its new tokens have not waited for them."""
        for sequence in self._running.values():
            if sequence.is_due:
                sequence.is_due = False
                self._keep(sequence)

    def _keep(self, sequence: RunningSequence) -> None:
        keys = sequence.keys[: sequence.stored]
        self._cache.keep(keys, self._slots.state, sequence.slot, sequence.logits)
        if not sequence.is_prompt:
            self._cache.make_ready()

    def _end(self, sequence: RunningSequence) -> None:
        del self._running[sequence.id]
        self._slots.give_back(sequence.slot)
        if sequence.prefix is not None:
            self._cache.release(sequence.prefix)
        if self._drafter is not None:
            self._drafter.end(sequence.id)
