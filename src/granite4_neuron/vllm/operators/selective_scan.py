"""The Mamba-1 recurrence: it has a decay per channel and state, and so no matrix form."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import torch
from torch.nn import functional as F

from granite4_neuron.vllm.operators.arguments import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    check_distinct,
    check_flags,
    check_floating,
    check_integers,
    check_shape,
    check_slots,
    is_padding,
    ragged,
)

# Tokens whose states exist at once: more take more memory and fewer steps.
_CHUNK_SIZE = 32


def selective_scan_fn(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    null_block_id: int | None = NULL_BLOCK_ID,
    block_size: int = 1024,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    cu_chunk_seqlen: torch.Tensor | None = None,
    last_chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run Mamba-1's selective scan over a batch, or over sequences that lie one after another.

        h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t;    y_t = h_t . C_t + D u_t;    y_t <- y_t silu(z_t)

    per channel, with h of d_state elements. Arithmetic is float32; states are rounded to ssm_states' dtype when they
    are stored. All sources are read before the first destination is written.

    Args:
        u: [dim, tokens] with query_start_loc, else [batch, dim, tokens]; not changed.
        ssm_states: [slots, dim, d_state], updated in place.
        delta: like u. Overwritten by y before the gate.
        A: [dim, d_state], negative.
        B, C: [n_groups, d_state, tokens] with query_start_loc, else [batch, n_groups, d_state, tokens]; consecutive
            channels share a group, and the groups' axis may be left out if there is only one group.
        D: [dim] or None.
        z: like u, or None. Overwritten by the result.
        delta_bias: [dim] or None; added to delta before the softplus.
        delta_softplus: apply softplus to delta.
        query_start_loc: [batch + 1], integers, where each sequence starts; an empty sequence leaves its slots
            unchanged, and tokens after the last sequence are padding.
        cache_indices: [batch], integers, the slot of each sequence, read and written; None for slots 0 to batch - 1.
            Or [batch, blocks], a block table, together with the three arguments of blocks below. A sequence whose
            source is -1 or `null_block_id` is padding, and touches no slot.
        has_initial_state: [batch], bool, false where h starts from zeros, whatever the slot holds; None for all false.
        null_block_id: the slot that marks padding, or None.
        block_size: tokens per block of a block table, unless `cu_chunk_seqlen` gives the blocks.
        block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx: [batch], integers, all or
            none: columns of the block table. h is read at the third column. After each block of this call except the
            last it is stored in the first column and those after it, in order, and after the last block in the second
            column.
        cu_chunk_seqlen, last_chunk_indices: [chunks + 1] and [batch], integers, both or neither: the blocks of this
            call's tokens. Without a block table they have no effect.

    Returns:
        delta, or z if it is given; zeros for padding.

    Raises:
        ValueError: an argument has a wrong shape, dtype or index, or gives two states one destination; the message
            names it.

    Source: Gu and Dao 2023, algorithm 2; signature and in-place rules of vLLM 0.33
    (vllm/model_executor/layers/mamba/ops/mamba_ssm.py, csrc/mamba/selective_scan_fwd.cu).
    """
    is_ragged = query_start_loc is not None
    B, C = (values.unsqueeze(-3) if values.dim() == u.dim() else values for values in (B, C))
    _check_tensors(u, ssm_states, delta, A, B, C, D=D, z=z, delta_bias=delta_bias, is_ragged=is_ragged)
    if query_start_loc is not None:
        starts, lengths = ragged("query_start_loc", query_start_loc, u.shape[-1])
    else:
        starts, lengths = torch.zeros(len(u), dtype=torch.int64), torch.full((len(u),), u.shape[-1])
    check_flags("has_initial_state", has_initial_state, len(lengths))
    sources, stores = _sources_and_stores(
        lengths,
        len(ssm_states),
        cache_indices,
        null_block_id,
        block_size,
        (block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx),
        cu_chunk_seqlen,
        last_chunk_indices,
    )
    continued = torch.zeros(len(lengths), dtype=torch.bool) if has_initial_state is None else has_initial_state
    states = ssm_states[sources.clamp(min=0)].float().where(continued[:, None, None], 0.0)

    dt = _time_steps(delta, delta_bias, delta_softplus)
    y, gated = torch.zeros_like(delta), torch.empty(0) if z is None else torch.zeros_like(z)
    for row, start in enumerate(starts.tolist()):
        state = states[row]
        for tokens, slot in stores[row]:
            span = slice(start, start + tokens)
            here: tuple[int | slice | EllipsisType, ...] = (..., span) if is_ragged else (row, ..., span)
            start += tokens
            y_here, state = _scan(u[here].float(), dt[here], A.float(), B[here].float(), C[here].float(), state)
            if D is not None:
                y_here += D.float()[:, None] * u[here]
            y[here] = y_here.to(y.dtype)
            if z is not None:
                gated[here] = (y_here * F.silu(z[here].float())).to(z.dtype)
            if slot != PAD_SLOT_ID:
                ssm_states[slot] = state.to(ssm_states.dtype)
    delta.copy_(y)
    return delta if z is None else z.copy_(gated)


def _check_tensors(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    is_ragged: bool,
) -> None:
    check_shape("A", A, -1, -1)
    dim, d_state = A.shape
    check_shape("u", u, *((dim, -1) if is_ragged else (-1, dim, -1)))
    check_shape("delta", delta, *u.shape)
    check_shape("z", z, *u.shape)
    check_shape("D", D, dim)
    check_shape("delta_bias", delta_bias, dim)
    check_shape("ssm_states", ssm_states, -1, dim, d_state)
    check_shape("B", B, *u.shape[:-2], -1, d_state, u.shape[-1])
    check_shape("C", C, *B.shape)
    if B.shape[-3] == 0 or dim % B.shape[-3]:
        raise ValueError(f"B has {B.shape[-3]} groups, which do not divide {dim} channels")
    check_floating(u=u, ssm_states=ssm_states, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)


def _time_steps(delta: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = delta.float() if bias is None else delta.float() + bias.float()[:, None]
    return F.softplus(dt) if softplus else dt


def _scan(
    u: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `selective_scan_fn` for consecutive tokens of one sequence, chunk by chunk, in float32.

    Within a chunk the recurrence is a prefix sum of pairs (decay, input), where (a, b) then (c, d) give (a c, b c + d).
    It takes as many steps as the chunk's length has binary digits (Blelloch 1990, section 1.4; in the order of Hillis
    and Steele). Nothing is divided by a decay, so underflow does no harm.

    Args:
        u, dt: [dim, tokens].
        A: [dim, d_state].
        B, C: [n_groups, d_state, tokens].
        state: [dim, d_state], before the first token.

    Returns:
        (y, state): y is like u, without D; the state after the last token.
    """
    dim, tokens = u.shape
    outputs = []
    for start in range(0, tokens, _CHUNK_SIZE):
        here = slice(start, start + _CHUNK_SIZE)
        decays = torch.exp(dt[:, here].T[..., None] * A)  # [tokens of the chunk, dim, d_state], as the next
        states = (dt[:, here] * u[:, here]).T[..., None] * _per_channel(B[..., here], dim)
        states[0] += decays[0] * state
        reach = 1
        while reach < len(states):
            states[reach:] = states[reach:] + decays[reach:] * states[:-reach]
            decays[reach:] = decays[reach:] * decays[:-reach]
            reach *= 2
        outputs.append((states * _per_channel(C[..., here], dim)).sum(-1).T)
        state = states[-1]
    return torch.cat(outputs, dim=1), state


def _per_channel(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Expand [n_groups, d_state, tokens] to [tokens, dim, d_state]."""
    return values.permute(2, 0, 1).repeat_interleave(dim // len(values), 1)


def _sources_and_stores(
    lengths: torch.Tensor,
    num_slots: int,
    cache_indices: torch.Tensor | None,
    null_block_id: int | None,
    block_size: int,
    columns: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    cu_chunk_seqlen: torch.Tensor | None,
    last_chunk_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
    """Return the slot where each sequence's state is read, [batch], and its parts in order: (tokens, slot to store in
    after them).

    Slots are -1 where nothing is read or stored. A sequence that is padding, or empty, has no tokens here.
    """
    has_blocks = any(column is not None for column in columns)
    table = _slots_of(cache_indices, len(lengths), num_slots, null_block_id, has_blocks)
    if has_blocks:
        first, last, initial = _checked_columns(columns, table)
        sources = table.gather(1, initial[:, None])[:, 0]
        blocks_of = _blocks_of(lengths.tolist(), block_size, cu_chunk_seqlen, last_chunk_indices)
        stores = _stores_in_blocks(blocks_of, table, first, last)
    else:
        sources = table[:, 0]
        stores = [[(length, slot)] for length, slot in zip(lengths.tolist(), sources.tolist(), strict=True)]

    live = (sources != PAD_SLOT_ID) & (lengths > 0)
    stores = [blocks if is_live else [] for blocks, is_live in zip(stores, live.tolist(), strict=True)]
    stored = [slot for blocks in stores for _, slot in blocks if slot != PAD_SLOT_ID]
    check_distinct("cache_indices", torch.tensor(stored))
    return sources, stores


def _slots_of(
    cache_indices: torch.Tensor | None, batch: int, num_slots: int, null_block_id: int | None, has_blocks: bool
) -> torch.Tensor:
    """Return the slots of each sequence, [batch, blocks], or [batch, 1] without blocks; -1 for padding."""
    if cache_indices is not None:
        check_shape("cache_indices", cache_indices, *((batch, -1) if has_blocks else (batch,)))
        table = check_slots("cache_indices", cache_indices.reshape(batch, -1), num_slots)
        return table.where(~is_padding(table, null_block_id), PAD_SLOT_ID)
    if has_blocks:
        raise ValueError("cache_indices is None where a block table is needed")
    if num_slots < batch:
        raise ValueError(f"ssm_states has {num_slots} slots where {batch} are needed")
    return torch.arange(batch)[:, None]


def _checked_columns(columns: Sequence[torch.Tensor | None], table: torch.Tensor) -> list[torch.Tensor]:
    names = ("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx")
    checked = []
    for name, column in zip(names, columns, strict=True):
        if column is None:
            raise ValueError(f"{name} is None where a block table needs all three of {', '.join(names)}")
        check_shape(name, column, len(table))
        checked.append(check_integers(name, column, 0, table.shape[1]))
    return checked


def _stores_in_blocks(
    blocks_of: list[list[int]], table: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> list[list[tuple[int, int]]]:
    """Return the parts of each sequence, one for each of its blocks: the last goes to its column `last`, the others to
    the columns from `first` on.
    """
    stores = []
    for row, blocks in enumerate(blocks_of):
        at = [int(first[row]) + block for block in range(len(blocks) - 1)] + [int(last[row])]
        if max(at) >= table.shape[1]:
            raise ValueError(f"cache_indices has {table.shape[1]} columns where row {row} needs {max(at) + 1}")
        stores.append(list(zip(blocks, table[row, at].tolist(), strict=False)))
    return stores


def _blocks_of(
    lengths: list[int],
    block_size: int,
    cu_chunk_seqlen: torch.Tensor | None,
    last_chunk_indices: torch.Tensor | None,
) -> list[list[int]]:
    """Return how many tokens of each sequence go to each of its blocks."""
    if cu_chunk_seqlen is None or last_chunk_indices is None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size} where 1 or more is needed")
        return [[min(block_size, length - start) for start in range(0, length, block_size)] for length in lengths]
    check_shape("last_chunk_indices", last_chunk_indices, len(lengths))
    _, sizes = ragged("cu_chunk_seqlen", cu_chunk_seqlen, sum(lengths))
    last = check_integers("last_chunk_indices", last_chunk_indices, -1, len(sizes)).tolist()
    blocks_of, start = [], 0
    for length, index in zip(lengths, last, strict=True):
        blocks = sizes[start : index + 1].tolist() if length else []
        if sum(blocks) != length:
            raise ValueError(f"cu_chunk_seqlen cuts {sum(blocks)} tokens where a sequence has {length}")
        start += len(blocks)
        blocks_of.append(blocks)
    return blocks_of
