"""The PTX of Triton's inline assembly, for Triton's interpreter, which has none: each register is a NumPy array."""

import re

import numpy as np

HALF = np.uint32(0xFFFF)


def run(assembly, constraints, values, dtypes):
    """Run instructions for each element of arrays; return an array for each output.

    Args:
        constraints: as LLVM takes them, of outputs and inputs.
        values: inputs, of one shape.
        dtypes: NumPy's, of outputs.
    """
    kinds = [each.strip("=&") for each in constraints.split(",")]
    registers = {}
    for number, (kind, value) in enumerate(zip(kinds[len(dtypes) :], values, strict=True), len(dtypes)):
        bits = value.view(f"u{value.dtype.itemsize}").astype(np.uint32)
        registers[f"${kind}" if kind.isdigit() else f"${number}"] = bits
    for line in re.sub(r"^\s*\{|\}\s*$", "", assembly).split(";"):
        if line.strip() and not line.strip().startswith((".reg", "wgmma.wait_group")):
            _execute(line.strip(), registers)
    outputs = [registers[f"${number}"] for number in range(len(dtypes))]
    return [
        bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype) for bits, dtype in zip(outputs, dtypes, strict=True)
    ]


def _execute(line, registers):
    name, text = line.split(None, 1)
    result, *sources = [each.strip() for each in re.split(r",(?![^{]*\})", text)]

    def read(source):
        if source.startswith("{"):
            low, high = (read(each.strip()) for each in source.strip("{}").split(","))
            return (low & HALF) | high << np.uint32(16)
        return registers[source] if source in registers else np.uint32(int(source, 0) & 0xFFFFFFFF)

    bits = np.asarray(OPERATIONS[name](*map(read, sources)), np.uint32)
    if result.startswith("{"):
        low, high = (each.strip() for each in result.strip("{}").split(","))
        registers[low], registers[high] = bits & HALF, bits >> np.uint32(16)
    else:
        registers[result] = bits


def _lop3(a, b, c, table):
    """Return the bits for which a table of eight bits says so; a is the highest of the three that choose one."""
    result = np.uint32(0)
    for place in range(8):
        if int(table) >> place & 1:
            result = result | (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
    return result


def _prmt(a, b, selector):
    result = np.uint32(0)
    for place in range(4):
        chosen = int(selector) >> 4 * place & 0xF
        assert chosen < 8  # no copies of signs
        byte = (b if chosen > 3 else a) >> np.uint32(8 * (chosen % 4)) & np.uint32(0xFF)
        result = result | byte << np.uint32(8 * place)
    return result


def _numbers(bits, place):
    """Return the numbers of bfloat16 in the lower or upper half of words, in float64."""
    half = bits << np.uint32(16) if place == 0 else bits & ~HALF
    return np.asarray(half).view(np.float32).astype(np.float64)


def _rounded(numbers):
    """Return the bits of numbers in float64 rounded to bfloat16, ties to even."""
    bits = np.asarray(numbers, np.float64).view(np.uint64)
    last, below = np.uint64(1 << 45), np.uint64((1 << 44) - 1)
    bits = (bits + below + (bits >> np.uint64(45) & np.uint64(1))) & ~(last - np.uint64(1))
    return bits.view(np.float64).astype(np.float32).view(np.uint32) >> np.uint32(16)


def _in_pairs(function):
    def operation(*operands):
        low, high = (_rounded(function(*(_numbers(each, place) for each in operands))) for place in (0, 1))
        return low | high << np.uint32(16)

    return operation


def _dp4a(is_signed):
    def operation(codes, bytes, total):
        for shift in np.arange(0, 32, 8, dtype=np.uint32):
            code, byte = ((each >> shift).astype(np.uint8) for each in (codes, bytes))
            total = total + code.view(np.int8).astype(np.int32).view(np.uint32) * (
                byte.view(np.int8).astype(np.int32).view(np.uint32) if is_signed else byte.astype(np.uint32)
            )
        return total

    return operation


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "sub.rn.bf16x2": _in_pairs(lambda a, b: a - b),
    "mul.rn.bf16x2": _in_pairs(lambda a, b: a * b),
    "fma.rn.bf16x2": _in_pairs(lambda a, b, c: a * b + c),
    "sub.f32": lambda a, b: (a.view(np.float32) - b.view(np.float32)).view(np.uint32),
    "cvt.rn.bf16x2.f32": lambda high, low: (
        _rounded(low.view(np.float32)) | _rounded(high.view(np.float32)) << np.uint32(16)
    ),
    "dp4a.s32.s32": _dp4a(True),
    "dp4a.s32.u32": _dp4a(False),
}
