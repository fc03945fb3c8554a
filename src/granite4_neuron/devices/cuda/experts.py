"""The choice of experts, and the experts of few tokens: their weights are read once, in place.

Kernels choose experts by sortable keys: 64-bit integers in the order of the router's logits, with the expert's number
in the low bits. So one maximum gives both.
"""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda import fused_moe, products
from granite4_neuron.devices.cuda.linear import multiply_rows
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.devices.cuda.weights import parts_of
from granite4_neuron.devices.graphs.topk import topk_softmax as topk_softmax_in_order
from granite4_neuron.ops import Weight, moe

# Up to this many tokens each token is a product of its own: they are so few that the router's weight is read once.
_FEW_TOKENS = 16
_NAN_BITS = tl.constexpr(0x7FC00000)
_NO_KEY = tl.constexpr(torch.iinfo(torch.int64).min)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.router_logits`."""
    if len(x) > _FEW_TOKENS:
        return products.router_logits(x, weight)
    return multiply_rows(x.float(), weight, None, False)


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.topk_softmax`, with the experts in int32."""
    return choose_experts(router_logits.float(), top_k)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: Weight,
    w2: Weight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.fused_experts`; weights are read in place."""
    is_one = len(hidden_states) == 1
    return (_chosen_experts if is_one else fused_moe.fused_experts)(hidden_states, w1, w2, topk_weights, topk_ids)


def _chosen_experts(hidden_states, w1, w2, topk_weights, topk_ids):
    ids, is_gated = topk_ids.flatten(), w1.shape[1] != w2.shape[2]
    (first, first_scales), (second, second_scales) = parts_of(w1), parts_of(w2)
    activated = multiply_rows(hidden_states, first, ids, is_gated, first_scales)
    if not is_gated:
        activated = moe.relu2(activated)
    y = multiply_rows(activated, second, ids, False, second_scales)
    return (y.view(*topk_ids.shape, -1) * topk_weights[..., None]).sum(1).to(hidden_states.dtype)


@operator()
def choose_experts(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `devices.graphs.operators.topk_softmax`."""
    return topk_softmax_in_order(router_logits, top_k)


@choose_experts.register_fake
def _(router_logits, top_k):
    weights = router_logits.new_empty(len(router_logits), top_k, dtype=torch.float32)
    return weights, weights.new_empty(weights.shape, dtype=torch.int32)


def _launch_choose_experts(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, num_experts = router_logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=router_logits.device)
    ids = torch.empty(weights.shape, dtype=torch.int32, device=weights.device)
    _choose_experts_kernel[tokens,](
        router_logits,
        weights,
        ids,
        num_experts,
        TOP_K=top_k,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOPK=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, ids


register_launch(choose_experts, _launch_choose_experts)


@triton.jit
def _choose_experts_kernel(
    router_logits,
    topk_weights,
    topk_ids,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """Choose one token's experts.

    Grid: (tokens,).

    Args:
        router_logits: [tokens, num_experts] in float32.
        topk_weights, topk_ids: [tokens, TOP_K] in float32 and int32.
    """
    pid_m, offs_topk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_TOPK)
    keys = load_expert_keys(router_logits + pid_m * num_experts, num_experts, BLOCK_E, "")
    ids, weights = topk_of_keys(keys, TOP_K, BLOCK_TOPK)
    tl.store(topk_weights + pid_m * TOP_K + offs_topk, weights, offs_topk < TOP_K)
    tl.store(topk_ids + pid_m * TOP_K + offs_topk, ids, offs_topk < TOP_K)


@triton.jit
def load_expert_keys(router_logits, num_experts, BLOCK_E: tl.constexpr, CACHE_MODIFIER: tl.constexpr):
    """Load a token's router logits [num_experts] as sortable keys: [BLOCK_E] in int64."""
    offs_e = tl.arange(0, BLOCK_E)
    logits = tl.load(router_logits + offs_e, offs_e < num_experts, -float("inf"), cache_modifier=CACHE_MODIFIER)
    return expert_keys(logits, offs_e, BLOCK_E)


@triton.jit
def expert_keys(logits, offs_e, BLOCK_E: tl.constexpr):
    """Return the sortable keys, in int64, for float32 logits of experts offs_e, which are below BLOCK_E.

    Of equal logits the first expert's key is the largest; NaN is above all.
    """
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # 0.0 and -0.0 are equal
    bits = tl.where(logits != logits, _NAN_BITS, bits)  # whatever its sign
    return (_sortable(bits).to(tl.int64) << 32) | (BLOCK_E - 1 - offs_e)


@triton.jit
def _sortable(bits):
    """Map the bits of floats to integers in the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def without_key(keys, key):
    return tl.where(keys == key, _NO_KEY, keys)


@triton.jit
def expert_of_key(key, BLOCK_E: tl.constexpr):
    return BLOCK_E - 1 - (key & (BLOCK_E - 1)).to(tl.int32)


@triton.jit
def topk_of_keys(keys, TOP_K: tl.constexpr, BLOCK_TOPK: tl.constexpr):
    """Return the experts of the TOP_K largest keys, and the softmax of their logits, each [BLOCK_TOPK]."""
    offs_topk = tl.arange(0, BLOCK_TOPK)
    ids, logits = tl.zeros([BLOCK_TOPK], tl.int32), tl.full([BLOCK_TOPK], -float("inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        keys = without_key(keys, largest)
        logit = _sortable((largest >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        ids = tl.where(offs_topk == i, expert_of_key(largest, keys.shape[0]), ids)
        logits = tl.where(offs_topk == i, logit, logits)
    weights = tl.exp(logits - tl.max(logits, 0))
    return ids, weights / tl.sum(weights, 0)


@triton.jit
def ranks_of_keys(keys):
    """Return how many keys are larger than each of keys, [BLOCK_E] in int32. It takes fewer steps than `topk_of_keys`,
    and many threads.
    """
    return tl.sum((keys[:, None] > keys[None]).to(tl.int32), 0)


@triton.jit
def choices_of_expert(
    router_logits, expert, offs_m, is_real, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr
):
    """Return, for each token, which of all M * TOP_K choices is this expert, and whether a real token chose it: two of
    [BLOCK_M].
    """
    offs_e = tl.arange(0, BLOCK_E)[None]
    ptrs = router_logits + offs_m[:, None] * NUM_EXPERTS + offs_e
    keys = expert_keys(tl.load(ptrs, is_real[:, None] & (offs_e < NUM_EXPERTS), -float("inf")), offs_e, BLOCK_E)
    key = tl.sum(tl.where(offs_e == expert, keys, 0), 1)
    rank = tl.sum((keys > key[:, None]).to(tl.int32), 1)
    return offs_m * TOP_K + rank, is_real & (rank < TOP_K)


@triton.jit
def any_of(mask):
    """Return whether any element of a mask is set."""
    return tl.sum(mask.to(tl.int32), 0) > 0
