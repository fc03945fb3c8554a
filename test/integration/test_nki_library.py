"""The emulator runs kernels of AWS's public nki-library, and the results are compared with AWS's own references.

    NKI_LIBRARY_SRC=nki-library pytest -s test/integration/test_nki_library.py

Each line of the table that -s shows is one launch: its error against the reference relative to the reference's
largest value, and what it did.
"""

import nki
import numpy as np
import pytest
import torch

from test.support.nki_library import library_folder, member, provided_library
from test.support.nki_library_cases import Case, cases, to_torch

pytestmark = pytest.mark.versions

CASES = dict(cases())


@pytest.fixture(scope="module", autouse=True)
def library():
    with provided_library(library_folder()):
        yield


def launch(case: Case) -> list[np.ndarray]:
    arrays = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in case.inputs.items()}
    kernel = member(case.kernel) if isinstance(case.kernel, str) else case.kernel
    kernel = kernel if isinstance(kernel, nki.Kernel) else nki.Kernel(kernel)
    results = nki.simulate(kernel[case.programs])(**arrays, **case.options)
    if case.written:
        return [arrays[name] for name in case.written]
    return list(results) if isinstance(results, list | tuple) else [results]


def expected(case: Case) -> list[np.ndarray]:
    results = case.reference(**{name: to_torch(value) for name, value in case.inputs.items()})
    results = list(results.values()) if isinstance(results, dict) else results
    results = list(results) if isinstance(results, list | tuple) else [results]
    return [result.float().numpy() if isinstance(result, torch.Tensor) else result for result in results]


def difference(value: np.ndarray, exact: np.ndarray) -> float:
    value, exact = np.asarray(value, np.float64).reshape(exact.shape), np.asarray(exact, np.float64)
    if not np.isfinite(value).all():
        return float("inf")
    return float(np.abs(value - exact).max() / max(np.abs(exact).max(), 1e-30))


@pytest.mark.parametrize("name", CASES)
def test_equals_its_own_reference(name):
    case = CASES[name]()
    outputs, exact = launch(case), expected(case)
    if name.startswith("rmsnorm_quant"):  # a row of float8 is followed by its scale
        outputs = [outputs[0].view("float8_e4m3")[..., : exact[0].shape[-1]]]
    worst = max(difference(output, reference) for output, reference in zip(outputs, exact, strict=True))
    from nki.emulation import last_launch

    launched = last_launch()
    print(f"\n{name:90} {worst:8.1e} {len(launched.instructions):7} instructions {launched.hbm_bytes / 1e6:8.2f} MB")
    assert worst <= case.tolerance
