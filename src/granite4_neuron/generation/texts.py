"""Whole texts: of one prompt, of a list, or of any number of prompts that come one by one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, Output, PrefixCache, Request, SamplingParams, SlotPrefixCache
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.drafting.drafters import Drafter
from granite4_neuron.engine.request import check_has
from granite4_neuron.engine.slots import slots_that_fit
from granite4_neuron.errors import UserError
from granite4_neuron.generation.in_order import InOrder, Job
from granite4_neuron.generation.loop import MOST_SEQUENCES, GenerationError, sampling_params, stream_generate
from granite4_neuron.generation.prompts import Prompt, PromptEncoder, encode_one, single, split
from granite4_neuron.runtime.interface import Runtime

LOOK_AHEAD = 2 * MOST_SEQUENCES  # prompts of an iterator that are read before the text of the first is given out

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


class _PromptJob(Job):
    """A prompt of an iterator, which has the number `index`."""

    def __init__(self, index: int, request: Request | None, error: str | None = None):
        self.requests = [] if request is None else [request]
        self._index = index
        self._pieces: list[str] = []
        self._reason = "error"
        self._error = error

    def add(self, index: int, output: Output) -> None:
        self._pieces.append(output.text)
        self._reason = output.finish_reason or "error"
        self._error = output.error and f"prompt {self._index + 1}: {output.error}"

    def refuse(self, error: UserError) -> None:
        self._error = f"prompt {self._index + 1}: {error}"

    @property
    def text(self) -> GeneratedText:
        return GeneratedText("".join(self._pieces), self._reason, self._error)


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
        prefix_cache: PrefixCache | SlotPrefixCache | None = None,
        drafter: Drafter | None = None,
        draft_tokens: int = 4,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        check_has("prefix_cache", prefix_cache, "match_prefix", "insert")
        check_has("drafter", drafter, "propose", "end")
        if "progress" in options:
            raise UserError("progress is for prompts whose number is known; give a list, or leave it out.")
        if adapter is not None and not isinstance(adapter, str):
            raise UserError("prompts of an iterator share one adapter; give its name, or a list of prompts.")
        own = SamplingParams.of_keywords(stream_generate, options)
        params = sampling_params(runtime, tokenizer, ignore_eos, own)
        # A prompt of one token stands for those to come: what is wrong with an option is said at once.
        self._request = Request([0], max_tokens, adapter=adapter, **vars(params))
        self._request.check(runtime.config.vocab_size)
        AppliedAdapter.of(adapter, [0], runtime.adapters)
        self._runtime = runtime
        self._tokenizer = tokenizer
        self._prefix_cache = prefix_cache
        self._drafter = drafter
        self._draft_tokens = draft_tokens
        self._shown = dict(tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs)

    def texts(self, prompts: Iterator[Prompt]) -> Iterator[GeneratedText]:
        """Yield the text of each prompt, in their order."""
        runs: InOrder[_PromptJob] = InOrder(
            self._engine,
            longest=self._runtime.max_length,
            portion=MOST_SEQUENCES,
            look_ahead=LOOK_AHEAD,
            shares_prefixes=self._prefix_cache is not None,
        )
        with (
            closing(PromptEncoder(self._tokenizer, **self._shown)) as encoder,
            closing(runs.run(self._job(encoder, *each) for each in enumerate(prompts))) as jobs,
        ):
            for job in jobs:
                yield job.text

    def _job(self, encoder: PromptEncoder, index: int, prompt: Prompt) -> _PromptJob:
        which = f"prompt {index + 1}"
        limits = self._runtime.config.vocab_size, self._runtime.max_length
        try:
            prompt = single(prompt, which)
            tokens = encode_one(encoder, prompt, *limits, which)
            request = encoder.for_answer(prompt, replace(self._request, tokens=tokens))
        except UserError as error:
            return _PromptJob(index, None, str(error))
        return _PromptJob(index, request.with_seed_offset(index))

    def _engine(self, max_length: int) -> Engine:
        set_aside = () if self._prefix_cache is None else self._prefix_cache.slots
        return Engine(
            self._runtime,
            slots_that_fit(self._runtime, MOST_SEQUENCES, max_length, set_aside),
            max_length=max_length,
            tokenizer=self._tokenizer,
            prompts_first=True,
            prefix_cache=self._prefix_cache,
            drafter=self._drafter,
            draft_tokens=self._draft_tokens,
        )
