"""Many tokens' choices of experts, sorted by expert into blocks of rows: a block has one expert.

In plain torch with static shapes, without a sort or a running sum; there is room for the largest possible number of
blocks. The blocks are in two parts, for two cores: each part has half of the non-empty blocks, then empty ones.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

BLOCK_ROWS = 128  # the number of partitions: with fewer rows a product takes as long
PARTS = 2
_CHUNK = 128  # tokens that are counted by one product with a triangle


def num_blocks(tokens: int, top_k: int, num_experts: int) -> int:
    """Return the most blocks there can be, rounded up to a multiple of PARTS."""
    most = min((tokens * top_k + num_experts * (BLOCK_ROWS - 1)) // BLOCK_ROWS, num_experts * -(-tokens // BLOCK_ROWS))
    return -(-most // PARTS) * PARTS


def expert_blocks(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort choices into blocks. A token's i-th choice has the number token * top_k + i.

    Args:
        topk_ids: [tokens, top_k], integers, no expert twice for a token. Ids outside 0 to num_experts - 1 choose
            nothing: the caller marks padding with them.

    Returns:
        loads: [blocks] in int32: a block's expert, where it differs from the previous block's or a part begins;
            num_experts elsewhere and in empty blocks.
        tokens: [BLOCK_ROWS, blocks] in int32: the token of each row; the number of tokens where there is none.
        choices: like tokens: the choice of each row; BLOCK_ROWS * blocks where there is none.
    """
    topk_ids = topk_ids.to(torch.int32)
    tokens, top_k = topk_ids.shape
    size = num_blocks(tokens, top_k, num_experts)
    experts = torch.arange(num_experts, dtype=torch.int32, device=topk_ids.device)
    is_choice = topk_ids[..., None] == experts  # [tokens, top_k, num_experts]
    chosen_before = _counts_before(is_choice.any(1))

    blocks = _divide(is_choice.any(1).sum(0, dtype=torch.int32) + BLOCK_ROWS - 1, BLOCK_ROWS)
    first_block = (blocks[:, None] * (experts[:, None] < experts)).sum(0, dtype=torch.int32)
    total = blocks.sum(dtype=torch.int32)
    in_first_part = _divide(total + 1, PARTS)
    empty = size // PARTS - in_first_part  # blocks at the first part's end

    number = first_block + _divide(chosen_before, BLOCK_ROWS)
    block = number + empty * (number >= in_first_part)
    place = chosen_before % BLOCK_ROWS * size + block
    places = place[:, None].where(is_choice, 0).sum(-1, dtype=torch.int32)
    places = places.where(is_choice.any(-1), BLOCK_ROWS * size).flatten()
    nothing = torch.full((BLOCK_ROWS * size + 1,), BLOCK_ROWS * size, dtype=torch.int32, device=topk_ids.device)
    numbers = torch.arange(tokens * top_k, dtype=torch.int32, device=topk_ids.device)
    choices = nothing.index_put((places,), numbers)[:-1].view(BLOCK_ROWS, size)

    loads = _loads(blocks, first_block, in_first_part, size)
    return loads, _divide(choices, top_k).clamp(max=tokens), choices


def combine_choices(
    y: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Return each token's weighted sum over its choices: [tokens, hidden], zeros for a token without choices.

    Args:
        y: [tokens * top_k or more, hidden]: the result of each choice; anything for tokens without choices.
        topk_ids: [tokens, top_k]. A token's ids are all inside 0 to num_experts - 1, or all outside.
        topk_weights: [tokens, top_k].
    """
    tokens, top_k = topk_ids.shape
    rows = y[: tokens * top_k].view(tokens, top_k, -1)
    sums = torch.einsum("tk,tkh->th", topk_weights.to(y.dtype), rows)
    first = topk_ids[:, :1]
    return sums.where((first >= 0) & (first < num_experts), 0.0)


def _divide(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Divide integers that are not negative, rounding down. torch-mlir lowers `//` to float64, but this to integers."""
    return numbers.div(by, rounding_mode="trunc")


def _counts_before(is_chosen: torch.Tensor) -> torch.Tensor:
    """Count how many earlier tokens chose each expert, as products with triangles: [tokens, num_experts] in int32."""
    tokens, num_experts = is_chosen.shape
    chunks = F.pad(is_chosen.float(), (0, 0, 0, -tokens % _CHUNK)).view(-1, _CHUNK, num_experts)
    within = _earlier(_CHUNK, chunks) @ chunks
    before = _earlier(len(chunks), chunks) @ chunks.sum(1)
    return (within + before[:, None]).view(-1, num_experts)[:tokens].to(torch.int32)


def _earlier(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return [size, size]: 1 where the column is before the row."""
    numbers = torch.arange(size, dtype=torch.int32, device=like.device)
    return (numbers < numbers[:, None]).to(like.dtype)


def _loads(blocks: torch.Tensor, first_block: torch.Tensor, in_first_part: torch.Tensor, size: int) -> torch.Tensor:
    """Return `loads` of `expert_blocks`."""
    num_experts = len(blocks)
    place = torch.arange(size, dtype=torch.int32, device=blocks.device)
    is_second_part = place >= size // PARTS
    number = place - is_second_part * (size // PARTS - in_first_part)
    has_rows = number < torch.where(is_second_part, blocks.sum(dtype=torch.int32), in_first_part)
    begins_part = place % (size // PARTS) == 0
    begins_expert = ((number[:, None] == first_block) & (blocks > 0)).any(1)
    expert = (first_block + blocks <= number[:, None]).sum(1, dtype=torch.int32)
    return expert.where(has_rows & (begins_part | begins_expert), num_experts)
