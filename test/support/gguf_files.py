"""GGUF files of small checkpoints, in any type, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize

from benchmarks.gguf_checkpoint import write_gguf

# The bytes of a block in which the scales of K-quants are, in float16.
SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}

# Takes a tensor's name and its values, and returns bytes and type; None for no tensor.
Change = Callable[[str, numpy.ndarray], tuple[numpy.ndarray, Type] | None]


def written(folder: Path, type: str | None = None) -> Path:
    """Write a checkpoint folder beside it, with all matrices in a type of GGUF, or as `write_gguf` does."""
    plain = folder.parent / f"{folder.name}.gguf"
    write_gguf(folder, plain)
    return plain if type is None else rewritten(plain, folder.parent / f"{folder.name}-{type}.gguf", in_type(type))


def in_type(name: str) -> Change:
    """Return what puts all matrices into a type; K-quants, to which gguf does not quantize, have random numbers."""
    kind, random = Type[name], numpy.random.default_rng(0)

    def change(_: str, values: numpy.ndarray) -> tuple[numpy.ndarray, Type]:
        if is_small(values):
            return values, Type.F32
        if name not in SCALES:
            return quantize(values, kind), kind
        blocks = random.integers(0, 256, quant_shape_to_byte_shape(values.shape, kind), dtype=numpy.uint8)
        start, end = SCALES[name]
        bytes_of_block = gguf.GGML_QUANT_SIZES[kind][1]
        scales = blocks.reshape(-1, bytes_of_block)[:, start:end].view(numpy.uint16)
        # Finite and small, of either sign: an exponent of 4 to 7.
        scales[:] = scales & 0x83FF | (scales >> 10 & 3 | 4) << 10
        blocks.reshape(-1, bytes_of_block)[:, start:end] = scales.view(numpy.uint8)
        return blocks, kind

    return change


def is_small(values: numpy.ndarray) -> bool:
    """Return whether llama.cpp has a tensor in float32 in any file."""
    return values.ndim < 2 or min(values.shape[-2:]) < 16


def rewritten(
    source: Path, to: Path, tensors: Change = lambda name, values: (values, Type.F32), metadata: Mapping[str, Any] = {}
) -> Path:
    """Write a GGUF file anew, with changed tensors and metadata. None stands for nothing."""
    reader = gguf.GGUFReader(source)
    architecture = metadata.get("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(to, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in metadata:
            continue
        of_items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of_items)
    for name, value in metadata.items():
        if value is not None and name != "general.architecture":
            of_items = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value), of_items)
    for tensor in reader.tensors:
        changed = tensors(tensor.name, dequantize(tensor.data, tensor.tensor_type))
        if changed is not None:
            writer.add_tensor(tensor.name, numpy.array(changed[0]), raw_dtype=changed[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to
