"""Quantized weights: their distance from the original weights, and plain products with them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron import ops
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.ops.formats.int4 import FORMAT as INT4
from granite4_neuron.ops.formats.int4 import GROUP
from granite4_neuron.ops.formats.int8 import _PART, quantize_per_channel
from granite4_neuron.ops.formats.int8 import FORMAT as INT8
from granite4_neuron.ops.formats.lossless12 import FORMAT as LOSSLESS12
from granite4_neuron.ops.weight import QuantizedWeight
from test.support import oracles
from test.support.oracles import relative_error

pytestmark = pytest.mark.versions

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_round_trip(weight, values, scale):
    """Check that every value is off by at most half a step, and that each row uses its whole range."""
    weight = weight.double()
    assert values.dtype == torch.int8 and values.shape == weight.shape and values.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == weight.shape[:-1] and torch.isfinite(scale).all()
    error = (values.double() * scale.double()[..., None] - weight).abs()
    assert (error <= 0.5 * scale.double()[..., None] * (1 + 1e-5)).all()
    largest = values.abs().amax(-1)
    assert torch.equal(largest == 127, weight.abs().amax(-1) >= 127 * torch.finfo(torch.float32).tiny)


class TestQuantizePerChannel:
    @pytest.mark.parametrize("dtype", TOLERANCES)
    @given(
        shape=st.sampled_from([(1, 1), (7, 33), (3, 5, 16), (2, 1, 200)]),
        exponent=st.integers(-20, 12),
        seed=st.integers(0, 1000),
    )
    def test_round_trip(self, dtype, shape, exponent, seed):
        """Rows have very different sizes, so another row's scale would lose the small ones."""
        g = torch.Generator().manual_seed(seed)
        sizes = 2.0 ** (exponent + torch.randint(-3, 3, shape[:-1], generator=g))
        weight = (torch.randn(shape, generator=g) * sizes[..., None]).to(dtype)
        assert_round_trip(weight, *quantize_per_channel(weight))

    def test_known_numbers(self):
        weight = torch.tensor([[127.0, -127.0, 0.4, -0.6], [0.5, 0.0, -1.0, 1.0 / 254]])
        values, scale = quantize_per_channel(weight)
        assert values.tolist() == [[127, -127, 0, -1], [64, 0, -127, 0]]
        assert scale.tolist() == pytest.approx([1.0, 1 / 127])

    def test_rows_of_zeros(self):
        weight = torch.randn(2, 3, 8)
        weight[1, 1] = 0
        values, scale = quantize_per_channel(weight)
        assert values[1, 1].count_nonzero() == 0 and scale[1, 1] == 1
        assert torch.equal(INT8.quantize(weight).dequantize(torch.float32)[1, 1], torch.zeros(8))

    @pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e30, 3e38])
    def test_extreme_sizes(self, size):
        weight = torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * size
        assert_round_trip(weight, *quantize_per_channel(weight))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_row_that_is_not_finite_stays_so_alone(self, value):
        weight = torch.randn(3, 8)
        weight[1, 2] = value
        quantized = INT8.quantize(weight)
        assert torch.isfinite(quantized.scales).tolist() == [True, False, True]
        assert not torch.isfinite(quantized.dequantize(torch.float32)[1]).any()

    def test_large_tensors_are_done_in_parts(self):
        weight = torch.randn(3, 500, 1000)
        assert weight.numel() > _PART and 500 * 1000 % _PART
        assert_round_trip(weight, *quantize_per_channel(weight))
        wide = torch.randn(2, _PART + 1)
        assert_round_trip(wide, *quantize_per_channel(wide))

    def test_any_strides(self):
        weight = torch.randn(8, 6, 5).transpose(0, 2)
        values, scale = quantize_per_channel(weight)
        assert_round_trip(weight, values, scale)


class TestInt4:
    @given(
        shape=st.sampled_from([(1, 1), (7, 33), (2, 3, 64), (5, 200)]),
        exponent=st.integers(-40, 60),
        seed=st.integers(0, 1000),
    )
    def test_each_group_is_closer_than_rounded_to_nearest(self, shape, exponent, seed):
        """Groups have very different sizes. They are compared with multiples of a sixteenth of each group's range."""
        g = torch.Generator().manual_seed(seed)
        sizes = 2.0 ** (exponent + torch.randint(-3, 3, shape, generator=g))
        weight = torch.randn(shape, generator=g) * sizes
        quantized = INT4.quantize(weight)
        error = in_groups((quantized.dequantize(torch.float32) - weight).double())
        groups = in_groups(weight.double())
        step = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().double()
        nearest = (groups / step).round().clamp(-8, 7).nan_to_num() * step - groups
        assert (error.norm(dim=-1) <= nearest.norm(dim=-1) * (1 + 1e-5)).all()

    def test_known_numbers(self):
        """Four bits can hold these numbers exactly, on either side of zero, with the even column in the lower half."""
        weight = torch.arange(-8.0, 8.0).repeat(2, 2) * torch.tensor([[0.5], [-2.0]])
        quantized = INT4.quantize(weight)
        assert torch.equal(quantized.dequantize(torch.float32), weight)
        assert quantized.scales.tolist() == [[0.5], [-2.0]]
        assert quantized.values[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]

    def test_zeros_and_numbers_that_are_not_finite(self):
        weight = torch.randn(3, 2 * GROUP)
        weight[0], weight[1, 3] = 0, math.nan
        whole = INT4.quantize(weight).dequantize(torch.float32)
        assert whole[0].count_nonzero() == 0 and torch.isfinite(whole[2]).all()
        assert not torch.isfinite(whole[1, :GROUP]).any() and torch.isfinite(whole[1, GROUP:]).all()

    def test_size(self):
        assert INT4.quantize(torch.randn(64, 256)).num_bytes * 8 == 4.5 * 64 * 256


class TestLossless12:
    @given(
        shape=st.sampled_from([(1, 1), (7, 33), (2, 3, 64), (5, 2000)]),
        exponent=st.integers(-140, 120),
        seed=st.integers(0, 1000),
    )
    def test_it_has_the_bits_of_bfloat16(self, shape, exponent, seed):
        """Up to eight numbers of a row have other exponents: zeros, subnormal numbers, the largest, infinity."""
        g = torch.Generator().manual_seed(seed)
        weight = (torch.randn(shape, generator=g) * 2.0**exponent).bfloat16()
        others = torch.tensor([0.0, -0.0, 1e-39, -9e-41, 3e38, -math.inf, 1e-30, -1e30])
        columns = torch.randperm(shape[-1], generator=g)[:8]
        weight[..., columns] = others[: len(columns)].bfloat16()
        if not LOSSLESS12.holds(stored := LOSSLESS12.quantize(weight)):  # random numbers may add others
            return
        assert torch.equal(stored.dequantize(torch.bfloat16).view(torch.int16), weight.view(torch.int16))

    def test_a_row_with_too_many_other_exponents(self):
        weight = torch.ones(3, 100)
        weight[1, :8], weight[2, :9] = 1e-9, 1e-9
        assert LOSSLESS12.holds(LOSSLESS12.quantize(weight[:2]))
        assert not LOSSLESS12.holds(LOSSLESS12.quantize(weight))

    def test_size(self):
        assert LOSSLESS12.quantize(torch.randn(64, 1024)).num_bytes == 64 * (1536 + 10)


def in_groups(weight):
    return F.pad(weight, (0, -weight.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


@pytest.mark.parametrize("dtype", TOLERANCES)
class TestProducts:
    """Products equal float64 products with the dequantized weights, rounded to dtype once."""

    def weights(self, *shape):
        weight = INT8.quantize(torch.randn(shape) / shape[-1] ** 0.5)
        return weight, weight.dequantize(torch.float64)

    def test_linear_and_logits(self, dtype):
        x, bias = torch.randn(2, 3, 33).to(dtype), torch.randn(20).to(dtype)
        weight, exact = self.weights(20, 33)
        expected = x.double() @ exact.T
        for b, total in ((None, expected), (bias, expected + bias.double())):
            y = ops.linear(x, weight, b)
            assert y.dtype == dtype and relative_error(y, total) <= TOLERANCES[dtype]
        y = ops.logits(x, weight, 3.0)
        assert y.dtype == torch.float32 and relative_error(y, expected / 3) <= TOLERANCES[dtype]

    def test_mlp(self, dtype):
        x = torch.randn(5, 32).to(dtype)
        w1, exact1 = self.weights(2 * 24, 32)
        w2, exact2 = self.weights(32, 24)
        gate, up = (x.double() @ exact1.T).chunk(2, -1)
        y = ops.mlp(x, w1, w2)
        assert y.dtype == dtype
        assert relative_error(y, (F.silu(gate) * up) @ exact2.T) <= 2 * TOLERANCES[dtype]

    @pytest.mark.parametrize("tokens", [1, 12])
    def test_experts(self, dtype, tokens):
        x, router = torch.randn(tokens, 16).to(dtype), torch.randn(5, 16)
        w1, exact1 = self.weights(5, 2 * 12, 16)
        w2, exact2 = self.weights(5, 16, 12)
        chosen = ops.topk_softmax(x.float() @ router.T, 2)
        y = ops.fused_experts(x, w1, w2, *chosen)
        assert y.dtype == dtype
        exact = oracles.mixture_of_experts(x, router, exact1, exact2, 2)
        assert relative_error(y, exact) <= 2 * TOLERANCES[dtype]


def test_experts_that_no_token_chose_are_not_read():
    w1, w2 = INT8.quantize(torch.randn(5, 24, 16)), INT8.quantize(torch.randn(5, 16, 12))
    w1.scales[3:], w2.scales[3:] = math.nan, math.nan
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
    assert torch.isfinite(ops.fused_experts(torch.randn(3, 16), w1, w2, torch.full((3, 2), 0.5), ids)).all()


@pytest.mark.parametrize("format", ops.FORMATS.values(), ids=ops.FORMATS)
class TestFormats:
    def test_options_list_every_format(self, format):
        assert tuple(ops.FORMATS) == QUANTIZATIONS and ops.FORMATS[format.name] is format

    def test_size(self, format):
        weight = format.quantize(torch.randn(3, 5, 96))
        assert format.num_bytes(weight.shape) == weight.num_bytes

    @pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96)])
    def test_tensors_have_the_declared_layout(self, format, shape):
        weight = format.quantize(torch.randn(shape))
        assert isinstance(weight, QuantizedWeight) and weight.shape == shape
        layout = {ending: (tensor.shape, tensor.dtype) for ending, tensor in weight.tensors().items()}
        assert layout == format.layout(torch.Size(shape))

    def test_rows_and_experts_equal_those_of_the_whole_matrix(self, format):
        weight = format.quantize(torch.randn(2, 5, 96))
        whole, ids = weight.dequantize(torch.float32), torch.tensor([[7], [0]])
        assert whole.shape == weight.shape
        assert torch.equal(weight.rows(ids), whole.flatten(0, 1)[ids])
        assert torch.equal(weight.expert(1).dequantize(torch.float32), whole[1])

    def test_a_weight_moves_to_other_memory(self, format):
        weight = format.quantize(torch.randn(3, 64))
        places = {ending: torch.empty_like(tensor) for ending, tensor in weight.tensors().items()}
        moved = weight.moved_to(places)
        assert moved.values is places[""] and moved.scales is places["_scale"]
        assert torch.equal(moved.dequantize(torch.float32), weight.dequantize(torch.float32))
