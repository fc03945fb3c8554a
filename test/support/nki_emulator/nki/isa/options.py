"""Options that instructions take beside their operands."""

from __future__ import annotations

import enum

from nki.values import platform


class engine(enum.Enum):
    """The engine that an instruction runs on; `unknown` leaves the choice to the compiler."""

    unknown = "unknown"
    tensor = "tensor"
    vector = "vector"
    scalar = "scalar"
    gpsimd = "gpsimd"
    sync = "sync"


class dge_mode(enum.Enum):
    """The maker of a DMA's descriptors: GpSimd (swdge), its own block (hwdge), or the host before the run (none)."""

    unknown = "unknown"
    none = "none"
    swdge = "swdge"
    hwdge = "hwdge"


class dma_engine(enum.Enum):
    """The queue that moves the data."""

    dma = "dma"
    gpsimd_dma = "gpsimd_dma"


class oob_mode(enum.Enum):
    """The effect of an index out of range: an error, or nothing is moved for it."""

    error = "error"
    skip = "skip"


class matmul_perf_mode(enum.Enum):
    """Modes in which TensorE runs a product; the fast modes are not emulated."""

    none = "none"
    double_row = "double_row"
    double_row_gen3 = "double_row_gen3"
    double_pixel = "double_pixel"


class reduce_cmd(enum.Enum):
    """The command for an engine's register of reductions."""

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
    """Return the generation of the platform's cores."""
    return {"trn2": nc_version.gen3, "trn3": nc_version.gen4}[platform()]
