"""The choice of tokens on the CPU: the functions of `ops.sampling`, for all rows of a step in one call.

Rows are divided among the kernels' threads. Nothing sorts a vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from granite4_neuron.devices.cpu.build import kernel, load_kernels
from granite4_neuron.ops import sampling as definition
from granite4_neuron.ops.sampling import Choice, Chosen, Logprobs

_NO_TOKENS, _NO_VALUES = torch.empty(0, dtype=torch.int64), torch.empty(0)


def form() -> ModuleType:
    """Return this module; or the plain definition, if the kernels cannot be compiled here."""
    return sys.modules[__name__] if load_kernels() is None else definition


def choose(logits: Sequence[torch.Tensor], choices: Sequence[Choice]) -> list[Chosen]:
    """Compute `ops.sampling.choose`, for contiguous logits."""
    if not choices:
        return []
    chosen, logprobs, about = kernel("choose")(
        list(logits), *_flat(choices), max(choice.num_logprobs or 0 for choice in choices)
    )
    return [
        Chosen(token)
        if token < 0 or choice.num_logprobs is None
        else Chosen(token, _report(logprobs[row], about[row], choice.num_logprobs))
        for row, (token, choice) in enumerate(zip(chosen, choices, strict=True))
    ]


def _flat(choices: Sequence[Choice]) -> tuple[Any, ...]:
    """Return all choices as the kernel takes them, see `choose` of kernels/sampling.h: numbers of each row one after
    another, the masks, and the rows' tokens with their values.
    """
    reals: list[float] = []
    wholes: list[int] = []
    masks: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    offsets = [0]
    for choice in choices:
        reals += choice.scale if choice.temperature > 0 else 0.0, choice.top_p, choice.typical_p, choice.cutoff
        reals += (0.0, 0.0, 1.0) if choice.penalties is None else choice.penalties[2:]
        wholes += _signed(choice.seed), choice.place, choice.top_k
        for bits in (choice.mask, choice.allowed):
            wholes.append(-1 if bits is None else len(masks))
            masks += [] if bits is None else [bits]
        wholes.append(-1 if choice.num_logprobs is None else choice.num_logprobs)
        forbidden = None if choice.forbidden is None else (choice.forbidden, choice.forbidden.float())
        for part in (choice.biases, choice.penalties, forbidden):
            if part is not None:
                tokens.append(part[0])
                values.append(part[1])
            offsets.append(offsets[-1] + (0 if part is None else len(part[0])))
    all_tokens = torch.cat(tokens) if tokens else _NO_TOKENS
    return reals, wholes, masks, all_tokens, torch.cat(values) if tokens else _NO_VALUES, offsets


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Compute `ops.sampling.logprobs` for a token after each row of logits [rows, vocab_size], contiguous."""
    logprobs, about = kernel("token_logprobs")(logits, tokens, num_top)
    return [_report(*each, num_top) for each in zip(logprobs, about, strict=True)]


def _signed(seed: int) -> int:
    """Return the number whose two's complement has the 64 bits of a seed."""
    return seed if seed < 2**63 else seed - 2**64


def _report(logprobs: torch.Tensor, about: torch.Tensor, num_top: int) -> Logprobs:
    rank, *top = about.tolist()
    found = num_top - top[:num_top].count(-1)
    return Logprobs(logprobs[0].item(), rank, about[1 : 1 + found], logprobs[1 : 1 + found])
