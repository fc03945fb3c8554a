"""TensorE: matrix products and transposes."""

from __future__ import annotations

from nki import language as nl
from nki.isa.operands import record
from nki.isa.options import engine, get_nc_version, matmul_perf_mode, nc_version
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import Memory, require

MAX_STATIONARY = 128
MAX_MOVING = 512
TILE_SIZES = (32, 64, 128)
MAX_TRANSPOSE = {"tensor": 128, "vector": 32}


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> None:
    """dst = stationary.T @ moving on TensorE, or dst += with `accumulate`; None adds if a product was written to dst.

    Accumulating onto anything but a matrix product is undefined on the hardware and an error here. With `is_transpose`
    one operand is the identity, and dst has the other's dtype. tile_position and tile_size say which part of TensorE
    computes. They change no result.
    """
    require(perf_mode is matmul_perf_mode.none, f"perf_mode {perf_mode} is not emulated")
    for tensor, role in ((stationary, "stationary"), (moving, "moving")):
        require(tensor.buffer is Memory.SBUF, f"{role} is in {tensor.buffer.value}; it must be in SBUF")
        require(tensor.dtype in nl.FLOAT_DTYPES, f"{role} is {tensor.dtype}; TensorE multiplies floats")
        is_known = tensor.dtype != nl.float8_e4m3fn or get_nc_version() >= nc_version.gen4
        require(is_known, f"{role} is {tensor.dtype}, which NeuronCore-v4 multiplies, not v3")
    require(dst.buffer is Memory.PSUM, f"dst is in {dst.buffer.value}; it must be in PSUM")
    dtype = stationary.dtype if is_transpose else "float32"
    require(dst.dtype == dtype, f"dst is {dst.dtype}; it must be {dtype}")
    for tensor, role in ((dst, "dst"), (stationary, "stationary"), (moving, "moving")):
        require(tensor.ndim == 2, f"{role} {tensor.shape} of a matrix product has {tensor.ndim} dimensions, not 2")
    require(len(dst.banks) == 1, "one matrix product must fit one PSUM bank")
    require(dst.is_dense, f"dst {dst.shape} of a matrix product is strided")
    rows, columns = stationary.free_size, moving.free_size
    require(stationary.partitions == moving.partitions, f"{stationary.partitions} and {moving.partitions} partitions")
    require(rows <= MAX_STATIONARY, f"stationary has {rows} columns; at most {MAX_STATIONARY}")
    require(columns <= MAX_MOVING, f"moving has {columns} columns; at most {MAX_MOVING}")
    _check_tile(stationary, tile_position, tile_size)
    is_float32 = stationary.dtype == "float32"
    require(is_float32 == (moving.dtype == "float32"), "float32 multiplies float32 only")
    require(dst.shape == (rows, columns), f"dst is {dst.shape}, not ({rows}, {columns})")
    for tensor, is_declared in ((stationary, is_stationary_onezero), (moving, is_moving_onezero)):
        is_onezero = not is_declared or ((tensor.array == 0) | (tensor.array == 1)).all()
        require(bool(is_onezero), "an operand declared to be ones and zeros holds something else")

    product = stationary.read("stationary").T @ moving.read("moving")
    is_product = dst.is_product
    if accumulate is None:
        require(is_product.all() or not is_product.any(), "part of dst holds a matrix product and part does not")
        accumulate = bool(is_product.all()) and not is_transpose
    if accumulate:
        require(bool(is_product.all()), "accumulate=True on PSUM that holds no matrix product")
        product = dst.array + product
    dst.write(product, is_product=not is_transpose)
    has_onezero = is_stationary_onezero or is_moving_onezero or is_transpose
    flops = 0 if is_transpose else 2 * stationary.partitions * rows * columns
    last_launch().record(
        "tensor",
        "nc_matmul",
        stationary.partitions,
        columns,
        is_float32=is_float32,
        has_onezero=has_onezero,
        flops=flops,
    )


def _check_tile(stationary: NkiTensor, position: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Check the part of TensorE that computes: 32, 64 or 128 rows and columns, at a multiple of that."""
    require(bool(position) == bool(size), "tile_position and tile_size go together")
    for start, length, used in zip(position, size, stationary.shape, strict=bool(size)):
        is_part = length in TILE_SIZES and start % length == 0 and start + length <= MAX_STATIONARY
        require(is_part, f"{length} of TensorE's rows or columns from {start}")
        require(used <= length, f"stationary is {stationary.shape}, and the tile of TensorE {size}")


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None) -> None:
    """Transpose [partitions, free] to [free, partitions], on TensorE from SBUF to PSUM or on VectorE up to 32 x 32."""
    where = engine.value
    if where == "unknown":
        where = "tensor" if dst.buffer is Memory.PSUM else "vector"
    require(where in MAX_TRANSPOSE, f"{where} does not transpose")
    for tensor, role in ((dst, "dst"), (data, "data")):
        require(tensor.ndim == 2, f"{role} {tensor.shape} of a transpose has {tensor.ndim} dimensions, not 2")
    rows, columns = data.shape
    require(dst.dtype == data.dtype, f"dst is {dst.dtype}, data is {data.dtype}")
    require(dst.shape == (columns, rows), f"dst is {dst.shape}, not ({columns}, {rows})")
    limit = MAX_TRANSPOSE[where]
    require(max(rows, columns) <= limit, f"({rows}, {columns}) transposed on {where}; at most ({limit}, {limit})")
    values = data.read("data").T
    if where == "vector":
        dst.write(values)
        record("vector", "nc_transpose", dst)
        return
    require((data.buffer, dst.buffer) == (Memory.SBUF, Memory.PSUM), "a transpose on TensorE goes from SBUF to PSUM")
    require(len(dst.banks) == 1, "one transpose must fit one PSUM bank")
    require(dst.is_dense, f"dst {dst.shape} of a transpose is strided")
    dst.write(values)
    last_launch().record("tensor", "nc_transpose", rows, rows, is_float32=data.dtype == "float32", has_onezero=True)
