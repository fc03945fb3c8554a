"""Generates text for one batch of prompts, with a new engine for each batch."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, GenerationStats, PrefixCache, Request, with_overrides
from granite4_neuron.engine.drafters import Drafter
from granite4_neuron.engine.prefix_cache import SHORTEST_SHARED, common_length
from granite4_neuron.engine.request import check_text, check_tokens
from granite4_neuron.engine.sampling import is_whole
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
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    progress: Callable[[int, int], None] | None = None,
    prefix_cache: PrefixCache | None = None,
    drafter: Drafter | None = None,
    draft_tokens: int = 4,
) -> Iterator[GenerationResponse]:
    """Continue one prompt or several; yields each token as it comes.

    Args:
        runtime, tokenizer: from `load`. The tokenizer may be None with token ids and `ignore_eos`; then there is no
            text.
        prompt: a text, a list of token ids, or a list of these. Prompts may differ in length; each is continued as if
            it were alone.
        max_tokens: the most new tokens per prompt; fewer if the runtime's longest sequence is reached.
        temperature, top_k, top_p, min_p, repetition_penalty: None for the checkpoint's generation_config.json;
            temperature 0 is greedy.
        seed: makes sampling repeatable; prompt number i uses seed + i.
        stop: strings that end a sequence; they are not part of its text.
        stop_token_ids: tokens that end a sequence, besides the checkpoint's end-of-sequence tokens.
        ignore_eos: do not stop at the checkpoint's end-of-sequence tokens.
        progress: called with (prompt tokens done, prompt tokens in all) after each step of prefill.
        prefix_cache: of this runtime. Prompts start from their cached prefixes, and a prefix of several prompts is
            computed once. Later calls can use the same cache.
        drafter, draft_tokens: proposes tokens, and the most at a time. Accepted drafts make texts faster and do not
            change them.

    Raises:
        UserError: a prompt is empty or longer than the model's limit, or an option is outside its range. After the last
            token also if the model's logits were not finite for one of the prompts, which ends that prompt early.
    """
    _check_types(tokenizer, max_tokens, seed, stop, stop_token_ids, ignore_eos)
    sampling = with_overrides(runtime.generation_config, temperature, top_k, top_p, min_p, repetition_penalty)
    stop_ids = frozenset(stop_token_ids)
    if not ignore_eos:
        stop_ids |= end_of_sequence_tokens(tokenizer, sampling)
    limit = runtime.max_length
    prompts = _encode(tokenizer, prompt, runtime.config.vocab_size, limit)
    shared = [frozenset()] * len(prompts) if prefix_cache is None else _shared_lengths(prompts)
    requests = [
        Request(
            tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=None if seed is None else seed + index,
            stop_token_ids=stop_ids,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            snapshots_at=shared[index],
        )
        for index, tokens in enumerate(prompts)
    ]
    longest = max(map(len, prompts)) + max(1, max_tokens)
    engine = Engine(
        runtime,
        len(prompts),
        max_length=longest,
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
    """The continuation of a prompt, or the list of those of several; arguments are those of `stream_generate`."""
    texts = [""] * len(_as_list(prompt))
    for response in stream_generate(runtime, tokenizer, prompt, **options):
        texts[response.index] += response.text
    return texts if _is_several(prompt) else texts[0]


def _run(
    engine: Engine, ids: Sequence[int], prompt_tokens: int, progress: Callable[[int, int], None] | None
) -> Iterator[GenerationResponse]:
    index_of = {id: index for index, id in enumerate(ids)}
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
                    index = index_of[output.id]
                    yield GenerationResponse(index, output.token, output.text, output.finish_reason, engine.stats)
    finally:  # the caller may stop early, and the prefix cache and the drafter outlive the engine
        for id in ids:
            engine.cancel(id)
    if error is not None:
        raise UserError(error)


def _check_types(
    tokenizer: PreTrainedTokenizerFast | None,
    max_tokens: int,
    seed: int | None,
    stop: str | Sequence[str],
    stop_token_ids: Sequence[int],
    ignore_eos: bool,
) -> None:
    for name, value in (("max_tokens", max_tokens), ("seed", seed)):
        if not is_whole(value) and not (name == "seed" and value is None):
            raise UserError(f"{name} is {reprlib.repr(value)}, and must be a whole number.")
    if not isinstance(stop, str) and not (_is_list(stop) and all(isinstance(text, str) for text in stop)):
        raise UserError(f"stop is {reprlib.repr(stop)}, and must be a text or a list of texts.")
    if not (isinstance(stop_token_ids, (set, frozenset)) or _is_list(stop_token_ids)) or not all(
        map(is_whole, stop_token_ids)
    ):
        raise UserError(f"stop_token_ids is {reprlib.repr(stop_token_ids)}, and must be a list of token ids.")
    if tokenizer is None and not ignore_eos:
        raise UserError("without a tokenizer there is no end-of-sequence token; set ignore_eos, and give token ids.")


def _shared_lengths(prompts: Sequence[Sequence[int]]) -> list[frozenset[int]]:
    """For each prompt, the lengths of prefixes that it shares with others and that are long enough for a snapshot."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    # In sorted order, prompts with a common prefix are neighbours.
    shared = [common_length(prompts[one], prompts[other]) for one, other in itertools.pairwise(order)]
    lengths: list[list[int]] = [[0] for _ in prompts]
    for length in sorted(set(shared)):
        for place, number in enumerate(order):
            is_shared = any(each >= length for each in shared[max(0, place - 1) : place + 1])
            if is_shared and length - lengths[number][-1] >= SHORTEST_SHARED:
                lengths[number].append(length)
    return [frozenset(of_one[1:]) for of_one in lengths]


def _encode(
    tokenizer: PreTrainedTokenizerFast | None, prompt: Prompt | Sequence[Prompt], vocab_size: int, limit: int
) -> list[list[int]]:
    encoded = []
    prompts = _as_list(prompt)
    for number, one in enumerate(prompts, start=1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        tokens = _tokens(tokenizer, one, which)
        check_tokens(tokens, vocab_size, which)
        if len(tokens) >= limit:
            raise UserError(
                f"{which} has {len(tokens)} tokens; with one new token at least it can have at most {limit - 1}, as "
                f"this model's longest sequence is {limit}."
            )
        encoded.append(tokens)
    if not encoded:
        raise UserError("there is no prompt; give at least one.")
    return encoded


def _tokens(tokenizer: PreTrainedTokenizerFast | None, prompt: Prompt, which: str) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError(f"{which} is text, and there is no tokenizer; give token ids.")
        check_text(prompt, which)
        return tokenizer.encode(prompt)
    if not _is_list(prompt):
        raise UserError(f"{which} is of type {type(prompt).__name__}; give a text or a list of token ids.")
    return list(prompt)


def _is_several(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a list of prompts, and not one prompt."""
    return _is_list(prompt) and (len(prompt) == 0 or isinstance(prompt[0], str) or _is_list(prompt[0]))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _as_list(prompt: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    return prompt if _is_several(prompt) else [prompt]


def end_of_sequence_tokens(tokenizer: PreTrainedTokenizerFast, generation_config: GenerationConfig) -> frozenset[int]:
    """The end-of-sequence tokens of the tokenizer and of the checkpoint's generation_config.json."""
    ids: set[int] = set()
    for each in (generation_config.eos_token_id, tokenizer.eos_token_id):
        ids |= set(each if isinstance(each, Sequence) else () if each is None else (each,))
    return frozenset(ids)
