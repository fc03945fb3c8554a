"""A step of the recurrence against its float64 definition."""

import pytest
import torch
from torch.nn import functional as F

from granite4_neuron import ops
from test.support import oracles
from test.support.oracles import relative_error
from test.unit.ops.test_mamba_chunk_scan import scan_inputs

pytestmark = pytest.mark.versions


class TestSelectiveStateStep:
    @pytest.mark.parametrize("groups", [1, 2])
    def test_equals_the_recurrence(self, groups):
        inputs = scan_inputs(3, 5, 4, 8, groups, 16)
        state, outputs = inputs["state"].clone(), []
        for t in range(5):
            x, dt, B, C = (inputs[name][:, t] for name in ("x", "dt", "B", "C"))
            outputs.append(ops.selective_state_step(state, x, dt, inputs["A"], B, C, inputs["D"]))
        exact_y, exact_state = oracles.ssm_recurrence(**inputs)
        assert relative_error(torch.stack(outputs, 1), exact_y) <= 1e-5
        assert relative_error(state, exact_state) <= 1e-5

    def test_expanded_arguments_give_the_same(self):
        """Callers of mamba_ssm expand dt, A, D and dt_bias to every channel."""
        inputs = scan_inputs(2, 1, 4, 8, 1, 16)
        x, B, C = (inputs[name][:, 0] for name in ("x", "B", "C"))
        raw, bias, z = torch.randn(2, 4), torch.randn(4), torch.randn(2, 4, 8)
        tied, expanded = inputs["state"].clone(), inputs["state"].clone()
        y = ops.selective_state_step(tied, x, raw, inputs["A"], B, C, inputs["D"], z, bias, True)
        y_expanded = ops.selective_state_step(
            expanded,
            x,
            raw[..., None].expand(-1, -1, 8),
            inputs["A"][:, None, None].expand(-1, 8, 16),
            B,
            C,
            inputs["D"][:, None].expand(-1, 8),
            z,
            bias[:, None].expand(-1, 8),
            True,
        )
        assert torch.allclose(tied, expanded, atol=1e-6) and torch.allclose(y, y_expanded, atol=1e-5)
        inputs["dt"] = F.softplus(raw + bias)[:, None]
        exact_y, _ = oracles.ssm_recurrence(**inputs)
        assert relative_error(y, exact_y[:, 0] * F.silu(z.double())) <= 1e-5
