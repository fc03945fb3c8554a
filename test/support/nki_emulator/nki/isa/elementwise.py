"""Instructions that treat every element alike, on VectorE, ScalarE and GpSimd, with arithmetic in float32."""

from __future__ import annotations

import numpy as np
from nki import language as nl
from nki.isa.operands import (
    apply,
    binary,
    cycles_of_two_tiles,
    elementwise_engine,
    not_both_psum,
    per_partition,
    record,
    rows,
    same_shapes,
)
from nki.isa.options import engine, reduce_cmd
from nki.language import Operator
from nki.tensors import NkiTensor
from nki.values import INTEGERS, Memory, require

SCALAR_ENGINE_PAIRS = (("multiply", "add"), ("multiply", None), ("add", None))
WIDE_INTEGERS = ("int32", "uint32")


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Operator,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 op data2. If all three are integers of 32 bits, the arithmetic is native, on GpSimd."""
    binary(op)
    same_shapes(dst, data1, data2)
    not_both_psum(data1, data2)
    operands = (dst, data1, data2)
    can_be_native = all(tensor.dtype in WIDE_INTEGERS and tensor.buffer is Memory.SBUF for tensor in operands)
    possible = ("gpsimd", "vector") if can_be_native else ("vector", "gpsimd")
    possible = ("gpsimd",) if op.name == "power" else possible
    where = elementwise_engine(engine, possible, *operands)
    if can_be_native and where == "gpsimd":
        wide = (tensor.read_unchanged("data").astype(np.int64) for tensor in (data1, data2))
        dst.write(np.asarray(op.function(*wide), np.int64).astype(dst.dtype))
    else:
        dst.write(op.function(data1.read("data1"), data2.read("data2")))
    record(where, "tensor_tensor", dst, cycles_of_two_tiles(op, dst, data1, data2))


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: float | NkiTensor,
    reverse0: bool = False,
    op1: Operator | None = None,
    operand1: float | NkiTensor | None = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1. The operands are constants or one float32 per partition."""
    require((op1 is None) == (operand1 is None), "op1 and operand1 go together")
    where = elementwise_engine(engine, ("vector", "scalar"), dst, data)
    if where == "scalar":
        pair = (op0.name, op1 and op1.name)
        require(pair in SCALAR_ENGINE_PAIRS, f"ScalarE has no tensor_scalar for {pair}")
    same_shapes(dst, data)
    result = apply(op0, data.read("data"), per_partition(operand0, data, "operand0"), reverse0)
    if op1 is not None:
        result = apply(op1, result, per_partition(operand1, data, "operand1"), reverse1)
    dst.write(result)
    record(where, "tensor_scalar", dst)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Operator,
    operand0: float | NkiTensor,
    op1: Operator,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1. operand0 is a constant or one per partition, operand1 a whole tile."""
    same_shapes(dst, data, operand1)
    not_both_psum(data, operand1)
    result = apply(op0, data.read("data"), per_partition(operand0, data, "operand0"), reverse0)
    dst.write(apply(op1, result, operand1.read("operand1"), reverse1))
    record("vector", "scalar_tensor_tensor", dst, 2)


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = 1 / data, on VectorE."""
    same_shapes(dst, data)
    dst.write(np.reciprocal(data.read("data")))
    record("vector", "reciprocal", dst, 8)


def activation(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
    reduce_op: Operator | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias) on ScalarE. scale and bias are constants or one per partition.

    reduce_res: [partitions, 1], the sum of the results over a partition's elements.
    """
    require(op.arity == 1, f"{op.name} is not an activation function")
    same_shapes(dst, data)
    require(not data.is_broadcast, f"data {data.shape} of an activation has a stride of 0")
    shift = np.float32(0) if bias is None else per_partition(bias, data, "bias", nl.FLOAT_DTYPES)
    result = op.function(data.read("data") * per_partition(scale, data, "scale") + shift)
    dst.write(result)
    if reduce_op is not None:
        require(reduce_op.name == "add", f"ScalarE sums up; it has no {reduce_op.name} to reduce with")
        require(reduce_cmd.value in ("idle", "reset_reduce"), "a reduction over several instructions is not emulated")
        if reduce_res is not None:
            reduce_res.write(result.reshape(data.partitions, -1).sum(1, dtype=np.float32, keepdims=True))
    record("scalar", f"activation {op.name}", dst)


def activation_reduce(
    dst: NkiTensor,
    op: Operator,
    data: NkiTensor,
    reduce_op: Operator,
    reduce_res: NkiTensor,
    bias: NkiTensor | float | None = None,
    scale: NkiTensor | float = 1.0,
    name: str | None = None,
) -> None:
    """Apply `activation` and sum its results."""
    activation(dst, op, data, bias, scale, reduce_op, reduce_res)


def tensor_copy_predicated(
    dst: NkiTensor,
    src: NkiTensor | float,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = src where the predicate is not 0 (or is 0). Elsewhere dst stays."""
    require(predicate.dtype in INTEGERS or predicate.dtype in nl.FLOAT_DTYPES, f"predicate is {predicate.dtype}")
    chosen = (rows(predicate, "predicate") != 0) != reverse_pred
    values = rows(src, "src") if isinstance(src, NkiTensor) else np.float32(src)
    dst.write(np.where(chosen, values, rows(dst, "dst")))
    is_from_psum = any(isinstance(v, NkiTensor) and v.buffer is Memory.PSUM for v in (src, predicate))
    record("vector", "tensor_copy_predicated", dst, 1 if is_from_psum else 2)
