"""Generates text for one batch of prompts, with a new engine for each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, GenerationStats, PrefixCache, Request, SamplingParams
from granite4_neuron.engine.drafters import Drafter
from granite4_neuron.engine.prefix_cache import SHORTEST_SHARED, common_length
from granite4_neuron.engine.request import check_text, check_tokens
from granite4_neuron.engine.sampling_params import is_list
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Runtime

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class GenerationResponse:
    """One new token of one sequence.

    index: which of the prompts.
    token: its id.
    text: the next piece of the sequence's text; may be empty while a character or a stop string is incomplete.
    finish_reason: "stop" (stop token or stop string) or "length" with the sequence's last token, else None.
    stats: of the whole call so far.
    """

    index: int
    token: int
    text: str
    finish_reason: str | None
    stats: GenerationStats


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
    **options,
) -> Iterator[GenerationResponse]:
    """Continue one prompt or several; yield each token as it comes.

    Args:
        runtime, tokenizer: from `load`. The tokenizer may be None with token ids and `ignore_eos`; then there is no
            text.
        prompt: a text, a list of token ids, or a list of these. Prompts may differ in length; each is continued as if
            it were alone.
        max_tokens: the most new tokens per prompt; fewer if the runtime's longest sequence is reached.
        ignore_eos: do not stop at the checkpoint's end-of-sequence tokens, unless a constraint says where to end.
        progress: called with (prompt tokens done, prompt tokens in all) after each step of prefill.
        prefix_cache: of this runtime. Prompts start from their cached prefixes, and a prefix of several prompts is
            computed once. Later calls can use the same cache.
        drafter, draft_tokens: proposes tokens, and the most at a time. Accepted drafts make texts faster and do not
            change them.
        options: sampling options such as `temperature`, `top_p`, `seed` and `stop`, see `engine.SamplingParams`. Prompt
            number i uses seed + i.

    Raises:
        UserError: a prompt is empty or longer than the model's limit, or an option is outside its range. After the last
            token also if the model's logits were not finite for one of the prompts, which ends that prompt early.
    """
    params = SamplingParams(**options)
    texts_or_tokens = _as_list(prompt)
    if tokenizer is None and not (ignore_eos and all(map(is_list, texts_or_tokens))):
        raise UserError("without a tokenizer, give token ids and set ignore_eos: there is no end-of-sequence token.")
    if tokenizer is not None and (not ignore_eos or params.constraint is not None):
        eos = end_of_sequence_tokens(tokenizer, runtime.generation_config)
        params = replace(params, stop_token_ids=params.stop_token_ids | eos)
    prompts = _encode(tokenizer, texts_or_tokens, runtime.config.vocab_size, runtime.max_length)
    shared = [frozenset()] * len(prompts) if prefix_cache is None else _shared_lengths(prompts)
    requests = [
        Request(tokens, max_tokens, snapshots_at=shared[index], **vars(params.with_seed_offset(index)))
        for index, tokens in enumerate(prompts)
    ]
    engine = Engine(
        runtime,
        len(prompts),
        max_length=max(map(len, prompts)) + max_tokens,
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
    texts = [""] * len(_as_list(prompt))
    for response in stream_generate(runtime, tokenizer, prompt, **options):
        texts[response.index] += response.text
    return texts if _is_several(prompt) else texts[0]


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
                    index = indices[output.id]
                    yield GenerationResponse(index, output.token, output.text, output.finish_reason, engine.stats)
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


def _encode(
    tokenizer: PreTrainedTokenizerFast | None, prompts: Sequence[Prompt], vocab_size: int, limit: int
) -> list[list[int]]:
    if not prompts:
        raise UserError("there is no prompt; give at least one.")
    encoded = []
    for number, tokens in enumerate(prompts, start=1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if isinstance(tokens, str):
            check_text(tokens, which)
            tokens = tokenizer.encode(tokens)
        check_tokens(tokens, vocab_size, which)
        if len(tokens) >= limit:
            raise UserError(
                f"{which} has {len(tokens)} tokens; with one new token at least it can have at most {limit - 1}, as "
                f"this model's longest sequence is {limit}."
            )
        encoded.append(list(tokens))
    return encoded


def _is_several(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Return whether a prompt is a list of prompts, and not one."""
    return is_list(prompt) and (len(prompt) == 0 or isinstance(prompt[0], str) or is_list(prompt[0]))


def _as_list(prompt: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    return prompt if _is_several(prompt) else [prompt]


def end_of_sequence_tokens(tokenizer: PreTrainedTokenizerFast, generation_config: GenerationConfig) -> frozenset[int]:
    """Return the end-of-sequence tokens of the tokenizer and of the checkpoint's generation_config.json."""
    ids: set[int] = set()
    for each in (generation_config.eos_token_id, tokenizer.eos_token_id):
        ids |= set(each if isinstance(each, Sequence) else () if each is None else (each,))
    return frozenset(ids)
