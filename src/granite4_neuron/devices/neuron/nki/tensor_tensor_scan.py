"""Mamba-2 prefill token by token, in time that grows linearly: the recurrence as VectorE's scan instruction."""

import nki
import nki.isa as nisa
import nki.language as nl
import torch

from granite4_neuron.devices.neuron.nki.common import (
    MAX_PARTITIONS,
    PSUM_BANK,
    along,
    common_divisor,
    flat,
    for_each,
    identity,
    load,
    on_all_partitions,
    ones,
    program_share,
)

TOKENS = MAX_PARTITIONS  # per tile
PRODUCT_CHANNELS = PSUM_BANK // TOKENS
SCAN_CHANNELS = 32  # per scan; a partition has their tokens one after another; tiles of 16 KiB per partition


def tensor_tensor_scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `tensor_tensor_scan` in torch, as a loop over tokens: same arguments, same results."""
    length, heads_per_group = x.shape[1], x.shape[2] // B.shape[2]
    inputs = x.float()
    B, C = (values.float().repeat_interleave(heads_per_group, dim=2) for values in (B, C))
    state, outputs = initial_states, []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)
        added = torch.einsum("bhn,bhp->bnhp", B[:, t], dt[:, t, :, None] * inputs[:, t])
        state = decay[:, None, :, None] * state + added
        outputs.append(torch.einsum("bhn,bnhp->bhp", C[:, t], state) + D[:, None] * inputs[:, t])
    return torch.stack(outputs, dim=1).to(x.dtype), state


@nki.jit
def tensor_tensor_scan(
    x: nl.ndarray,
    dt: nl.ndarray,
    A: nl.ndarray,
    B: nl.ndarray,
    C: nl.ndarray,
    D: nl.ndarray,
    initial_states: nl.ndarray,
) -> tuple[nl.ndarray, nl.ndarray]:
    """
    Compute the selective scan of Mamba-2 over whole sequences, a state element per partition, token after token.

    One instruction scans up to 32 channels of a head (64 for d_state 64) over a tile of 128 tokens. B and C are read
    from HBM once per program, and the products of dt, B and x are formed on chip.

    Dimensions:
        batch: sequences, one after the other
        length: tokens, any number; the last tile may be shorter
        num_heads: heads on this logical core; each program (LNC) takes an equal share of them
        head_dim: 32, 64 or 128
        n_groups: groups of consecutive heads with the same B and C
        d_state: 64 or 128; two channels share the partitions if it is 64

    Args:
        x (nl.ndarray): [batch, length, num_heads, head_dim], float32 or bfloat16.
        dt (nl.ndarray): [batch, length, num_heads], float32, after softplus and limits; 0 for padding, whose x, B and
            C must be finite.
        A (nl.ndarray): [num_heads], float32, negative.
        B (nl.ndarray): [batch, length, n_groups, d_state], dtype of x.
        C (nl.ndarray): like B.
        D (nl.ndarray): [num_heads], float32.
        initial_states (nl.ndarray): [batch, d_state, num_heads, head_dim], float32.

    Returns:
        y (nl.ndarray): like x.
        final_states (nl.ndarray): like initial_states.

    Notes:
        - num_heads must be a multiple of the number of programs. Limits: `limits.check_scan`.
        - Arithmetic is float32 for every dtype of x.
        - This kernel rounds as decode does, and serves to check `ssd_chunk_scan`. Neither has been timed on a device.
        - The compiler unrolls every loop. The number of instructions grows with length * num_heads * head_dim: 2,000
          for 128 tokens of 16 heads of 64. This is too many for prompts of many thousand tokens.
        - Source: Gu and Dao 2023, algorithm 2, with Mamba-2's scalar A per head.

    Pseudocode:
        for sequence, for tile of tokens:
            for head:
                decay[n, t] = exp(dt_t * A), the same for every n; 0 at the first token
                for 32 channels of the head:
                    inputs[n, (channel, t)] = B[t, n] * dt_t * x[t, channel]
                    inputs[n, (channel, 0)] += exp(dt_0 * A) * state[n, channel]
                    states = scan(decay * previous + inputs)
                    y[t, channel] = sum over n of C[t, n] * states[n, (channel, t)]
                    state[n, channel] = states[n, (channel, last)]
            y += D * x
    """
    batch, length, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2], B.shape[3]
    heads_per_group = num_heads // n_groups
    first_head, heads = program_share(num_heads)
    own_heads = nl.ds(first_head, heads)
    parts = MAX_PARTITIONS // d_state  # runs of a head's channels, side by side on the partitions
    part = head_dim // parts
    run = common_divisor(heads, heads_per_group)  # consecutive heads of one group
    heads_per_bank = PSUM_BANK // head_dim

    y = nl.ndarray((batch, length, num_heads, head_dim), dtype=x.dtype, buffer=nl.shared_hbm)
    final_states = nl.ndarray((batch, d_state, num_heads, head_dim), dtype=nl.float32, buffer=nl.shared_hbm)

    everywhere = ones(TOKENS, MAX_PARTITIONS, nl.float32)
    diagonal = identity(TOKENS)
    members = _members(parts, d_state)
    A_sb = on_all_partitions(load(A.reshape((1, num_heads))[0:1, own_heads], nl.float32))
    D_sb = on_all_partitions(load(D.reshape((1, num_heads))[0:1, own_heads], nl.float32))

    for b in range(batch):
        state_sb = nl.ndarray((MAX_PARTITIONS, heads, part), dtype=nl.float32, buffer=nl.sbuf)
        for p in range(parts):
            nisa.dma_copy(
                dst=state_sb[p * d_state : (p + 1) * d_state, :, :],
                src=initial_states[b, 0:d_state, own_heads, p * part : (p + 1) * part],
            )
        for start in range(0, length, TOKENS):
            tokens = nl.ds(start, min(TOKENS, length - start))
            x_sb = load(x[b, tokens, own_heads, 0:head_dim], nl.float32)
            dt_sb = load(dt[b, tokens, own_heads], nl.float32)
            B_sb = load(B[b, tokens, 0:n_groups, 0:d_state], nl.float32)
            C_sb = load(C[b, tokens, 0:n_groups, 0:d_state], nl.float32)
            rows = x_sb.shape[0]
            # Step 1: decays and inputs of all heads, with tokens on partitions.
            log_decay_sb = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=log_decay_sb, data1=dt_sb, data2=A_sb[0:rows, :], op=nl.multiply)
            dt_x_sb = nl.ndarray((rows, heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=dt_x_sb, data1=x_sb, data2=along(dt_sb, head_dim), op=nl.multiply)
            y_sb = nl.ndarray((rows, heads, head_dim), dtype=x.dtype, buffer=nl.sbuf)

            # Step 2: one head at a time, with the state on partitions: the scan over tokens, then the product with C.
            for run_start in range(0, heads, run):
                group = (first_head + run_start) // heads_per_group
                C_columns_sb = _columns(C_sb[:, group, :], parts)
                for bank_start in range(run_start, run_start + run, heads_per_bank):
                    count = min(heads_per_bank, run_start + run - bank_start)
                    bank = nl.ds(bank_start, count)
                    y_psum = nl.ndarray((rows, count, part, parts), dtype=nl.float32, buffer=nl.psum)
                    for i in range(count):
                        h = bank_start + i
                        decays = _decays(log_decay_sb[:, h : h + 1], everywhere, diagonal, min(part, SCAN_CHANNELS))
                        _scan_head(
                            y_psum[:, i, :, :],
                            state_sb[:, h, :],
                            dt_x_sb[:, h, :],
                            B_sb[:, group, :],
                            C_columns_sb,
                            decays,
                            members,
                            diagonal,
                        )
                    _add_skip(y_sb[:, bank, :], y_psum, x_sb[:, bank, :], D_sb[0:rows, bank])
            nisa.dma_copy(dst=y[b, tokens, own_heads, 0:head_dim], src=y_sb)
        for p in range(parts):
            nisa.dma_copy(
                dst=final_states[b, 0:d_state, own_heads, p * part : (p + 1) * part],
                src=state_sb[p * d_state : (p + 1) * d_state, :, :],
            )
    return y, final_states


def _members(parts: int, d_state: int) -> nl.ndarray:
    """Return [128, parts]: 1 where a partition belongs to a part."""
    members_sb = nl.ndarray((MAX_PARTITIONS, parts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=members_sb, value=0.0)
    for p in range(parts):
        nisa.memset(dst=members_sb[p * d_state : (p + 1) * d_state, p : p + 1], value=1.0)
    return members_sb


def _columns(C_sb: nl.ndarray, parts: int) -> nl.ndarray:
    """Transpose C [rows, d_state], once for every part: [128, rows]."""
    rows, d_state = C_sb.shape
    columns_sb = nl.ndarray((MAX_PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    columns_psum = nl.ndarray((d_state, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=columns_psum, data=C_sb)
    for p in range(parts):
        nisa.tensor_copy(
            dst=columns_sb[p * d_state : (p + 1) * d_state, :], src=columns_psum, engine=nisa.scalar_engine
        )
    return columns_sb


def _on_diagonal(values_sb: nl.ndarray, diagonal: nl.ndarray) -> nl.ndarray:
    """Return [rows, n] as n diagonal matrices side by side: [rows, n * rows]."""
    rows, count = values_sb.shape
    diagonals_sb = nl.ndarray((rows, count, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=diagonals_sb,
        data1=for_each(diagonal[0:rows, 0:rows], count),
        data2=along(values_sb, rows),
        op=nl.multiply,
        engine=nisa.gpsimd_engine,
    )
    return flat(diagonals_sb)


def _decays(
    log_decay_sb: nl.ndarray, everywhere: nl.ndarray, diagonal: nl.ndarray, channels: int
) -> tuple[nl.ndarray, nl.ndarray]:
    """Return a head's decays exp(log_decay [rows, 1]), tokens along the free dimension, on all partitions.

    Returns:
        [128, channels, rows], 0 at every channel's first token, where a new scan begins.
        [128, 1], the decay at the first token.
    """
    rows = log_decay_sb.shape[0]
    sums_psum = nl.ndarray((MAX_PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=sums_psum,
        stationary=everywhere[0:rows, :],
        moving=_on_diagonal(log_decay_sb, diagonal),
        is_stationary_onezero=True,
    )
    one_channel_sb = nl.ndarray((MAX_PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=one_channel_sb, op=nl.exp, data=sums_psum)
    decay_sb = nl.ndarray((MAX_PARTITIONS, channels, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=decay_sb, src=for_each(one_channel_sb, channels), engine=nisa.gpsimd_engine)
    nisa.memset(dst=decay_sb[:, :, 0:1], value=0.0)
    return decay_sb, one_channel_sb[:, 0:1]


def _scan_head(
    y_psum: nl.ndarray,
    state_sb: nl.ndarray,
    dt_x_sb: nl.ndarray,
    B_sb: nl.ndarray,
    C_columns_sb: nl.ndarray,
    decays: tuple[nl.ndarray, nl.ndarray],
    members: nl.ndarray,
    diagonal: nl.ndarray,
) -> None:
    """Scan a head's channels over a tile of tokens.

    Args:
        y_psum: [rows, part, parts], written.
        state_sb: [128, part], float32, advanced in place.
        dt_x_sb: [rows, head_dim], float32.
        B_sb: [rows, d_state], float32.
        C_columns_sb: [128, rows], float32.
        decays: from `_decays`.
        members: [128, parts], from `_members`.
        diagonal: [128, 128], the identity.
    """
    decay_sb, first_decay_sb = decays
    rows = B_sb.shape[0]
    parts, part = members.shape[1], state_sb.shape[1]
    dt_x_parts = dt_x_sb.reshape_dim(1, (parts, part))
    channels = decay_sb.shape[1]
    size = channels * rows
    for first in range(0, part, channels):
        own_channels = nl.ds(first, channels)
        inputs_sb = _inputs(dt_x_parts[:, :, own_channels], B_sb, diagonal)
        nisa.scalar_tensor_tensor(
            dst=inputs_sb[:, :, 0:1],
            data=state_sb[:, own_channels].expand_dim(2),
            op0=nl.multiply,
            operand0=first_decay_sb,
            op1=nl.add,
            operand1=inputs_sb[:, :, 0:1],
        )
        states_sb = nl.ndarray((MAX_PARTITIONS, channels, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor_scan(
            dst=states_sb.reshape((MAX_PARTITIONS, size)),
            data0=decay_sb.reshape((MAX_PARTITIONS, size)),
            data1=inputs_sb.reshape((MAX_PARTITIONS, size)),
            initial=0.0,
            op0=nl.multiply,
            op1=nl.add,
        )
        nisa.tensor_copy(dst=state_sb[:, own_channels], src=states_sb[:, :, rows - 1], engine=nisa.scalar_engine)
        nisa.tensor_tensor(
            dst=states_sb,
            data1=states_sb,
            data2=for_each(C_columns_sb, channels),
            op=nl.multiply,
            engine=nisa.gpsimd_engine,
        )
        for i in range(channels):
            nisa.nc_matmul(
                dst=y_psum[:, first + i, :],
                stationary=states_sb[:, i, :],
                moving=members,
                is_moving_onezero=True,
            )


def _inputs(dt_x_parts: nl.ndarray, B_sb: nl.ndarray, diagonal: nl.ndarray) -> nl.ndarray:
    """Compute each token's addition to the states: dt * x [rows, parts, channels] times B [rows, d_state].

    A product with a diagonal matrix per channel multiplies token by token and moves tokens to the free dimension.

    Returns:
        [128, channels, rows], float32.
    """
    rows, parts, channels = dt_x_parts.shape
    d_state = B_sb.shape[1]
    inputs_sb = nl.ndarray((MAX_PARTITIONS, channels, rows), dtype=nl.float32, buffer=nl.sbuf)
    for p in range(parts):
        own_partitions = nl.ds(p * d_state, d_state)
        diagonals_sb = _on_diagonal(dt_x_parts[:, p, :], diagonal)
        for start in range(0, channels, PRODUCT_CHANNELS):
            block = nl.ds(start, PRODUCT_CHANNELS)
            inputs_psum = nl.ndarray((d_state, PRODUCT_CHANNELS, rows), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=flat(inputs_psum),
                stationary=B_sb,
                moving=diagonals_sb[:, start * rows : (start + PRODUCT_CHANNELS) * rows],
            )
            nisa.tensor_copy(dst=inputs_sb[own_partitions, block, :], src=inputs_psum, engine=nisa.scalar_engine)
    return inputs_sb


def _add_skip(y_sb: nl.ndarray, y_psum: nl.ndarray, x_sb: nl.ndarray, D_sb: nl.ndarray) -> None:
    """Compute y = y_psum + D * x, for up to a bank of heads.

    Args:
        y_sb, x_sb: [rows, heads, head_dim].
        y_psum: [rows, heads, part, parts]; the parts of head_dim.
        D_sb: [rows, heads].
    """
    parts = (y_psum.shape[3], y_psum.shape[2])
    skip_sb = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    factors = along(D_sb, x_sb.shape[2])
    nisa.tensor_tensor(dst=skip_sb, data1=x_sb, data2=factors, op=nl.multiply)
    nisa.tensor_tensor(
        dst=y_sb.reshape_dim(2, parts),
        data1=skip_sb.reshape_dim(2, parts),
        data2=y_psum.permute((0, 1, 3, 2)),
        op=nl.add,
    )
