"""Generates text for one batch of prompts, with a new engine for each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    TokenLogprob,
)
from granite4_neuron.engine.drafters import Drafter
from granite4_neuron.engine.prefix_cache import SHORTEST_SHARED, common_length
from granite4_neuron.engine.slots import slots_that_fit
from granite4_neuron.errors import UserError
from granite4_neuron.generation.prompts import Prompt, PromptEncoder, encode, is_tokens, split
from granite4_neuron.runtime.interface import Runtime

# At a time: each takes memory for its state.
MOST_SEQUENCES = 64


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


def stream_generate(
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 256,
    ignore_eos: bool = False,
    progress: Callable[[int, int], None] | None = None,
    prefix_cache: PrefixCache | None = None,
    drafter: Drafter | None = None,
    draft_tokens: int = 4,
    adapter: str | Sequence[str | None] | None = None,
    **options,
) -> Iterator[GenerationResponse]:
    """Continue one prompt or several; yield each token as it comes.

    Args:
        runtime, tokenizer: from `load`. The tokenizer may be None with token ids and `ignore_eos`; then there is no
            text.
        prompt: a text; token ids, as a list, a tensor with one axis, or a tokenizer's BatchEncoding; a conversation, as
            a list of messages, each with a "role" and a "content"; or a list of these, or token ids with two axes.
            Prompts may differ in length; each is continued as if it were alone. As many run at a time as memory has
            room for, and `MOST_SEQUENCES` at most; the others wait in order.
        max_tokens: the most new tokens per prompt; fewer if the runtime's longest sequence is reached.
        ignore_eos: do not stop at the checkpoint's end-of-sequence tokens, unless a constraint says where to end.
        progress: called with (prompt tokens done, prompt tokens in all) after each step of prefill.
        prefix_cache: of this runtime. Prompts start from their cached prefixes, and a prefix of several prompts is
            computed once. Later calls can use the same cache.
        drafter, draft_tokens: proposes tokens, and the most at a time. Accepted drafts make texts faster and do not
            change them.
        adapter: the name of one of the runtime's adapters, or None for the model without; or a list of one for each
            prompt.
        options: sampling options such as `temperature`, `top_p`, `seed`, `stop`, `logprobs` and `logits_processors`,
            see `engine.SamplingParams`. Prompt number i uses seed + i.

    Raises:
        UserError: a prompt is empty or longer than the model's limit, or an option is outside its range. After the last
            token also if the model's logits were not finite for one of the prompts, which ends that prompt early.
    """
    params = SamplingParams(**options)
    singles, _ = split(prompt)
    if tokenizer is None and not (ignore_eos and all(map(is_tokens, singles))):
        raise UserError("without a tokenizer, give token ids and set ignore_eos: there is no end-of-sequence token.")
    if tokenizer is not None and (not ignore_eos or params.constraint is not None):
        eos = end_of_sequence_tokens(tokenizer, runtime.generation_config)
        params = replace(params, stop_token_ids=params.stop_token_ids | eos)
    prompts = encode(tokenizer, singles, runtime.config.vocab_size, runtime.max_length)
    adapters = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else adapter
    if len(adapters) != len(prompts):
        raise UserError(f"there are {len(adapters)} adapters for {len(prompts)} prompts; give one for each.")
    shared = [frozenset()] * len(prompts) if prefix_cache is None else _shared_lengths(prompts)
    requests = [
        Request(tokens, max_tokens, snapshots_at=at, adapter=name, **vars(params.with_seed_offset(index)))
        for index, (tokens, at, name) in enumerate(zip(prompts, shared, adapters, strict=True))
    ]
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
    ids = [engine.add(request) for request in requests]
    return _run(engine, ids, sum(map(len, prompts)), progress)


def generate(
    runtime: Runtime, tokenizer: PreTrainedTokenizerFast, prompt: Prompt | Sequence[Prompt], **options
) -> str | list[str]:
    """Return the continuation of a prompt, or a list for several; arguments are those of `stream_generate`."""
    singles, are_several = split(prompt)
    texts = [""] * len(singles)
    for response in stream_generate(runtime, tokenizer, singles, **options):
        texts[response.index] += response.text
    return texts if are_several else texts[0]


def chat(
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    messages: Prompt | Sequence[Prompt],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **options,
) -> str | list[str]:
    """Return the model's answer to a conversation, or a list for several.

    Args:
        messages: a conversation, or a text as a user's only message; or a list of these.
        tools, documents: see `ConversationEncoder.encode`; `tool_calls.parse_tool_calls` finds calls in an answer.
        options: of `stream_generate`.

    Raises:
        UserError: as `stream_generate` and `ConversationEncoder.encode`.
    """
    singles, are_several = split(messages)
    conversations = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in singles]
    with closing(PromptEncoder(tokenizer, tools=tools, documents=documents)) as encoder:
        prompts = [encoder.tokens(each, "the prompt") for each in conversations]
    answers = generate(runtime, tokenizer, prompts, **options)
    return answers if are_several else answers[0]


def _run(
    engine: Engine, ids: Sequence[int], prompt_tokens: int, progress: Callable[[int, int], None] | None
) -> Iterator[GenerationResponse]:
    indices = {id: index for index, id in enumerate(ids)}
    error, done = None, 0
    try:
        while engine.has_work:
            outputs = engine.step()
            before, done = done, engine.stats.prompt_tokens + engine.stats.cached_tokens
            if progress is not None and done > before:
                progress(done, prompt_tokens)
            for output in outputs:
                error = error or output.error
                if output.token is not None:
                    new = output.token, output.text, output.finish_reason
                    yield GenerationResponse(indices[output.id], *new, engine.stats, output.logprob, output.prompt)
    finally:  # the caller may stop early, and the prefix cache and the drafter outlive the engine
        for id in ids:
            engine.cancel(id)
    if error is not None:
        raise UserError(error)


def _shared_lengths(prompts: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """Return for each prompt the lengths of prefixes that it shares with others and that are long enough for a
    snapshot.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
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
