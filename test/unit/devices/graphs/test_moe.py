"""The experts' paths in compiled graphs, in plain torch on the CPU, equal the definition."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron import ops
from granite4_neuron.devices.graphs import moe
from granite4_neuron.devices.graphs.moe import ALL, BLOCKS, CHOSEN, ExpertPath, expert_path, with_capacity
from granite4_neuron.devices.graphs.operators import topk_sigmoid, topk_softmax
from test.support.oracles import relative_error

pytestmark = pytest.mark.versions

EXPERTS, HIDDEN, WIDTH = 6, 16, 12


def weights_of_experts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) / 4
    return w1, torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) / 4


def definition(x, w1, w2, weights, ids):
    """Compute token by token and choice by choice, in float64."""
    output = torch.zeros(x.shape, dtype=torch.float64)
    for token, (token_weights, experts) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(token_weights, experts, strict=True):
            gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
            output[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
    return output


def routed(tokens, top_k, bias, seed=0):
    """Return weights and experts of a random router that prefers experts by `bias`."""
    generator = torch.Generator().manual_seed(seed)
    return ops.topk_softmax(torch.randn(tokens, EXPERTS, generator=generator) + torch.tensor(bias), top_k)


UNIFORM, ONE, FEW = [0.0] * 6, [0.0, 0.0, 99.0, 0.0, 0.0, 0.0], [50.0, 50.0, 0.0, 0.0, 0.0, 25.0]


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("most", [0, 1, None])
def test_forms_of_few_tokens(tokens, most, monkeypatch):
    """Weights are fetched by index only if the tokens choose less than all of them and are not too many."""
    form = partial(moe.fused_experts, most_gathered=most)
    x, (w1, w2), (weights, ids) = torch.randn(tokens, HIDDEN), weights_of_experts(), routed(tokens, 1, UNIFORM)
    fetched = []
    select = torch.Tensor.index_select
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *a: fetched.append(a[0].shape) or select(*a))
    assert relative_error(form(x, w1, w2, weights, ids), definition(x, w1, w2, weights, ids)) <= 1e-5
    assert fetched == ([w1.shape, w2.shape] if most != 0 and tokens == 1 else [])


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("bias", [UNIFORM, ONE, FEW], ids=["uniform", "all to one", "a few"])
@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("path", [ExpertPath(CHOSEN), ExpertPath(ALL), 2, 5, 64], ids=str)
def test_equals_the_definition(path, tokens, bias, input_first):
    x, (w1, w2), (weights, ids) = torch.randn(tokens, HIDDEN), weights_of_experts(), routed(tokens, 3, bias)
    exact = definition(x, w1, w2, weights, ids)
    path = path if isinstance(path, ExpertPath) else with_capacity(ids.numel(), path)
    if input_first:
        w1, w2 = (w.transpose(1, 2).contiguous() for w in (w1, w2))
    output = moe.fused_experts(x, w1, w2, weights, ids, path=path, input_first=input_first)
    assert relative_error(output, exact) <= 1e-5


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, EXPERTS),
    capacity=st.integers(2, 12),
    bias=st.lists(st.sampled_from([0.0, 1.0, 3.0, 99.0]), min_size=EXPERTS, max_size=EXPERTS),
    seed=st.integers(0, 2**16),
)
def test_no_routing_drops_a_token(tokens, top_k, capacity, bias, seed):
    x, (w1, w2), (weights, ids) = torch.randn(tokens, HIDDEN), weights_of_experts(), routed(tokens, top_k, bias, seed)
    output = moe.fused_experts(x, w1, w2, weights, ids, path=with_capacity(ids.numel(), capacity))
    assert relative_error(output, definition(x, w1, w2, weights, ids)) <= 1e-5


@pytest.mark.parametrize(("top_k", "capacity"), [(1, 4), (1, 5), (2, 4), (3, 7)])
def test_there_are_as_many_blocks_as_the_worst_routing_needs(top_k, capacity):
    """All tokens go to as few experts as possible. With one expert no block is spare; one block less is too few."""
    tokens = 4 * capacity
    x, (w1, w2) = torch.randn(tokens, HIDDEN), weights_of_experts()
    weights, ids = torch.full((tokens, top_k), 1 / top_k), torch.arange(top_k).expand(tokens, -1)
    path = with_capacity(ids.numel(), capacity)
    exact = definition(x, w1, w2, weights, ids)
    assert relative_error(moe.fused_experts(x, w1, w2, weights, ids, path=path), exact) <= 1e-5
    needed = top_k * (tokens // capacity - 1) + 1  # one row of the first expert is unused
    assert needed <= path.num_blocks < needed + top_k
    fewer = ExpertPath(BLOCKS, capacity, needed - 1)
    with pytest.raises((IndexError, AssertionError)):
        assert relative_error(moe.fused_experts(x, w1, w2, weights, ids, path=fewer), exact) <= 1e-5


@pytest.mark.parametrize("poisoned", [0, 3, 8])
@pytest.mark.parametrize("path", [ExpertPath(CHOSEN), ExpertPath(ALL), 2, 4, 64], ids=str)
def test_a_token_of_nan_stays_alone(path, poisoned):
    """The token's logits are NaN too, so it goes to arbitrary experts. Padding is such a token."""
    x, (w1, w2), router = torch.randn(9, HIDDEN), weights_of_experts(), torch.randn(HIDDEN, EXPERTS)
    x[poisoned] = math.nan
    weights, ids = topk_softmax(x @ router, 3)
    path = path if isinstance(path, ExpertPath) else with_capacity(ids.numel(), path)
    output = moe.fused_experts(x, w1, w2, weights, ids, path=path)
    others = [token for token in range(9) if token != poisoned]
    exact = definition(x[others], w1, w2, weights[others], ids[others])
    assert output[poisoned].isnan().all()
    assert relative_error(output[others], exact) <= 1e-5


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 400])
def test_running_sum(tokens):
    values = torch.randint(0, 4, (tokens, 5)).float()
    assert torch.equal(moe._running_sum(values), values.cumsum(0))


@pytest.mark.parametrize("tokens", [5, 100], ids=["in pairs", "one after another"])
class TestTopK:
    def test_equals_torch(self, tokens):
        logits = torch.randn(tokens, 72)
        (weights, ids), (expected_weights, expected_ids) = (f(logits, 10) for f in (topk_softmax, ops.topk_softmax))
        assert torch.equal(ids, expected_ids)
        assert torch.equal(weights, expected_weights)

    def test_of_equal_logits_each_expert_is_chosen_once(self, tokens):
        weights, ids = topk_softmax(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], *[[0.0] * 5] * tokens]), 3)
        assert ids.tolist() == [[1, 2, 3], *[[0, 1, 2]] * tokens]
        assert torch.allclose(weights, torch.tensor(1 / 3))

    def test_nan_gives_experts_that_exist(self, tokens):
        _, ids = topk_softmax(torch.full((tokens, 5), math.nan), 3)
        assert 0 <= int(ids.min()) <= int(ids.max()) < 5


@pytest.mark.parametrize("tokens", [5, 100], ids=["in pairs", "one after another"])
@pytest.mark.parametrize("n_group", [1, 4])
class TestSigmoidChoice:
    def test_equals_torch(self, tokens, n_group):
        logits, bias = torch.randn(tokens, 72), torch.randn(72)
        arguments = bias, 6, n_group, (n_group + 1) // 2, True, 2.5
        (weights, ids), (expected_weights, expected_ids) = (
            f(logits, *arguments) for f in (topk_sigmoid, ops.topk_sigmoid)
        )
        assert torch.equal(ids, expected_ids)
        assert (weights - expected_weights).abs().max() <= 1e-6

    def test_nan_gives_experts_that_exist(self, tokens, n_group):
        logits = torch.randn(tokens, 8)
        logits[2] = math.nan
        weights, ids = topk_sigmoid(logits, torch.randn(8), 3, n_group, (n_group + 1) // 2, True, 1.0)
        assert 0 <= int(ids.min()) <= int(ids.max()) < 8
        assert weights.isfinite().all(1).tolist() == [token != 2 for token in range(tokens)]


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("path", [ExpertPath(CHOSEN), ExpertPath(ALL), 5], ids=str)
def test_experts_without_a_gate(path, input_first):
    x, (w1, w2), (weights, ids) = torch.randn(7, HIDDEN), weights_of_experts(), routed(7, 3, FEW)
    w1 = w1[:, : w2.shape[2]]
    exact = ops.fused_experts(x.double(), w1.double(), w2.double(), weights, ids)
    path = path if isinstance(path, ExpertPath) else with_capacity(ids.numel(), path)
    if input_first:
        w1, w2 = (w.transpose(1, 2).contiguous() for w in (w1, w2))
    output = moe.fused_experts(x, w1, w2, weights, ids, path=path, input_first=input_first)
    assert relative_error(output, exact) <= 1e-5


class TestPath:
    """The path for h-small, which uses 10 of 72 experts of a width of 768 for a token, and for one rank of four."""

    @pytest.mark.parametrize(
        ("tokens", "whole", "quarter"),
        [
            *((1, CHOSEN, CHOSEN), (2, CHOSEN, CHOSEN), (4, ALL, ALL), (512, ALL, ALL)),
            *((2048, BLOCKS, ALL), (8192, BLOCKS, BLOCKS)),
        ],
    )
    def test_by_tokens(self, tokens, whole, quarter):
        assert [expert_path(tokens, 10, 72, width).name for width in (768, 192)] == [whole, quarter]

    @pytest.mark.parametrize(("tokens", "capacity"), [(1024, 496), (2048, 704), (8192, 1400)])
    def test_capacity(self, tokens, capacity):
        path = expert_path(tokens, 10, 72, 768)
        assert path == with_capacity(tokens * 10, capacity)
        assert str(path) == f"{capacity} tokens per expert, {path.num_blocks} further blocks of {capacity}"
        assert str(expert_path(1, 10, 72, 768)) == "chosen experts"

    def test_the_experts_use_the_path(self):
        """`chosen` does not read experts that no token chose; the other paths do."""
        w1, w2 = weights_of_experts()
        w1[3:], w2[3:] = math.nan, math.nan
        x, weights, ids = torch.randn(1, HIDDEN), torch.ones(1, 1), torch.tensor([[2]])
        assert moe.fused_experts(x, w1, w2, weights, ids).isfinite().all()
        assert moe.fused_experts(x, w1, w2, weights, ids, path=ExpertPath(ALL)).isnan().all()

    def test_experts_without_a_gate_have_two_matrices_of_three(self):
        """Nemotron 3 Nano 30B-A3B chooses 6 of 128 experts of a width of 1,856. Lighter experts are cheaper to fetch
        than rows, so blocks are smaller, and on a rank of four they are worth their rows only for longer prompts.
        """
        choices, numbers = 2048 * 6, 1856 * 2  # numbers of an expert, by hidden_size
        times = {capacity: self.moves(capacity, choices, numbers) for capacity in range(8, 2048, 8)}
        path = expert_path(2048, 6, 128, 1856, has_gate=False)
        assert path == with_capacity(choices, 520) and times[520] <= 1.01 * min(times.values())
        assert times[expert_path(2048, 6, 128, 1856).capacity] > 1.01 * min(times.values())
        assert expert_path(512, 6, 128, 464).name == BLOCKS
        assert expert_path(512, 6, 128, 464, has_gate=False).name == ALL

    @staticmethod
    def moves(capacity, choices, numbers):
        """Return the numbers that blocks move, by hidden_size: 128 experts' weights once, further blocks' 3 times, rows
        4 times, and 6 for each choice.
        """
        blocks = (choices + 1) // capacity
        return (128 + 3 * blocks) * numbers + 4 * capacity * (128 + blocks) + 6 * choices

    @pytest.mark.parametrize("input_first", [False, True])
    @pytest.mark.parametrize("has_gate", [False, True])
    def test_weights_say_whether_there_is_a_gate(self, has_gate, input_first, monkeypatch):
        x, (w1, w2), (weights, ids) = torch.randn(3, HIDDEN), weights_of_experts(), routed(3, 2, UNIFORM)
        w1 = w1 if has_gate else w1[:, :WIDTH]
        if input_first:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        asked = []
        monkeypatch.setattr(moe, "expert_path", lambda *sizes: asked.append(sizes) or ExpertPath(ALL))
        moe.fused_experts(x, w1, w2, weights, ids, input_first=input_first)
        assert asked == [(3, 2, EXPERTS, WIDTH, True, has_gate)]
