"""The Mamba-2 recurrence over many tokens at once, as matrix products (state space duality, SSD).

`ssd_quadratic` is the whole of the mathematics: one decay matrix over all tokens. `mamba_chunk_scan_combined` applies
it chunk by chunk and carries the state, so that time and memory grow linearly with the length.
`mamba_chunk_scan_combined_varlen` has the signature of vLLM's function of this name: a ragged batch of sequences.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from granite4_neuron.ops.arguments import (
    NULL_BLOCK_ID,
    check_distinct,
    check_floating,
    check_integers,
    check_shape,
    check_slots,
    is_padding,
    ragged,
)


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
    """The recurrence of `selective_state_step` over `length` tokens, chunk by chunk.

    Arguments have the names, shapes and meaning of those of mamba_ssm's function of the same name, which also takes
    seq_idx and cu_seqlens: pass what follows initial_states by keyword. Arithmetic is float32. A token with dt = 0
    after softplus and limit leaves the state alone, and that is how padding is expressed; its x, B and C must be
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


def mamba_chunk_scan_combined_varlen(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    last_chunk_indices: torch.Tensor,
    seq_idx: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    final_states_out: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`mamba_chunk_scan_combined` over sequences that lie one after another, cut into chunks by the caller.

    The state passes from chunk to chunk in float32, and is rounded to `state_dtype` only where it is returned or
    stored. A sequence without tokens ends in its initial state.

    Args:
        x: [tokens, num_heads, head_dim]. Tokens after the last sequence are padding.
        dt: [tokens, num_heads].
        A: [num_heads], negative.
        B, C: [tokens, n_groups, d_state]; consecutive heads share a group.
        chunk_size: the most tokens that a chunk may have.
        cu_seqlens: [batch + 1], integers, where each sequence starts.
        cu_chunk_seqlens: [chunks + 1], integers, where each chunk starts; a chunk belongs to one sequence, and may be
            shorter than `chunk_size` anywhere.
        last_chunk_indices: [batch], integers, each sequence's last chunk; for one without tokens any value.
        seq_idx: [chunks], integers, each chunk's sequence.
        out: like x, receives the output; zeros for padding.
        D: [num_heads], or [num_heads, head_dim], or None.
        z: like x, or None; the output is multiplied by silu(z).
        dt_bias: [num_heads] or None; added to dt before the softplus.
        initial_states: [batch, num_heads, head_dim, d_state], or None for zeros; not changed.
        dt_softplus: apply softplus to dt.
        dt_limit: dt is clamped to it, after the softplus.
        return_intermediate_states: return the state after every chunk.
        state_dtype: of the states that are returned; C's where it is None.
        final_states_out: [slots, num_heads, head_dim, d_state], receives the states after each sequence, in its own
            dtype; not together with `return_intermediate_states`.
        final_state_indices: [batch], integers, the slot for each sequence; what would go to -1 or to slot 0, the null
            block, is not stored.

    Returns:
        The states after each sequence, [batch, num_heads, head_dim, d_state]; or those after each chunk,
        [chunks, num_heads, head_dim, d_state]; or None with `final_states_out`.

    Raises:
        ValueError: naming the argument whose shape, dtype, offsets or index is wrong.

    Source: as `mamba_chunk_scan_combined`; signature of vLLM 0.33 (vllm/model_executor/layers/mamba/ops/
    ssd_combined.py).
    """
    check_shape("x", x, -1, -1, -1)
    check_shape("B", B, len(x), -1, -1)
    tokens, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[1:]
    check_shape("dt", dt, tokens, num_heads)
    check_shape("A", A, num_heads)
    check_shape("C", C, *B.shape)
    check_shape("out", out, *x.shape)
    check_shape("D", D, *((num_heads,) if D is not None and D.dim() == 1 else (num_heads, head_dim)))
    check_shape("z", z, *x.shape)
    check_shape("dt_bias", dt_bias, num_heads)
    if n_groups == 0 or num_heads % n_groups:
        raise ValueError(f"B has {n_groups} groups, which do not divide {num_heads} heads")
    chunks_of, chunk_starts = _chunks_of_sequences(
        tokens, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx
    )
    batch = len(chunks_of)
    check_shape("initial_states", initial_states, batch, num_heads, head_dim, d_state)
    check_floating(x=x, dt=dt, A=A, B=B, C=C, out=out, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    if final_states_out is not None:
        if return_intermediate_states:
            raise ValueError("return_intermediate_states is True where final_states_out needs it to be False")
        if final_state_indices is None:
            raise ValueError("final_state_indices is None where final_states_out needs one slot per sequence")
        check_shape("final_states_out", final_states_out, -1, num_heads, head_dim, d_state)
        check_floating(final_states_out=final_states_out)
        check_shape("final_state_indices", final_state_indices, batch)
        slots = check_slots("final_state_indices", final_state_indices, len(final_states_out))
        stored = ~is_padding(slots, NULL_BLOCK_ID)
        check_distinct("final_state_indices", slots[stored])

    final_states = x.new_zeros(batch, num_heads, head_dim, d_state, dtype=torch.float32)
    if initial_states is not None:
        final_states.copy_(initial_states)
    chunk_states = []
    out[chunk_starts[-1] :] = 0
    for sequence, chunks in enumerate(chunks_of):
        states = final_states[sequence : sequence + 1]
        for chunk in chunks:
            here = slice(chunk_starts[chunk], chunk_starts[chunk + 1])
            y, states = mamba_chunk_scan_combined(
                x[None, here].float(),
                dt[None, here],
                A,
                B[None, here],
                C[None, here],
                chunk_size,
                D,
                None if z is None else z[None, here],
                dt_bias,
                states,
                dt_softplus,
                dt_limit,
                return_final_states=True,
            )
            out[here] = y[0]
            if return_intermediate_states:
                chunk_states.append(states[0])
        final_states[sequence] = states[0]

    if final_states_out is not None:
        final_states_out[slots[stored]] = final_states[stored].to(final_states_out.dtype)
        return None
    if return_intermediate_states:
        final_states = torch.stack(chunk_states) if chunk_states else final_states[:0]
    return final_states.to(C.dtype if state_dtype is None else state_dtype)


def ssd_quadratic(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one chunk at once, through a length x length decay matrix per head.

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
    """Sums over segments: out[..., i, j] = values[j + 1] + ... + values[i] for j <= i, and 0 for j > i.

    Every entry is summed from its own terms. A difference of two cumulative sums would lose digits where the sums are
    large, and for Granite's A they are.

    Args:
        values: [..., length].

    Returns:
        [..., length, length].
    """
    length = values.shape[-1]
    below_diagonal = torch.ones(length, length, dtype=values.dtype, device=values.device).tril(-1)
    return (values[..., None] * below_diagonal).cumsum(-2)  # the terms at [k, j] are values[k] where k > j


def groups_to_rows(values: torch.Tensor, n_groups: int) -> torch.Tensor:
    """[batch, length, heads, ...] as [batch * n_groups, length, heads of a group, ...]."""
    by_head = values.transpose(1, 2)
    return by_head.reshape(-1, by_head.shape[1] // n_groups, *by_head.shape[2:]).transpose(1, 2)


def rows_to_groups(values: torch.Tensor, n_groups: int) -> torch.Tensor:
    """The inverse of `groups_to_rows`."""
    by_head = values.transpose(1, 2)
    return by_head.reshape(-1, by_head.shape[1] * n_groups, *by_head.shape[2:]).transpose(1, 2)


def _chunks_of_sequences(
    tokens: int,
    chunk_size: int,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    last_chunk_indices: torch.Tensor,
    seq_idx: torch.Tensor,
) -> tuple[list[range], list[int]]:
    """(the chunks of each sequence, where each chunk starts and the last one ends), after a check that they agree."""
    _, lengths = ragged("cu_seqlens", cu_seqlens, tokens)
    chunk_starts, chunk_lengths = ragged("cu_chunk_seqlens", cu_chunk_seqlens, tokens)
    batch, chunks = len(lengths), len(chunk_lengths)
    if chunks and not 1 <= int(chunk_lengths.min()) <= int(chunk_lengths.max()) <= chunk_size:
        raise ValueError(
            f"cu_chunk_seqlens cuts chunks of {chunk_lengths.tolist()} where 1 to {chunk_size} are allowed"
        )
    check_shape("seq_idx", seq_idx, chunks)
    owners = check_integers("seq_idx", seq_idx, 0, batch)
    counts = torch.bincount(owners, minlength=batch)
    first = counts.cumsum(0) - counts
    if (owners.diff() < 0).any() or not lengths.equal(lengths.new_zeros(batch).index_add(0, owners, chunk_lengths)):
        raise ValueError(f"seq_idx is {owners.tolist()}, by which the chunks do not add up to the sequences")
    check_shape("last_chunk_indices", last_chunk_indices, batch)
    last = check_integers("last_chunk_indices", last_chunk_indices, -1, chunks)
    if not last[lengths > 0].equal((first + counts - 1)[lengths > 0]):
        raise ValueError(f"last_chunk_indices is {last.tolist()} where seq_idx gives {(first + counts - 1).tolist()}")
    return (
        [range(a, a + n) for a, n in zip(first.tolist(), counts.tolist(), strict=True)],
        [*chunk_starts.tolist(), int(cu_chunk_seqlens[-1])],
    )
