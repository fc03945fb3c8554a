"""Each head's factors for a step's tokens: computed with heads on partitions, then copied to channels.

a is dt * A, the logarithm of a token's decay.
"""

import nki.isa as nisa
import nki.language as nl

from granite4_neuron.devices.neuron.nki.common import PSUM_BANK, along, flat, ones


def load_on_heads(source: nl.ndarray) -> nl.ndarray:
    """Load float32 HBM [n, m, heads] with heads on partitions: [heads, n, m]. DMA moves whole rows of heads."""
    count, rows, heads = source.shape
    rows_sb = nl.ndarray((count * rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows_sb, src=source)
    heads_psum = nl.ndarray((heads, count * rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=heads_psum, data=rows_sb)
    heads_sb = nl.ndarray((heads, count, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=flat(heads_sb), src=heads_psum, engine=nisa.scalar_engine)
    return heads_sb


def members_of_groups(d_state: int, groups: int, heads: int) -> nl.ndarray:
    """Return [d_state, groups, heads], 1 where the head is in the group, else 0. All groups have the same size."""
    members_sb = nl.ndarray((d_state, groups, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=members_sb, value=0.0)
    size = heads // groups
    for group in range(groups):
        nisa.memset(dst=members_sb[:, group, group * size : (group + 1) * size], value=1.0)
    return members_sb


def channels_of_heads(identity_sb: nl.ndarray, head_dim: int) -> nl.ndarray:
    """Return [heads, heads, head_dim], 1 for the channels of a partition's own head, else 0."""
    heads = identity_sb.shape[0]
    channels_sb = nl.ndarray((heads, heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=channels_sb, src=along(identity_sb, head_dim), engine=nisa.gpsimd_engine)
    return channels_sb


def token_scores(B_sb: nl.ndarray, C_sb: nl.ndarray, members_sb: nl.ndarray) -> nl.ndarray:
    """Compute C_t . B_s for each head, [heads, t, s, rows] in PSUM.

    Args:
        B_sb, C_sb: [d_state, tokens, groups, rows].
        members_sb: [d_state, groups, heads].
    """
    d_state, tokens, groups, rows = B_sb.shape
    heads = members_sb.shape[2]
    scores_psum = nl.ndarray((heads, tokens * tokens * rows), dtype=nl.float32, buffer=nl.psum)
    for group in range(groups):
        products_sb = nl.ndarray((d_state, tokens, tokens, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=products_sb,
            data1=C_sb[:, :, group, :].expand_dim(2).broadcast(2, tokens),
            data2=B_sb[:, :, group, :].expand_dim(1).broadcast(1, tokens),
            op=nl.multiply,
        )
        nisa.nc_matmul(
            dst=scores_psum,
            stationary=members_sb[:, group, :],
            moving=products_sb.reshape((d_state, tokens * tokens * rows)),
            is_stationary_onezero=True,
        )
    return scores_psum.reshape((heads, tokens, tokens, rows))


def fill_output_factors(factors_sb: nl.ndarray, dt_sb: nl.ndarray, A_D_sb: nl.ndarray, scores_psum: nl.ndarray) -> None:
    """Write the factors of the state and of the tokens in each token's output.

    Args:
        factors_sb: [heads, t, 1 + tokens, rows], written: exp(a_1 + ... + a_t) for the state, and then for each token s
            C_t . B_s exp(a_{s+1} + ... + a_t) dt_s, plus D where s = t. Entries for s > t are meaningless.
        dt_sb: [heads, tokens, rows].
        A_D_sb: [heads, 2, 1].
        scores_psum: [heads, t, s, rows].
    """
    _, tokens, columns, _ = factors_sb.shape
    log_decay_sb = nl.ndarray(dt_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=log_decay_sb, data=dt_sb, op0=nl.multiply, operand0=A_D_sb[:, 0, :])
    nisa.memset(dst=factors_sb, value=0.0)
    for t in range(tokens):
        # Each sum is computed from its own terms, without subtraction.
        sums = factors_sb[:, t, 0 : t + 1, :]
        own = log_decay_sb[:, t : t + 1, :]
        if t == 0:
            nisa.tensor_copy(dst=sums, src=own)
        else:
            before = factors_sb[:, t - 1, 0 : t + 1, :]
            nisa.tensor_tensor(dst=sums, data1=before, data2=own.broadcast(1, t + 1), op=nl.add)
    nisa.activation(dst=factors_sb, op=nl.exp, data=factors_sb)
    of_tokens = factors_sb[:, :, 1:columns, :]
    nisa.tensor_tensor(dst=of_tokens, data1=of_tokens, data2=scores_psum, op=nl.multiply)
    steps = dt_sb.expand_dim(1).broadcast(1, tokens)
    nisa.tensor_tensor(dst=of_tokens, data1=of_tokens, data2=steps, op=nl.multiply)
    for t in range(tokens):
        itself = factors_sb[:, t, t + 1, :]
        nisa.tensor_scalar(dst=itself, data=itself, op0=nl.add, operand0=A_D_sb[:, 1, :])


def fill_state_factors(
    factors_sb: nl.ndarray, total_sb: nl.ndarray, dt_sb: nl.ndarray, A_D_sb: nl.ndarray, accepted_sb: nl.ndarray
) -> None:
    """Write the factors of the accepted tokens in the states. Other tokens have dt = 0 here.

    Args:
        factors_sb: [heads, tokens, rows], written: dt_s exp(a_{s+1} + ... + a_last).
        total_sb: [heads, rows], written: a_1 + ... + a_last, whose exponential is the states' factor.
        dt_sb: [heads, tokens, rows].
        A_D_sb: [heads, 2, 1].
        accepted_sb: [heads, rows], the same on every partition.
    """
    _, tokens, rows = dt_sb.shape
    taken_dt_sb = nl.ndarray(dt_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=taken_dt_sb, pattern=[[1, tokens], [0, rows]], channel_multiplier=0)
    accepted = accepted_sb.expand_dim(1).broadcast(1, tokens)
    nisa.tensor_tensor(dst=taken_dt_sb, data1=taken_dt_sb, data2=accepted, op=nl.less)
    nisa.tensor_tensor(dst=taken_dt_sb, data1=taken_dt_sb, data2=dt_sb, op=nl.multiply)
    log_decay_sb = nl.ndarray(dt_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=log_decay_sb, data=taken_dt_sb, op0=nl.multiply, operand0=A_D_sb[:, 0, :])
    nisa.memset(dst=factors_sb[:, tokens - 1, :], value=0.0)
    for s in range(tokens - 1, 0, -1):
        after = factors_sb[:, s, :]
        nisa.tensor_tensor(dst=factors_sb[:, s - 1, :], data1=after, data2=log_decay_sb[:, s, :], op=nl.add)
    nisa.tensor_tensor(dst=total_sb, data1=factors_sb[:, 0, :], data2=log_decay_sb[:, 0, :], op=nl.add)
    nisa.activation(dst=factors_sb, op=nl.exp, data=factors_sb)
    nisa.tensor_tensor(dst=factors_sb, data1=factors_sb, data2=taken_dt_sb, op=nl.multiply)


def exp_on_all_partitions(values_sb: nl.ndarray, identity_sb: nl.ndarray, partitions: int) -> nl.ndarray:
    """Compute the exponential of [heads, rows] on all of `partitions`: [partitions, rows, heads] in PSUM.

    VectorE reads one operand from PSUM and one from SBUF twice as fast as two from SBUF.
    """
    heads, rows = values_sb.shape
    own_sb = nl.ndarray((heads, rows, heads), dtype=nl.float32, buffer=nl.sbuf)
    own_head = identity_sb.expand_dim(1).broadcast(1, rows)
    nisa.tensor_tensor(dst=own_sb, data1=along(values_sb, heads), data2=own_head, op=nl.multiply)
    result_psum = nl.ndarray((partitions, rows, heads), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=flat(result_psum),
        stationary=ones(heads, partitions, nl.float32),
        moving=flat(own_sb),
        is_stationary_onezero=True,
    )
    nisa.activation(dst=result_psum, op=nl.exp, data=result_psum)
    return result_psum


def on_channels(factors_sb: nl.ndarray, channels_sb: nl.ndarray, lanes: int) -> nl.ndarray:
    """Copy [heads, n, rows] to each head's channels: [channels of a lane, lanes, n, rows].

    Args:
        channels_sb: from `channels_of_heads`.
    """
    heads, count, rows = factors_sb.shape
    heads_per_lane = heads // lanes
    width = heads_per_lane * channels_sb.shape[2]
    result_sb = nl.ndarray((width, lanes, count, rows), dtype=nl.float32, buffer=nl.sbuf)
    lanes_per_bank = PSUM_BANK // (count * rows)
    for start in range(0, lanes, lanes_per_bank):
        bank = nl.ds(start, min(lanes_per_bank, lanes - start))
        bank_psum = nl.ndarray(result_sb[:, bank, :, :].shape, dtype=nl.float32, buffer=nl.psum)
        for i in range(bank_psum.shape[1]):
            own_heads = nl.ds((start + i) * heads_per_lane, heads_per_lane)
            nisa.nc_matmul(
                dst=flat(bank_psum[:, i, :, :]),
                stationary=flat(channels_sb[:, own_heads, :]),
                moving=flat(factors_sb),
                is_stationary_onezero=True,
            )
        nisa.tensor_copy(dst=result_sb[:, bank, :, :], src=bank_psum, engine=nisa.scalar_engine)
    return result_sb
