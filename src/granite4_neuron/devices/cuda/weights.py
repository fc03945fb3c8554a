"""Matrices of weights: how operators take them, and how kernels read them. The formats of few bits are known here only.

An operator takes a matrix [..., rows, columns] as `values` and `scales`, as its format lays it out (`ops.formats`); the
scales of a tensor are None. A kernel takes both as one tuple, `stored`.

A product with one vector takes as long as memory does, if the rows (`load_tile`) are multiplied as they are (`gemv`):
the vector is prepared for that once, in a launch before (`prepare`). Other products read a tile as numbers in the
activations' dtype for tensor cores (`load_numbers`), so they have the bits of a product with the dequantized matrix;
but for experts of prompts in bfloat16 (`convert_codes`), where int8 and FP8 are rounded less.

In a kernel, scales in float32 mean that a byte is a column: values in int8 are numbers of int8, others of FP8. GPUs of
compute capability 9.0 and later have instructions for FP8. Elsewhere, as in Triton's interpreter, it is read by shifts,
which take longer than reading memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from granite4_neuron.config.choices import FP8_GROUP, INT4_GROUP
from granite4_neuron.devices.cuda.gemv import load_vector, rms_norm, rms_norm_part
from granite4_neuron.devices.cuda.launch import gdc_launch_dependents, gdc_wait, launch_options, supports_gdc
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops import FORMATS, QuantizedWeight, Weight
from granite4_neuron.ops.fp8 import FORMAT as FP8

# Columns of a quantized matrix are a multiple of this number: kernels read them in words of 4 bytes.
WHOLE_COLUMNS = 4

# Warps and most columns of a program that prepares a vector.
NUM_WARPS_OF_VECTOR, _COLUMNS_OF_VECTOR = 8, 512
_GROUP = tl.constexpr(INT4_GROUP)  # columns with one scale in int4: those of 16 bytes
_GROUP_OF_FP8 = tl.constexpr(FP8_GROUP)
_GROUPS_OF_PROGRAM = 128  # of 16 columns
_FORMATS = {torch.int8: FORMATS["int8"], torch.uint8: FORMATS["int4"], torch.float8_e4m3fn: FP8}


def parts_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return values and scales of a matrix."""
    if isinstance(weight, torch.Tensor):
        return weight, None
    assert isinstance(weight, QuantizedWeight)  # there is no other compact weight on a GPU
    return weight.values, weight.scales


def stored(values: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the argument of a kernel for a matrix: FP8 as bytes where there are no instructions for it. All GPUs have
    these that have programmatic dependent launch.
    """
    if values.dtype == torch.float8_e4m3fn and not supports_gdc(values):
        values = values.view(torch.uint8)
    return (values,) if scales is None else (values, scales)


def width_of(w1: torch.Tensor, w2: torch.Tensor) -> int:
    """Return the width of experts by the values of their matrices: the columns of w2, which in int4 has some more to
    fill a group. It is the rows of w1, or half of them with a gate.
    """
    rows, columns = w1.shape[1], w2.shape[2] * (2 if w2.dtype == torch.uint8 else 1)
    return rows if rows <= columns else rows // 2


def dense(values: torch.Tensor, scales: torch.Tensor | None, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix as a tensor; a quantized one in dtype. For definitions."""
    if scales is None:
        return values
    shape = torch.Size([*values.shape[:-1], columns])
    return QuantizedWeight(_FORMATS[values.dtype], values, scales, shape).dequantize(dtype)


@triton.jit
def rows_from(weight, row, K: tl.constexpr):
    """Return a stored matrix [.., K] from a row on."""
    if len(weight) == 1:
        return (weight[0] + row * K,)
    elif weight[0].dtype.element_ty == tl.int8:
        return weight[0] + row * K, weight[1] + row
    elif weight[1].dtype.element_ty == tl.float32:
        return weight[0] + row * K, weight[1] + row * ((K + _GROUP_OF_FP8 - 1) // _GROUP_OF_FP8)
    else:
        GROUPS: tl.constexpr = (K + _GROUP - 1) // _GROUP
        return weight[0] + row * (GROUPS * 16), weight[1] + row * GROUPS


# -- products with one vector, in which a row of a quantized matrix is pieces of 16 bytes: 16 columns, or 32 in int4


def prepare(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, values: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return a kernel's argument for a vector [1, columns] to multiply a matrix with: the vector itself for a tensor.

    For a quantized matrix it is normalised, if it has a norm. Its numbers become whole ones, times a power of two for
    each piece: of 16 bits with a sign, which lose nothing of a 16-bit number unless another one of the piece is more
    than 64 times as large; in float32 of 22 bits. They are cut into bytes, of which an instruction multiplies four with
    four codes. For FP8 they only are put in another order, in float32.

    Returns:
        The unit of each piece, and the sum of its numbers, [2, pieces]; and for each byte, from the lowest on, words of
        four columns, [1, pieces, 4], or in int4 of even columns and of odd ones, [2, pieces, 4]. For FP8 the numbers
        alone, [4, pieces, 4]: the first of each four columns, the second and so on.
    """
    if scales is None:
        return (x,)
    columns, has_bytes = x.shape[1], scales.dtype == torch.float32
    pieces = pieces_of(columns, has_bytes)
    vector = empty_vector(x if norm_weight is None else norm_weight, values, has_bytes, pieces)
    block_n = block_of_vector(columns)
    _prepare_kernel[triton.cdiv(columns, block_n),](
        x,
        norm_weight,
        vector,
        eps,
        K=columns,
        HAS_BYTES=has_bytes,
        PIECES=pieces,
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(columns),
        **launch_options(x, NUM_WARPS_OF_VECTOR),
    )
    return vector


def block_of_vector(columns: int) -> int:
    """Return the columns of a program that prepares a vector."""
    return min(_COLUMNS_OF_VECTOR, max(INT4_GROUP, int(triton.next_power_of_2(columns))))


def pieces_of(columns: int, has_bytes: bool) -> int:
    """Return the number of pieces of a row, in which a byte or half of one has a column."""
    return int(triton.cdiv(columns, 16 if has_bytes else INT4_GROUP))


def empty_vector(like: torch.Tensor, values: torch.Tensor, has_bytes: bool, pieces: int) -> tuple[torch.Tensor, ...]:
    """Return memory for what `prepare` returns, for a vector in the dtype of `like` and a matrix with these values."""
    if has_bytes and values.dtype != torch.int8:
        return (like.new_empty(4, pieces, 4, dtype=torch.float32),)
    units = like.new_empty(2, pieces, dtype=torch.float32)
    shape, num_bytes = (1 if has_bytes else 2, pieces, 4), 3 if like.dtype == torch.float32 else 2
    return units, *(units.new_empty(shape, dtype=torch.int32) for _ in range(num_bytes))


@triton.jit
def _prepare_kernel(
    x,
    norm_weight,
    vector,
    eps,
    K: tl.constexpr,
    HAS_BYTES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_GDC: tl.constexpr,
):
    """Prepare BLOCK_N numbers of a vector x [K], which is normalised first if it has a norm.

    Grid: (cdiv(K, BLOCK_N),).
    """
    gdc_launch_dependents(USE_GDC)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if norm_weight is None:
        gdc_wait(USE_GDC)
        values = load_vector(x, offs_n, K).to(tl.float32)
    else:
        norm_weights = load_vector(norm_weight, offs_n, K)
        gdc_wait(USE_GDC)
        whole = load_vector(x, tl.arange(0, BLOCK_K), K)
        values = rms_norm_part(load_vector(x, offs_n, K), whole, norm_weights, eps, K)
    store_block(vector, values, tl.program_id(0), PIECES, HAS_BYTES)


@triton.jit
def store_block(vector, values, block, PIECES: tl.constexpr, HAS_BYTES: tl.constexpr):
    """Write a block of a prepared vector of PIECES pieces: values as for `store_vector`."""
    first = block * (values.shape[1] // (16 if HAS_BYTES else 32))
    store_vector(vector, values, first, PIECES - first, PIECES, HAS_BYTES)


@triton.jit
def store_vector(vector, values, first, count, PIECES: tl.constexpr, HAS_BYTES: tl.constexpr):
    """Write `count` pieces, from `first` on, of a prepared vector of PIECES: values [1, BLOCK_K] in float32, zeros
    beyond them.
    """
    COLUMNS: tl.constexpr = 16 if HAS_BYTES else 32
    BLOCK: tl.constexpr = values.shape[1] // COLUMNS
    if len(vector) == 1:
        offs_k = tl.arange(0, values.shape[1])[None]
        offs = offs_k % 4 * (PIECES * 4) + first * 4 + offs_k // 4
        tl.store(vector[0] + offs, values, offs_k < count * COLUMNS)
    else:
        BITS: tl.constexpr = 20 if len(vector) == 4 else 14
        values = tl.reshape(values, [BLOCK, COLUMNS])
        largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        # Not so small that a factor is infinite; infinite for NaN, too.
        exponents = tl.maximum(largest & 0x7F800000, 0x10000000)
        factors = (0x7F000000 - exponents + (BITS << 23)).to(tl.float32, bitcast=True)
        units = exponents.to(tl.float32, bitcast=True) * (1.0 / (1 << BITS))
        # The last bits of a float32 of this size are the nearest whole number.
        numbers = (values * factors[:, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        offs = tl.arange(0, BLOCK)
        offs_word = (first + offs)[:, None] * 4 + tl.arange(0, 4)[None]
        mask = (offs < count)[:, None] & (offs_word >= 0)
        tl.store(vector[0] + first + offs, units, offs < count)
        tl.store(vector[0] + PIECES + first + offs, tl.sum(numbers, 1).to(tl.float32), offs < count)
        if HAS_BYTES:
            _store_bytes(vector, 0, tl.reshape(numbers, [BLOCK, 4, 4]), offs_word, mask)
        else:
            even, odd = tl.split(tl.reshape(numbers, [BLOCK, 4, 4, 2]))
            _store_bytes(vector, 0, even, offs_word, mask)
            _store_bytes(vector, PIECES * 4, odd, offs_word, mask)


@triton.jit
def _store_bytes(vector, start, numbers, offs_word, mask):
    """Write the bytes of numbers [BLOCK, 4, 4], four in a word, at offs_word from `start` on."""
    for i in tl.static_range(len(vector) - 1):
        bytes = ((numbers >> (8 * i)) & 0xFF) << (8 * tl.arange(0, 4))[None, None]
        tl.store(vector[1 + i] + start + offs_word, tl.sum(bytes, 2), mask)


@triton.jit
def load_prepared(x, weight, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Load a prepared vector, the argument x of a kernel, for a quantized weight: its first BLOCK pieces.

    Returns:
        A tuple: units and sums, [1, BLOCK], and for each byte a tuple of words [1, BLOCK, 4], one or two. For FP8 one
        tuple only, of four of numbers [1, BLOCK, 4].
    """
    offs = tl.arange(0, BLOCK)[None]
    offs_word = offs[:, :, None] * 4 + tl.arange(0, 4)[None, None]
    if len(x) == 1:
        numbers, mask = x[0], offs_word < PIECES * 4
        first, second = _load_fours(numbers, offs_word, mask), _load_fours(numbers + PIECES * 4, offs_word, mask)
        numbers += PIECES * 8
        third, fourth = _load_fours(numbers, offs_word, mask), _load_fours(numbers + PIECES * 4, offs_word, mask)
        return ((first, second, third, fourth),)
    else:
        units = tl.load(x[0] + offs, offs < PIECES, 0.0)
        sums = tl.load(x[0] + PIECES + offs, offs < PIECES, 0.0)
        low, middle = _load_bytes(x[1], weight, offs_word, PIECES), _load_bytes(x[2], weight, offs_word, PIECES)
        if len(x) == 3:
            return units, sums, low, middle
        else:
            return units, sums, low, middle, _load_bytes(x[3], weight, offs_word, PIECES)


@triton.jit
def _load_bytes(words, weight, offs_word, PIECES: tl.constexpr):
    mask = offs_word < PIECES * 4
    if weight[1].dtype.element_ty == tl.float32:
        return (_load_fours(words, offs_word, mask),)
    else:
        return _load_fours(words, offs_word, mask), _load_fours(words + PIECES * 4, offs_word, mask)


@triton.jit
def load_factor(x, weight, offs_k, K: tl.constexpr):
    """Load a vector [K] without a norm, or a prepared one, as the factor of `gemv` for a stored weight."""
    if len(weight) == 1:
        return (load_vector(x[0], offs_k, K).to(tl.float32),)
    else:
        COLUMNS: tl.constexpr = 16 if weight[1].dtype.element_ty == tl.float32 else 32
        return load_prepared(x, weight, (K + COLUMNS - 1) // COLUMNS, offs_k.shape[0] // COLUMNS)


@triton.jit
def load_normed_factor(x, norm_weights, eps, weight, offs_k, K: tl.constexpr):
    """Do the same with a vector that is normalised here, unless it is prepared."""
    if len(weight) == 1:
        return (rms_norm(load_vector(x[0], offs_k, K), norm_weights, eps, K),)
    else:
        return load_factor(x, weight, offs_k, K)


@triton.jit
def load_tile(weight, offs_n, N, offs_k, K: tl.constexpr):
    """Load rows of a matrix [N, K] for `gemv`, zeros outside the matrix.

    Args:
        offs_n: [BLOCK_N].
        offs_k: [BLOCK_K], all numbers from 0 on.

    Returns:
        A tuple: a tile of a tensor, [BLOCK_N, BLOCK_K]; or codes in words, [BLOCK_N, pieces, 4] in int32, and the
        scales of rows, [BLOCK_N], or of pieces, [BLOCK_N, pieces].
    """
    if len(weight) == 1:
        mask = (offs_n < N)[:, None] & (offs_k < K)[None]
        return (tl.load(weight[0] + offs_n[:, None] * K + offs_k[None], mask, 0.0),)
    elif weight[0].dtype.element_ty == tl.int8:
        rows, offs_piece = offs_n[:, None], tl.arange(0, offs_k.shape[0] // 16)[None]
        return _load_words(weight, rows, offs_piece, rows < N, K), tl.load(weight[1] + offs_n, offs_n < N, 0.0)
    else:
        COLUMNS: tl.constexpr = 16 if weight[1].dtype.element_ty == tl.float32 else 32
        rows, offs_piece = offs_n[:, None], tl.arange(0, offs_k.shape[0] // COLUMNS)[None]
        return _load_words(weight, rows, offs_piece, rows < N, K), _load_scales(weight, rows, offs_piece, rows < N, K)


@triton.jit
def load_tile_of_experts(weight, experts, offs_piece, is_chosen, offs_n, N: tl.constexpr, K: tl.constexpr):
    """Load rows of several experts of a quantized weight [EXPERTS, N, K] for `gemv`, with a scale for each piece.

    Args:
        experts, offs_piece, is_chosen: [BLOCK], for each piece its expert in int64, its place in the row, and whether
            it is wanted.
        offs_n: [BLOCK_N].
    """
    rows, mask = experts[None] * N + offs_n[:, None], (offs_n < N)[:, None] & is_chosen[None]
    words = _load_words(weight, rows, offs_piece[None], mask, K)
    if weight[0].dtype.element_ty == tl.int8:
        return words, tl.load(weight[1] + rows, mask, 0.0)
    else:
        return words, _load_scales(weight, rows, offs_piece[None], mask, K)


@triton.jit
def _load_words(weight, rows, offs_piece, mask, K: tl.constexpr):
    """Load pieces of rows: [BLOCK_N, BLOCK, 4] in int32."""
    GROUPS: tl.constexpr = (K + _GROUP - 1) // _GROUP
    WORDS: tl.constexpr = K // 4 if weight[1].dtype.element_ty == tl.float32 else GROUPS * 4  # of a row
    offs_word = offs_piece[:, :, None] * 4 + tl.arange(0, 4)[None, None]
    words = weight[0].to(tl.pointer_type(tl.int32), bitcast=True)
    offs, mask = rows[:, :, None] * WORDS + offs_word, mask[:, :, None] & (offs_word < WORDS)
    if WORDS % 4 == 0:
        return _load_fours(words, offs, mask)
    else:
        return tl.load(words + offs, mask, 0)


@triton.jit
def _load_fours(words, offs, mask):
    """Load four words at each place, a multiple of 4: [BLOCK_N, BLOCK, 4]. A mask is the same for all four.

    They are loaded as [BLOCK_N, BLOCK * 4], so that neighbouring threads have neighbouring fours. Of three axes the
    compiler may give them rows instead, and would then move the words of a tile to where those of a vector are.
    """
    SHAPE: tl.constexpr = [offs.shape[0], offs.shape[1] * 4]
    offs = tl.multiple_of(tl.max_contiguous(tl.reshape(offs, SHAPE), [1, 4]), [1, 4])
    mask = tl.max_constancy(tl.reshape(tl.broadcast_to(mask, [SHAPE[0], SHAPE[1] // 4, 4]), SHAPE), [1, 4])
    return tl.reshape(tl.load(words + offs, mask, 0), [SHAPE[0], SHAPE[1] // 4, 4])


@triton.jit
def _load_scales(weight, rows, offs_piece, mask, K: tl.constexpr):
    """Load scales of pieces of rows, which have one of their own in int4: [BLOCK_N, BLOCK]."""
    OF_FP8: tl.constexpr = weight[1].dtype.element_ty == tl.float32
    COLUMNS: tl.constexpr = _GROUP_OF_FP8 if OF_FP8 else _GROUP
    GROUPS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    offs_group = offs_piece // (COLUMNS // 16) if OF_FP8 else offs_piece
    return tl.load(weight[1] + rows * GROUPS + offs_group, mask & (offs_group < GROUPS), 0.0)


@triton.jit
def gemv(tile, factor, HAS_FP8: tl.constexpr):
    """Multiply a tile of `load_tile` with a factor of `load_factor`, [1, ..], or each row with its own: [BLOCK_N] in
    float32.

    Args:
        HAS_FP8: whether the GPU has instructions for FP8, as all have that have programmatic dependent launch.
    """
    if len(tile) == 1:
        return tl.sum(tile[0].to(tl.float32) * factor[0], 1)
    else:
        words = tile[0]
        total = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
        if len(factor) == 1:
            total = _number_products(words, factor[0], HAS_FP8)
        else:
            for i in tl.static_range(len(factor) - 1, 1, -1):  # from the highest byte on
                total = total * 256.0 + _byte_products(words, factor[i], i == len(factor) - 1).to(tl.float32)
            if len(factor[2]) == 2:
                total -= 8.0 * factor[1]  # codes of int4 are from 0 on
            total *= factor[0]
        if len(tile[1].shape) == 1:
            return tl.sum(total, 1) * tile[1]
        else:
            return tl.sum(total * tile[1].to(tl.float32), 1)


@triton.jit
def _number_products(words, numbers, HAS_FP8: tl.constexpr):
    """Multiply numbers of FP8, [BLOCK_N, pieces, 4] in words, with a prepared vector: the sum of each piece."""
    if HAS_FP8:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b16 pair<2>, half<4>;
            .reg .b32 halves<2>;
            mov.b32 {pair0, pair1}, $4;
            cvt.rn.f16x2.e4m3x2 halves0, pair0;
            cvt.rn.f16x2.e4m3x2 halves1, pair1;
            mov.b32 {half0, half1}, halves0;
            mov.b32 {half2, half3}, halves1;
            cvt.f32.f16 $0, half0;
            cvt.f32.f16 $1, half1;
            cvt.f32.f16 $2, half2;
            cvt.f32.f16 $3, half3;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        products = first * numbers[0] + second * numbers[1] + third * numbers[2] + fourth * numbers[3]
    else:
        products = tl.zeros(words.shape, tl.float32)
        for i in tl.static_range(4):
            products += _numbers_of_fp8(words << (24 - 8 * i)) * numbers[i]
    return tl.sum(products, 2)


@triton.jit
def _numbers_of_fp8(words):
    """Return the numbers of FP8 in the highest bytes of words: times 2^-120, sign, exponent and mantissa are those of a
    float32, and so are numbers without a leading bit.
    """
    return ((words >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _byte_products(words, bytes, SIGNED: tl.constexpr):
    """Multiply codes, [BLOCK_N, pieces, 4] in words, with bytes of numbers: the sum of each piece, in int32."""
    acc = tl.zeros(words.shape, tl.int32)
    if len(bytes) == 2:
        products = dot4(words & 0x0F0F0F0F, bytes[0], acc, SIGNED)
        products = dot4((words >> 4) & 0x0F0F0F0F, bytes[1], products, SIGNED)
    else:
        products = dot4(words, bytes[0], acc, SIGNED)
    return tl.sum(products, 2)


@triton.jit
def dot4(codes, bytes, acc, SIGNED: tl.constexpr):
    """Return acc + the product of four codes, which are signed, with four bytes; all int32."""
    if SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, bytes, acc], tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [codes, bytes, acc], tl.int32, is_pure=True, pack=1
        )


# -- products on tensor cores


@triton.jit
def load_numbers(weight, offs_n, N, start, K: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Load a tile of a matrix [N, K], rounded to DTYPE as `Format.dequantize` rounds: columns from start on, [BLOCK_N,
    BLOCK_K], zeros outside the matrix.

    Args:
        N: None if all rows exist.
    """
    if len(weight) == 1:
        return _load_columns(weight[0], offs_n, N, start, K, BLOCK_K)
    elif weight[0].dtype.element_ty == tl.int8:
        pairs = weight[0].to(tl.pointer_type(tl.int16), bitcast=True)
        pairs = _load_columns(pairs, offs_n, N, start // 2, K // 2, BLOCK_K // 2).to(tl.int32)
        # As float32 these are 2^23 + 128 + code and 2^15 + 128 + code. Converting integers takes four times as long.
        even, odd = select_bits(pairs, 0xFF, 0x4B000080), select_bits(pairs, 0xFF00, 0x47008000)
        even, odd = even.to(tl.float32, bitcast=True) - 8388736.0, odd.to(tl.float32, bitcast=True) - 32896.0
        codes = tl.reshape(tl.join(even, odd), [offs_n.shape[0], BLOCK_K])
        scales = tl.load(weight[1] + offs_n) if N is None else tl.load(weight[1] + offs_n, offs_n < N, 0.0)
        return (codes * scales[:, None]).to(DTYPE)
    elif weight[1].dtype.element_ty == tl.float32:
        SPAN: tl.constexpr = _GROUP_OF_FP8 if BLOCK_K >= _GROUP_OF_FP8 else BLOCK_K
        SCALES: tl.constexpr = (K + _GROUP_OF_FP8 - 1) // _GROUP_OF_FP8  # of a row
        scales = _load_columns(weight[1], offs_n, N, start // _GROUP_OF_FP8, SCALES, BLOCK_K // SPAN)
        codes = _load_columns(weight[0], offs_n, N, start, K, BLOCK_K)
        numbers = codes.to(tl.float32) if codes.dtype == tl.float8e4nv else _numbers_of_fp8(codes.to(tl.int32) << 24)
        numbers = tl.reshape(numbers, [offs_n.shape[0], BLOCK_K // SPAN, SPAN])
        return tl.reshape(numbers * scales[:, :, None], [offs_n.shape[0], BLOCK_K]).to(DTYPE)
    else:
        GROUPS: tl.constexpr = (K + _GROUP - 1) // _GROUP
        pairs = _load_columns(weight[0], offs_n, N, start // 2, GROUPS * 16, BLOCK_K // 2).to(tl.int32)
        scales = _load_columns(weight[1], offs_n, N, start // _GROUP, GROUPS, BLOCK_K // _GROUP).to(tl.float32)
        # As float32 these are 2^19 + code. A scale has 8 bits, so 2^19 + 8 times a scale is exact.
        codes = tl.join(select_bits(pairs << 4, 0xF0, 0x49000000), select_bits(pairs, 0xF0, 0x49000000))
        codes = tl.reshape(codes, [offs_n.shape[0], BLOCK_K // _GROUP, _GROUP]).to(tl.float32, bitcast=True)
        numbers = tl.fma(codes, tl.broadcast_to(scales[:, :, None], codes.shape), -524296.0 * scales[:, :, None])
        return tl.reshape(numbers, [offs_n.shape[0], BLOCK_K]).to(DTYPE)


@triton.jit
def _load_columns(values, offs_n, N, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns of rows offs_n of values [N, K], from start on: [BLOCK_N, BLOCK_K], zeros outside."""
    offs_k = start + tl.arange(0, BLOCK_K)
    ptrs = values + offs_n[:, None] * K + offs_k[None]
    other = tl.zeros([1, 1], tl.float32).to(values.dtype.element_ty)
    if N is None:
        if K % BLOCK_K == 0:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, (offs_k < K)[None], other)
    else:
        return tl.load(ptrs, (offs_n < N)[:, None] & (offs_k < K)[None], other)


@triton.jit
def select_bits(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """Return (words & MASK) ^ BITS in one instruction: of two constants a compiler makes two."""
    return tl.inline_asm_elementwise(
        f"lop3.b32 $0, $1, {MASK}, {BITS}, 0x6A;", "=r,r", [words], tl.int32, is_pure=True, pack=1
    )


# -- products on tensor cores in bfloat16, whose left operand is converted in registers

# Of 16 columns that tensor cores multiply at a time, a thread holds four of a row: 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
# for a t from 0 to 3. Here they are 4 t, 4 t + 2, 4 t + 1 and 4 t + 3: those of a word, in the order in which it takes
# the fewest instructions to convert them. The right operand has its columns in the same order (`in_code_order`). A sum
# of 16 columns has the same bits in any order.

BLOCK_OF_CODES = 64  # columns of a tile; there are whole ones only
_SCALES_OF_CODES = 2.0**-61, 2.0**63  # the smallest and the largest of FP8, see `convert_codes`


def loses_digits(weight: Weight) -> bool:
    """Return whether `convert_codes` loses digits of a matrix: of FP8 with scales out of its range, but for those of
    zeros.
    """
    if not isinstance(weight, QuantizedWeight) or weight.format is not FP8:
        return False
    sizes, (smallest, largest) = weight.scales.abs(), _SCALES_OF_CODES
    is_out = (sizes > 0) & ((sizes < smallest) | (sizes > largest))
    return bool(is_out.any()) and bool(replace(weight, scales=is_out.float()).dequantize(torch.float32).any())


def format_of(values: torch.Tensor) -> str:
    """Return the name of a quantized matrix's format, a kernel's constant."""
    return {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}[values.dtype]


def words_of(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of a quantized matrix, four in a word: [.., rows, columns / 4] in int32, of int4 in int16."""
    return values.view(torch.int16 if values.dtype == torch.uint8 else torch.int32)


def in_code_order(x: torch.Tensor) -> torch.Tensor:
    """Return x, [rows, columns] contiguous in bfloat16, with each 16 columns in the order of `convert_codes`."""
    y = torch.empty_like(x)
    groups = x.numel() // 16
    _order_columns_kernel[triton.cdiv(groups, _GROUPS_OF_PROGRAM),](
        x.view(torch.int32), y.view(torch.int32), groups, BLOCK=_GROUPS_OF_PROGRAM, num_warps=4
    )
    return y


@triton.jit(do_not_specialize=["groups"])
def _order_columns_kernel(x, y, groups, BLOCK: tl.constexpr):
    """Put the columns of BLOCK groups of 16 into the order of `convert_codes`.

    Grid: (cdiv(groups, BLOCK),).

    Args:
        x, y: [groups, 8] in int32, of which each is two numbers.
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs, mask = group * 8 + tl.arange(0, 4)[None], group < groups
    first_ptrs = x + offs + tl.arange(0, 4)[None]
    first, second = tl.load(first_ptrs, mask, 0), tl.load(first_ptrs + 1, mask, 0)
    tl.store(y + offs, (first & 0xFFFF) | (second << 16), mask)
    tl.store(y + offs + 4, ((first >> 16) & 0xFFFF) | (second & -0x10000), mask)


@triton.jit
def code_order(x):
    """Put the columns of x [M, N] into the order of `convert_codes`."""
    parts = tl.reshape(x, [x.shape[0], x.shape[1] // 16, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 1, 4, 2, 3]), [x.shape[0], x.shape[1]])


@triton.jit
def scale_ptrs_of(scales, row, K: tl.constexpr, FORMAT: tl.constexpr):
    """Return pointers to the first scales of rows, [ROWS, 1]; in int4 to two of them, in int32."""
    if FORMAT == "int8":
        ptrs = scales + row
    elif FORMAT == "int4":
        ptrs = scales.to(tl.pointer_type(tl.int32), bitcast=True) + row * (K // (2 * _GROUP))
    else:
        ptrs = scales + row * ((K + _GROUP_OF_FP8 - 1) // _GROUP_OF_FP8)
    return ptrs[:, None]


@triton.jit
def convert_codes(words, scale_ptrs, start, FORMAT: tl.constexpr):
    """Return columns of rows of a quantized matrix, from the column `start` on, as tensor cores' left operand:
    [ROWS, BLOCK_K] in bfloat16, in the order above.

    Numbers of int4 are rounded as `Format.dequantize` rounds them. In int8 the scale is left to `scale_outputs`. In FP8
    it is the sum of two numbers of bfloat16, and the product is rounded once; it is 2^-56 of the number, so scales are
    from 2^-61 to 2^63 (`loses_digits`).

    Args:
        words: [ROWS, BLOCK_K / 4], `words_of`.
        scale_ptrs: `scale_ptrs_of`.
    """
    ROWS: tl.constexpr = words.shape[0]
    BLOCK_K: tl.constexpr = 4 * words.shape[1]
    if FORMAT == "int8":
        n0, n1, n2, n3 = codes_of_int8(words)
    elif FORMAT == "int4":
        scales = tl.load(scale_ptrs + start // (2 * _GROUP))
        low, high = (scales & 0xFFFF).to(tl.int16), (scales >> 16).to(tl.int16)
        scales = tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))
        scales = tl.broadcast_to(tl.reshape(scales, [ROWS, 2, 1]), [ROWS, 2, _GROUP // 4])
        n0, n1, n2, n3 = numbers_of_int4(words, tl.reshape(scales, words.shape))
    else:
        high, low = two_parts(tl.load(scale_ptrs + start // _GROUP_OF_FP8) * 2.0**64)
        n0, n1, n2, n3 = numbers_of_fp8(words, tl.broadcast_to(high, words.shape), tl.broadcast_to(low, words.shape))
    pairs = tl.reshape(tl.join(tl.join(n0, n2), tl.join(n1, n3)), [ROWS, BLOCK_K // 16, 4, 2, 2])
    return tl.reshape(tl.permute(pairs, [0, 1, 3, 2, 4]), [ROWS, BLOCK_K])


@triton.jit
def scale_outputs(acc, scale_ptrs, FORMAT: tl.constexpr):
    """Multiply sums of products with `convert_codes`, [ROWS, BLOCK_M], with what is left to the end."""
    if FORMAT == "int8":
        acc *= tl.load(scale_ptrs)
    elif FORMAT == "fp8":
        acc *= 2.0**56
    return acc


@triton.jit
def codes_of_int8(words):
    """Return the codes of words: the first, third, second and fourth. With their bits 128 + the lower seven and 128 or
    256 are numbers of bfloat16.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, odd;
        shr.u32 odd, $4, 8;
        lop3.b32 a, $4, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 b, $4, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 c, odd, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 d, odd, 0x00800080, 0x43004300, 0xEA;
        sub.rn.bf16x2 a, a, b;
        sub.rn.bf16x2 c, c, d;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, c;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def numbers_of_int4(words, scales):
    """Return the numbers of words: the first, third, second and fourth. With its bits 128 + a code is a number of
    bfloat16; the product is rounded once.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, c, scales, zeros;
        mov.b32 scales, {$5, $5};
        mov.b32 zeros, 0x43084308;
        mov.b32 a, {$4, $4};
        prmt.b32 a, a, 0, 0x4140;
        shr.u32 c, a, 4;
        lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
        sub.rn.bf16x2 a, a, zeros;
        sub.rn.bf16x2 c, c, zeros;
        mul.rn.bf16x2 a, a, scales;
        mul.rn.bf16x2 c, c, scales;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, c;
        }""",
        "=h,=h,=h,=h,h,h",
        [words, scales],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def numbers_of_fp8(words, high, low):
    """Return the numbers of words times high + low and 2^-120: the first, third, second and fourth. Without their signs
    these codes are the upper bits of such numbers of bfloat16.

    Args:
        high, low: `two_parts`.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, signs, sizes, places;
        mov.b32 places, 0x07F007F0;
        and.b32 signs, $4, 0x80808080;
        shr.u32 sizes, $4, 4;
        lop3.b32 c, places, sizes, signs, 0xCA;
        shl.b32 sizes, $4, 4;
        shl.b32 signs, signs, 8;
        lop3.b32 a, places, sizes, signs, 0xCA;
        mul.rn.bf16x2 b, a, $6;
        mul.rn.bf16x2 d, c, $6;
        fma.rn.bf16x2 a, a, $5, b;
        fma.rn.bf16x2 c, c, $5, d;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, c;
        }""",
        "=h,=h,=h,=h,r,r,r",
        [words, high, low],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def two_parts(x):
    """Return two numbers of bfloat16 of which x is the sum but for its last bits, each twice in a word of int32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        .reg .f32 rest;
        cvt.rn.bf16x2.f32 high, $2, $2;
        and.b32 $1, high, 0xFFFF0000;
        mov.b32 rest, $1;
        sub.f32 rest, $2, rest;
        cvt.rn.bf16x2.f32 $1, rest, rest;
        mov.b32 $0, high;
        }""",
        "=&r,=&r,f",
        [x],
        (tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def finished(acc):
    """Return sums of products in float32 as they are, after tensor cores have finished them.

    Without it a loop's next round may write registers of an operand that wgmma has not read yet: Triton lets several
    run on, whether or not their operands lie in registers.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)


@triton.jit
def wait_for_tensor_cores(start):
    """Do the same for all products before it, so that tensor cores may begin with one while the next is converted.

    Args:
        start: any integer.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [start], tl.int32, is_pure=False, pack=1
    )


def dequantized(values: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized matrix [rows, columns] as a tensor, for a product of many tokens: writing it once takes less
    than dequantizing each tile for each block of tokens.
    """
    y = torch.empty([*values.shape[:-1], columns], dtype=dtype, device=values.device)
    rows = y[..., 0].numel()
    _dequantize_kernel[triton.cdiv(rows, 16), triton.cdiv(columns, 256)](
        stored(values, scales), y, rows, K=columns, BLOCK_N=16, BLOCK_K=256, num_warps=4
    )
    return y


@triton.jit
def _dequantize_kernel(weight, y, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Dequantize BLOCK_N rows and BLOCK_K columns of a matrix [N, K] to y.

    Grid: (cdiv(N, BLOCK_N), cdiv(K, BLOCK_K)).
    """
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    offs_k = start + tl.arange(0, BLOCK_K)
    numbers = load_numbers(weight, offs_n, N, start, K, BLOCK_K, y.dtype.element_ty)
    tl.store(y + offs_n[:, None] * K + offs_k[None], numbers, (offs_n < N)[:, None] & (offs_k < K)[None])
