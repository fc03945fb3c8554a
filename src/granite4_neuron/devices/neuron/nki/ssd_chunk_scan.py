"""Mamba-2 prefill by state space duality: chunks of 128 tokens as matrix products."""

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
    load,
    on_all_partitions,
    ones,
    ones_below_diagonal,
    ones_from_diagonal,
    program_share,
)
from granite4_neuron.ops.mamba_chunk_scan import mamba_chunk_scan_combined

CHUNK_SIZE = MAX_PARTITIONS


def ssd_chunk_scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `ssd_chunk_scan` in torch: same arguments, same results."""
    states = initial_states.permute(0, 2, 3, 1).contiguous()
    y, states = mamba_chunk_scan_combined(
        x, dt, A, B, C, CHUNK_SIZE, D, initial_states=states, return_final_states=True
    )
    return y, states.permute(0, 3, 1, 2)


@nki.jit
def ssd_chunk_scan(
    x: nl.ndarray,
    dt: nl.ndarray,
    A: nl.ndarray,
    B: nl.ndarray,
    C: nl.ndarray,
    D: nl.ndarray,
    initial_states: nl.ndarray,
) -> tuple[nl.ndarray, nl.ndarray]:
    """
    Compute the selective scan of Mamba-2 over whole sequences, as matrix products within chunks of 128 tokens.

    The state stays in SBUF from chunk to chunk. All heads of a group share one product of B and C.

    Dimensions:
        batch: sequences, one after the other
        length: tokens, any number; the last chunk may be shorter
        num_heads: heads on this logical core; each program (LNC) takes an equal share of them
        head_dim: 32, 64 or 128
        n_groups: groups of consecutive heads with the same B and C
        d_state: up to 128

    Args:
        x (nl.ndarray): [batch, length, num_heads, head_dim], float32 or bfloat16. In bfloat16 the products with x, B
            and C have bfloat16 operands.
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
        - Every decay is the exponential of a sum of its own terms, none of them positive. So nothing overflows however
          large the decay rates are, and no digits cancel. Sums and decays are float32 for every dtype of x.
        - Source: Dao and Gu 2024, section 6.

    Pseudocode:
        for sequence, for chunk:
            a = dt * A                                                  # [token, head]
            from_start, to_end, total = exp(sum of a up to, after and over all tokens)
            for group:
                scores[j, i] = B_j . C_i for j <= i else 0              # once for all heads
                for head:
                    decay[j, i] = exp(a_{j+1} + ... + a_i)
                    y = (decay * scores).T @ (dt * x) + from_start * (C @ state) + D * x
                    state = total * state + B.T @ (to_end * dt * x)
    """
    batch, length, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2], B.shape[3]
    first_head, heads = program_share(num_heads)
    own_heads = nl.ds(first_head, heads)
    heads_per_group = num_heads // n_groups

    y = nl.ndarray((batch, length, num_heads, head_dim), dtype=x.dtype, buffer=nl.shared_hbm)
    final_states = nl.ndarray((batch, d_state, num_heads, head_dim), dtype=nl.float32, buffer=nl.shared_hbm)

    masks = chunk_masks()
    A_sb = on_all_partitions(load(A.reshape((1, num_heads))[0:1, own_heads], nl.float32))
    D_sb = on_all_partitions(load(D.reshape((1, num_heads))[0:1, own_heads], nl.float32))

    for b in range(batch):
        state_sb = load(initial_states[b, 0:d_state, own_heads, 0:head_dim], nl.float32)
        for start in range(0, length, CHUNK_SIZE):
            tokens = nl.ds(start, min(CHUNK_SIZE, length - start))
            x_sb = load(x[b, tokens, own_heads, 0:head_dim], x.dtype)
            dt_sb = load(dt[b, tokens, own_heads], nl.float32)
            B_sb = load(B[b, tokens, 0:n_groups, 0:d_state], x.dtype)
            C_sb = load(C[b, tokens, 0:n_groups, 0:d_state], x.dtype)
            y_sb = nl.ndarray(x_sb.shape, dtype=x.dtype, buffer=nl.sbuf)
            inputs = (x_sb, dt_sb, B_sb, C_sb)
            scan_chunk(y_sb, state_sb, inputs, (A_sb, D_sb), masks, (first_head, heads_per_group))
            nisa.dma_copy(dst=y[b, tokens, own_heads, 0:head_dim], src=y_sb)
        nisa.dma_copy(dst=final_states[b, 0:d_state, own_heads, 0:head_dim], src=state_sb)
    return y, final_states


def chunk_masks() -> tuple[nl.ndarray, nl.ndarray, nl.ndarray]:
    """Return three matrices of 0 and 1, [128, 128] in float32, that add up tokens: those up to each one, after it, and
    all.
    """
    up_to = ones_from_diagonal(CHUNK_SIZE)  # [k, i] = 1 for k <= i
    after = ones_below_diagonal(CHUNK_SIZE)  # [k, j] = 1 for k > j
    everywhere = ones(CHUNK_SIZE, MAX_PARTITIONS, nl.float32)
    return up_to, after, everywhere


def scan_chunk(
    y_sb: nl.ndarray,
    state_sb: nl.ndarray,
    inputs: tuple[nl.ndarray, nl.ndarray, nl.ndarray, nl.ndarray],
    A_D: tuple[nl.ndarray, nl.ndarray],
    masks: tuple[nl.ndarray, nl.ndarray, nl.ndarray],
    place: tuple[int, int],
) -> None:
    """Write a chunk's outputs, and advance the state in place.

    Args:
        y_sb: [rows, heads, head_dim], written.
        state_sb: [d_state, heads, head_dim], float32.
        inputs: x [rows, heads, head_dim]; dt [rows, heads], float32; B and C [rows, groups, d_state], dtype of x.
        A_D: A and D, [128, heads], float32, the same on every partition.
        masks: from `chunk_masks`.
        place: (the number of the first of the heads, from the first of the groups on; heads of a group).
    """
    x_sb, dt_sb, B_sb, C_sb = inputs
    A_sb, D_sb = A_D
    first_head, heads_per_group = place
    rows, heads, head_dim = x_sb.shape
    d_state = state_sb.shape[0]
    up_to, after, everywhere = masks
    run = common_divisor(heads, heads_per_group)  # consecutive heads of one group
    heads_per_bank = PSUM_BANK // head_dim

    # Step 1: the decays from the chunk's start to each token, and from each token to the chunk's end.
    log_decay_sb = nl.ndarray((rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=log_decay_sb, data1=dt_sb, data2=A_sb[0:rows, 0:heads], op=nl.multiply)
    decays_sb = _boundary_decays(log_decay_sb, up_to, after, everywhere)
    from_start_sb = decays_sb[0:rows, 0, 0:heads]
    to_end_sb = decays_sb[0:rows, 1, 0:heads]
    total_sb = decays_sb[0:d_state, 2, 0:heads]

    # Step 2: the operands of the products, for all heads at once.
    dt_x_sb = _times_per_head(x_sb, dt_sb, x_sb.dtype, nisa.gpsimd_engine)
    D_x_sb = _times_per_head(x_sb, D_sb[0:rows, 0:heads], nl.float32, nisa.gpsimd_engine)
    remaining_sb = _times_per_head(dt_x_sb, to_end_sb, x_sb.dtype, nisa.vector_engine)
    state_operand_sb = state_sb
    if x_sb.dtype != nl.float32:
        state_operand_sb = nl.ndarray((d_state, heads, head_dim), dtype=x_sb.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=state_operand_sb, src=state_sb, engine=nisa.scalar_engine)

    # Step 3: a PSUM bank of heads at a time: the tokens' contributions to each other, and the state's.
    for run_start in range(0, heads, run):
        group = (first_head + run_start) // heads_per_group
        C_transposed_sb, scores_sb = _scores(B_sb[0:rows, group, :], C_sb[0:rows, group, :], up_to)
        for bank_start in range(run_start, run_start + run, heads_per_bank):
            bank = nl.ds(bank_start, min(heads_per_bank, run_start + run - bank_start))
            within_psum = _within_chunk(log_decay_sb[:, bank], scores_sb, dt_x_sb[:, bank, :], up_to, after)
            _add_from_state(
                y_sb[:, bank, :],
                within_psum,
                C_transposed_sb,
                state_operand_sb[:, bank, :],
                from_start_sb[:, bank],
                D_x_sb[:, bank, :],
            )
            _advance_state(state_sb[:, bank, :], B_sb[0:rows, group, :], remaining_sb[:, bank, :], total_sb[:, bank])


def _boundary_decays(
    log_decay_sb: nl.ndarray, up_to: nl.ndarray, after: nl.ndarray, everywhere: nl.ndarray
) -> nl.ndarray:
    """Compute exp of the sums of log_decay [rows, heads] from the chunk's start, to its end, and over all of it.

    Returns:
        [128, 3, heads], float32: up to and including token i; after token j; over all tokens, on every partition.
    """
    rows, heads = log_decay_sb.shape
    sums_psum = nl.ndarray((MAX_PARTITIONS, 3, heads), dtype=nl.float32, buffer=nl.psum)
    summands = (up_to, after, everywhere)
    for i in range(3):
        nisa.nc_matmul(
            dst=sums_psum[:, i, :],
            stationary=summands[i][0:rows, :],
            moving=log_decay_sb,
            is_stationary_onezero=True,
        )
    decays_sb = nl.ndarray((MAX_PARTITIONS, 3, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=decays_sb, op=nl.exp, data=sums_psum)
    return decays_sb


def _times_per_head(values_sb: nl.ndarray, factors_sb: nl.ndarray, dtype: str, engine: nisa.engine) -> nl.ndarray:
    """Multiply values [rows, heads, head_dim] by factors [rows, heads]."""
    product_sb = nl.ndarray(values_sb.shape, dtype=dtype, buffer=nl.sbuf)
    factors = along(factors_sb, values_sb.shape[2])
    nisa.tensor_tensor(dst=product_sb, data1=values_sb, data2=factors, op=nl.multiply, engine=engine)
    return product_sb


def _scores(B_sb: nl.ndarray, C_sb: nl.ndarray, up_to: nl.ndarray) -> tuple[nl.ndarray, nl.ndarray]:
    """Return the group's C [rows, d_state] transposed, and B_j . C_i for j <= i, else 0, as [j, i] in float32."""
    rows, d_state = B_sb.shape
    transposed_psum = nl.ndarray((d_state, 2, rows), dtype=B_sb.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=transposed_psum[:, 0, :], data=B_sb)
    nisa.nc_transpose(dst=transposed_psum[:, 1, :], data=C_sb)
    transposed_sb = nl.ndarray((d_state, 2, rows), dtype=B_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=transposed_sb, src=transposed_psum, engine=nisa.scalar_engine)

    scores_psum = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores_psum, stationary=transposed_sb[:, 0, :], moving=transposed_sb[:, 1, :])
    scores_sb = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scores_sb, data1=scores_psum, data2=up_to[0:rows, 0:rows], op=nl.multiply)
    return transposed_sb[:, 1, :], scores_sb


def _within_chunk(
    log_decay_sb: nl.ndarray, scores_sb: nl.ndarray, dt_x_sb: nl.ndarray, up_to: nl.ndarray, after: nl.ndarray
) -> nl.ndarray:
    """Compute the contributions of a chunk's tokens to its outputs, for up to a bank of heads of one group.

    Args:
        log_decay_sb: [rows, heads], float32.
        scores_sb: [j, i], float32, from `_scores`.
        dt_x_sb: [rows, heads, head_dim].

    Returns:
        [rows, heads, head_dim] in PSUM.
    """
    rows, heads, head_dim = dt_x_sb.shape
    heads_per_product = PSUM_BANK // CHUNK_SIZE
    y_psum = nl.ndarray((rows, heads, head_dim), dtype=nl.float32, buffer=nl.psum)
    for start in range(0, heads, heads_per_product):
        count = min(heads_per_product, heads - start)
        # summands[k, h, i] = a_k for k <= i, else 0; those after j add up to a_{j+1} + ... + a_i.
        summands_sb = nl.ndarray((rows, count, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=summands_sb,
            data1=for_each(up_to[0:rows, 0:rows], count),
            data2=along(log_decay_sb[:, start : start + count], rows),
            op=nl.multiply,
            engine=nisa.gpsimd_engine,
        )
        sums_psum = nl.ndarray((rows, count, rows), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=flat(sums_psum),
            stationary=after[0:rows, 0:rows],
            moving=flat(summands_sb),
            is_stationary_onezero=True,
        )
        decay_sb = nl.ndarray((rows, count, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=decay_sb, op=nl.exp, data=sums_psum)  # 1 where j > i; the score is 0 there
        weights_sb = nl.ndarray((rows, count, rows), dtype=dt_x_sb.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=weights_sb, data1=decay_sb, data2=for_each(scores_sb, count), op=nl.multiply)
        for h in range(count):
            nisa.nc_matmul(dst=y_psum[:, start + h, :], stationary=weights_sb[:, h, :], moving=dt_x_sb[:, start + h, :])
    return y_psum


def _add_from_state(
    y_sb: nl.ndarray,
    within_psum: nl.ndarray,
    C_transposed_sb: nl.ndarray,
    state_sb: nl.ndarray,
    from_start_sb: nl.ndarray,
    D_x_sb: nl.ndarray,
) -> None:
    """Compute y = within + from_start * (C @ state) + D * x, for up to a bank of heads of one group.

    Args:
        y_sb, within_psum, D_x_sb: [rows, heads, head_dim].
        C_transposed_sb: [d_state, rows].
        state_sb: [d_state, heads, head_dim], before the chunk, in the dtype of C.
        from_start_sb: [rows, heads], float32.
    """
    carried_psum = nl.ndarray(within_psum.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=flat(carried_psum), stationary=C_transposed_sb, moving=flat(state_sb))
    sum_sb = nl.ndarray(within_psum.shape, dtype=nl.float32, buffer=nl.sbuf)
    for h in range(sum_sb.shape[1]):  # ScalarE can do one head at a time, and VectorE is the busiest engine
        nisa.activation(dst=sum_sb[:, h, :], op=nl.copy, data=carried_psum[:, h, :], scale=from_start_sb[:, h : h + 1])
    nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=within_psum, op=nl.add)
    nisa.tensor_tensor(dst=y_sb, data1=sum_sb, data2=D_x_sb, op=nl.add, engine=nisa.gpsimd_engine)


def _advance_state(state_sb: nl.ndarray, B_sb: nl.ndarray, remaining_sb: nl.ndarray, total_sb: nl.ndarray) -> None:
    """Compute state = total * state + B.T @ remaining, in place, for up to a bank of heads of one group.

    Args:
        state_sb: [d_state, heads, head_dim], float32.
        B_sb: [rows, d_state].
        remaining_sb: [rows, heads, head_dim], dt * x decayed to the chunk's end.
        total_sb: [d_state, heads], float32, the chunk's decay on every partition.
    """
    update_psum = nl.ndarray(state_sb.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=flat(update_psum), stationary=B_sb, moving=flat(remaining_sb))
    factors = along(total_sb, state_sb.shape[2])
    nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=factors, op=nl.multiply, engine=nisa.gpsimd_engine)
    nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=update_psum, op=nl.add)
