"""The operators of graphs on a GPU, with the definitions of its kernels on the CPU, give the numbers of plain torch."""

import math

import pytest
import torch

from granite4_neuron.devices.cuda.operators import GPU
from granite4_neuron.ops import TORCH, moe, topk_softmax
from test.support.oracles import relative_error
from test.unit.devices.graphs.test_moe import definition

pytestmark = pytest.mark.versions

BFLOAT16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-6, BFLOAT16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def compare(name, *arguments, dtype):
    """Compare with the definition in float64, of the same numbers."""
    exact = [
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in arguments
    ]
    output = getattr(GPU, name)(*arguments)
    assert output.dtype == dtype
    assert relative_error(output, getattr(TORCH, name)(*exact)) <= TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 16), (16,), (3, 1, 16), (1, 5, 16)], ids=str)
class TestLinear:
    @pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
    def test_linear(self, shape, has_bias, dtype):
        bias = random(24, dtype=dtype) if has_bias else None
        compare("linear", random(*shape, dtype=dtype), random(24, 16, dtype=dtype), bias, dtype=dtype)

    def test_mlp(self, shape, dtype):
        weights = random(24, 16, dtype=dtype), random(16, 12, dtype=dtype)
        compare("mlp", random(*shape, dtype=dtype), *weights, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_router(tokens, dtype):
    """The result is float32 for every dtype of weights."""
    x, weight = random(tokens, 16, dtype=dtype), random(6, 16, dtype=dtype)
    output = GPU.router_logits(x, weight)
    assert output.dtype == torch.float32
    assert relative_error(output, x.double() @ weight.double().T) <= 1e-6


@DTYPES
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("spread", [1, 0], ids=["routed", "all choose the same"])
def test_experts(spread, tokens, dtype):
    """There are 6 experts, 2 for each token. For up to 2 tokens the experts' weights are fetched by index."""
    logits = random(tokens, 6, dtype=torch.float32) * spread + torch.tensor([0.0, 0.1, 0.0, 0.0, 0.2, 0.0])
    weights, ids = topk_softmax(logits, 2)
    x, w1, w2 = random(tokens, 16, dtype=dtype), random(6, 32, 16, dtype=dtype), random(6, 16, 16, dtype=dtype)
    output = GPU.fused_experts(x, w1, w2, weights, ids)
    assert output.dtype == dtype
    assert relative_error(output, definition(x, w1, w2, weights, ids)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_without_a_gate(tokens):
    """The first matrix has as many rows as the second has columns."""
    weights, ids = topk_softmax(random(tokens, 6, dtype=torch.float32), 2)
    x, w1, w2 = (random(*shape, dtype=torch.float32) for shape in ((tokens, 16), (6, 24, 16), (6, 16, 24)))
    exact = moe.fused_experts(x.double(), w1.double(), w2.double(), weights, ids)
    assert relative_error(GPU.fused_experts(x, w1, w2, weights, ids), exact) <= 1e-5
    assert relative_error(GPU.mlp(x, w1[0], w2[0]), moe.mlp(x.double(), w1[0].double(), w2[0].double())) <= 1e-5


@DTYPES
@pytest.mark.parametrize("slots", [[1, 2, 3], [3, 1, 2], None], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_attention(tokens, slots, dtype):
    """Unwritten parts of the cache are NaN."""
    ends = torch.tensor([[64], [9], [tokens]])
    positions = ends - tokens + torch.arange(tokens)
    rows = torch.tensor(slots or [1, 2, 3])
    key, value = random(4, 2, 64, 8, dtype=dtype), random(4, 2, 64, 8, dtype=dtype)
    for cache in (key, value):
        for row, end in zip(rows, ends[:, 0], strict=True):
            cache[row, :, end:] = math.nan
        cache[0] = math.nan
    where = positions, torch.full((3,), tokens), rows if slots else None
    compare("cached_attention", random(3, tokens, 4, 8, dtype=dtype), key, value, *where, 0.3, 64, dtype=dtype)
