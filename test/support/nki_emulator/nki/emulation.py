"""Launches of kernels: their programs, the programs' instructions, and the memory they held."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nki.running import last_launch, launching
from nki.tensors import NkiTensor, Storage
from nki.values import (
    DTYPES,
    FLOATS,
    INTEGER_SENTINEL,
    PARTITIONS,
    PSUM_BANK_BYTES,
    PSUM_BANKS,
    Memory,
    NkiError,
    require,
    sbuf_partition_bytes,
)

__all__ = [
    "INTEGER_SENTINEL",
    "Instruction",
    "Launch",
    "NkiError",
    "NkiTensor",
    "last_launch",
    "launching",
    "stochastic_rounding",
]


@dataclass(frozen=True)
class Instruction:
    """One instruction of one program.

    engine: tensor, vector, scalar, gpsimd or dma.
    elements: per partition; of a matrix product, the columns of the moving operand.
    is_float32: the operands of a matrix product are float32.
    has_onezero: an operand of a matrix product is declared to be ones and zeros, or is the identity.
    cycles_per_element: of VectorE, from the costs in the documentation of `nki.isa`; 1 on other engines.
    flops: of a matrix product, without transposes.
    dma_elements: (bytes, how many) of the pieces that a DMA moves. See `nki.dma_elements`.
    """

    program: int
    engine: str
    op: str
    partitions: int
    elements: int
    hbm_read: int = 0
    hbm_written: int = 0
    is_float32: bool = False
    has_onezero: bool = False
    cycles_per_element: int = 1
    flops: int = 0
    dma_elements: tuple[tuple[int, int], ...] = ()


def stochastic_rounding() -> np.random.Generator | None:
    """Return the generator for rounding, from NEURON_RT_STOCHASTIC_ROUNDING_EN and _SEED, or None."""
    if os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN") != "1":
        return None
    return np.random.default_rng(int(os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "0")))


class Launch:
    """One call of a kernel: its programs, their instructions and the memory they held at most."""

    def __init__(self, programs: int, random: np.random.Generator | None = None):
        self.programs = programs
        self.random = random
        self.program = 0
        self.barriers = 0  # that the running program has met
        self.instructions: list[Instruction] = []
        self.peak_sbuf_bytes = 0
        self.peak_psum_banks = 0
        self._storages: list[Storage] = []
        self._shared: list[NkiTensor] = []
        self._next_shared = 0

    def start_program(self, program: int) -> None:
        self.program, self.barriers = program, 0
        self._storages = []
        self._next_shared = 0

    def finish_program(self) -> None:
        """Check the program's memory, which a compiler would have to allocate."""
        require(self._next_shared == len(self._shared), "the programs allocate different shared_hbm tensors")
        sbuf = self._peak(Memory.SBUF, lambda storage: storage.partition_bytes)
        psum = self._peak(Memory.PSUM, lambda storage: -(-storage.partition_bytes // PSUM_BANK_BYTES))
        most = sbuf_partition_bytes()
        require(sbuf <= most, f"SBUF: {sbuf} bytes per partition, of {most}")
        require(psum <= PSUM_BANKS, f"PSUM: {psum} banks, of {PSUM_BANKS}")
        self.peak_sbuf_bytes = max(self.peak_sbuf_bytes, sbuf)
        self.peak_psum_banks = max(self.peak_psum_banks, psum)

    def _peak(self, memory: Memory, size: Callable[[Storage], int]) -> int:
        changes: Counter[int] = Counter()
        for storage in self._storages:
            if storage.memory is memory and storage.first_use is not None:
                changes[storage.first_use] += size(storage)
                changes[storage.last_use + 1] -= size(storage)
        held = peak = 0
        for time in sorted(changes):
            held += changes[time]
            peak = max(peak, held)
        return peak

    def allocate(self, shape: Sequence[int], dtype: str, memory: Memory) -> NkiTensor:
        """Allocate memory full of NaN (integers: a sentinel). Programs get the same `shared_hbm` tensors, in order."""
        shape = tuple(shape)
        if memory.is_on_chip:
            require(len(shape) >= 2, f"a tensor in {memory.value} needs a partition and a free dimension, not {shape}")
            require(shape[0] <= PARTITIONS, f"{shape[0]} partitions; there are {PARTITIONS}")
        if memory is Memory.SHARED_HBM and self.program > 0:
            require(self._next_shared < len(self._shared), "the programs allocate different shared_hbm tensors")
            tensor = self._shared[self._next_shared]
            self._next_shared += 1
            require(
                (tensor.shape, tensor.dtype) == (shape, dtype), "the programs allocate different shared_hbm tensors"
            )
            return tensor
        sentinel = math.nan if dtype in FLOATS else INTEGER_SENTINEL
        storage = Storage(np.full(shape, sentinel, DTYPES[dtype]), memory)
        self._storages.append(storage)
        tensor = NkiTensor(storage.array, storage)
        if memory is Memory.SHARED_HBM:
            self._shared.append(tensor)
            self._next_shared += 1
        return tensor

    def record(self, engine: str, op: str, partitions: int, elements: int, **more: Any) -> None:
        self.instructions.append(Instruction(self.program, engine, op, partitions, elements, **more))

    def use(self, storage: Storage) -> None:
        """Record that the next instruction reads or writes this storage."""
        now = len(self.instructions)
        storage.first_use = now if storage.first_use is None else storage.first_use
        storage.last_use = now

    def count(self, engine: str | None = None, op: str | None = None, program: int = 0) -> int:
        """Count the instructions of one program; of one engine and with one name, if given."""
        return sum(
            i.program == program and engine in (None, i.engine) and op in (None, i.op) for i in self.instructions
        )

    @property
    def hbm_bytes(self) -> int:
        """Return the bytes read from and written to HBM by all programs together."""
        return sum(i.hbm_read + i.hbm_written for i in self.instructions)
