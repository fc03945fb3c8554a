"""Mixture of experts with static shapes, in plain torch: the router decides which weights are read, not how many.

Three paths give the same sums (`expert_path` chooses among them):

* chosen: the weights of each choice are fetched.
* all: every expert for every token, weighted 0 where it was not chosen.
* blocks: every expert has room for a fixed number of tokens, its capacity. Choices beyond that go into further blocks
  of the same size, each of which fetches the weights of its expert. There are enough further blocks for every possible
  choice, so that no token is ever dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from granite4_neuron.ops.moe import activate

CHOSEN, ALL, BLOCKS = "chosen", "all", "blocks"
# Tokens to count at a time: a count up to this is exact in every dtype that a compiler may choose for a product.
_ROWS = 128
_CAPACITY_STEP = 8
# Multiplications that a Trainium2 core makes while it moves one 16-bit number: 667 TFLOP/s and 2.9 TB/s per chip.
_PRODUCTS_PER_MOVE = 230
# The most tokens whose experts a Neuron device fetches by index by default. Published ports of hybrid models have run
# this for one token, four times as fast as all experts, and NxD Inference does it for two.
MOST_GATHERED = 2
# Fetched weights are read, written and read again.
_FETCHED = 3
# Rows of blocks are fetched, then written by the second product; from these each choice is fetched twice.
_MOVES_OF_ROW, _MOVES_OF_CHOICE = _FETCHED + 1, 2 * _FETCHED


@dataclass(frozen=True)
class ExpertPath:
    """A way to compute the experts.

    name: "chosen", "all" or "blocks".
    capacity: for "blocks", the rows of each expert and of each further block.
    num_blocks: for "blocks", the number of further blocks.
    """

    name: str
    capacity: int = 0
    num_blocks: int = 0

    @property
    def reason(self) -> str:
        """The reason for this path, to follow "as"."""
        return {
            CHOSEN: "so few tokens choose less than all weights",
            ALL: "it fetches no weights by index, and to arrange these tokens by expert would take longer",
            BLOCKS: "that takes the least time and drops no token",
        }[self.name]

    def __str__(self) -> str:
        if self.name != BLOCKS:
            return f"{self.name} experts"
        return f"{self.capacity} tokens per expert, {self.num_blocks} further blocks of {self.capacity}"


def expert_path(
    tokens: int,
    top_k: int,
    num_experts: int,
    intermediate_size: int,
    gathers: bool = True,
    has_gate: bool = True,
) -> ExpertPath:
    """Choose the path that takes the least time on a device, for `tokens` tokens that choose `top_k` experts each.

    A step takes as long as its data movement or its multiplications, whichever is longer. "all" multiplies most and
    moves least: only the weights. "blocks" multiplies less, but moves rows of hidden_size numbers, which counts for
    much if ranks share the experts' widths.

    Args:
        intermediate_size: an expert's width on one rank.
        gathers: whether few tokens may fetch the weights that they choose.
        has_gate: whether an expert has a matrix for its gate, a third one of this width.
    """
    choices, columns = tokens * top_k, intermediate_size * (3 if has_gate else 2)
    # At this capacity the further blocks' weights and the experts' own rows take the same time to move.
    best = math.sqrt(_FETCHED * choices * columns / (_MOVES_OF_ROW * num_experts))
    capacity = max(1, round(best / _CAPACITY_STEP)) * _CAPACITY_STEP
    paths = [ExpertPath(ALL), with_capacity(choices, capacity)]
    if gathers:
        paths.insert(0, ExpertPath(CHOSEN))
    times = [_time(path, tokens, choices, num_experts, columns) for path in paths]
    return paths[times.index(min(times))]


def _time(path: ExpertPath, tokens: int, choices: int, num_experts: int, columns: int) -> float:
    """Estimate the time, in units of moving one expert's weights: `columns` * hidden_size numbers."""
    if path.name == CHOSEN:
        return _FETCHED * choices
    if path.name == ALL:
        return num_experts * max(1, tokens / _PRODUCTS_PER_MOVE)
    rows = path.capacity * (num_experts + path.num_blocks)
    moved_rows = (_MOVES_OF_ROW * rows + _MOVES_OF_CHOICE * choices) / columns
    return max(num_experts + _FETCHED * path.num_blocks + moved_rows, rows / _PRODUCTS_PER_MOVE)


def with_capacity(choices: int, capacity: int) -> ExpertPath:
    """Return the path with blocks of `capacity` rows, as many as any `choices` choices can fill.

    An expert that has q further blocks was chosen more than q * capacity times. So there are fewer than (choices + 1) /
    capacity further blocks, counting the row that `_places` sets aside; and if all of these are used, the last one is
    not full.
    """
    return ExpertPath(BLOCKS, capacity, max(1, (choices + 1) // capacity))


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    path: ExpertPath | None = None,
    input_first: bool = False,
    most_gathered: int | None = None,
) -> torch.Tensor:
    """Compute `ops.fused_experts` of unquantized weights, the only ones in graphs.

    Args:
        path: None to call `expert_path`.
        input_first: weights are in NxD Inference's layout: w1 [num_experts, hidden_size, 2 * intermediate_size], or
            without a gate half as wide, and w2 [num_experts, intermediate_size, hidden_size].
        most_gathered: the most tokens that may fetch the weights that they choose; None for any number.
    """
    tokens, top_k = topk_ids.shape
    weights = _Weights(w1, w2, input_first)
    gathers = most_gathered is None or tokens <= most_gathered
    path = path or expert_path(tokens, top_k, weights.num_experts, weights.width, gathers, weights.has_gate)
    if path.name == CHOSEN:
        return _chosen_experts(hidden_states, weights, topk_weights, topk_ids)
    if path.name == ALL:
        return _all_experts(hidden_states, weights, topk_weights, topk_ids)
    return _experts_in_blocks(hidden_states, weights, topk_weights, topk_ids, path)


@dataclass(frozen=True)
class _Weights:
    """Weights of some or all experts. They are multiplied in their stored layout, never transposed."""

    w1: torch.Tensor
    w2: torch.Tensor
    input_first: bool

    @property
    def num_experts(self) -> int:
        return self.w1.shape[0]

    @property
    def width(self) -> int:
        """intermediate_size."""
        return self.w2.shape[1 if self.input_first else 2]

    @property
    def has_gate(self) -> bool:
        return self.w1.shape[2 if self.input_first else 1] != self.width

    def of(self, experts: torch.Tensor) -> _Weights:
        return _Weights(self.w1.index_select(0, experts), self.w2.index_select(0, experts), self.input_first)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Activate the first product of [experts, rows, hidden_size]: [experts, rows, intermediate_size]."""
        return activate(torch.bmm(x, self.w1 if self.input_first else self.w1.transpose(1, 2)), self.width)

    def first_of_all(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `first` of [rows, hidden_size], which all experts share."""
        if self.input_first:
            return activate(torch.bmm(x.expand(self.num_experts, -1, -1), self.w1), self.width)
        product = F.linear(x, self.w1.flatten(0, 1)).unflatten(1, (self.num_experts, -1))
        return activate(product, self.width).transpose(0, 1)

    def second(self, x: torch.Tensor) -> torch.Tensor:
        """Map [experts, rows, intermediate_size] to [experts, rows, hidden_size]."""
        return torch.bmm(x, self.w2 if self.input_first else self.w2.transpose(1, 2))

    def sum_of_second(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `second` over all experts."""
        if self.input_first:
            return x.transpose(0, 1).flatten(1) @ self.w2.flatten(0, 1)
        return self.second(x).sum(0)


def _chosen_experts(
    hidden_states: torch.Tensor, weights: _Weights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    tokens, top_k = topk_ids.shape
    fetched = weights.of(topk_ids.reshape(-1))
    x = hidden_states[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, 1, -1)
    y = fetched.second(fetched.first(x)).view(tokens, top_k, -1)
    return (y.float() * topk_weights[..., None]).sum(1).to(hidden_states.dtype)


def _all_experts(
    hidden_states: torch.Tensor, weights: _Weights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    expert_weights = (topk_weights[..., None] * _one_hot(topk_ids, weights.num_experts)).sum(1)  # [tokens, num_experts]
    activated = weights.first_of_all(hidden_states).float() * expert_weights.T[..., None]
    return weights.sum_of_second(activated.to(hidden_states.dtype))


def _experts_in_blocks(
    hidden_states: torch.Tensor,
    weights: _Weights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    path: ExpertPath,
) -> torch.Tensor:
    own, further, block_experts = _places(topk_ids, weights.num_experts, path)
    # Unused rows hold a token of zeros, so they stay zeros.
    x = F.pad(hidden_states, (0, 0, 0, 1))
    output = [
        _sum_of_choices(x, blocks, topk_weights, places, path.capacity)
        for blocks, places in ((weights, own), (weights.of(block_experts), further))
    ]
    return output[0] + output[1]


def _sum_of_choices(
    x: torch.Tensor, weights: _Weights, topk_weights: torch.Tensor, places: _Places, capacity: int
) -> torch.Tensor:
    """Sum the choices that have a place, [tokens, hidden_size]; the sum is a product, which adds in float32.

    Args:
        x: [tokens + 1, hidden_size], the last row zeros.
    """
    nobody, at = len(x) - 1, places.row.flatten()
    row_tokens = _tokens_of_rows(places, weights.num_experts, capacity)
    y = weights.second(weights.first(x.index_select(0, row_tokens).view(weights.num_experts, capacity, -1)))
    chosen = y.flatten(0, 1).index_select(0, at).view(nobody, -1, y.shape[-1])
    return torch.bmm(topk_weights.to(y.dtype)[:, None], chosen)[:, 0]


def _tokens_of_rows(places: _Places, num_blocks: int, capacity: int) -> torch.Tensor:
    """Return the token in each row of all blocks, [rows]; the number of tokens for a row without one.

    Each row has at most one choice, so a token's number is a sum over the choices: a product of ones and zeros with the
    number's digits, which are exact in every dtype that a compiler may choose for it. A scatter is slow on Neuron.
    """
    tokens, top_k = places.row.shape
    row = places.row.flatten().float()
    block = torch.floor(row / capacity)
    token = torch.arange(tokens, dtype=torch.int32, device=row.device)[:, None].expand(-1, top_k)
    high = token.div(_ROWS, rounding_mode="trunc")  # torch-mlir lowers `//` of integers to float64
    digits = torch.stack([high, token % _ROWS + 1]).where(places.mask, 0).flatten(1).float()
    in_block = (block == torch.arange(num_blocks, dtype=row.dtype, device=row.device)[:, None]).float()
    at_place = (row - block * capacity)[:, None] == torch.arange(capacity, dtype=row.dtype, device=row.device)
    high, low = ((digits[:, None] * in_block).flatten(0, 1) @ at_place.float()).unflatten(0, (2, -1))
    number = torch.where(low == 0, tokens, high * _ROWS + low - 1)
    # A token with NaN may choose an expert twice, and both choices are in one row.
    return number.clamp(max=tokens).to(places.row.dtype).flatten()


@dataclass(frozen=True)
class _Places:
    """The row of each choice among those of all blocks, [tokens, top_k].

    A choice that has no place here has an unused row.
    """

    row: torch.Tensor
    mask: torch.Tensor


def _places(topk_ids: torch.Tensor, num_experts: int, path: ExpertPath) -> tuple[_Places, _Places, torch.Tensor]:
    """Return (places in the experts' own blocks, those in the further blocks, the expert of each further block).

    The unused rows are the first row of the first expert and the last row of the last further block.
    """
    capacity = path.capacity
    chosen = _one_hot(topk_ids, num_experts)  # [tokens, top_k, num_experts]
    per_token = chosen.sum(1)
    set_aside = (torch.arange(num_experts, dtype=topk_ids.dtype, device=chosen.device) == 0).float()
    up_to = _running_sum(per_token) + set_aside
    blocks = torch.ceil((up_to[-1] - capacity).clamp(min=0) / capacity)
    blocks_up_to = _running_sum(blocks[:, None])[:, 0]

    # Counted among the choices of the same expert, and from the first of its further blocks on.
    place = (chosen * (up_to - per_token)[:, None]).sum(-1)
    first_block = (chosen * (blocks_up_to - blocks)).sum(-1)
    is_own = place < capacity
    own_row = topk_ids * capacity + place.to(topk_ids.dtype)
    further_row = (first_block * capacity + place - capacity).to(topk_ids.dtype)
    own = _Places(own_row.where(is_own, 0), is_own)
    further = _Places(further_row.where(~is_own, path.num_blocks * capacity - 1), ~is_own)
    at = torch.arange(path.num_blocks, dtype=topk_ids.dtype, device=chosen.device)[:, None]
    return own, further, (blocks_up_to <= at).sum(-1, dtype=topk_ids.dtype).clamp(max=num_experts - 1)


def _one_hot(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return [..., num_experts] in float32."""
    return (topk_ids[..., None] == torch.arange(num_experts, dtype=topk_ids.dtype, device=topk_ids.device)).float()


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Compute values[0] + ... + values[i], [rows, columns] in float32, as products with triangular matrices of 128
    rows.
    """
    rows, columns = values.shape
    chunks = F.pad(values, (0, 0, 0, -rows % _ROWS)).view(-1, _ROWS, columns)
    within = _triangle(_ROWS, values).expand(len(chunks), -1, -1) @ chunks
    if len(chunks) > 1:
        totals = within[:, -1]
        within = within + (_running_sum(totals) - totals)[:, None]
    return within.reshape(-1, columns)[:rows]


def _triangle(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return ones on and below the diagonal."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril()
