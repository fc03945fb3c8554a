"""Contributions of a step's tokens to each other's outputs, beside the state; heads on partitions."""

import nki.isa as nisa
import nki.language as nl

from granite4_neuron.ops.nki.common import flat, for_each, times


def token_scores(B_columns: nl.ndarray, C_columns: nl.ndarray, heads: int, place: tuple[int, int]) -> nl.ndarray:
    """Compute C_t . B_s of each row's tokens, for each of its heads: [rows * heads, t, s], float32.

    One product per group has the tokens of all rows beside each other; a row's own are a block on its diagonal.

    Args:
        B_columns, C_columns: [d_state, n_groups, rows, tokens].
        place: this program's first head, and heads per group.
    """
    _, n_groups, rows, tokens = B_columns.shape
    first_head, heads_per_group = place
    size = rows * tokens
    scores_hbm = nl.ndarray((n_groups, size, size), dtype=nl.float32, buffer=nl.private_hbm)
    for group in range(n_groups):
        scores_psum = nl.ndarray((size, size), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=scores_psum, stationary=flat(C_columns[:, group, :, :]), moving=flat(B_columns[:, group, :, :])
        )
        scores_sb = nl.ndarray((size, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=scores_sb, src=scores_psum, engine=nisa.scalar_engine)
        nisa.dma_copy(dst=scores_hbm[group], src=scores_sb)
    own_groups = max(1, heads // heads_per_group)
    blocks = scores_hbm.ap(
        pattern=[
            [tokens * size + tokens, rows],
            [size * size, own_groups],
            [0, heads // own_groups],
            [size, tokens],
            [1, tokens],
        ],
        offset=first_head // heads_per_group * size * size,
    )
    result_sb = nl.ndarray((rows * heads, tokens, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=result_sb, src=blocks)
    return result_sb


def within_tokens(x_sb: nl.ndarray, dt_sb: nl.ndarray, A_D_sb: nl.ndarray, scores_sb: nl.ndarray) -> nl.ndarray:
    """Compute the tokens' part in their own and later outputs, without the state: [heads, tokens, head_dim].

    Args:
        x_sb: [heads, tokens, head_dim], the heads of all rows.
        dt_sb: [heads, tokens].
        A_D_sb: [heads, 2].
        scores_sb: [heads, t, s].
    """
    heads, tokens, head_dim = x_sb.shape
    log_decay_sb = nl.ndarray((heads, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=log_decay_sb, data=dt_sb, op0=nl.multiply, operand0=A_D_sb[:, 0:1])
    # sums[t, s] = a_{s+1} + ... + a_t, each a sum of its own terms; where s > t, what exp makes 0.
    sums_sb = nl.ndarray((heads, tokens, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sums_sb, value=-1e30)
    for t in range(tokens):
        nisa.memset(dst=sums_sb[:, t, t : t + 1], value=0.0)
        if t > 0:
            nisa.tensor_scalar(
                dst=sums_sb[:, t, 0:t], data=sums_sb[:, t - 1, 0:t], op0=nl.add, operand0=log_decay_sb[:, t : t + 1]
            )
    nisa.activation(dst=sums_sb, op=nl.exp, data=sums_sb)
    weights_sb = times(times(sums_sb, scores_sb), for_each(dt_sb, tokens))

    products_sb = nl.ndarray((heads, tokens, head_dim, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=products_sb,
        data1=weights_sb.expand_dim(2).broadcast(2, head_dim),
        data2=x_sb.permute((0, 2, 1)).expand_dim(1).broadcast(1, tokens),
        op=nl.multiply,
    )
    result_sb = nl.ndarray((heads, tokens, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=result_sb, op=nl.add, data=products_sb, axis=3)
    nisa.scalar_tensor_tensor(
        dst=result_sb, data=x_sb, op0=nl.multiply, operand0=A_D_sb[:, 1:2], op1=nl.add, operand1=result_sb
    )
    return result_sb


def load_on_heads(source: nl.ndarray, columns: tuple[int, ...]) -> nl.ndarray:
    """Load HBM [rows, heads, columns...] with rows and heads on partitions, in float32: [rows * heads, columns...]."""
    tile_sb = nl.ndarray((source.shape[0] * source.shape[1], *columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=source)
    return tile_sb
