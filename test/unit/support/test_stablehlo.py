"""Each fault that `test.support.stablehlo` looks for, planted once."""

import pytest
import torch

pytest.importorskip("torch_mlir", reason="torch_mlir is not installed; the extra dev has it")
pytest.importorskip("jax", reason="jax is not installed; the extra dev has it")

from granite4_neuron.planning.analysis.torch_lowering import lower
from test.support.stablehlo import findings, text_findings
from test.unit.support.test_fx_lint import ROWS, graph_of

COLUMNS = torch.zeros(4, 4, dtype=torch.int64)
FAULTS = {
    "is in float64": lambda x, state: x.double() * 2,
    "is a sort": lambda x, state: x.sort(-1).values,
    "has rank 5": lambda x, state: x.view(2, 2, 2, 2, 1) * 2,
    "has 16 indices": lambda x, state: state.scatter_(1, COLUMNS, x).sum(),
    "has 6 indices": lambda x, state: x.index_select(0, ROWS.repeat(3)) * 2,
    "has 8 indices": lambda x, state: torch.ops.aten.index_put_(state, [None, ROWS], x[:, :2]).sum(),
    "places in a sequence": lambda x, state: x.index_select(1, ROWS) * 2,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    found = findings(lower(graph_of(FAULTS[fault])).text, 4)
    assert any(fault.split(",")[0] in finding for finding in found), found


def test_rows_and_numbers_are_accepted():
    graph = graph_of(lambda x, state: state.copy_(x.index_select(0, ROWS.repeat(2)) * 0.5).sum())
    assert findings(lower(graph).text, 4) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("%6 = stablehlo.dynamic_iota %5, dim = 0 : (tensor<1xi64>) -> tensor<128xi32>", "depends on values"),
        ("%6 = stablehlo.add %5, %4 : tensor<?x4xf32>", "depends on values"),
        ("%6 = stablehlo.add %5, %4 : tensor<f64>", "is in float64"),
        ("%6 = stablehlo.constant dense<0.000000e+00> : tensor<2xf64>", "is in float64"),
    ],
)
def test_an_unexpected_line_is_refused(line, fault):
    assert text_findings(line)[0].startswith(fault)
