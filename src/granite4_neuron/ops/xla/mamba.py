"""The Mamba-2 recurrence in compiled graphs: all chunks at once, and running sums as products with triangles."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops.mamba_chunk_scan import groups_to_rows, rows_to_groups
from granite4_neuron.ops.mamba_kernels import MambaKernels, Results

# Tokens that are scanned at once: the number of partitions that Trainium's engines work on.
CHUNK_SIZE = 128


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
    """Compute `ops.mamba_chunk_scan_combined` with the final states, for dt after softplus and limit.

    Args:
        x: [batch, length, num_heads, head_dim].
        dt: [batch, length, num_heads]; 0 for padding.
        A, D: [num_heads].
        B, C: [batch, length, n_groups, d_state].
        initial_states: [batch, num_heads, head_dim, d_state].
        chunk_size: tokens per chunk.

    Returns:
        (y, the states after the last token), shaped like x and initial_states; y in x's dtype, states in float32.

    Source: Dao and Gu 2024, section 6 and listing 1.
    """
    length, n_groups = x.shape[1], B.shape[2]
    chunk_size = min(chunk_size, length)
    # A row is one group of one sequence, and its tokens are cut into chunks: [rows * chunks, chunk_size, ...].
    x_chunks, dt_chunks, decay_chunks, B_chunks, C_chunks = (
        _chunks(groups_to_rows(values.float(), n_groups), chunk_size) for values in (x, dt, dt * A.float(), B, C)
    )
    B_chunks, C_chunks = B_chunks[:, :, 0], C_chunks[:, :, 0]
    log_decay = decay_chunks.transpose(1, 2)  # [rows * chunks, heads, chunk_size]

    upper = torch.ones(chunk_size, chunk_size, device=x.device).triu()
    from_start = torch.exp(torch.einsum("ki,chk->chi", upper, log_decay))
    to_end = torch.exp(torch.einsum("jk,chk->chj", upper.triu(1), log_decay))
    decay = torch.exp(segment_sum(log_decay))

    dt_x = x_chunks * dt_chunks[..., None]
    added = torch.einsum("cjhp,cjn->chpn", dt_x * to_end.transpose(1, 2)[..., None], B_chunks)
    before, states = _pass_on(initial_states.float(), added, log_decay.sum(-1), n_groups)

    causal_scores = torch.einsum("cin,cjn->cij", C_chunks, B_chunks).tril()  # once for all heads of a group
    within = torch.einsum("chij,cjhp->cihp", causal_scores[:, None] * decay, dt_x)
    y = torch.einsum("cin,chpn->cihp", C_chunks, before) * from_start.transpose(1, 2)[..., None] + within
    rows = x.shape[0] * n_groups
    y = rows_to_groups(y.reshape(rows, -1, *y.shape[2:])[:, :length], n_groups)
    return (y + x.float() * D.float()[:, None]).to(x.dtype), states


def segment_sum(values: torch.Tensor) -> torch.Tensor:
    """Compute `ops.mamba_chunk_scan.segment_sum` as a product: [..., length] to [..., length, length].

    Every entry is summed from its own terms here too.
    """
    length = values.shape[-1]
    upper = torch.ones(length, length, device=values.device).triu()
    terms = values[..., None] * upper.T.tril(-1)  # at [k, j] values[k] where k > j
    return torch.einsum("ki,...kj->...ij", upper, terms)


def _pass_on(
    initial_states: torch.Tensor, added: torch.Tensor, log_decay: torch.Tensor, n_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before each chunk, and those after the last one.

    Args:
        initial_states: [batch, num_heads, head_dim, d_state].
        added: [rows * chunks, heads, head_dim, d_state], what each chunk alone would leave behind.
        log_decay: [rows * chunks, heads], of whole chunks.

    Returns:
        Shaped like added, and like initial_states.
    """
    batch, num_heads, head_dim, d_state = initial_states.shape
    rows = batch * n_groups
    initial_states = initial_states.reshape(rows, num_heads // n_groups, head_dim, d_state)
    by_row = zip(*(_by_row(values, rows) for values in (initial_states, added, log_decay)), strict=True)
    passed = [_pass_on_in_a_row(*row_values) for row_values in by_row]
    before, after = (row_states[0] if rows == 1 else torch.cat(row_states) for row_states in zip(*passed, strict=True))
    return before, after.reshape(batch, num_heads, head_dim, d_state)


def _by_row(values: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Return a tensor's parts by row; of a single row the tensor itself: a slice of all of it would be copied."""
    return (values,) if rows == 1 else values.chunk(rows)


def _pass_on_in_a_row(
    initial_state: torch.Tensor, added: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `_pass_on`, for the [1, ...] initial state and the [chunks, ...] of one row."""
    decay = torch.exp(segment_sum(F.pad(log_decay.T, (1, 0)))).tril()  # [heads, chunks + 1, chunks + 1]
    parts = torch.cat([initial_state, added])
    before, after = (torch.einsum("hij,jhpn->ihpn", part, parts) for part in (decay[:, :-1], decay[:, -1:]))
    return before, after


def _chunks(values: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Cut [rows, length, ...] into [rows * chunks, chunk_size, ...], the last one of a row padded with zeros."""
    padding = -values.shape[1] % chunk_size
    if padding:
        values = F.pad(values, (0, 0) * (values.dim() - 2) + (0, padding))
    return values.reshape(-1, chunk_size, *values.shape[2:])


def _chunked(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_kernels.chunked_scan`; chunks have the same size on every machine."""
    return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state)


def _quadratic(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_kernels.quadratic_scan`."""
    return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state, chunk_size=x.shape[1])


CHUNKED = MambaKernels(_chunked)
QUADRATIC = MambaKernels(_quadratic)
