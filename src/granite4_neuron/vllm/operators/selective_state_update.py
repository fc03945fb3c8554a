"""`ops.selective_state_step` over states in slots, for several tokens per row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from granite4_neuron.ops.selective_state_step import selective_state_step
from granite4_neuron.ops.stochastic_rounding import Rounding, stochastic_round
from granite4_neuron.vllm.operators.arguments import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    check_distinct,
    check_floating,
    check_integers,
    check_shape,
    check_slots,
    is_padding,
    ragged,
)

_TRITON_ROUNDS = 10  # the meaning of vLLM's 0


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    dst_state_batch_indices: torch.Tensor | None = None,
    null_block_id: int | None = NULL_BLOCK_ID,
    out: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    is_blackwell: bool = False,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
    *,
    rounding_seed: int | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance states that are kept in slots by one token per row, or by a few: a verify step of speculation.

    Every token computes `selective_state_step` from the state that the row's previous token left, in float32; states
    are rounded to `state`'s dtype only when they are stored. All sources are read before the first destination is
    written: a slot may be one row's source and another's destination, and a source that is no row's destination does
    not change.

    * Without `num_accepted_tokens` a row starts from state_batch_indices[row, 0] and stores the state after its last
      token in dst_state_batch_indices[row, 0].
    * With it, a row starts from state_batch_indices[row, max(num_accepted_tokens[row] - 1, 0)], where the last accepted
      token left its state, and stores the state after token t in dst_state_batch_indices[row, t], for every t.

    The heads axis may be left out of all tensors together, for a single head.

    Args:
        state: [slots, num_heads, head_dim, d_state], updated in place.
        x: [tokens, num_heads, head_dim].
        dt: like x.
        A: [num_heads, head_dim, d_state], negative. If A, dt and dt_bias are expanded from one value per head (stride
            0), the decay is computed once per head.
        B, C: [tokens, n_groups, d_state]; consecutive heads share a group.
        D: [num_heads, head_dim] or None.
        dt_bias: [num_heads, head_dim] or None; added to dt before the softplus. It comes before z, as in vLLM's Triton
            version; in mamba_ssm and vLLM's CPU version it comes after z.
        z: like x, or None; the output is multiplied by silu(z).
        dt_softplus: apply softplus to dt.
        state_batch_indices: [rows] or [rows, columns], integers, where to read states; None for slots 0 to rows - 1,
            read and written. A row whose source is -1 or `null_block_id` is padding, and touches no slot. There may
            be more rows than x has.
        dst_state_batch_indices: where to store states, likewise; None for state_batch_indices. States for -1 or
            `null_block_id` are not stored.
        null_block_id: the slot that marks padding, or None.
        out: like x, receives the result, and may be x itself; None for a new tensor.
        num_accepted_tokens: [rows], integers from 0 to columns. Entries for padding do not matter.
        cu_seqlens: [rows + 1], integers, where each row's tokens start in x; None for one token per row. An empty row
            leaves its slots unchanged.
        is_blackwell: part of vLLM's signature, a hint for GPUs, without effect here.
        enable_stochastic_rounding: round states that are stored with `stochastic_round`; `state` is then in float16 or
            bfloat16 (in vLLM float16 only).
        cache_philox_rounds: rounds of the random number generator; 0 means 10.
        rounding_seed: 64 bits; None for a new one in each call, from torch's generator, as in vLLM.
        positions: [rows], integers, each row's first position; None for 0. They are needed with a constant seed;
            otherwise each call would round with the same random numbers.

    Returns:
        `out`; zeros for padding.

    Raises:
        ValueError: an argument has a wrong shape, dtype or index, or gives two states one destination; the message
            names it.

    Source: as `selective_state_step`; signature and in-place rules of vLLM 0.33
    (vllm/model_executor/layers/mamba/ops/mamba_ssm.py).
    """
    if out is None:
        out = torch.empty_like(x)
    check_shape("out", out, *x.shape)
    if state.dim() == 3:
        state, x, dt, B, C = (values.unsqueeze(1) for values in (state, x, dt, B, C))
        A = A.unsqueeze(0)
        z = None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if values is None else values.unsqueeze(0) for values in (D, dt_bias))
    _check_shapes(state, x, dt, A, B, C, D=D, dt_bias=dt_bias, z=z)
    check_floating(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, z=z, out=out)
    if cu_seqlens is None:
        starts, lengths = torch.arange(len(x)), torch.ones(len(x), dtype=torch.int64)
    else:
        starts, lengths = ragged("cu_seqlens", cu_seqlens, len(x))
    sources, destinations = _sources_and_destinations(
        lengths, len(state), state_batch_indices, dst_state_batch_indices, null_block_id, num_accepted_tokens
    )
    live = (sources != PAD_SLOT_ID).nonzero()[:, 0]
    live = live[lengths[live].argsort(descending=True, stable=True)]

    store = _nearest
    if enable_stochastic_rounding:
        rounding = _rounding(state, rounding_seed, cache_philox_rounds)
        first = _first_positions(positions, len(lengths))[live]
        store = partial(_stochastic, first=first, rounding=rounding)
    elif rounding_seed is not None or positions is not None:
        raise ValueError("enable_stochastic_rounding is False where True is needed, for a rounding_seed or positions")

    # An expanded tensor holds only one value per head.
    if _is_expanded(A, 2) and _is_expanded(dt, 1) and (dt_bias is None or _is_expanded(dt_bias, 1)):
        A, dt, dt_bias = A[..., 0, 0], dt[..., 0], None if dt_bias is None else dt_bias[..., 0]
    y = _advance(
        state,
        sources[live],
        destinations[live],
        starts[live],
        lengths[live],
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        z=z,
        dt_softplus=dt_softplus,
        store=store,
    )
    return out.copy_(y.view(out.shape))


def _check_shapes(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
) -> None:
    check_shape("state", state, -1, -1, -1, -1)
    _, num_heads, head_dim, d_state = state.shape
    check_shape("x", x, -1, num_heads, head_dim)
    check_shape("dt", dt, *x.shape)
    check_shape("A", A, num_heads, head_dim, d_state)
    check_shape("B", B, len(x), -1, d_state)
    check_shape("C", C, *B.shape)
    check_shape("D", D, num_heads, head_dim)
    check_shape("dt_bias", dt_bias, num_heads, head_dim)
    check_shape("z", z, *x.shape)
    if B.shape[1] == 0 or num_heads % B.shape[1]:
        raise ValueError(f"B has {B.shape[1]} groups, which do not divide {num_heads} heads")


def _advance(
    state: torch.Tensor,
    sources: torch.Tensor,
    destinations: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_softplus: bool,
    store: Callable[[torch.Tensor, torch.dtype, torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Compute `selective_state_update` for rows without padding, whose indices need no checks.

    Args:
        sources, starts, lengths: [rows]; lengths do not increase, so that the rows with a token t are the first ones.
        destinations: [rows, tokens of the longest row], -1 where a state is not stored.
        x to dt_softplus: as in `selective_state_step`, with tokens in place of the batch.
        store: converts the states of some rows [n] after token t to another dtype: (states, dtype, rows, t).

    Returns:
        [tokens, num_heads, head_dim] in float32, zeros for tokens that belong to no row.
    """
    y = torch.zeros(x.shape)
    current = state[sources].float()
    for t in range(int(lengths[0]) if len(lengths) else 0):
        rows = int((lengths > t).sum())
        at = starts[:rows] + t
        gate = None if z is None else z[at]
        y[at] = selective_state_step(
            current[:rows], x[at].float(), dt[at], A, B[at], C[at], D, gate, dt_bias, dt_softplus
        )
        stored = (destinations[:rows, t] != PAD_SLOT_ID).nonzero()[:, 0]
        state[destinations[stored, t]] = store(current[stored], state.dtype, stored, t)
    return y


def _nearest(states: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor, t: int) -> torch.Tensor:
    return states.to(dtype)


def _stochastic(
    states: torch.Tensor, dtype: torch.dtype, rows: torch.Tensor, t: int, first: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """first: [all rows], the positions of token 0."""
    return stochastic_round(states, dtype, first[rows] + t, rounding)


def _rounding(state: torch.Tensor, seed: int | None, rounds: int) -> Rounding:
    if state.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"state is in {state.dtype} where float16 or bfloat16 is needed, for stochastic rounding")
    if rounds < 0:
        raise ValueError(f"cache_philox_rounds is {rounds} where 0 or more is needed")
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (1,)))
    return Rounding(seed, rounds=rounds or _TRITON_ROUNDS)


def _first_positions(positions: torch.Tensor | None, rows: int) -> torch.Tensor:
    if positions is None:
        return torch.zeros(rows, dtype=torch.int64)
    check_shape("positions", positions, rows)
    return check_integers("positions", positions, 0, 2**31)


def _sources_and_destinations(
    lengths: torch.Tensor,
    num_slots: int,
    state_batch_indices: torch.Tensor | None,
    dst_state_batch_indices: torch.Tensor | None,
    null_block_id: int | None,
    num_accepted_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots where each row's state is read, [rows], and stored after each token, [rows, tokens of the
    longest].

    Slots are -1 where nothing is read or stored.
    """
    rows = len(lengths)
    written = "state_batch_indices" if dst_state_batch_indices is None else "dst_state_batch_indices"
    if state_batch_indices is None:
        if dst_state_batch_indices is not None or num_accepted_tokens is not None:
            raise ValueError("state_batch_indices is None where it is needed, for destinations or accepted tokens")
        if num_slots < rows:
            raise ValueError(f"state has {num_slots} slots where {rows} are needed")
        read = write = torch.arange(rows)[:, None]
    else:
        read = write = _table("state_batch_indices", state_batch_indices, rows, num_slots, null_block_id)
        if dst_state_batch_indices is not None:
            write = _table(written, dst_state_batch_indices, rows, num_slots, null_block_id)

    column = _source_columns(num_accepted_tokens, read, lengths)
    sources = read.gather(1, column[:, None])[:, 0].where(lengths > 0, PAD_SLOT_ID)

    lengths = lengths.where(sources != PAD_SLOT_ID, 0)
    tokens = torch.arange(int(lengths.max()) if rows else 0)
    if num_accepted_tokens is None:
        destinations = write[:, :1].where(tokens == lengths[:, None] - 1, PAD_SLOT_ID)
    elif write.shape[1] < len(tokens):
        raise ValueError(
            f"{written} has {write.shape[1]} columns where a row of {len(tokens)} tokens needs one per token"
        )
    else:
        destinations = write[:, : len(tokens)].where(tokens < lengths[:, None], PAD_SLOT_ID)
    check_distinct(written, destinations[destinations != PAD_SLOT_ID])
    return sources, destinations


def _source_columns(
    num_accepted_tokens: torch.Tensor | None, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the column of the table where each row's state is read, [rows]."""
    column = torch.zeros(len(lengths), dtype=torch.int64)
    if num_accepted_tokens is not None:
        check_shape("num_accepted_tokens", num_accepted_tokens, len(lengths))
        has_blocks = (table != PAD_SLOT_ID).any(1) & (lengths > 0)
        accepted = check_integers("num_accepted_tokens", num_accepted_tokens[has_blocks], 0, table.shape[1] + 1)
        column[has_blocks] = (accepted - 1).clamp(min=0)
    return column


def _table(name: str, indices: torch.Tensor, rows: int, num_slots: int, null_block_id: int | None) -> torch.Tensor:
    """Return a table [rows, columns] in int64, with -1 for padding of either kind."""
    table = indices[:, None] if indices.dim() == 1 else indices
    check_shape(name, table, -1, -1)
    if len(table) < rows or table.shape[1] == 0:
        raise ValueError(f"{name} has shape {list(indices.shape)} where {rows} rows of one column or more are needed")
    table = check_slots(name, table[:rows], num_slots)
    return table.where(~is_padding(table, null_block_id), PAD_SLOT_ID)


def _is_expanded(values: torch.Tensor, last_axes: int) -> bool:
    return all(stride == 0 for stride in values.stride()[-last_axes:])
