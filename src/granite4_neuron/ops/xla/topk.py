"""The router's choice and the likeliest token, in plain torch without a sort, which the compiler for Trainium does not
handle.
"""

from __future__ import annotations

import math

import torch

# Tokens up to which logits are compared in pairs: as few instructions as there can be, but num_experts ** 2 values per
# token.
_MOST_IN_PAIRS = 64
# Of a vocabulary's candidates: so many groups of neighbouring tokens, with so many candidates of each.
_GROUPS, _OF_A_GROUP = 64, 8


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.topk_softmax`. Of equal logits the first is chosen; where a token's are NaN, the last expert."""
    logits, num_experts = router_logits.float(), router_logits.shape[-1]
    choose = _by_comparison if len(logits) <= _MOST_IN_PAIRS else _one_after_another
    top_logits, experts = choose(logits, top_k)
    return top_logits.softmax(-1), experts.int().clamp(max=num_experts - 1)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the token of each row's highest logit, of equal ones the first: [rows, vocab_size] to [rows] in int32.

    It is -1 for a row whose highest logit is not finite, or that has a NaN.
    """
    vocab_size = logits.shape[-1]
    top = logits.amax(-1, keepdim=True)
    tokens = torch.arange(vocab_size, dtype=torch.float32, device=logits.device)
    first = torch.where(logits == top, tokens, float(vocab_size)).amin(-1)
    # Whether a maximum of NaN is NaN depends on the device; a comparison with it is false on all.
    none = torch.full_like(top, math.inf)
    is_finite = ((logits <= top) & (top.abs() < none)).float().amin(-1)
    return (is_finite * (first + 1) - 1).int()


def candidates(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return high logits of each row, with their tokens: [rows, vocab_size] to [rows, 2 * count + 1] in float32.

    These are the logits from the highest down, their tokens, and a bound: no other logit of the row is above it. They
    are the highest ones, unless more than 8 of these are among one 64th of the vocabulary; then the bound is as high as
    one of them. Where a row has too few tokens the logits are -inf.
    """
    rows, vocab_size = logits.shape
    padding = -vocab_size % _GROUPS
    left = torch.nn.functional.pad(logits, (0, padding), value=-math.inf).view(rows, _GROUPS, -1)
    tokens = torch.arange(vocab_size + padding, dtype=torch.float32, device=logits.device).view(1, _GROUPS, -1)
    tops, firsts = [], []
    for _ in range(_OF_A_GROUP):
        tops.append(left.amax(-1, keepdim=True))
        firsts.append(torch.where(left == tops[-1], tokens, float(vocab_size + padding)).amin(-1, keepdim=True))
        left = torch.where(tokens == firsts[-1], -math.inf, left)
    found, of_tokens = (torch.cat(each, -1).view(rows, -1) for each in (tops, firsts))
    places = torch.arange(found.shape[1], dtype=torch.int32, device=logits.device)
    this, other = found[:, :, None], found[:, None]
    rank = torch.where(places[:, None] > places, other >= this, other > this).float().sum(-1)
    is_chosen = rank[:, None] == torch.arange(count, dtype=torch.float32, device=logits.device)[:, None]
    highest, of_highest = (torch.where(is_chosen, each[:, None], 0.0).sum(-1) for each in (found, of_tokens))
    bound = torch.maximum(tops[-1].amax(1), highest[:, -1:])
    return torch.cat([highest, of_highest, bound], -1)


def _by_comparison(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits of the chosen experts, the experts), each [tokens, top_k] in float32.

    The rank of an expert is how many others are above it.
    """
    experts = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    this, other = logits[:, :, None], logits[:, None]
    is_above = torch.where(experts[:, None] > experts, other >= this, other > this)
    rank = is_above.float().sum(-1)
    is_chosen = (rank[:, None] == torch.arange(top_k, dtype=torch.float32, device=logits.device)[:, None]).float()
    return (is_chosen * logits[:, None]).sum(-1), (is_chosen * experts.float()).sum(-1)


def _one_after_another(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `_by_comparison`, by taking the largest of those that are left as many times."""
    num_experts = logits.shape[-1]
    experts = torch.arange(num_experts, dtype=torch.float32, device=logits.device).expand(logits.shape)
    nobody, lowest = torch.full_like(logits, num_experts), torch.full_like(logits, -math.inf)
    top_logits, chosen = [], []
    for _ in range(top_k):
        top = logits.amax(-1, keepdim=True)
        first = torch.where(logits == top, experts, nobody).amin(-1, keepdim=True)
        logits = torch.where(experts == first, lowest, logits)
        top_logits.append(top)
        chosen.append(first)
    return torch.cat(top_logits, -1), torch.cat(chosen, -1)
