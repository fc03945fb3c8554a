"""The Mamba-2 recurrence for compiled graphs, in plain torch: all chunks at once, sums as products with triangular
matrices.

Products and transposes have rank 3 at most: tokens are the last axis, so that heads are stacked like the rows of a
matrix.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops.causal_conv1d import depthwise_convolution
from granite4_neuron.ops.mamba_operators import MambaOperators, Results

# Tokens to scan at once: the number of partitions that Trainium's engines work on.
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
    batch, length, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    chunk_size = min(chunk_size, length)
    # A row is a chunk of a sequence: x [rows, num_heads * head_dim, chunk_size], dt [rows, num_heads, chunk_size].
    x_chunks, dt_chunks = (_tokens_last(values.float(), chunk_size) for values in (x.flatten(2), dt))
    C_chunks = _tokens_last(C.float().flatten(2), chunk_size).reshape(-1, d_state, chunk_size)
    B_chunks = chunks(B.float().flatten(2), chunk_size)
    B_chunks = B_chunks.unflatten(2, (n_groups, d_state)).transpose(1, 2).reshape(-1, chunk_size, d_state)
    rows = len(x_chunks)
    heads, groups = rows * num_heads, rows * n_groups

    log_decay = (dt_chunks * A.float()[:, None]).view(heads, chunk_size)
    upper = _upper_triangle(chunk_size, x.device)
    from_start = torch.exp(log_decay @ upper).view(heads, 1, chunk_size)
    to_end = torch.exp(log_decay @ upper.triu(1).T).view(heads, 1, chunk_size)
    decay = torch.exp(segment_sum(log_decay))  # [heads, from, to]

    dt_x = x_chunks.view(heads, head_dim, chunk_size) * dt_chunks.view(heads, 1, chunk_size)
    at_end = (dt_x * to_end).view(groups, -1, chunk_size)
    added = torch.bmm(at_end, B_chunks)  # [groups, heads of a group * head_dim, d_state]
    before, states = _pass_on(
        initial_states.float(),
        added.view(rows, num_heads, head_dim * d_state),
        log_decay.sum(-1).view(rows, num_heads),
    )

    causal_scores = torch.bmm(B_chunks, C_chunks).triu()  # [groups, from, to], once for all heads of a group
    weights = causal_scores[:, None] * decay.view(groups, -1, chunk_size, chunk_size)
    within = torch.bmm(dt_x, weights.view(heads, chunk_size, chunk_size))
    from_before = torch.bmm(before.reshape(groups, -1, d_state), C_chunks).view(heads, head_dim, chunk_size)
    y = from_before * from_start + within
    y = y.view(rows, num_heads * head_dim, chunk_size).transpose(1, 2).reshape(batch, -1, num_heads, head_dim)
    return (y[:, :length] + x.float() * D.float()[:, None]).to(x.dtype), states.view(initial_states.shape)


def segment_sum(values: torch.Tensor) -> torch.Tensor:
    """Compute `ops.mamba_chunk_scan.segment_sum`, transposed, as a product: [rows, length] to [rows, length, length].

    The entry at [j, i] is values[j + 1] + ... + values[i] for j <= i, and 0 for j > i. It is summed from its own terms,
    as there.
    """
    length = values.shape[-1]
    upper = _upper_triangle(length, values.device)
    terms = values[:, None] * upper.triu(1)  # at [j, k] values[k] where k > j
    return (terms.view(-1, length) @ upper).view(-1, length, length)


def _upper_triangle(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, device=device).triu()


def _pass_on(
    initial_states: torch.Tensor, added: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before each chunk, and the states after the last one.

    Args:
        initial_states: [batch, num_heads, head_dim, d_state].
        added: [batch * chunks, num_heads, head_dim * d_state], each chunk's final states from zeros.
        log_decay: [batch * chunks, num_heads], over whole chunks.

    Returns:
        Shaped like added; and [batch, num_heads, head_dim * d_state].
    """
    initial_states = initial_states.flatten(2)
    batch, rows = len(initial_states), len(added)
    if rows == batch:
        return initial_states, initial_states * torch.exp(log_decay)[..., None] + added
    chunks = rows // batch
    passed = [
        _pass_on_in_a_row(initial_states[row], added[at : at + chunks], log_decay[at : at + chunks])
        for row, at in enumerate(range(0, rows, chunks))
    ]
    before, after = zip(*passed, strict=True)
    return before[0] if batch == 1 else torch.cat(before), torch.stack(after)


def _pass_on_in_a_row(
    initial_state: torch.Tensor, added: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `_pass_on` for one row: an initial state [num_heads, ...] and chunks [chunks, num_heads, ...]."""
    # [num_heads, from, to]: from the initial state or a chunk, to before a chunk or after the last one.
    decay = torch.exp(segment_sum(F.pad(log_decay.T, (1, 0)))).triu()
    parts = torch.cat([initial_state[None], added]).transpose(0, 1)
    passed = torch.bmm(decay.transpose(1, 2), parts)  # [num_heads, chunks + 1, head_dim * d_state]
    return passed[:, :-1].transpose(0, 1), passed[:, -1]


def chunks(values: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Cut [batch, length, width] into [rows, chunk_size, width], the last one of a sequence padded with zeros."""
    padding = -values.shape[1] % chunk_size
    if padding:
        values = F.pad(values, (0, 0, 0, padding))
    return values.reshape(-1, chunk_size, values.shape[2])


def _tokens_last(values: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Cut [batch, length, width] into [rows, width, chunk_size], contiguous."""
    return chunks(values, chunk_size).transpose(1, 2).contiguous()


def _chunked(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_operators.chunked_scan`; the chunk size is the same on every machine."""
    return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state)


def _quadratic(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_operators.quadratic_scan`."""
    return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state, chunk_size=x.shape[1])


def _single_token(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_operators.single_token_scan` element by element, so that a compiler can make it one loop."""
    batch, num_heads, head_dim, d_state = ssm_state.shape
    groups = (-1, num_heads // B.shape[2] * head_dim, d_state)
    B_rows, C_rows = (values.float().reshape(-1, 1, d_state) for values in (B, C))
    dt_x = (dt[:, 0, :, None] * x[:, 0].float()).reshape(*groups[:2], 1)
    decay = torch.exp(dt[:, 0] * A.float())[..., None, None]
    new_state = (ssm_state * decay).view(groups) + dt_x * B_rows
    y = (new_state * C_rows).sum(-1).view(batch, num_heads, head_dim) + x[:, 0].float() * D.float()[:, None]
    return y.to(x.dtype)[:, None], new_state.view(ssm_state.shape)


def _single_token_convolution(x, conv_state, weight, bias, lengths) -> Results:
    """Compute `causal_conv1d` of one token; the window is unchanged where the token is padding."""
    inputs = torch.cat([conv_state.transpose(1, 2), x], dim=1)
    y = F.silu(depthwise_convolution(inputs, weight, bias))
    window = inputs[:, 1:].where((lengths > 0)[:, None, None], inputs[:, :-1])
    return y, window.transpose(1, 2)


CHUNKED = MambaOperators(_chunked)
QUADRATIC = MambaOperators(_quadratic)
SINGLE_TOKEN = MambaOperators(_single_token, _single_token_convolution)
