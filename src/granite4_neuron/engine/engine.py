"""Continuous batching: sequences start when there is room, and leave when they end, while others run.

Each step of the engine is one step of the runtime: a chunk of prompts, or one more token of every sequence whose prompt
is done. They take turns, so that a long prompt holds up no sequence for longer than a chunk; and they are not mixed,
since a chunk beside single tokens would be padded to a rectangle.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine.memory import Slots
from granite4_neuron.engine.request import GenerationStats, Output, Request, RunningSequence
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Runtime


class Engine:
    """Runs requests on a runtime, many at a time. To be used by one thread.

    What a sequence gives does not depend on the others: on when they come and go, how long they are, or whether they
    fail.

    Args:
        runtime: what runs the steps.
        num_sequences: how many sequences run at a time; the others wait in the order in which they came.
        max_length: the longest sequence, prompt and continuation; None for the model's longest.
        memory_bytes: what the sequences' state and cache may take, of those that run and in slots that keep the memory
            of earlier ones; None for no limit but `num_sequences` times `max_length`.
        tokenizer: makes tokens to text; None for outputs without text.
        prompts_first: run all prompts before any sequence goes on, for a batch whose tokens nobody waits for. A prompt
            that comes later holds up all others then.

    Raises:
        UserError: the runtime cannot hold so many or so long sequences, or the memory not one.
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
    ):
        longest = runtime.config.max_position_embeddings
        self.runtime = runtime
        self.max_length = longest if max_length is None else min(max_length, longest)
        self.stats = GenerationStats()
        self._slots = Slots(runtime, num_sequences, self.max_length, memory_bytes)
        self._tokenizer = tokenizer
        self._prompts_first = prompts_first
        self._ids = itertools.count()
        self._waiting: deque[RunningSequence] = deque()
        self._running: dict[int, RunningSequence] = {}  # by id, in the order in which they started
        self._prompts_are_next = True

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> int:
        """Take in a request; it starts in a later step.

        Returns:
            The id that its outputs bear.

        Raises:
            UserError: the request is wrong in itself, or could never run: it is longer than the engine's sequences, or
                needs more memory than there is.
        """
        request.check(self.runtime.config.vocab_size)
        if request.stop and self._tokenizer is None:
            raise UserError("stop strings need an engine with a tokenizer; give stop tokens.")
        if len(request.tokens) >= self.max_length:
            raise UserError(
                f"the prompt has {len(request.tokens)} tokens; sequences here have at most {self.max_length}, of which "
                "at least one is new."
            )
        limit = min(len(request.tokens) + request.max_tokens, self.max_length)
        self._slots.check(limit)
        defaults = self.runtime.generation_config
        sequence = RunningSequence.of(next(self._ids), request, defaults, self._tokenizer, limit)
        self._waiting.append(sequence)
        return sequence.id

    def cancel(self, id: int) -> bool:
        """End a sequence at once, without a further output; false if it has ended already."""
        if id in self._running:
            self._end(self._running[id])
            return True
        for sequence in self._waiting:
            if sequence.id == id:
                self._waiting.remove(sequence)
                return True
        return False

    def step(self) -> list[Output]:
        """Run one step; returns the new tokens, at most one of each sequence. With nothing to do, none."""
        self._start_waiting()
        prompts = [sequence for sequence in self._running.values() if sequence.is_prompt]
        others = [sequence for sequence in self._running.values() if not sequence.is_prompt]
        if prompts and (self._prompts_first or self._prompts_are_next or not others):
            self._prompts_are_next = False
            return self._run_prompts(prompts)
        self._prompts_are_next = True
        return self._decode(others) if others else []

    def _start_waiting(self) -> None:
        """In their order: one that does not fit yet holds back those behind it."""
        while self._waiting:
            slot = self._slots.take(self._waiting[0].limit)
            if slot is None:
                return
            sequence = self._waiting.popleft()
            sequence.slot = slot
            self._running[sequence.id] = sequence

    def _run_prompts(self, sequences: Sequence[RunningSequence]) -> list[Output]:
        """One chunk of the first prompt, together with those of others that fit into the padded step."""
        started = time.perf_counter()
        rows: list[Row] = []
        for sequence in sequences[: self.runtime.rows_per_step]:
            row = sequence.next_row(self.runtime.tokens_per_step)
            longest = max(len(each.tokens) for each in (*rows, row))
            if rows and (len(rows) + 1) * longest > self.runtime.tokens_per_step:
                break
            rows.append(row)
        logits = self.runtime.step(self._slots.state, rows)
        self.stats.prompt_tokens += sum(len(row.tokens) for row in rows)
        self.stats.prompt_seconds += time.perf_counter() - started
        return self._after(sequences[: len(rows)], rows, logits)

    def _decode(self, sequences: Sequence[RunningSequence]) -> list[Output]:
        started = time.perf_counter()
        rows = [sequence.next_row(1) for sequence in sequences]
        outputs = self._after(sequences, rows, self.runtime.step(self._slots.state, rows))
        self.stats.decode_tokens += len(outputs)
        self.stats.decode_seconds += time.perf_counter() - started
        return outputs

    def _after(self, sequences: Sequence[RunningSequence], rows: Sequence[Row], logits: torch.Tensor) -> list[Output]:
        """Choose the next token of each sequence all of whose tokens have been run."""
        outputs = []
        for sequence, row, of_row in zip(sequences, rows, logits, strict=True):
            sequence.stored += len(row.tokens)
            if sequence.stored < len(sequence.tokens):
                continue
            output = self._choose(sequence, of_row)
            if output.finish_reason is not None:
                self._end(sequence)
            outputs.append(output)
        return outputs

    def _choose(self, sequence: RunningSequence, logits: torch.Tensor) -> Output:
        try:
            token = sequence.sampler(logits, sequence.tokens)
        except UserError as error:  # the logits are not finite, and this is no matter of the other sequences
            return Output(sequence.id, None, sequence.text.finish(), "error", str(error))
        self.stats.generated_tokens += 1
        return sequence.append(token)

    def _end(self, sequence: RunningSequence) -> None:
        del self._running[sequence.id]
        self._slots.give_back(sequence.slot)
