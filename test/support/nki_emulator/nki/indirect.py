"""Access patterns over HBM at places that are known only when the kernel runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import Memory, NkiError, require
from numpy.lib.stride_tricks import as_strided

MAX_BYTES = 2**32  # an offset in bytes has 32 bits


class IndirectView(NkiTensor):
    """A pattern of [stride, count] that starts at one index, or whose rows start at an index each; for DMA only.

    An index counts along dimension `indirect_dim` of the tensor, whatever the pattern. Sources: "NKI Access Patterns"
    and `nki.isa.dma_copy` in the Neuron SDK's documentation (release 2.32). They do not define a negative index, or a
    pattern that begins within the tensor and ends outside it. Both are refused.

    Args:
        base: a whole tensor in HBM.
        pattern: [stride, count] of each dimension, in elements.
        offset: elements from the place of the index.
        indices: int32 or uint32 in SBUF, [1, 1], or [count of the first dimension, 1] if `is_vector`.
    """

    def __init__(
        self,
        base: NkiTensor,
        pattern: Sequence[Sequence[int]],
        offset: int,
        indices: NkiTensor,
        is_vector: bool,
        indirect_dim: int,
    ):
        strides, counts = zip(*pattern, strict=True)
        require(not base.buffer.is_on_chip, f"the tensor is in {base.buffer.value}; indirect access is to HBM")
        require(base.array.size == base.storage.array.size, "ap addresses a whole tensor, and this is a part of one")
        require(base.array.flags.c_contiguous, "ap addresses a tensor whose dimensions are in order")
        require(base.array.nbytes <= MAX_BYTES, f"{base.array.nbytes} bytes; an offset reaches {MAX_BYTES}")
        require(indices.buffer is Memory.SBUF, f"the offset is in {indices.buffer.value}; it must be in SBUF")
        require(indices.dtype in ("int32", "uint32"), f"the offset is {indices.dtype}; it must be int32 or uint32")
        rows = counts[0] if is_vector else 1
        require(indices.shape == (rows, 1), f"the offset is {indices.shape}, not {(rows, 1)}")
        self.limit = base.shape[indirect_dim]
        self.index_stride = math.prod(base.shape[indirect_dim + 1 :])
        if is_vector:
            require(indirect_dim == 0, "a vector_offset goes along dimension 0")
            require(strides[0] == self.index_stride, f"the first stride is {strides[0]}, not {self.index_stride}")
        self.flat = base.array.reshape(-1)
        self.strides, self.offset, self.indices, self.is_vector = strides, offset, indices, is_vector
        super().__init__(as_strided(self.flat[:1], counts, [0] * len(counts)), base.storage)

    def __getitem__(self, key: object) -> NkiTensor:
        raise NkiError("an indirect view has no views of its own")

    def _view(self, array: np.ndarray) -> NkiTensor:
        raise NkiError("an indirect view has no views of its own")

    def places(self, skips: bool) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield parts of the first dimension, each with the memory that it stands for.

        An index outside the dimension is an error, or leaves its part out if `skips`.
        """
        last_launch().use(self.indices.storage)
        shape = (1, *self.shape[1:]) if self.is_vector else self.shape
        reach = 1 + sum((count - 1) * stride for count, stride in zip(shape, self.strides, strict=True))
        byte_strides = [stride * self.flat.itemsize for stride in self.strides]
        for row, index in enumerate(self.indices.array[:, 0].tolist()):
            require(index >= 0, f"index {index} is negative")
            require(skips or index < self.limit, f"index {index} of a dimension of {self.limit}")
            if index < self.limit:
                start = self.offset + index * self.index_stride
                require(start + reach <= self.flat.size, f"from index {index} the pattern ends outside the tensor")
                part = slice(row, row + 1) if self.is_vector else slice(None)
                yield part, as_strided(self.flat[start:], shape, byte_strides)
