"""The generation loop: prefill prompts in chunks, then decode until every sequence has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from granite4_neuron.errors import UserError
from granite4_neuron.generation.sampling import Sampler, with_overrides
from granite4_neuron.generation.text import TextStream
from granite4_neuron.runtime.cpu import CPURuntime, Row
from granite4_neuron.state import HybridState

Prompt = str | Sequence[int]


@dataclass
class GenerationStats:
    """Totals over all sequences of a call; grows while it runs. Times in seconds."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0  # generated ones but the first of each sequence, which prefill gives
    decode_seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class GenerationResponse:
    """One new token of one sequence.

    index: which of the prompts.
    token: its id.
    text: what can be added to the sequence's text now; may be empty while a character or a stop string is incomplete.
    finish_reason: None, or with the sequence's last token "stop" (stop token or stop string) or "length".
    stats: of the whole call so far.
    """

    index: int
    token: int
    text: str
    finish_reason: str | None
    stats: GenerationStats


@dataclass
class _Sequence:
    index: int
    tokens: list[int]
    sampler: Sampler
    text: TextStream
    prompt_length: int = field(init=False)
    stored: int = 0  # tokens that the state has seen

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    def row(self, most: int | None = None) -> Row:
        """The next tokens to run, `most` of them at most."""
        stop = len(self.tokens) if most is None else min(len(self.tokens), self.stored + most)
        return Row(slot=self.index + 1, start=self.stored, tokens=self.tokens[self.stored : stop])


def stream_generate(
    model: CPURuntime,
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
) -> Iterator[GenerationResponse]:
    """Continue one prompt or several, giving out each token as it comes.

    Args:
        model, tokenizer: from `load`.
        prompt: a text, a list of token ids, or a list of those. Prompts may differ in length; each is continued as if
            it were alone.
        max_tokens: new tokens per prompt at most; fewer where the model's max_position_embeddings is reached.
        temperature, top_k, top_p, min_p, repetition_penalty: None for the checkpoint's generation_config.json;
            temperature 0 is greedy.
        seed: makes sampling repeatable; prompt number i draws from seed + i.
        stop: strings that end a sequence; they are not part of its text.
        stop_token_ids: tokens that end a sequence, beside the checkpoint's end-of-sequence tokens.
        ignore_eos: do not stop at the checkpoint's end-of-sequence tokens.
        progress: called with (prompt tokens done, prompt tokens in all) after each step of prefill.

    Raises:
        UserError: an empty prompt, one longer than the model's limit, or an option outside its range.
    """
    config = with_overrides(model.generation_config, temperature, top_k, top_p, min_p, repetition_penalty)
    stop = [stop] if isinstance(stop, str) else list(stop)
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}, and must be at least 1.")
    if "" in stop:
        raise UserError("a stop string is empty; it would end every text at once.")
    limit = model.config.max_position_embeddings
    sequences = [
        _Sequence(index, tokens, Sampler(config, None if seed is None else seed + index), TextStream(tokenizer, stop))
        for index, tokens in enumerate(_encode(tokenizer, prompt, model.config.vocab_size, limit))
    ]
    stop_ids = set(stop_token_ids)
    if not ignore_eos:
        stop_ids |= _eos_token_ids(config.eos_token_id) | _eos_token_ids(tokenizer.eos_token_id)
    return _run(model, sequences, max_tokens, limit, stop_ids, progress)


def generate(
    model: CPURuntime, tokenizer: PreTrainedTokenizerFast, prompt: Prompt | Sequence[Prompt], **options
) -> str | list[str]:
    """The continuation of a prompt, or the list of those of several; arguments are those of `stream_generate`."""
    texts = [""] * len(_as_list(prompt))
    for response in stream_generate(model, tokenizer, prompt, **options):
        texts[response.index] += response.text
    return texts if _is_several(prompt) else texts[0]


def chat_prompt(tokenizer: PreTrainedTokenizerFast, user: str, system: str | None = None) -> list[int]:
    """Tokens of a conversation's beginning, by the tokenizer's chat template, up to where the assistant speaks.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise UserError("this checkpoint's tokenizer has no chat template; give the prompt without --chat.")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"this checkpoint's chat template refuses the conversation ({error}).") from None
    return tokenizer.encode(text, add_special_tokens=False)


def _run(
    model: CPURuntime,
    sequences: list[_Sequence],
    max_tokens: int,
    limit: int,
    stop_ids: set[int],
    progress: Callable[[int, int], None] | None,
) -> Iterator[GenerationResponse]:
    longest = max(sequence.prompt_length for sequence in sequences)
    state = model.allocate(len(sequences), min(longest + max_tokens, limit))
    stats = GenerationStats()

    running: list[_Sequence] = []
    for sequence, logits in _prefill(model, state, sequences, stats, progress):
        response = _append(sequence, logits, max_tokens, limit, stop_ids, stats)
        if response.finish_reason is None:
            running.append(sequence)
        yield response

    while running:
        started = time.perf_counter()
        logits = model.step(state, [sequence.row() for sequence in running])
        responses = []
        for sequence, row in zip(running, logits, strict=True):
            sequence.stored += 1
            responses.append(_append(sequence, row, max_tokens, limit, stop_ids, stats))
        stats.decode_seconds += time.perf_counter() - started
        stats.decode_tokens += len(responses)
        running = [
            sequence for sequence, response in zip(running, responses, strict=True) if response.finish_reason is None
        ]
        yield from responses


def _prefill(
    model: CPURuntime,
    state: HybridState,
    sequences: list[_Sequence],
    stats: GenerationStats,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[_Sequence, torch.Tensor]]:
    """Run the prompts; each sequence comes out with its first logits as soon as its prompt is done."""
    total = sum(sequence.prompt_length for sequence in sequences)
    waiting = sequences
    while waiting:
        started = time.perf_counter()
        now = waiting[: model.prompts_per_step]
        rows = [sequence.row(max(1, model.tokens_per_step // len(now))) for sequence in now]
        logits = model.step(state, rows)
        for sequence, row in zip(now, rows, strict=True):
            sequence.stored += len(row.tokens)
            stats.prompt_tokens += len(row.tokens)
        stats.prompt_seconds += time.perf_counter() - started
        if progress is not None:
            progress(stats.prompt_tokens, total)
        done = [(s, row) for s, row in zip(now, logits, strict=True) if s.stored == s.prompt_length]
        waiting = [sequence for sequence in waiting if sequence.stored < sequence.prompt_length]
        yield from done


def _append(
    sequence: _Sequence,
    logits: torch.Tensor,
    max_tokens: int,
    limit: int,
    stop_ids: set[int],
    stats: GenerationStats,
) -> GenerationResponse:
    token = sequence.sampler(logits, sequence.tokens)
    sequence.tokens.append(token)
    stats.generated_tokens += 1
    text, reason = "", None
    if token in stop_ids:
        reason = "stop"
    else:
        text = sequence.text.add(token)
        if sequence.text.stopped:
            reason = "stop"
        elif len(sequence.tokens) - sequence.prompt_length == max_tokens or len(sequence.tokens) == limit:
            reason = "length"
    if reason is not None:
        text += sequence.text.finish()
    return GenerationResponse(sequence.index, token, text, reason, stats)


def _encode(
    tokenizer: PreTrainedTokenizerFast, prompt: Prompt | Sequence[Prompt], vocab_size: int, limit: int
) -> list[list[int]]:
    encoded = []
    prompts = _as_list(prompt)
    for number, one in enumerate(prompts, start=1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if isinstance(one, str) and not _is_utf8(one):
            raise UserError(f"{which} is not text in UTF-8.")
        tokens = tokenizer.encode(one) if isinstance(one, str) else [int(token) for token in one]
        if not tokens:
            raise UserError(f"{which} is empty; give at least one token of text.")
        if len(tokens) >= limit:
            raise UserError(f"{which} has {len(tokens)} tokens; this model takes at most {limit - 1}.")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise UserError(f"{which} has a token id outside the vocabulary, which is 0 to {vocab_size - 1}.")
        encoded.append(tokens)
    if not encoded:
        raise UserError("there is no prompt; give at least one.")
    return encoded


def _is_several(prompt: Prompt | Sequence[Prompt]) -> bool:
    return not isinstance(prompt, str) and (len(prompt) == 0 or not isinstance(prompt[0], Integral))


def _is_utf8(text: str) -> bool:
    """False for text that came from bytes in another encoding, which Python keeps as lone surrogates."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _as_list(prompt: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    return prompt if _is_several(prompt) else [prompt]


def _eos_token_ids(ids: int | Sequence[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)
