"""Prompts as callers give them: texts, token ids and conversations, one or several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeGuard

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.checkpoint import tokenizing
from granite4_neuron.engine import Request
from granite4_neuron.engine.request import check_text, check_tokens
from granite4_neuron.engine.sampling_params import is_list
from granite4_neuron.errors import UserError
from granite4_neuron.generation.conversation_encoder import ConversationEncoder

Messages = Sequence[Mapping[str, Any]]
# A mapping is a tokenizer's BatchEncoding.
Prompt = str | Sequence[int] | torch.Tensor | np.ndarray | Messages | Mapping[str, Any]

_KINDS = "a string, a list or tensor of token ids, what a tokenizer returns, a list of messages, or a list of such"


def split(prompt: Prompt | Iterable[Prompt], which: str = "the prompt") -> tuple[list[Prompt], bool]:
    """Return the single prompts, and whether `prompt` is several: a list, a generator or another iterable of prompts,
    or token ids with two axes. Messages call the prompt `which`.

    Raises:
        UserError: it is not a prompt.
    """
    if isinstance(prompt, Mapping):
        return _of_encoding(prompt)
    if isinstance(prompt, (torch.Tensor, np.ndarray)):
        return _rows(prompt)
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, Iterable) and not isinstance(prompt, (Sequence, Set)):
        return _singles(prompt), True
    if not is_list(prompt):
        raise UserError(f"{which} is of type {type(prompt).__name__}; give {_KINDS}.")
    if prompt and (_is_message(prompt[0]) or not _is_prompt(prompt[0])):
        return [prompt], False
    return _singles(prompt), True


def encode(
    encoder: PromptEncoder, prompts: Sequence[Prompt], vocab_size: int, limit: int
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Return the tokens of prompts from `split`, by their indices, and what is wrong with the others: a prompt that is
    empty, too long, or invalid.

    Args:
        vocab_size: token ids must be below it.
        limit: the most tokens of a sequence, with one new token.

    Raises:
        UserError: there is no prompt.
    """
    if not prompts:
        raise UserError("there is no prompt; give at least one.")
    encoded, errors = {}, {}
    for index, prompt in enumerate(prompts):
        which = "the prompt" if len(prompts) == 1 else f"prompt {index + 1}"
        try:
            encoded[index] = encode_one(encoder, prompt, vocab_size, limit, which)
        except UserError as error:
            errors[index] = str(error)
    return encoded, errors


def encode_one(encoder: PromptEncoder, prompt: Prompt, vocab_size: int, limit: int, which: str) -> list[int]:
    """Return the tokens of one prompt from `split` or `single`; see `encode`. Messages call it `which`.

    Raises:
        UserError: it is empty, too long, or invalid.
    """
    tokens = encoder.tokens(prompt, which)
    check_tokens(tokens, vocab_size, which)
    _check_length(len(tokens), limit, which)
    return list(tokens)


def _check_length(length: int, limit: int, which: str) -> None:
    if length >= limit:
        raise UserError(
            f"{which} has {length} tokens; with one new token at least it can have at most {limit - 1}, as this "
            f"model's longest sequence is {limit}."
        )


def is_tokens(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """Return whether a prompt from `split` is token ids already."""
    return not isinstance(prompt, str) and not _is_conversation(prompt)


class PromptEncoder:
    """Encodes texts and conversations. The encoder of conversations is made for the first of them.

    Args:
        shown: in conversations, beside the messages, such as tools and documents; see `ConversationEncoder.encode`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, **shown: Any):
        self._tokenizer = tokenizer
        self._shown = shown
        self._conversations: ConversationEncoder | None = None

    def tokens(self, prompt: Prompt, which: str) -> Sequence[int]:
        """Return the tokens of one prompt from `split`; messages call it `which`.

        Raises:
            UserError: it is invalid.
        """
        if is_tokens(prompt):
            return prompt
        if self._tokenizer is None:
            raise UserError(f"{which} is not token ids, and there is no tokenizer to encode it.")
        if isinstance(prompt, str):
            check_text(prompt, which)
            return tokenizing.encode(self._tokenizer, prompt)
        if not _is_conversation(prompt) or not all(map(_is_message, prompt)):
            raise UserError(f'{which} is not a conversation: each message must be a dictionary with a "role".')
        if self._conversations is None:
            self._conversations = ConversationEncoder(self._tokenizer)
        return self._conversations.encode(prompt, **self._shown)

    def for_answer(self, prompt: Prompt, request: Request) -> Request:
        """Return the request of an encoded prompt; of a conversation as `ConversationEncoder.for_answer`."""
        if self._conversations is None or not _is_conversation(prompt):
            return request
        return self._conversations.for_answer(request, bool(self._shown.get("tools")))

    def close(self) -> None:
        """Close the encoder of conversations, if it was made."""
        if self._conversations is not None:
            self._conversations.close()


def _is_prompt(value: object) -> bool:
    return isinstance(value, (str, Mapping, torch.Tensor, np.ndarray)) or is_list(value)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _is_conversation(prompt: Prompt) -> TypeGuard[Messages]:
    return is_list(prompt) and bool(prompt) and _is_message(prompt[0])


def _singles(prompts: Iterable[Prompt]) -> list[Prompt]:
    return [single(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, start=1)]


def single(prompt: Prompt, which: str) -> Prompt:
    """Return one of several prompts, as `split` returns it; messages call it `which`.

    Raises:
        UserError: it is not a prompt, or several.
    """
    if is_list(prompt) and not prompt:
        return prompt
    singles, are_several = split(prompt, which)
    # A tokenizer's tensors have two axes even for one text.
    if len(singles) != 1 or (are_several and not isinstance(prompt, (Mapping, torch.Tensor, np.ndarray))):
        raise UserError(f"{which} has several prompts; lists of prompts cannot be nested.")
    return singles[0]


def _of_encoding(encoding: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """Return the token ids of a BatchEncoding without its padding."""
    if "input_ids" not in encoding:
        raise UserError(
            'the prompt is a dictionary without input_ids; a conversation is a list of messages, each with a "role".'
        )
    rows, are_several = split(encoding["input_ids"])
    mask = encoding.get("attention_mask")
    if mask is None:
        return rows, are_several
    masks, _ = split(mask)
    if list(map(len, masks)) != list(map(len, rows)):
        raise UserError("the prompt's attention_mask and input_ids differ in shape.")
    return [list(itertools.compress(*pair)) for pair in zip(rows, masks, strict=True)], are_several


def _rows(ids: torch.Tensor | np.ndarray) -> tuple[list[Prompt], bool]:
    if ids.ndim not in (1, 2):
        raise UserError(f"the prompt has {ids.ndim} axes; token ids have one, or two for several prompts.")
    return (ids.tolist(), True) if ids.ndim == 2 else ([ids.tolist()], False)
