"""`ops.mamba_chunk_scan_combined` over a ragged batch of sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from granite4_neuron.ops.mamba_chunk_scan import mamba_chunk_scan_combined
from granite4_neuron.vllm.operators.arguments import (
    NULL_BLOCK_ID,
    check_distinct,
    check_floating,
    check_integers,
    check_shape,
    check_slots,
    is_padding,
    ragged,
)


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
    """Run `mamba_chunk_scan_combined` over sequences that lie one after another, cut into chunks by the caller.

    The state passes from chunk to chunk in float32, and is rounded to `state_dtype` only when it is returned or stored.
    The final state of a sequence without tokens is its initial state.

    Args:
        x: [tokens, num_heads, head_dim]. Tokens after the last sequence are padding.
        dt: [tokens, num_heads].
        A: [num_heads], negative.
        B, C: [tokens, n_groups, d_state]; consecutive heads share a group.
        chunk_size: the most tokens that a chunk may have.
        cu_seqlens: [batch + 1], integers, where each sequence starts.
        cu_chunk_seqlens: [chunks + 1], integers, where each chunk starts; a chunk belongs to one sequence, and may be
            shorter than `chunk_size` anywhere.
        last_chunk_indices: [batch], integers, each sequence's last chunk; any value for a sequence without tokens.
        seq_idx: [chunks], integers, each chunk's sequence.
        out: like x, receives the output; zeros for padding.
        D: [num_heads], or [num_heads, head_dim], or None.
        z: like x, or None; the output is multiplied by silu(z).
        dt_bias: [num_heads] or None; added to dt before the softplus.
        initial_states: [batch, num_heads, head_dim, d_state], or None for zeros; not changed.
        dt_softplus: apply softplus to dt.
        dt_limit: dt is clamped to it, after the softplus.
        return_intermediate_states: return the state after every chunk.
        state_dtype: the dtype of returned states; None for C's dtype.
        final_states_out: [slots, num_heads, head_dim, d_state], receives the states after each sequence, in its own
            dtype; not together with `return_intermediate_states`.
        final_state_indices: [batch], integers, the slot for each sequence; states for -1 or for slot 0, the null block,
            are not stored.

    Returns:
        The states after each sequence, [batch, num_heads, head_dim, d_state]; or those after each chunk,
        [chunks, num_heads, head_dim, d_state]; or None with `final_states_out`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, offset or index; the message names it.

    Source: as `mamba_chunk_scan_combined`; signature of vLLM 0.33 (vllm/model_executor/layers/mamba/ops/
    ssd_combined.py).
    """
    _check_tensors(x, dt, A, B, C, out, D=D, z=z, dt_bias=dt_bias)
    chunks_of, chunk_starts = _chunks_of_sequences(
        len(x), chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx
    )
    shape = (len(chunks_of), *x.shape[1:], B.shape[2])
    check_shape("initial_states", initial_states, *shape)
    check_floating(x=x, dt=dt, A=A, B=B, C=C, out=out, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    if final_states_out is not None:
        if return_intermediate_states:
            raise ValueError("return_intermediate_states is True where final_states_out needs it to be False")
        slots, stored = _final_slots(final_states_out, final_state_indices, shape)

    final_states = x.new_zeros(shape, dtype=torch.float32)
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


def _check_tensors(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> None:
    check_shape("x", x, -1, -1, -1)
    check_shape("B", B, len(x), -1, -1)
    tokens, num_heads, head_dim = x.shape
    n_groups = B.shape[1]
    check_shape("dt", dt, tokens, num_heads)
    check_shape("A", A, num_heads)
    check_shape("C", C, *B.shape)
    check_shape("out", out, *x.shape)
    check_shape("D", D, *((num_heads,) if D is not None and D.dim() == 1 else (num_heads, head_dim)))
    check_shape("z", z, *x.shape)
    check_shape("dt_bias", dt_bias, num_heads)
    if n_groups == 0 or num_heads % n_groups:
        raise ValueError(f"B has {n_groups} groups, which do not divide {num_heads} heads")


def _final_slots(
    final_states_out: torch.Tensor, final_state_indices: torch.Tensor | None, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each sequence's final state, and whether the state is stored there, both [batch].

    Args:
        shape: of the final states of all sequences.
    """
    if final_state_indices is None:
        raise ValueError("final_state_indices is None where final_states_out needs one slot per sequence")
    check_shape("final_states_out", final_states_out, -1, *shape[1:])
    check_floating(final_states_out=final_states_out)
    check_shape("final_state_indices", final_state_indices, shape[0])
    slots = check_slots("final_state_indices", final_state_indices, len(final_states_out))
    stored = ~is_padding(slots, NULL_BLOCK_ID)
    check_distinct("final_state_indices", slots[stored])
    return slots, stored


def _chunks_of_sequences(
    tokens: int,
    chunk_size: int,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    last_chunk_indices: torch.Tensor,
    seq_idx: torch.Tensor,
) -> tuple[list[range], list[int]]:
    """Check that the arguments agree; return (the chunks of each sequence, the starts of all chunks and the end of the
    last).
    """
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
