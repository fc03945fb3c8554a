"""The Mamba-2 recurrence, token by token."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def selective_state_step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """Advance `state` by one token, in place, and read the output from it.

        state <- exp(dt * A) * state + dt * x (outer) B;    y = state . C + D * x;    y <- y * silu(z)

    Arguments are those of mamba_ssm's selective_state_update, without state_batch_indices; arithmetic is float32.

    Args:
        state: [batch, num_heads, head_dim, d_state], updated in place.
        x: [batch, num_heads, head_dim].
        dt: [batch, num_heads], or [batch, num_heads, head_dim].
        A: [num_heads], or [num_heads, head_dim, d_state]; negative.
        B, C: [batch, n_groups, d_state]; consecutive heads share a group.
        D: [num_heads], or [num_heads, head_dim], or None.
        z: [batch, num_heads, head_dim] or None.
        dt_bias: [num_heads], or [num_heads, head_dim], or None; added to dt before the softplus.
        dt_softplus: apply softplus to dt.

    Returns:
        [batch, num_heads, head_dim] in x's dtype.

    Source: Dao and Gu 2024, equation 2 with scalar A per head; state-spaces/mamba selective_state_update.
    """
    batch, num_heads, head_dim, d_state = state.shape
    n_groups = B.shape[1]

    dt = _per_head(dt.float(), batch_dims=2)
    if dt_bias is not None:
        dt = dt + _per_head(dt_bias.float(), batch_dims=1)
    if dt_softplus:
        dt = F.softplus(dt)
    if A.dim() == 1:
        A = A[:, None, None]
    decay = torch.exp(dt[..., None] * A.float())

    # The multiply and the add. Groups join the batch, so that B and C are broadcast and never copied per head. It is
    # done in place, because a temporary of the state's size costs more than the arithmetic.
    rows = (batch * n_groups, num_heads // n_groups, head_dim)
    new_state = state.float().mul_(decay).view(*rows, d_state)
    new_state += torch.einsum("rhp,rn->rhpn", (dt * x.float()).reshape(rows), B.float().reshape(-1, d_state))
    if state.dtype != torch.float32:
        state.copy_(new_state.view(state.shape))

    y = torch.bmm(new_state.flatten(1, 2), C.float().reshape(-1, d_state, 1)).reshape(batch, num_heads, head_dim)
    if D is not None:
        y = y + _per_head(D.float(), batch_dims=1) * x
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


def _per_head(values: torch.Tensor, batch_dims: int) -> torch.Tensor:
    """Return [..., num_heads] as [..., num_heads, 1]; [..., num_heads, head_dim] as it is."""
    return values[..., None] if values.dim() == batch_dims else values
