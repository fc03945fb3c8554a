"""Experts against their definition, with poisoned tokens and with NaN in the weights that no token chose."""

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

    def test_experts_that_no_token_chose_are_not_read(self):
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

    @pytest.mark.parametrize("width", [12, 7])
    def test_without_a_gate_it_is_a_squared_relu(self, width):
        """The first matrix has as many rows as the second has columns. The grouped product refuses a width of 7."""
        torch.manual_seed(0)
        x, w1, w2 = torch.randn(9, 16), torch.randn(5, width, 16), torch.randn(5, 16, width)
        weights, ids = ops.topk_softmax(x @ torch.randn(16, 5), 2)
        exact = torch.zeros(9, 16, dtype=torch.float64)
        for token, chosen in enumerate(ids.tolist()):
            for weight, expert in zip(weights[token].double(), chosen, strict=True):
                hidden = w1[expert].double() @ x[token].double()
                exact[token] += weight * (w2[expert].double() @ hidden.clamp(min=0).square())
        assert relative_error(ops.fused_experts(x, w1, w2, weights, ids), exact) <= 1e-5
        mlp = w2[0].double() @ (w1[0].double() @ x.double().T).clamp(min=0).square()
        assert relative_error(ops.mlp(x, w1[0], w2[0]), mlp.T) <= 1e-5


CHOICE = dict(top_k=3, n_group=4, topk_group=2, norm_topk_prob=True, scaling_factor=2.5)


class TestSigmoidChoice:
    def exact(self, logits, bias, top_k, n_group, topk_group, norm_topk_prob, scaling_factor):
        """Return the weights of a token by expert, in Python's floats."""
        scores = [1 / (1 + math.exp(-logit)) for logit in logits.double().tolist()]
        sums = [score + b for score, b in zip(scores, bias.double().tolist(), strict=True)]
        size = len(sums) // n_group
        groups = [range(first, first + size) for first in range(0, len(sums), size)]
        groups.sort(key=lambda group: -sum(sorted((sums[expert] for expert in group), reverse=True)[:2]))
        allowed = sorted((expert for group in groups[:topk_group] for expert in group), key=lambda one: -sums[one])
        total = sum(scores[expert] for expert in allowed[:top_k]) if norm_topk_prob else 1.0
        return {expert: scaling_factor * scores[expert] / total for expert in allowed[:top_k]}

    @pytest.mark.parametrize(
        "change", [{}, dict(n_group=1, topk_group=1), dict(norm_topk_prob=False), dict(top_k=1)], ids=str
    )
    def test_the_bias_chooses_and_the_weights_come_without_it(self, change):
        """Closed groups stay closed where all sums are negative (NVIDIA's code and mlx-lm count them as 0), and the
        weight of a single expert is normalised too (not in mlx-lm).
        """
        torch.manual_seed(1)
        logits, bias, arguments = torch.randn(50, 16), torch.randn(16) - 3.0, {**CHOICE, **change}
        weights, ids = ops.topk_sigmoid(logits, bias, **arguments)
        changed = ids.sort(-1)[0] != ops.topk_sigmoid(logits, torch.zeros(16), **arguments)[1].sort(-1)[0]
        assert changed.any(1).float().mean() > 0.5, "the bias matters here"
        for token in range(50):
            expected = self.exact(logits[token], bias, **arguments)
            assert ids[token].tolist() == list(expected)
            assert torch.allclose(weights[token].double(), torch.tensor(list(expected.values()), dtype=torch.float64))

    def test_a_poisoned_token_stays_alone_and_chooses_existing_experts(self):
        logits, bias = torch.randn(3, 16), torch.randn(16)
        logits[1] = math.nan
        weights, ids = ops.topk_sigmoid(logits, bias, **CHOICE)
        assert torch.isfinite(weights).all(1).tolist() == [True, False, True]
        assert ids.min() >= 0 and ids.max() < 16

    def test_scores_that_are_all_zero(self):
        """Weights stay finite where the sigmoid of all logits is 0."""
        weights, _ = ops.topk_sigmoid(torch.full((1, 16), -200.0), torch.randn(16), **CHOICE)
        assert torch.isfinite(weights).all()
