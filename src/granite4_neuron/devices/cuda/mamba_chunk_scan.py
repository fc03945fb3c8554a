"""The Mamba-2 recurrence of prompts on a GPU for the scan "quadratic", in plain torch that inductor compiles."""

from __future__ import annotations

import torch

from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE, chunks


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
    """Compute `devices.graphs.mamba.mamba_chunk_scan`, but keep tokens before heads, as in the inputs, and compute sums
    as scans.
    """
    batch, length, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    size = min(chunk_size, length)
    # A row is a chunk of a sequence; consecutive heads share a group.
    x_rows = chunks(x.float().flatten(2), size).unflatten(-1, (num_heads, head_dim))
    dt_rows = chunks(dt, size)
    B_rows, C_rows = (_groups_first(chunks(values.float().flatten(2), size), n_groups) for values in (B, C))
    rows = len(x_rows)

    # In float64 a difference of sums has all digits of a float32, even if the sums go down to -10,000.
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
