"""This project's SSD kernel and `ssd` of AWS's nki-library give the same outputs and final states in the emulator.

    NKI_LIBRARY_SRC=nki-library pytest -s test/integration/test_nki_library_ssd.py

Each line of the table that -s shows has the errors of outputs and final states of both kernels against the recurrence
in float64, relative to its largest value.
"""

import math
import os

import pytest
import torch

from benchmarks.kernels import command as kernels
from benchmarks.kernels import nki_library
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import ssd_chunk_scan
from test.support.nki_cases import error, scan_inputs, scan_oracle
from test.support.nki_library import SOURCE, library_folder, provided_library
from test.support.nki_library_ssd import has_ssd, ssd_arguments, ssd_kernel, ssd_results

pytestmark = pytest.mark.versions

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PADDING = 37
SHAPES = {str(tuple(shape.values())): shape for shape in map(nki_library.shape_of, nki_library.TP_DEGREES)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(scope="module")
def nkilib_ssd():
    folder = library_folder()
    if not has_ssd(folder):
        pytest.skip(f"the nki-library in {folder} has no kernel ssd, which came with SDK 2.30")
    with provided_library(folder):
        yield ssd_kernel()


def both(nkilib_ssd, inputs):
    """Return the errors of outputs and final states, of this project's kernel and of the library's."""
    exact = scan_oracle(inputs)
    ours = launch(ssd_chunk_scan, *inputs.values())
    theirs = ssd_results(*launch(nkilib_ssd, *ssd_arguments(inputs)))
    return [[error(value, true) for value, true in zip(results, exact, strict=True)] for results in (ours, theirs)]


@every_shape
@pytest.mark.parametrize(
    ("dtype", "length"), [(torch.float32, length) for length in nki_library.LENGTHS] + [(torch.bfloat16, 512)]
)
def test_both_equal_the_recurrence(nkilib_ssd, shape, dtype, length):
    inputs = scan_inputs(1, length, dtype=dtype, max_A=4.0, **shape)
    inputs["dt"][:, -PADDING:] = 0
    errors = both(nkilib_ssd, inputs)
    sizes = f"{shape['heads']} x {shape['head_dim']}, length {length}, {dtype}"
    print(f"\n{sizes}: ours {errors[0][0]:.1e} {errors[0][1]:.1e}", end="")
    print(f", nkilib {errors[1][0]:.1e} {errors[1][1]:.1e}")
    assert max(map(max, errors)) <= TOLERANCE[dtype]


def test_only_one_takes_fast_decays(nkilib_ssd):
    """The sum of dt * A over a chunk goes below -88, and the library computes exp of minus that sum."""
    ours, theirs = both(nkilib_ssd, scan_inputs(1, 256, heads=12))
    assert max(ours) <= TOLERANCE[torch.float32]
    assert math.inf in theirs


def test_extension_is_exact(nkilib_ssd):
    one, two, three = (
        kernels.cost_of(nkilib_ssd, ssd_arguments(scan_inputs(1, blocks * kernels.BLOCK, heads=4)))
        for blocks in (1, 2, 3)
    )
    extended = one.extended(two, 2)
    assert (extended.instructions, extended.hbm_bytes) == (three.instructions, three.hbm_bytes)


def test_report(nkilib_ssd, capsys):
    assert nki_library.main([os.environ[SOURCE]]) == 0
    output = capsys.readouterr().out
    assert output.count("nkilib_ssd") == output.count("ssd_chunk_scan") == len(nki_library.TP_DEGREES) * 3


def test_a_folder_without_the_kernel_is_reported(capsys, tmp_path):
    assert nki_library.main([str(tmp_path)]) == 2
    assert "has no kernel ssd" in capsys.readouterr().err
