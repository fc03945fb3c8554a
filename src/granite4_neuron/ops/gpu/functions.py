"""Operators of graphs on a GPU. For a token of each sequence they are kernels in Triton, `ops.gpu.kernels`.

Decode of few sequences has further ones, `ops.gpu.token_layer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from granite4_neuron.ops import attention as plain_attention
from granite4_neuron.ops import moe as plain_moe
from granite4_neuron.ops import quantization
from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.ops.mamba_kernels import MambaKernels, Results
from granite4_neuron.ops.xla import attention, moe, topk
from granite4_neuron.ops.xla.mamba import CHUNK_SIZE, chunks

# Up to which a product is one of each token with the weights: few enough for weights to be read once.
_FEW_TOKENS = 16


def kernel_of(definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of a definition: of its name, in the module of its module's name and "_kernels"."""
    # Not at the top: Triton comes with a torch for GPUs only.
    return getattr(importlib.import_module(f"{definition.__module__}_kernels"), definition.__name__)


def kernel(definition: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Return granite4_neuron::NAME, one node of a graph: on a CPU the definition, on a GPU the kernel of its name."""

    def launch(*arguments: Any, **options: Any) -> Any:
        return kernel_of(definition)(*arguments, **options)

    name = f"granite4_neuron::{definition.__name__}"
    operator = torch.library.custom_op(name, definition, mutates_args=mutates, device_types="cpu")
    operator.register_kernel("cuda")(launch)
    return operator


def convolve_token(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> torch.Tensor:
    """Compute `ops.causal_conv1d` of one token, and update conv_state in place."""
    y, window = causal_conv1d(x, conv_state, weight, bias, lengths)
    conv_state.copy_(window)
    return y


def advance_token(
    x: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.selective_state_step`, with its arguments but log_decay = dt * A, [batch, num_heads], in float32."""
    heads_per_group = x.shape[1] // B.shape[1]
    b, c = (values.float().repeat_interleave(heads_per_group, 1)[:, :, None] for values in (B, C))
    inputs = x.float()
    ssm_state.mul_(torch.exp(log_decay)[..., None, None]).add_((dt[..., None] * inputs)[..., None] * b)
    return (ssm_state * c).sum(-1) + inputs * D.float()[:, None]


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor | None, is_gated: bool) -> torch.Tensor:
    """Multiply every token by a matrix, or by several of many matrices.

    Args:
        x: [tokens, columns].
        weight: [rows, columns]; with ids [matrices, rows, columns].
        ids: [tokens * matrices of a token], int, or None.
        is_gated: return silu(gate) * up, see `ops.silu_and_mul`.

    Returns:
        [tokens, rows] or [len(ids), rows], or half as many rows, in x's dtype.
    """
    if ids is None:
        y = F.linear(x, weight.to(x.dtype))
    else:
        y = torch.bmm(weight[ids], x.repeat_interleave(len(ids) // len(x), 0)[..., None])[..., 0]
    return plain_moe.silu_and_mul(y) if is_gated else y


def choose_experts(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.xla.topk_softmax`."""
    return topk.topk_softmax(router_logits, top_k)


def attend_token(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    """Compute `ops.cached_attention` of one token of each sequence, in the order of their slots."""
    return plain_attention.cached_attention(
        query, key_cache, value_cache, positions, lengths, None, scale, kv_length
    ).contiguous()


_convolve_token = kernel(convolve_token, mutates=("conv_state",))
_advance_token = kernel(advance_token, mutates=("ssm_state",))
_multiply_rows = kernel(multiply_rows)
_choose_experts = kernel(choose_experts)
_attend_token = kernel(attend_token)


@_convolve_token.register_fake
def _(x, conv_state, weight, bias, lengths):
    return x.new_empty(x.shape, dtype=torch.float32)


@_advance_token.register_fake
def _(x, *others):
    return x.new_empty(x.shape, dtype=torch.float32)


@_multiply_rows.register_fake
def _(x, weight, ids, is_gated):
    return x.new_empty(len(x) if ids is None else len(ids), weight.shape[-2] // (1 + is_gated))


@_choose_experts.register_fake
def _(router_logits, top_k):
    weights = router_logits.new_empty(len(router_logits), top_k, dtype=torch.float32)
    return weights, weights.new_empty(weights.shape, dtype=torch.int32)


@_attend_token.register_fake
def _(query, *others):
    return query.new_empty(query.shape)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `ops.linear` of weights that are not quantized."""
    if x.numel() > x.shape[-1]:
        return quantization.linear(x, weight, bias)
    y = _multiply_rows(x.reshape(1, -1), weight, None, False)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def mlp(x: torch.Tensor, input_weight: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.mlp` of weights that are not quantized."""
    if x.numel() > x.shape[-1]:
        return plain_moe.mlp(x, input_weight, output_weight)
    activated = _multiply_rows(x.reshape(1, -1), input_weight, None, True)
    return _multiply_rows(activated, output_weight, None, False).view(x.shape)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `ops.router_logits`."""
    if len(x) > _FEW_TOKENS:
        return plain_moe.router_logits(x, weight)
    return _multiply_rows(x.float(), weight, None, False)


def topk_softmax(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.topk_softmax`, with the experts in int32."""
    return _choose_experts(router_logits.float(), top_k)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.fused_experts` of weights that are not quantized; each is read where it lies, and once.

    The products of many tokens are grouped by expert. A GPU has grouped products in bfloat16 only, and of matrices with
    rows of a multiple of 16 bytes.
    """
    arguments = (hidden_states, w1, w2, topk_weights, topk_ids)
    if topk_ids.numel() < w1.shape[0]:
        return _chosen_experts(*arguments)
    has_whole_rows = all(weight.shape[-1] * weight.itemsize % 16 == 0 for weight in (w1, w2))
    has_groups = hidden_states.dtype == torch.bfloat16 and has_whole_rows
    return (plain_moe.experts_by_group if has_groups else moe.fused_experts)(*arguments)


def _chosen_experts(hidden_states, w1, w2, topk_weights, topk_ids):
    ids = topk_ids.flatten()
    y = _multiply_rows(_multiply_rows(hidden_states, w1, ids, True), w2, ids, False)
    return (y.view(*topk_ids.shape, -1) * topk_weights[..., None]).sum(1).to(hidden_states.dtype)


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    scale: float,
    kv_length: int,
) -> torch.Tensor:
    """Compute `ops.cached_attention`."""
    caches, where = (key_cache, value_cache), (positions, lengths)
    if query.shape[1] > 1 or slots is not None:
        return attention.cached_attention(query, *caches, *where, slots, scale, kv_length)
    return _attend_token(query, *caches, *where, scale, kv_length)


def _convolve(x, conv_state, weight, bias, lengths) -> Results:
    """Compute `causal_conv1d` of one token."""
    return _convolve_token(x, conv_state, weight, bias, lengths), conv_state


def _single_token(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_kernels.single_token_scan`."""
    dt = dt[:, 0]
    y = _advance_token(x[:, 0], dt, dt * A, B[:, 0], C[:, 0], D, ssm_state)
    return y.to(x.dtype)[:, None], ssm_state


def mamba_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `ops.xla.mamba.mamba_chunk_scan`, with tokens before heads as they come, and sums as scans."""
    batch, length, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    size = min(chunk_size, length)
    # A row is a chunk of a sequence; consecutive heads share a group.
    x_rows = chunks(x.float().flatten(2), size).unflatten(-1, (num_heads, head_dim))
    dt_rows = chunks(dt, size)
    B_rows, C_rows = (_groups_first(chunks(values.float().flatten(2), size), n_groups) for values in (B, C))
    rows = len(x_rows)

    # A difference of sums in float64 has all digits of a float32, even where sums go down to -10,000.
    sums = (dt_rows * A).double().transpose(1, 2).cumsum(-1)  # [rows, num_heads, size]
    decay = torch.exp((sums[..., None] - sums[:, :, None]).clamp(max=0.0).float())  # [rows, num_heads, to, from]
    from_start, to_end = (
        torch.exp(values.float()).transpose(1, 2)[..., None] for values in (sums, sums[..., -1:] - sums)
    )
    causal_scores = torch.bmm(C_rows, B_rows.transpose(1, 2)).tril()  # [rows * n_groups, to, from]
    weights = (decay * dt_rows.transpose(1, 2)[:, :, None]).view(len(causal_scores), -1, size, size)
    weights = (weights * causal_scores[:, None]).view(-1, size, size)
    within = torch.bmm(weights, x_rows.transpose(1, 2).reshape(-1, size, head_dim))
    within = within.view(rows, num_heads, size, head_dim).transpose(1, 2)

    at_end = _groups_first((x_rows * (dt_rows[..., None] * to_end)).flatten(2), n_groups)
    added = torch.bmm(at_end.transpose(1, 2), B_rows).view(batch, -1, *initial_states.shape[1:])
    chunk_decay = torch.exp(sums[..., -1].float()).view(batch, -1, num_heads, 1, 1)
    states = [initial_states]
    for chunk in range(rows // batch):
        states.append(states[-1] * chunk_decay[:, chunk] + added[:, chunk])
    before = torch.stack(states[:-1], 1).view(rows * n_groups, -1, d_state)
    from_before = torch.bmm(C_rows, before.transpose(1, 2)).view(rows, n_groups, size, -1).transpose(1, 2)

    y = within + from_before.reshape(x_rows.shape) * from_start
    return (y.reshape(batch, -1, num_heads, head_dim)[:, :length] + x.float() * D.float()[:, None]).to(x.dtype), states[
        -1
    ]


def _groups_first(rows: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Map [rows, size, n_groups * width] to [rows * n_groups, size, width]."""
    return rows.unflatten(-1, (n_groups, -1)).transpose(1, 2).flatten(0, 1)


def _chunked(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_kernels.chunked_scan`; chunks have the same size on every machine."""
    return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state)


def _quadratic(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_kernels.quadratic_scan`."""
    return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state, chunk_size=x.shape[1])


CHUNKED = MambaKernels(_chunked)
QUADRATIC = MambaKernels(_quadratic)
SINGLE_TOKEN = MambaKernels(_single_token, _convolve)
