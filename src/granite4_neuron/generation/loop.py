"""Generates text for one batch of prompts, with a new engine for each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron.engine import (
    Engine,
    GenerationStats,
    PrefixCache,
    PromptReport,
    Request,
    SamplingParams,
    SlotPrefixCache,
    TokenLogprob,
)
from granite4_neuron.engine.drafting.drafters import Drafter
from granite4_neuron.engine.prefix.cache import SHORTEST_SHARED, common_length
from granite4_neuron.engine.request import check_has
from granite4_neuron.engine.slots import slots_that_fit
from granite4_neuron.errors import UserError
from granite4_neuron.generation.prompts import Prompt, PromptEncoder, encode, is_tokens, split
from granite4_neuron.runtime.interface import Runtime

# At a time: each takes memory for its state.
MOST_SEQUENCES = 64

_NO_TOKENIZER = "without a tokenizer, give token ids and set ignore_eos: there is no end-of-sequence token."


@dataclass(frozen=True)
class GenerationResponse:
    """One new token of one sequence.

    index: which of the prompts.
    token: its id.
    text: the next piece of the sequence's text; may be empty while a character or a stop string is incomplete.
    finish_reason: "stop" (stop token or stop string) or "length" with the sequence's last token, else None.
    stats: of the whole call so far.
    logprob: of the token, if `logprobs` asks for it.
    prompt: with the sequence's first token: what the prefix cache had of its prompt, and the prompt's log-probabilities
        if `prompt_logprobs` asks for them.
    """

    index: int
    token: int
    text: str
    finish_reason: str | None
    stats: GenerationStats
    logprob: TokenLogprob | None = None
    prompt: PromptReport | None = None


class GenerationError(UserError):
    """One or more prompts could not be continued to their ends. All others were.

    errors: a sentence for each of those, by their indices.
    num_prompts: how many there are in all.
    """

    def __init__(self, errors: Mapping[int, str], num_prompts: int):
        first = errors[min(errors)]
        super().__init__(
            first if len(errors) == 1 else f"{len(errors)} of {num_prompts} prompts failed; the first: {first}"
        )
        self.errors = errors
        self.num_prompts = num_prompts

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors, self.num_prompts)


def stream_generate(
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast | None,
    prompt: Prompt | Iterable[Prompt],
    *,
    max_tokens: int = 256,
    ignore_eos: bool = False,
    progress: Callable[[int, int], None] | None = None,
    prefix_cache: PrefixCache | SlotPrefixCache | None = None,
    drafter: Drafter | None = None,
    draft_tokens: int = 4,
    adapter: str | Sequence[str | None] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Continue one prompt or several; yield each token as it comes.

    Args:
        runtime, tokenizer: from `load`. The tokenizer may be None with token ids and `ignore_eos`; then there is no
            text.
        prompt: a text; token ids, as a list, a tensor with one axis, or a tokenizer's BatchEncoding; a conversation, as
            a list of messages, each with a "role" and a "content"; or a list or a generator of these, or token ids with
            two axes. Prompts may differ in length; each is continued as if it were alone. As many run at a time as
            memory has room for, and `MOST_SEQUENCES` at most; the others wait in order.
        max_tokens: the most new tokens per prompt; fewer if the runtime's longest sequence is reached.
        ignore_eos: do not stop at the checkpoint's end-of-sequence tokens, unless a constraint says where to end.
        progress: called with (prompt tokens done, prompt tokens in all) after each step of prefill.
        prefix_cache: of this runtime. Prompts start from their cached prefixes, and a prefix of several prompts is
            computed once. Later calls can use the same cache.
        drafter, draft_tokens: proposes tokens, and the most at a time. Accepted drafts make texts faster and do not
            change them.
        adapter: the name of one of the runtime's adapters, or None for the model without; or a list of one for each
            prompt.
        tools, documents, chat_template_kwargs: what conversations show; see `ConversationEncoder.encode`.
            `tool_calls.parse_tool_calls` finds calls in an answer.
        options: sampling options such as `temperature`, `top_p`, `seed`, `stop`, `logprobs` and `logits_processors`,
            see `engine.SamplingParams`. Prompt number i uses seed + i.

    Raises:
        UserError: an option is outside its range, there is no such adapter, or something is no prompt at all.
        GenerationError: a prompt is empty, longer than the model's limit, or invalid; or it ended early,
            such as with logits that are not finite. If some prompts are right, this comes after their last token.
    """
    check_has("prefix_cache", prefix_cache, "match_prefix", "insert")
    params = SamplingParams.of_keywords(stream_generate, options)
    singles, _ = split(prompt)
    if tokenizer is None and not all(map(is_tokens, singles)):
        raise UserError(_NO_TOKENIZER)
    params = sampling_params(runtime, tokenizer, ignore_eos, params)
    adapters = [adapter] * len(singles) if adapter is None or isinstance(adapter, str) else adapter
    if len(adapters) != len(singles):
        raise UserError(f"there are {len(adapters)} adapters for {len(singles)} prompts; give one for each.")
    shown = dict(tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs)
    with closing(PromptEncoder(tokenizer, **shown)) as encoder:
        by_index, errors = encode(encoder, singles, runtime.config.vocab_size, runtime.max_length)
        if not by_index:
            raise GenerationError(errors, len(singles))
        prompts = list(by_index.values())
        shared = [frozenset()] * len(prompts) if prefix_cache is None else shared_lengths(prompts)
        requests = []
        for (index, tokens), at in zip(by_index.items(), shared, strict=True):
            options = vars(params.with_seed_offset(index))
            request = Request(tokens, max_tokens, snapshots_at=at, adapter=adapters[index], **options)
            requests.append(encoder.for_answer(singles[index], request))
    max_length = min(max(map(len, prompts)) + max_tokens, runtime.max_length)
    set_aside = () if prefix_cache is None else prefix_cache.slots
    engine = Engine(
        runtime,
        slots_that_fit(runtime, min(len(prompts), MOST_SEQUENCES), max_length, set_aside),
        max_length=max_length,
        tokenizer=tokenizer,
        prompts_first=True,
        prefix_cache=prefix_cache,
        drafter=drafter,
        draft_tokens=draft_tokens,
    )
    indices = {engine.add(request): index for index, request in zip(by_index, requests, strict=True)}
    return _run(engine, indices, errors, sum(map(len, prompts)), progress)


def sampling_params(
    runtime: Runtime, tokenizer: PreTrainedTokenizerFast | None, ignore_eos: bool, params: SamplingParams
) -> SamplingParams:
    """Return the options with the end-of-sequence tokens, unless they are ignored; see `stream_generate`.

    Raises:
        UserError: they are not ignored, and there is no tokenizer.
    """
    if tokenizer is None:
        if not ignore_eos:
            raise UserError(_NO_TOKENIZER)
        return params
    if ignore_eos and params.constraint is None:
        return params
    eos = end_of_sequence_tokens(tokenizer, runtime.generation_config)
    return replace(params, stop_token_ids={*(params.stop_token_ids or ()), *eos})


def _run(
    engine: Engine,
    indices: Mapping[int, int],
    errors: Mapping[int, str],
    prompt_tokens: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[GenerationResponse]:
    """Run an engine to its end.

    Args:
        indices: of the prompts of its sequences, by their ids.
        errors: of other prompts, by their indices.
    """
    done = 0
    num_prompts = len(indices) + len(errors)
    try:
        while engine.has_work:
            outputs = engine.step()
            before, done = done, engine.stats.prompt_tokens + engine.stats.cached_tokens
            if progress is not None and done > before:
                progress(done, prompt_tokens)
            for output in outputs:
                if output.error is not None:
                    which = "" if num_prompts == 1 else f"prompt {indices[output.id] + 1}: "
                    errors = {**errors, indices[output.id]: which + output.error}
                if output.token is not None:
                    new = output.token, output.text, output.finish_reason
                    yield GenerationResponse(indices[output.id], *new, engine.stats, output.logprob, output.prompt)
    finally:  # the caller may stop early, and the prefix cache and the drafter outlive the engine
        for id in indices:
            engine.cancel(id)
    if errors:
        raise GenerationError(errors, num_prompts)


def shared_lengths(prompts: Sequence[list[int]]) -> list[frozenset[int]]:
    """Return for each prompt the lengths of prefixes that it shares with others and that are long enough for a
    snapshot.
    """
    order = sorted(range(len(prompts)), key=lambda number: prompts[number])
    # In sorted order, prompts with a common prefix are neighbours.
    shared = [common_length(prompts[one], prompts[other]) for one, other in itertools.pairwise(order)]
    lengths: list[list[int]] = [[0] for _ in prompts]
    for length in sorted(set(shared)):
        for place, number in enumerate(order):
            is_shared = any(each >= length for each in shared[max(0, place - 1) : place + 1])
            if is_shared and length - lengths[number][-1] >= SHORTEST_SHARED:
                lengths[number].append(length)
    return [frozenset(prompt_lengths[1:]) for prompt_lengths in lengths]


def end_of_sequence_tokens(tokenizer: PreTrainedTokenizerFast, generation_config: GenerationConfig) -> frozenset[int]:
    """Return the end-of-sequence tokens of the tokenizer and of the checkpoint's generation_config.json."""
    ids: set[int] = set()
    for each in (generation_config.eos_token_id, tokenizer.eos_token_id):
        ids |= set(each if isinstance(each, Sequence) else () if each is None else (each,))
    return frozenset(ids)
