"""One token of the Mamba-2 recurrence for a batch of sequences, in one pass over their states."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import torch

from granite4_neuron.ops.nki.common import (
    MAX_PARTITIONS,
    PSUM_BANK,
    along,
    common_divisor,
    flat,
    for_each,
    largest_divisor,
    load,
    ones,
    program_share,
)
from granite4_neuron.ops.selective_state_update import selective_state_step

MAX_SEQUENCES = 16  # at a time; each needs columns in a PSUM bank,
MAX_ROW = 16384  # and its x on partition 0: so many float32 for all of them


def ssm_decode_torch(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `ssm_decode`: same arguments, same results."""
    new_states = states.permute(0, 2, 3, 1).contiguous()
    y = selective_state_step(new_states, x, dt, A, B, C, D)
    return y, new_states.permute(0, 3, 1, 2)


@nki.jit
def ssm_decode(
    states: nl.ndarray,
    x: nl.ndarray,
    dt: nl.ndarray,
    A: nl.ndarray,
    B: nl.ndarray,
    C: nl.ndarray,
    D: nl.ndarray,
) -> tuple[nl.ndarray, nl.ndarray]:
    """
    Advance every sequence's state by one token and read the output from it.

    A state is read from HBM once and written once, and no other traffic is of its size.

    Dimensions:
        batch: sequences
        num_heads: heads on this logical core; each program (LNC) takes an equal share of them
        head_dim: 32, 64 or 128
        n_groups: groups of consecutive heads with the same B and C, up to 128
        d_state: up to 128

    Args:
        states (nl.ndarray): [batch, d_state, num_heads, head_dim], float32.
        x (nl.ndarray): [batch, num_heads, head_dim], float32 or bfloat16.
        dt (nl.ndarray): [batch, num_heads], float32, after softplus and limits.
        A (nl.ndarray): [num_heads], float32, negative.
        B (nl.ndarray): [batch, n_groups, d_state], dtype of x.
        C (nl.ndarray): like B.
        D (nl.ndarray): [num_heads], float32.

    Returns:
        y (nl.ndarray): like x.
        new_states (nl.ndarray): like states.

    Notes:
        - num_heads must be a multiple of the number of programs. Limits: `limits.check_ssm_decode`.
        - Arithmetic is float32 for every dtype of x.
        - The caller may give new_states the memory of states (`input_output_aliases`): a sequence's state is written
          after it was read, and by the program that read it.
        - Sequences share instructions but no arithmetic: a NaN in one does not reach another.
        - Source: Dao and Gu 2024, equation 2 with a scalar A per head.

    Pseudocode:
        for sequence:
            state = exp(dt * A) * state + B (outer) (dt * x)        # outer product and broadcast on TensorE
            y_columns = state.T @ C                                 # channels on partitions
        y = transpose(y_columns) + D * x
    """
    batch, d_state, num_heads, head_dim = states.shape
    n_groups = B.shape[1]
    first_head, heads = program_share(num_heads)
    own_heads = nl.ds(first_head, heads)
    heads_per_group = num_heads // n_groups
    run = common_divisor(heads, heads_per_group)  # consecutive heads of one group
    heads_per_column = largest_divisor(run, MAX_PARTITIONS // head_dim)
    sequences = max(1, min(MAX_SEQUENCES, MAX_ROW // (heads * head_dim)))

    y = nl.ndarray((batch, num_heads, head_dim), dtype=x.dtype, buffer=nl.shared_hbm)
    new_states = nl.ndarray((batch, d_state, num_heads, head_dim), dtype=nl.float32, buffer=nl.shared_hbm)

    one_row = ones(1, MAX_PARTITIONS, nl.float32)
    A_sb = load(A.reshape((1, num_heads))[0:1, own_heads], nl.float32)
    D_sb = load(D.reshape((1, num_heads))[0:1, own_heads].broadcast(0, min(sequences, batch)), nl.float32)

    for start in range(0, batch, sequences):
        rows = nl.ds(start, min(sequences, batch - start))
        # Step 1: what all sequences of the pass share. The operands of outer products are on
        # partition 0, one sequence after the other.
        x_row = load(x.expand_dim(0)[0:1, rows, own_heads, 0:head_dim], nl.float32)
        B_row = load(B.expand_dim(0)[0:1, rows, 0:n_groups, 0:d_state], nl.float32)
        dt_row = load(dt.expand_dim(0)[0:1, rows, own_heads], nl.float32)
        count = dt_row.shape[1]
        decay_row = nl.ndarray((1, count, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=decay_row, data1=dt_row, data2=for_each(A_sb, count), op=nl.multiply)
        nisa.activation(dst=decay_row, op=nl.exp, data=decay_row)
        decay_sb = _on_partitions(decay_row, one_row[0:1, 0:d_state])
        C_columns = _transposed(load(C[rows, 0:n_groups, 0:d_state], nl.float32))

        # Step 2: each state once: loaded, decayed, updated by an outer product, stored, and read by C on the way.
        columns = heads // heads_per_column
        width = heads_per_column * head_dim
        y_psum = nl.ndarray((width, columns, count), dtype=nl.float32, buffer=nl.psum)
        for s in range(count):
            state_sb = load(states[start + s, 0:d_state, own_heads, 0:head_dim], nl.float32)
            dt_x_row = nl.ndarray((1, heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=dt_x_row,
                data1=x_row[:, s, :, :],
                data2=along(dt_row[:, s, :], head_dim),
                op=nl.multiply,
                engine=nisa.engine.gpsimd,
            )

            for run_start in range(0, heads, run):
                group = (first_head + run_start) // heads_per_group
                own_run = nl.ds(run_start, run)
                _advance_state(
                    state_sb[:, own_run, :], decay_sb[:, s, own_run], B_row[:, s, group, :], dt_x_row[:, own_run, :]
                )
            nisa.dma_copy(dst=new_states[start + s, 0:d_state, own_heads, 0:head_dim], src=state_sb)

            for column in range(columns):
                first = column * heads_per_column
                group = (first_head + first) // heads_per_group
                nisa.nc_matmul(
                    dst=y_psum[:, column, s : s + 1],
                    stationary=flat(state_sb[:, first : first + heads_per_column, :]),
                    moving=C_columns[:, group, s : s + 1],
                )
        # Step 3: the outputs of all sequences, back from channels on partitions to sequences there.
        _store_y(y[rows, own_heads, 0:head_dim], y_psum, x[rows, own_heads, 0:head_dim], D_sb)
    return y, new_states


def _transposed(C_sb: nl.ndarray) -> nl.ndarray:
    """C [sequences, n_groups, d_state] as columns [d_state, n_groups, sequences]."""
    count, n_groups, d_state = C_sb.shape
    columns_psum = nl.ndarray((d_state, n_groups, count), dtype=nl.float32, buffer=nl.psum)
    for group in range(n_groups):
        nisa.nc_transpose(dst=columns_psum[:, group, :], data=C_sb[:, group, :])
    columns_sb = nl.ndarray((d_state, n_groups, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=columns_sb, src=columns_psum, engine=nisa.engine.scalar)
    return columns_sb


def _on_partitions(decay_row: nl.ndarray, one_row: nl.ndarray) -> nl.ndarray:
    """A row [1, sequences, heads] on as many partitions as `one_row` [1, partitions] has ones."""
    _, count, heads = decay_row.shape
    partitions = one_row.shape[1]
    decay_psum = nl.ndarray((partitions, count, heads), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=flat(decay_psum), stationary=one_row, moving=flat(decay_row), is_stationary_onezero=True)
    decay_sb = nl.ndarray((partitions, count, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=decay_sb, src=decay_psum, engine=nisa.engine.scalar)
    return decay_sb


def _advance_state(state_sb: nl.ndarray, decay_sb: nl.ndarray, B_row: nl.ndarray, dt_x_row: nl.ndarray) -> None:
    """state = decay * state + B (outer) dt * x, in place, for heads of one group.

    Args:
        state_sb: [d_state, heads, head_dim], float32.
        decay_sb: [d_state, heads], the same on every partition.
        B_row: [1, d_state].
        dt_x_row: [1, heads, head_dim].
    """
    _, heads, head_dim = state_sb.shape
    nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=along(decay_sb, head_dim), op=nl.multiply)
    heads_per_bank = PSUM_BANK // head_dim
    for start in range(0, heads, heads_per_bank):
        bank = nl.ds(start, min(heads_per_bank, heads - start))
        bank_sb = state_sb[:, bank, :]
        update_psum = nl.ndarray(bank_sb.shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=flat(update_psum), stationary=B_row, moving=flat(dt_x_row[:, bank, :]))
        nisa.tensor_tensor(dst=bank_sb, data1=bank_sb, data2=update_psum, op=nl.add)


def _store_y(y: nl.ndarray, y_psum: nl.ndarray, x: nl.ndarray, D_sb: nl.ndarray) -> None:
    """y = transpose(y_psum) + D * x.

    Args:
        y, x: [sequences, heads, head_dim] in HBM.
        y_psum: [channels of a column, columns, sequences].
        D_sb: [sequences or more, heads], float32, the same in every row.
    """
    count, heads, head_dim = x.shape
    width, columns, _ = y_psum.shape
    y_columns_sb = nl.ndarray((width, columns, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=y_columns_sb, src=y_psum, engine=nisa.engine.scalar)

    x_sb = load(x, nl.float32)
    D_x_sb = nl.ndarray((count, heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=D_x_sb, data1=x_sb, data2=along(D_sb[0:count, :], head_dim), op=nl.multiply, engine=nisa.engine.gpsimd
    )

    y_sb = nl.ndarray((count, heads, head_dim), dtype=y.dtype, buffer=nl.sbuf)
    columns_per_bank = PSUM_BANK // width
    for start in range(0, columns, columns_per_bank):
        bank_columns = min(columns_per_bank, columns - start)
        y_rows_psum = nl.ndarray((count, bank_columns, width), dtype=nl.float32, buffer=nl.psum)
        for i in range(bank_columns):
            nisa.nc_transpose(dst=y_rows_psum[:, i, :], data=y_columns_sb[:, start + i, :])
        bank = nl.ds(start * heads // columns, bank_columns * heads // columns)
        nisa.tensor_tensor(
            dst=flat(y_sb[:, bank, :]), data1=flat(D_x_sb[:, bank, :]), data2=flat(y_rows_psum), op=nl.add
        )
    nisa.dma_copy(dst=y, src=y_sb)
