"""A GGUF file: its metadata and its tensors, as they are stored."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from granite4_neuron.errors import UserError
from granite4_neuron.system.regular_files import check_regular

if TYPE_CHECKING:
    import gguf
    import numpy

_MAGIC = b"GGUF"
_NATIVE = "I"  # the library's code for this processor's byte order
_LENGTH = struct.Struct("<Q")  # before a text
_LIST_HEADER = 12  # bytes: the type of its entries, and their number
_ROWS_AS_ONE = 32  # a power of two


class GGUFTensor(NamedTuple):
    """A tensor in the file.

    type: the name of its type, such as "Q4_0".
    shape: with the columns last; in the file they come first.
    offset: from the beginning of the file.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """Metadata and tensors of a GGUF file. Only the metadata is in memory."""

    def __init__(self, path: Path, fields: Mapping[str, gguf.ReaderField], tensors: Mapping[str, GGUFTensor]):
        self.path, self.tensors = path, tensors
        self._fields = fields

    def get(self, key: str) -> Any:
        """Return a value of the metadata as plain Python: a number, text, flag or list of these; None if there is none.

        Raises:
            UserError: it has another type.
        """
        field = self._fields.get(key)
        if field is None:
            return None
        try:
            last: Any = field.parts[-1]  # for a list, which is read below, the list itself
            return last if isinstance(last, list) else field.contents()
        except (ValueError, IndexError, TypeError):
            raise UserError(f"{self.path} is damaged: its {key} cannot be read.") from None

    def raw(self, name: str) -> numpy.ndarray:
        """Return the bytes of a tensor, [..., rows, bytes of a row]. They are mapped for as long as the array lives."""
        # Not at the top: most commands read no GGUF file.
        import numpy
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        about = self.tensors[name]
        shape = quant_shape_to_byte_shape(about.shape, GGMLQuantizationType[about.type])
        return numpy.memmap(self.path, mode="r", offset=about.offset, shape=shape)

    def dequantized(self, name: str) -> numpy.ndarray:
        """Return a tensor in float32, with exactly the values that ggml gives it."""
        import numpy
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        about, raw = self.tensors[name], self.raw(name)
        rows = raw.size // raw.shape[-1]
        # Blocks do not depend on rows. The library takes 16 rows at a time, and longer rows are three times as fast.
        together = min(_ROWS_AS_ONE, rows & -rows)
        values = dequantize(raw.reshape(rows // together, -1), GGMLQuantizationType[about.type]).reshape(about.shape)
        return values if values.flags.writeable else numpy.array(values)


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file's, by its name or by its first bytes."""
    if not os.path.isfile(path):  # also False for a string that cannot be a path
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. Reading its vocabulary takes a second.

    Raises:
        UserError: it is not a GGUF file, is damaged, is one part of several, or gguf is not installed.
    """
    try:
        check_regular(path)
        return _read(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def _read(path: Path) -> GGUFFile:
    with open(path, "rb") as start:
        if start.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{path} is not a GGUF file, whose first four bytes are GGUF.")
    try:
        file, byte_order = _file_and_byte_order(path)
    # The library has no exception class of its own; numpy raises these for positions outside the file.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{path} is damaged or incomplete ({reason}); download or copy it again.") from None
    if byte_order != _NATIVE:
        raise UserError(f"{path} is in the byte order of other processors; convert it with gguf-convert-endian.")
    if (parts := file.get("split.count")) not in (None, 0, 1):
        raise UserError(f"{path} is one of {parts} parts of a model; join them with llama-gguf-split --merge.")
    return file


def _file_and_byte_order(path: Path) -> tuple[GGUFFile, str]:
    """Read the header; return the byte order as the library's code."""
    try:
        import gguf
        import numpy
    except ImportError:
        raise UserError(f"{path} is a GGUF file, which takes gguf; install it with: pip install gguf.") from None

    class Reader(gguf.GGUFReader):
        """Refuses contents beyond the end of the file, where numpy returns less than it was asked for, and tensors at
        other offsets than their sizes imply. Reads lists as Python lists: the library would make an array for each of
        the hundreds of thousands of entries of a vocabulary.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> numpy.ndarray:
            _check_end(self.data, offset + int(count) * numpy.dtype(dtype).itemsize)
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = gguf.GGUFValueType(self._get(orig_offs, numpy.uint32)[0])
            start, length = orig_offs + _LIST_HEADER, int(self._get(orig_offs + 4, numpy.uint64)[0])
            if kind == gguf.GGUFValueType.STRING:
                values, end = _texts(self.data, start, length)
            else:
                numbers = self._get(start, self.gguf_scalar_to_np[kind], length)
                values, end = numbers.tolist(), start + numbers.nbytes
            return end - orig_offs, [values], [0], [gguf.GGUFValueType.ARRAY, kind]

        def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
            # In ggml they lie one after another in the order of the header, and it reads no other files either.
            start, alignment, place = int(start_offs), int(self.alignment), 0
            self.described: dict[str, GGUFTensor] = {}
            for field in fields:
                name, tensor = _tensor(field)
                if name in self.described:
                    raise ValueError(f"it has two tensors {name}")
                if tensor.offset != place:
                    raise ValueError(
                        f"its tensor {name} is at {tensor.offset:,}, where those before it end at {place:,}"
                    )
                _check_end(self.data, start + place + tensor.num_bytes)
                self.described[name] = tensor._replace(offset=start + place)
                place += -(-tensor.num_bytes // alignment) * alignment

    reader = Reader(os.fspath(path))
    return GGUFFile(path, reader.fields, reader.described), reader.byte_order


def _check_end(data: numpy.ndarray, end: int) -> None:
    if end > len(data):
        raise ValueError(f"it ends after {len(data):,} bytes, before its contents do")


def _tensor(field: gguf.ReaderField) -> tuple[str, GGUFTensor]:
    """Return the name of the tensor that a part of the header describes, and the tensor, with the header's offset."""
    import gguf

    name = str(bytes(field.parts[1]), "utf-8")
    columns_first, (type,), (offset,) = (field.parts[part].tolist() for part in (3, 4, 5))
    kind = gguf.GGMLQuantizationType(type)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if columns_first and columns_first[0] % block:
        raise ValueError(f"its tensor {name} has rows of {columns_first[0]}, and {kind.name} has blocks of {block}")
    num_bytes = math.prod(columns_first) // block * block_bytes
    return name, GGUFTensor(kind.name, tuple(reversed(columns_first)), offset, num_bytes)


def _texts(data: numpy.ndarray, start: int, length: int) -> tuple[list[str], int]:
    """Read texts, each after its length in bytes; return them and where they end."""
    texts, view = [], data.data
    for _ in range(length):
        begin = start + _LENGTH.size
        end = begin + (_LENGTH.unpack_from(view, start)[0] if begin <= len(view) else 0)
        if end > len(view):
            raise ValueError(f"it ends after {len(view):,} bytes, before its contents do")
        texts.append(str(view[begin:end], "utf-8"))
        start = end
    return texts, start
