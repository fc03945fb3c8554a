"""What instructions are told beside their operands."""

from __future__ import annotations

import enum


class engine(enum.Enum):
    """Where an instruction runs; `unknown` leaves the choice to the compiler."""

    unknown = "unknown"
    tensor = "tensor"
    vector = "vector"
    scalar = "scalar"
    gpsimd = "gpsimd"


class dge_mode(enum.Enum):
    """Who makes a DMA's descriptors: GpSimd (swdge), a block of its own (hwdge), or the host before the run (none)."""

    unknown = "unknown"
    none = "none"
    swdge = "swdge"
    hwdge = "hwdge"


class dma_engine(enum.Enum):
    """Which queue moves."""

    dma = "dma"
    gpsimd_dma = "gpsimd_dma"


class oob_mode(enum.Enum):
    """What an index out of range does: an error, or nothing is moved for it."""

    error = "error"
    skip = "skip"


class matmul_perf_mode(enum.Enum):
    """How TensorE runs a product; the fast modes are not emulated."""

    none = "none"
    double_row = "double_row"
    double_row_gen3 = "double_row_gen3"
    double_pixel = "double_pixel"


class reduce_cmd(enum.Enum):
    """What becomes of an engine's register of reductions."""

    idle = "idle"
    reset = "reset"
    reduce = "reduce"
    reset_reduce = "reset_reduce"
    load_reduce = "load_reduce"


class nc_version(enum.IntEnum):
    """Generations of NeuronCores."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


def get_nc_version() -> nc_version:
    """Trainium2's."""
    return nc_version.gen3
