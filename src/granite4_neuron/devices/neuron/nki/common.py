"""Steps that several kernels share. They are plain functions: the compiler inlines them into the kernel.

On chip the first dimension of a tensor is the partition; `rows` counts partitions, `columns` elements within one.
"""

import nki.isa as nisa
import nki.language as nl

# Plain integers, which the compiler requires in shapes.
MAX_PARTITIONS = 128
PSUM_BANK = 512  # float32 per partition; one matrix product fits one bank


def program_share(total: int) -> tuple[int, int]:
    """Return (first, count): this program's part of `total` heads or channels. All programs get equal shares."""
    first, count = 0, total
    if nl.program_ndim() > 0:
        count = total // nl.num_programs(0)
        first = nl.program_id(0) * count
    return first, count


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`."""
    largest = 1
    for candidate in range(2, min(number, limit) + 1):
        if number % candidate == 0:
            largest = candidate
    return largest


def common_divisor(first: int, second: int) -> int:
    """Return the greatest common divisor."""
    greatest = 1
    for candidate in range(2, min(first, second) + 1):
        if first % candidate == 0 and second % candidate == 0:
            greatest = candidate
    return greatest


def load(src: nl.ndarray, dtype: str) -> nl.ndarray:
    """Load the content of HBM `src` into a tile in SBUF, cast to `dtype` on the way."""
    tile_sb = nl.ndarray(src.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=src)
    return tile_sb


def ones(rows: int, columns: int, dtype: str) -> nl.ndarray:
    """Return [rows, columns] of 1."""
    tile_sb = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile_sb, value=1.0)
    return tile_sb


def ones_from_diagonal(size: int) -> nl.ndarray:
    """Return [size, size] in float32: 1 where row <= column, else 0."""
    return _ones_where(size, 1, 0, nl.greater_equal)


def ones_below_diagonal(size: int) -> nl.ndarray:
    """Return [size, size] in float32: 1 where row > column, else 0."""
    return _ones_where(size, -1, -1, nl.greater_equal)


def identity(size: int) -> nl.ndarray:
    """Return [size, size] in float32: 1 where row = column, else 0."""
    return _ones_where(size, 1, 0, nl.equal)


def _ones_where(size: int, sign: int, offset: int, comparison: object) -> nl.ndarray:
    """Return 1 where sign * (column - row) + offset compares true with 0, else 0."""
    tile_sb = nl.ndarray((size, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=tile_sb,
        pattern=[[sign, size]],
        offset=offset,
        channel_multiplier=-sign,
        on_true_tile=ones(size, size, nl.float32),
        on_false_value=0.0,
        cmp_op=comparison,
    )
    return tile_sb


def on_all_partitions(row_sb: nl.ndarray) -> nl.ndarray:
    """Copy a row [1, columns] in float32, at most a PSUM bank, to [128, columns]."""
    columns = row_sb.shape[1]
    rows_psum = nl.ndarray((MAX_PARTITIONS, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=rows_psum,
        stationary=ones(1, MAX_PARTITIONS, nl.float32),
        moving=row_sb,
        is_stationary_onezero=True,
    )
    rows_sb = nl.ndarray((MAX_PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows_sb, src=rows_psum)
    return rows_sb


def flat(tile: nl.ndarray) -> nl.ndarray:
    """View [rows, n, m] as [rows, n * m], the shape of a matrix product's operands."""
    rows, count, columns = tile.shape
    return tile.reshape((rows, count * columns))


def along(tile: nl.ndarray, columns: int) -> nl.ndarray:
    """View [rows, n] as [rows, n, columns], every element `columns` times."""
    return tile.expand_dim(2).broadcast(2, columns)


def for_each(tile: nl.ndarray, copies: int) -> nl.ndarray:
    """View [rows, n] as [rows, copies, n], the whole row `copies` times."""
    return tile.expand_dim(1).broadcast(1, copies)


def times(first_sb: nl.ndarray, second_sb: nl.ndarray) -> nl.ndarray:
    """Compute first * second, in float32."""
    product_sb = nl.ndarray(first_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product_sb, data1=first_sb, data2=second_sb, op=nl.multiply)
    return product_sb
