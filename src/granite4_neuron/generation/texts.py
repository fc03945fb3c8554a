"""Whole texts: of one prompt, of a list, or of any number of prompts that come one by one."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, Output, Request, SamplingParams
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.request import check_has
from granite4_neuron.engine.slots import slots_that_fit
from granite4_neuron.errors import UserError
from granite4_neuron.generation.loop import (
    MOST_SEQUENCES,
    GenerationError,
    sampling_params,
    shared_lengths,
    stream_generate,
)
from granite4_neuron.generation.prompts import Prompt, PromptEncoder, encode_one, single, split
from granite4_neuron.runtime.interface import Runtime

# Prompts of an iterator that are read before the text of the first of them is given out, and how many at a time.
LOOK_AHEAD = 2 * MOST_SEQUENCES
_PORTION = MOST_SEQUENCES

_LOGGER = logging.getLogger(__name__)


class GeneratedText(str):
    """The continuation of one prompt: a text, with how it ended.

    finish_reason: "stop" (stop token or stop string), "length" or "error".
    error: a sentence that says why the prompt could not be continued to its end, else None. The text is then as far as
        it came.
    """

    finish_reason: str
    error: str | None

    def __new__(cls, text: str, finish_reason: str = "stop", error: str | None = None) -> GeneratedText:
        made = super().__new__(cls, text)
        made.finish_reason, made.error = finish_reason, error
        return made


def generate(
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast | None,
    prompt: Prompt | Iterable[Prompt] | Iterator[Prompt],
    **options: Any,
) -> GeneratedText | list[GeneratedText] | Iterator[GeneratedText]:
    """Return the continuation of a prompt, a list for a list of prompts, or an iterator for an iterator.

    A prompt of several that cannot be continued does not lose the others: its text has an `error`.

    An iterator, such as a generator, may be of any length. Texts come in the order of the prompts, of which at most
    `LOOK_AHEAD` are read ahead; nothing is kept of those before. It takes no `progress`, and one `adapter` for all
    prompts. Closing the returned iterator ends what runs.

    Args:
        options: those of `stream_generate`.

    Raises:
        UserError: as `stream_generate`.
        GenerationError: a single prompt could not be continued to its end.
    """
    if isinstance(prompt, Iterator):
        return _Each(runtime, tokenizer, **options).texts(prompt)
    singles, are_several = split(prompt)
    pieces: list[list[str]] = [[] for _ in singles]
    reasons = ["error"] * len(singles)
    errors: dict[int, str] = {}
    try:
        for response in stream_generate(runtime, tokenizer, singles, **options):
            pieces[response.index].append(response.text)
            reasons[response.index] = response.finish_reason or "error"
    except GenerationError as error:
        if not are_several:
            raise
        _LOGGER.warning("%s", error)
        errors = dict(error.errors)
    texts = [
        GeneratedText("".join(text), reason, errors.get(index))
        for index, (text, reason) in enumerate(zip(pieces, reasons, strict=True))
    ]
    return texts if are_several else texts[0]


def chat(
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast | None,
    messages: Prompt | Iterable[Prompt] | Iterator[Prompt],
    **options: Any,
) -> GeneratedText | list[GeneratedText] | Iterator[GeneratedText]:
    """Return the model's answer to a conversation, a list for several, or an iterator for an iterator; as `generate`,
    but a text is a user's only message.
    """
    if isinstance(messages, Iterator):
        return generate(runtime, tokenizer, map(_conversation, messages), **options)
    singles, are_several = split(messages)
    conversations = list(map(_conversation, singles))
    return generate(runtime, tokenizer, conversations if are_several else conversations[0], **options)


def _conversation(prompt: Prompt) -> Prompt:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


class _Each:
    """Continues prompts one after the other as they come, many at a time. Arguments are those of `stream_generate`."""

    def __init__(
        self,
        runtime: Runtime,
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        max_tokens: int = 256,
        ignore_eos: bool = False,
        adapter: str | None = None,
        prefix_cache: Any = None,
        drafter: Any = None,
        draft_tokens: int = 4,
        tools: Any = None,
        documents: Any = None,
        **options: Any,
    ):
        check_has("prefix_cache", prefix_cache, "match_prefix", "insert")
        check_has("drafter", drafter, "propose", "end")
        if "progress" in options:
            raise UserError("progress is for prompts whose number is known; give a list, or leave it out.")
        if adapter is not None and not isinstance(adapter, str):
            raise UserError("prompts of an iterator share one adapter; give its name, or a list of prompts.")
        self._runtime = runtime
        self._tokenizer = tokenizer
        params = sampling_params(runtime, tokenizer, ignore_eos, SamplingParams(**options))
        # A prompt of one token stands for those to come: what is wrong with an option is said at once.
        self._request = Request([0], max_tokens, adapter=adapter, **vars(params))
        self._request.check(runtime.config.vocab_size)
        AppliedAdapter.of(adapter, [0], runtime.adapters)
        self._reuse = dict(prefix_cache=prefix_cache, drafter=drafter, draft_tokens=draft_tokens)
        self._shares_prefixes = prefix_cache is not None
        self._set_aside: Sequence[int] = () if prefix_cache is None else prefix_cache.slots
        self._shown = dict(tools=tools, documents=documents)
        self._engine: Engine | None = None
        self._waiting: deque[tuple[int, Request]] = deque()  # encoded prompts that the engine does not have yet
        self._indices: dict[int, int] = {}  # of the prompts that the engine has, by its ids
        self._pieces: dict[int, list[str]] = {}
        self._ended: dict[int, GeneratedText] = {}  # by index, until those before have ended too

    def texts(self, prompts: Iterator[Prompt]) -> Iterator[GeneratedText]:
        """Yield the text of each prompt, in their order."""
        given = taken = 0
        has_more = True
        try:
            with closing(PromptEncoder(self._tokenizer, **self._shown)) as encoder:
                while True:
                    while has_more and taken + _PORTION <= given + LOOK_AHEAD:
                        portion = list(itertools.islice(prompts, _PORTION))
                        self._encode(encoder, portion, taken)
                        taken += len(portion)
                        has_more = len(portion) == _PORTION
                    self._admit()
                    if self._engine is not None and self._engine.has_work:
                        for output in self._engine.step():
                            self._take(output)
                    while given in self._ended:
                        yield self._ended.pop(given)
                        given += 1
                    if given == taken and not has_more:
                        return
        finally:  # the caller may stop early, and the prefix cache and the drafter outlive the engine
            for id in self._indices:
                assert self._engine is not None  # it has them
                self._engine.cancel(id)

    def _encode(self, encoder: PromptEncoder, portion: Sequence[Prompt], first: int) -> None:
        """Encode prompts, of which the first has the index `first`."""
        limits = self._runtime.config.vocab_size, self._runtime.max_length
        encoded: dict[int, list[int]] = {}
        for index, prompt in enumerate(portion, start=first):
            which = f"prompt {index + 1}"
            try:
                encoded[index] = encode_one(encoder, single(prompt, which), *limits, which)
            except UserError as error:
                self._ended[index] = GeneratedText("", "error", str(error))
        shared = shared_lengths(list(encoded.values())) if self._shares_prefixes else [frozenset()] * len(encoded)
        for (index, tokens), at in zip(encoded.items(), shared, strict=True):
            request = replace(self._request, tokens=tokens, snapshots_at=at).with_seed_offset(index)
            self._waiting.append((index, request))

    def _admit(self) -> None:
        """Give the engine the prompts that it has room for. One that is too long waits until the engine has no work;
        then a new one has twice the room at least.
        """
        longest = max((self._length(request) for _, request in self._waiting), default=0)
        if not self._indices and longest > (0 if self._engine is None else self._engine.max_length):
            length = longest if self._engine is None else max(longest, 2 * self._engine.max_length)
            self._engine = None  # its memory first
            self._engine = self._new_engine(min(length, self._runtime.max_length))
        while self._engine is not None and self._waiting:
            index, request = self._waiting[0]
            if self._length(request) > self._engine.max_length:
                break
            self._waiting.popleft()
            self._pieces[index] = []
            try:
                self._indices[self._engine.add(request)] = index
            except UserError as error:  # of its constraint or another option that depends on the prompt
                self._end(index, "error", f"prompt {index + 1}: {error}")

    def _length(self, request: Request) -> int:
        return min(len(request.tokens) + request.max_tokens, self._runtime.max_length)

    def _new_engine(self, max_length: int) -> Engine:
        return Engine(
            self._runtime,
            slots_that_fit(self._runtime, MOST_SEQUENCES, max_length, self._set_aside),
            max_length=max_length,
            tokenizer=self._tokenizer,
            prompts_first=True,
            **self._reuse,
        )

    def _take(self, output: Output) -> None:
        index = self._indices[output.id]
        self._pieces[index].append(output.text)
        if output.finish_reason is not None:
            del self._indices[output.id]
            self._end(index, output.finish_reason, output.error and f"prompt {index + 1}: {output.error}")

    def _end(self, index: int, reason: str, error: str | None) -> None:
        self._ended[index] = GeneratedText("".join(self._pieces.pop(index)), reason, error)
