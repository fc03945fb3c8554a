"""Norms against their definitions in float64."""

import pytest
import torch
from torch.nn import functional as F

from granite4_neuron import ops

pytestmark = pytest.mark.versions


class TestNorm:
    def test_rms_norm(self):
        x, weight = torch.randn(3, 5, 16), torch.randn(16)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), exact, atol=1e-5)

    @pytest.mark.parametrize("groups", [1, 4])
    def test_the_gate_comes_before_the_norm_of_each_group(self, groups):
        x, z, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
        gated = (x.double() * F.silu(z.double())).view(3, groups, -1)
        exact = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 16) * weight
        assert torch.allclose(ops.rms_norm_gated(x, z, weight, 1e-5, groups).double(), exact, atol=1e-5)
