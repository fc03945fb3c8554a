"""The dtypes of weights and activations, by torch's names, which config.json also uses."""

from __future__ import annotations

from typing import NamedTuple


class _Dtype(NamedTuple):
    num_bytes: int
    stored: str


_TABLE = {"float32": _Dtype(4, "F32"), "bfloat16": _Dtype(2, "BF16"), "float16": _Dtype(2, "F16")}
DTYPES = tuple(_TABLE)
DTYPE_BYTES = {name: dtype.num_bytes for name, dtype in _TABLE.items()}  # of a number
STORED_DTYPES = {dtype.stored: name for name, dtype in _TABLE.items()}  # by their names in safetensors
