"""Products of bfloat16 by AMX, and in its order of sums where a processor does not have it."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from granite4_neuron.devices.cpu import build
from granite4_neuron.ops.formats import int4, int8, lossless12

DRIVER = Path(__file__).parents[4] / "support" / "tile_sums.cpp"
FORMATS = {"plain": None, "int8": int8.FORMAT, "int4": int4.FORMAT, "lossless12": lossless12.FORMAT}
ROWS = 70
COUNTS = (1, 2, 3, 4, 5, 16, 17, 33, 300)


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """A function for each format: (values, scales or None, x) to y."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("AMX's order of sums needs a processor with AVX-512")
    order = [] if build._may_use_amx() else ["-DGRANITE4_TILE_SUMS"]
    built = tmp_path_factory.mktemp("tile_sums") / "tile_sums.so"
    flags = [flag for flag in build._FLAGS if not flag.startswith("-O")] + ["-O1", *build._QUIET]
    flags += [*build._processor_flags(), *build._including_formats(build._SOURCES, built.parent)]
    flags += [*order, "-DGRANITE4_FORMAT=plain"]
    includes = [f"-I{build._SOURCES}", f"-isystem{build._TORCH / 'include'}"]
    libraries = [f"-L{build._TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [*build._compiler(), *flags, *includes, str(DRIVER), "-shared", "-o", str(built), *libraries]
    subprocess.run(command, check=True, capture_output=True)
    library = ctypes.CDLL(str(built))

    def multiply(name, values, scales, x, rows):
        y = torch.full((len(x), rows), torch.nan)
        tensors = [None if each is None else each.contiguous() for each in (values, scales, x)]
        values, scales, x = (None if each is None else ctypes.c_void_p(each.data_ptr()) for each in tensors)
        count, columns = tensors[2].shape
        sizes = ctypes.c_int64(rows), ctypes.c_int64(columns)
        library[name](values, scales, *sizes, x, ctypes.c_int64(count), ctypes.c_void_p(y.data_ptr()))
        return y

    return multiply


def in_order(x, weight, scales):
    """Multiply in the order that Intel's manual gives for TDPBF16PS: by blocks of 32 columns, of which even and odd
    ones are added up apart. Products of two bfloat16 are exact in float32.

    Args:
        x: [vectors, columns]; weight: [rows, columns]; both bfloat16 in float32.
        scales: of each row and block, [rows, blocks], or None.
    """
    total = np.zeros((len(x), len(weight)), np.float32)
    for block, first in enumerate(range(0, x.shape[1], 32)):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for column in range(first, min(first + 32, x.shape[1])):
            sums[column % 2] += np.outer(x[:, column], weight[:, column])
        both = sums[0] + sums[1]
        if scales is not None:  # fused: the product is exact in float64, and the sum is rounded once more at most
            total = (both.astype(np.float64) * scales[:, block] + total).astype(np.float32)
        else:
            total += both
    return total


def numbers_of(name, weight):
    """Return (stored values, stored scales, numbers to multiply by, their scales by block, their scales by row)."""
    if name == "plain":
        return weight, None, weight.float().numpy(), None, None
    stored = FORMATS[name].quantize(weight)
    scales = stored.scales.float()
    if name == "lossless12":
        return stored.values, scales, weight.float().numpy(), None, None
    if name == "int8":
        return stored.values, scales, stored.values.float().numpy(), None, scales.view(-1).numpy()
    values = stored.values.view(len(weight), -1)
    numbers = torch.stack([values & 15, values >> 4], -1).flatten(1).float() - 8
    return stored.values, scales, numbers[:, : weight.shape[1]].numpy(), scales.view(len(weight), -1).numpy(), None


@pytest.mark.slow
@pytest.mark.parametrize("columns", [32, 33, 50, 96, 768])
@pytest.mark.parametrize("name", FORMATS)
def test_any_number_of_vectors_has_the_order_of_amx(products, name, columns):
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(ROWS, columns, generator=generator).bfloat16()
    x = torch.randn(max(COUNTS), columns, generator=generator).bfloat16()
    values, scales, numbers, of_blocks, of_rows = numbers_of(name, weight)
    expected = in_order(x.float().numpy(), numbers, of_blocks)
    if of_rows is not None:
        expected *= of_rows
    for count in COUNTS:
        y = products(name, values, scales, x[:count], ROWS)
        np.testing.assert_array_equal(y.numpy(), expected[:count], err_msg=f"{count} vectors")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("weight, x", [(1e-39, 1.0), (1.0, 1e-39), (1e-39, 1e30), (1e30, 1e-39), (1e-30, 1e-9)])
def test_subnormal_numbers_count_as_zeros(products, weight, x, count):
    """So do subnormal products, and subnormal numbers whose product would be normal. Later the mode is restored."""
    weight, x = torch.full((32, 32), weight).bfloat16(), torch.full((count, 32), x).bfloat16()
    assert torch.equal(products("plain", weight, None, x, 32), torch.zeros(count, 32))
    assert (torch.full((32,), 1e-39) * 0.5).all()
