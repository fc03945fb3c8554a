"""The steps of a Mamba layer's prompt that have no kernel here, as plain NKI kernels: norms, in_proj and out_proj.

Neuron's compiler makes these steps from torch. The kernels show how few bytes NKI would move for them, and are for
counting only.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from granite4_neuron.devices.neuron.nki.common import (
    MAX_PARTITIONS,
    PSUM_BANK,
    load,
    on_all_partitions,
    program_share,
)

TOKENS = MAX_PARTITIONS  # of a tile
EPS = 1e-5


@nki.jit
def residual_norm(x: nl.ndarray, update: nl.ndarray, weight: nl.ndarray) -> tuple[nl.ndarray, nl.ndarray]:
    """
    Compute x + update, and its RMS norm.

    Args:
        x (nl.ndarray): [tokens, hidden], float32; tokens are a multiple of 128 for each program (LNC).
        update (nl.ndarray): like x.
        weight (nl.ndarray): [hidden], bfloat16.

    Returns:
        total (nl.ndarray): like x.
        normed (nl.ndarray): [tokens, hidden], bfloat16.
    """
    tokens, hidden = x.shape
    total = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    normed = nl.ndarray((tokens, hidden), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    weight_sb = _row_on_all_partitions(weight)
    first, own = program_share(tokens)
    for start in range(first, first + own, TOKENS):
        rows = nl.ds(start, TOKENS)
        total_sb = load(x[rows, 0:hidden], nl.float32)
        update_sb = load(update[rows, 0:hidden], nl.float32)
        nisa.tensor_tensor(dst=total_sb, data1=total_sb, data2=update_sb, op=nl.add)
        nisa.dma_copy(dst=total[rows, 0:hidden], src=total_sb)
        scale_sb = nl.ndarray((TOKENS, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=scale_sb, op=nl.rsqrt, data=_squares(total_sb), scale=1.0 / hidden, bias=EPS)
        normed_sb = nl.ndarray((TOKENS, hidden), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=normed_sb, data=total_sb, op0=nl.multiply, operand0=scale_sb, op1=nl.multiply, operand1=weight_sb
        )
        nisa.dma_copy(dst=normed[rows, 0:hidden], src=normed_sb)
    return total, normed


@nki.jit
def in_projection(x: nl.ndarray, weight: nl.ndarray) -> tuple[nl.ndarray]:
    """
    Compute x @ weight. Each program (LNC) takes its share of the outputs, so both read x, and each weight is read once.

    Args:
        x (nl.ndarray): [tokens, inputs], bfloat16; tokens and inputs are multiples of 128.
        weight (nl.ndarray): [inputs, outputs], bfloat16.

    Returns:
        y (nl.ndarray): [tokens, outputs], bfloat16.
    """
    tokens, inputs = x.shape
    y = nl.ndarray((tokens, weight.shape[1]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    columns_sb = nl.ndarray((MAX_PARTITIONS, inputs // MAX_PARTITIONS, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    for start in range(0, tokens, TOKENS):
        rows = nl.ds(start, TOKENS)
        _transpose(columns_sb[:, :, rows], load(x[rows, 0:inputs], nl.bfloat16))
    _project(y, columns_sb, weight)
    return (y,)


@nki.jit
def out_projection(y: nl.ndarray, norm: nl.ndarray, weight: nl.ndarray) -> tuple[nl.ndarray, nl.ndarray]:
    """
    Compute (y * norm) @ weight, and the sum of squares of y, by which the caller divides.

    Args:
        y (nl.ndarray): [tokens, inputs], bfloat16, gated; tokens and inputs are multiples of 128.
        norm (nl.ndarray): [inputs], bfloat16.
        weight (nl.ndarray): [inputs, outputs], bfloat16.

    Returns:
        partial (nl.ndarray): [tokens, outputs], float32, to be summed over the ranks.
        squares (nl.ndarray): [tokens, 1], float32, likewise.
    """
    tokens, inputs = y.shape
    partial = nl.ndarray((tokens, weight.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    squares = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    norm_sb = _row_on_all_partitions(norm)
    columns_sb = nl.ndarray((MAX_PARTITIONS, inputs // MAX_PARTITIONS, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    first, own = program_share(tokens)
    for start in range(0, tokens, TOKENS):
        rows = nl.ds(start, TOKENS)
        y_sb = load(y[rows, 0:inputs], nl.float32)
        if first <= start < first + own:
            nisa.dma_copy(dst=squares[rows, 0:1], src=_squares(y_sb))
        weighted_sb = nl.ndarray((TOKENS, inputs), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=weighted_sb, data1=y_sb, data2=norm_sb, op=nl.multiply)
        _transpose(columns_sb[:, :, rows], weighted_sb)
    _project(partial, columns_sb, weight)
    return partial, squares


def _row_on_all_partitions(row: nl.ndarray) -> nl.ndarray:
    """Copy [columns] in HBM to [128, columns], float32."""
    columns = row.shape[0]
    rows_sb = nl.ndarray((MAX_PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, columns, PSUM_BANK):
        bank = nl.ds(start, min(PSUM_BANK, columns - start))
        row_sb = load(row.reshape((1, columns))[0:1, bank], nl.float32)
        nisa.tensor_copy(dst=rows_sb[:, bank], src=on_all_partitions(row_sb))
    return rows_sb


def _squares(values_sb: nl.ndarray) -> nl.ndarray:
    """Return each row's sum of squares, [rows, 1], float32."""
    squares_sb = nl.ndarray(values_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    sums_sb = nl.ndarray((values_sb.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(dst=squares_sb, op=nl.square, data=values_sb, reduce_op=nl.add, reduce_res=sums_sb)
    return sums_sb


def _transpose(columns_sb: nl.ndarray, rows_sb: nl.ndarray) -> None:
    """Transpose [tokens, inputs] to [128, inputs // 128, tokens]: input i on partition i % 128."""
    tokens = rows_sb.shape[0]
    for block in range(columns_sb.shape[1]):
        inputs = nl.ds(block * MAX_PARTITIONS, MAX_PARTITIONS)
        block_psum = nl.ndarray((MAX_PARTITIONS, tokens), dtype=rows_sb.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=block_psum, data=rows_sb[:, inputs])
        nisa.tensor_copy(dst=columns_sb[:, block, :], src=block_psum, engine=nisa.scalar_engine)


def _project(y: nl.ndarray, columns_sb: nl.ndarray, weight: nl.ndarray) -> None:
    """Write x @ weight to y [tokens, outputs], this program's share of the outputs; columns_sb is x, transposed."""
    _, blocks, tokens = columns_sb.shape
    first, own = program_share(weight.shape[1])
    for start in range(first, first + own, PSUM_BANK):
        outputs = nl.ds(start, min(PSUM_BANK, first + own - start))
        count = min(PSUM_BANK, first + own - start)
        source = weight.reshape((blocks, MAX_PARTITIONS, weight.shape[1]))[:, :, outputs].permute((1, 0, 2))
        weight_sb = load(source, nl.bfloat16)
        for token in range(0, tokens, TOKENS):
            rows = nl.ds(token, TOKENS)
            y_psum = nl.ndarray((TOKENS, count), dtype=nl.float32, buffer=nl.psum)
            for block in range(blocks):
                nisa.nc_matmul(
                    dst=y_psum,
                    stationary=columns_sb[:, block, rows],
                    moving=weight_sb[:, block, :],
                    accumulate=block > 0,
                )
            y_sb = nl.ndarray((TOKENS, count), dtype=y.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=y_sb, src=y_psum)
            nisa.dma_copy(dst=y[rows, outputs], src=y_sb)
