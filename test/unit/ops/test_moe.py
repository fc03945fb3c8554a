"""Experts against their definition, with poisoned tokens and weights that nobody chose."""

import math

import pytest
import torch

from granite4_neuron import ops
from test.support import oracles
from test.support.oracles import relative_error

pytestmark = pytest.mark.versions


class TestExperts:
    @pytest.mark.parametrize("tokens", [1, 2, 7, 64])
    @pytest.mark.parametrize("top_k", [1, 3, 5])
    def test_equals_the_definition(self, tokens, top_k):
        torch.manual_seed(tokens)
        x, router = torch.randn(tokens, 16), torch.randn(5, 16)
        w1, w2 = torch.randn(5, 24, 16) / 4, torch.randn(5, 16, 12) / 4
        weights, ids = ops.topk_softmax(x @ router.T, top_k)
        assert torch.allclose(weights.sum(-1), torch.ones(tokens))
        output = ops.fused_experts(x, w1, w2, weights, ids)
        assert torch.allclose(output.double(), oracles.mixture_of_experts(x, router, w1, w2, top_k), atol=1e-4)

    def test_widths_that_the_grouped_product_refuses(self):
        x, router, w1, w2 = torch.randn(9, 18), torch.randn(5, 18), torch.randn(5, 14, 18), torch.randn(5, 18, 7)
        weights, ids = ops.topk_softmax(x @ router.T, 2)
        exact = oracles.mixture_of_experts(x, router, w1, w2, 2)
        assert relative_error(ops.fused_experts(x, w1, w2, weights, ids), exact) <= 1e-5

    def test_a_dtype_that_the_grouped_product_refuses(self):
        x, router = torch.randn(9, 16).double(), torch.randn(5, 16).double()
        w1, w2 = torch.randn(5, 24, 16).double(), torch.randn(5, 16, 12).double()
        weights, ids = ops.topk_softmax((x @ router.T).float(), 2)
        output, exact = ops.fused_experts(x, w1, w2, weights, ids), oracles.mixture_of_experts(x, router, w1, w2, 2)
        assert output.dtype == torch.float64 and relative_error(output, exact) <= 1e-5

    def test_experts_that_nobody_chose_are_not_read(self):
        x, w1, w2 = torch.randn(3, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
        w1[3:], w2[3:] = math.nan, math.nan
        ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
        assert torch.isfinite(ops.fused_experts(x, w1, w2, torch.full((3, 2), 0.5), ids)).all()

    def test_a_poisoned_token_stays_alone(self):
        x, w1, w2 = torch.randn(4, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
        x[2] = math.nan
        weights, ids = ops.topk_softmax(x @ torch.randn(16, 5), 2)
        finite = torch.isfinite(ops.fused_experts(x, w1, w2, weights, ids)).all(1)
        assert finite.tolist() == [True, True, False, True]
