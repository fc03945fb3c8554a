"""The Mamba-2 recurrence over many tokens at once, as matrix products (state space duality, SSD).

`ssd_quadratic` is the whole of the mathematics: one decay matrix over all tokens. `mamba_chunk_scan_combined` applies
it chunk by chunk and carries the state, so that time and memory grow linearly with the length.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the recurrence of `selective_state_step` over `length` tokens, chunk by chunk.

    Arguments have the names, shapes and meaning that they have in mamba_ssm's function of this name. That function also
    takes seq_idx and cu_seqlens, so pass arguments after initial_states by keyword. Arithmetic is float32. A token with
    dt = 0 after softplus and limit leaves the state unchanged: this is how to express padding; its x, B and C must be
    finite.

    Args:
        x: [batch, length, num_heads, head_dim].
        dt: [batch, length, num_heads].
        A: [num_heads], negative.
        B, C: [batch, length, n_groups, d_state]; consecutive heads share a group.
        chunk_size: tokens per chunk; any value gives the same result up to rounding.
        D: [num_heads], or [num_heads, head_dim], or None.
        z: like x, or None; y is multiplied by silu(z).
        dt_bias: [num_heads] or None; added to dt before the softplus.
        initial_states: [batch, num_heads, head_dim, d_state] or None for zeros.
        dt_softplus: apply softplus to dt.
        dt_limit: dt is clamped to it, after the softplus.
        return_final_states: also return the state after the last token.

    Returns:
        y, [batch, length, num_heads, head_dim] in x's dtype; with `return_final_states` also the final states,
        [batch, num_heads, head_dim, d_state] in float32.

    Source: Dao and Gu 2024, section 6 (the block decomposition) and listing 1.
    """
    batch, length, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    heads_per_group = num_heads // n_groups

    if dt_bias is not None:
        dt = dt.float() + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt.float())
    if dt_limit != (0.0, math.inf):
        dt = dt.clamp(*dt_limit)

    # Groups join the batch: within one of them B and C are shared by all heads, and every tensor has rank 4 at most.
    rows = batch * n_groups
    x_rows = groups_to_rows(x.float(), n_groups)
    dt_rows = groups_to_rows(dt.float(), n_groups)
    A_rows = A.float().view(n_groups, heads_per_group).repeat(batch, 1)
    B_rows, C_rows = (values.float().transpose(1, 2).reshape(rows, length, d_state) for values in (B, C))
    if initial_states is None:
        states = x_rows.new_zeros(rows, heads_per_group, head_dim, d_state)
    else:
        states = initial_states.float().reshape(rows, heads_per_group, head_dim, d_state)

    outputs = []
    for start in range(0, length, chunk_size):
        chunk = slice(start, start + chunk_size)
        y, states = ssd_quadratic(
            x_rows[:, chunk], dt_rows[:, chunk], A_rows, B_rows[:, chunk], C_rows[:, chunk], states
        )
        outputs.append(y)

    y = rows_to_groups(torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], n_groups)
    if D is not None:
        y = torch.addcmul(y, x.float(), D.float()[:, None] if D.dim() == 1 else D.float())
    if z is not None:
        y = y * F.silu(z.float())
    y = y.to(x.dtype)
    return (y, states.reshape(batch, num_heads, head_dim, d_state)) if return_final_states else y


def ssd_quadratic(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all tokens of one chunk at once, through a length x length decay matrix per head.

        y_i = sum_{j <= i} (C_i . B_j) exp(a_{j+1} + ... + a_i) dt_j x_j  +  exp(a_1 + ... + a_i) S_0 C_i
        S   = exp(a_1 + ... + a_L) S_0 + sum_j exp(a_{j+1} + ... + a_L) dt_j x_j (outer) B_j,      a = dt * A

    A row is one group of one sequence. All tensors are float32.

    Args:
        x: [rows, length, heads, head_dim].
        dt: [rows, length, heads].
        A: [rows, heads].
        B, C: [rows, length, d_state].
        states: [rows, heads, head_dim, d_state], S_0.

    Returns:
        (y, new states), shaped like x and states.
    """
    log_decay = (dt * A[:, None]).transpose(1, 2)  # [rows, heads, length]
    decay = torch.exp(segment_sum(log_decay))
    decay_from_start = torch.exp(log_decay.cumsum(-1))
    decay_to_end = decay[:, :, -1]

    dt_x = x * dt[..., None]
    causal_scores = torch.einsum("rin,rjn->rij", C, B).tril()  # once per group: heads differ in their decay only
    within = torch.einsum("rhij,rjhp->rihp", causal_scores[:, None] * decay, dt_x)
    from_start = torch.einsum("rin,rhpn->rihp", C, states)
    y = torch.addcmul(within, from_start, decay_from_start.transpose(1, 2)[..., None])

    added = torch.einsum("rjhp,rjn->rhpn", dt_x * decay_to_end.transpose(1, 2)[..., None], B)
    return y, torch.addcmul(added, states, decay_from_start[:, :, -1, None, None])


def segment_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over segments: out[..., i, j] = values[j + 1] + ... + values[i] for j <= i, and 0 for j > i.

    Every entry is summed from its own terms. A difference of two cumulative sums would lose digits where the sums are
    large, as they are for Granite's A.

    Args:
        values: [..., length].

    Returns:
        [..., length, length].
    """
    length = values.shape[-1]
    below_diagonal = torch.ones(length, length, dtype=values.dtype, device=values.device).tril(-1)
    return (values[..., None] * below_diagonal).cumsum(-2)  # the terms at [k, j] are values[k] where k > j


def groups_to_rows(values: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Return [batch, length, heads, ...] as [batch * n_groups, length, heads of a group, ...]."""
    by_head = values.transpose(1, 2)
    return by_head.reshape(-1, by_head.shape[1] // n_groups, *by_head.shape[2:]).transpose(1, 2)


def rows_to_groups(values: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Invert `groups_to_rows`."""
    by_head = values.transpose(1, 2)
    return by_head.reshape(-1, by_head.shape[1] * n_groups, *by_head.shape[2:]).transpose(1, 2)
