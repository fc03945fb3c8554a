"""The Triton kernels with quantized weights against products with the numbers that these stand for, in float64."""

from dataclasses import replace

import pytest
import torch

from granite4_neuron.devices.cuda.fused_moe import multiply_by_experts
from granite4_neuron.devices.cuda.head import score_tokens
from granite4_neuron.devices.cuda.linear import multiply_rows
from granite4_neuron.devices.cuda.operator import LAUNCHES
from granite4_neuron.devices.cuda.products import multiply_tokens
from granite4_neuron.devices.cuda.token_operators import OneRowOperators, TokenOperators
from granite4_neuron.devices.cuda.weights import dequantized, loses_digits
from granite4_neuron.ops import QuantizedWeight
from granite4_neuron.ops.fp8 import FORMAT as FP8
from test.support.oracles import relative_error
from test.support.quantizing import GPU_FORMATS
from test.unit.devices.cuda.test_kernels import DEVICE, copied, random, seed
from test.unit.devices.cuda.test_token_kernels import lengths_of, products_of_bfloat16

pytestmark = pytest.mark.versions

pytest.importorskip("triton", reason="Triton is not installed")
__all__ = ["products_of_bfloat16", "seed"]  # fixtures
# Triton's interpreter truncates where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 4e-2}
EPS = 1e-5
EACH = [
    pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str),
    pytest.mark.parametrize("format", GPU_FORMATS),
]
# The second ones fill no group, nor a piece of 16 bytes in int8.
COLUMNS = pytest.mark.parametrize("columns", [768, 104])
BATCHES = pytest.mark.parametrize(
    ("batch", "operators"), [(1, OneRowOperators), (3, TokenOperators)], ids=["one", "three"]
)


def each(test):
    for mark in EACH:
        test = mark(test)
    return test


def weights(format, *shape):
    """Return values, scales, and the numbers that they stand for in float64; rows are of different sizes."""
    numbers = random(*shape) * torch.linspace(0.5, 2, shape[-2])[:, None] / shape[-1] ** 0.5
    quantized = GPU_FORMATS[format].quantize(numbers)
    return quantized.values, quantized.scales, quantized.dequantize(torch.float32).double()


def compare(operator, arguments, exact, dtype, rows=slice(None), **constants):
    """Compare the launch with the definition in float64, where `exact` are the places of weights and scales."""
    ours = [copied(argument, DEVICE) for argument in arguments]
    outputs = LAUNCHES[operator](*ours, **constants)
    theirs = [
        argument.double() if isinstance(argument, torch.Tensor) and argument.is_floating_point() else argument
        for argument in arguments
    ]
    for place, weight in exact.items():
        theirs[place] = weight
    expected = operator(*theirs, **constants)
    if not isinstance(expected, tuple):
        outputs, expected = [outputs], [expected]
    for mine, other in zip(outputs, expected, strict=True):
        assert relative_error(mine.cpu()[rows], other[rows]) <= TOLERANCE[dtype]
    return [mine.cpu() for mine in outputs]


@each
@COLUMNS
@BATCHES
class TestTokens:
    def test_mixer_inputs(self, batch, operators, columns, format, dtype):
        channels, num_heads = 21, 3
        values, scales, numbers = weights(format, 13 + channels + num_heads, columns)
        convolution = random(channels, 4, dtype=dtype), None, random(batch, channels, 3, dtype=dtype)
        norm = 1 + random(columns, dtype=dtype)
        arguments = random(batch, columns), norm, values, *convolution, lengths_of(batch, 1), None, scales
        compare(operators.mixer_inputs, arguments, {2: numbers, 8: None}, dtype, num_heads=num_heads, eps=EPS)

    def test_heads(self, batch, operators, columns, format, dtype):
        values, scales, numbers = zip(*(weights(format, rows, columns) for rows in (37, 11, 11)), strict=True)
        arguments = random(batch, columns), 1 + random(columns, dtype=dtype), *values, EPS, *scales
        exact = dict(enumerate(numbers, 2)) | dict.fromkeys((6, 7, 8))
        compare(operators.project_heads, arguments, exact, dtype)

    @pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
    def test_sum_with_a_product(self, has_norm, batch, operators, columns, format, dtype):
        values, scales, numbers = weights(format, 22, columns)
        x = random(batch, columns) if has_norm else random(batch, columns, dtype=dtype)
        norm = 1 + random(columns, dtype=dtype) if has_norm else None
        arguments = random(batch, 22), x, norm, values, 0.22, EPS, scales
        compare(operators.add_product, arguments, {3: numbers, 6: None}, dtype)

    def test_mlp(self, batch, operators, columns, format, dtype):
        values, scales, numbers = weights(format, 44, columns)
        arguments = random(batch, columns), 1 + random(columns, dtype=dtype), values, EPS, scales
        compare(operators.activate, arguments, {2: numbers, 4: None}, dtype)

    @pytest.mark.parametrize("width", [64, 72])
    def test_experts(self, width, batch, operators, columns, format, dtype):
        experts, top_k = 6, 3
        normed, lengths = random(batch, columns, dtype=dtype), torch.ones(batch, dtype=torch.int32)
        logits = random(batch, experts).mul(2).round()  # of which some are equal
        first, w1 = weights(format, 42, columns), weights(format, experts, 2 * width, columns)
        given = normed, first[0], w1[0], logits, lengths, top_k, first[1], w1[1]
        activated, chosen = compare(operators.activate_experts, given, {1: first[2], 2: w1[2], 6: None, 7: None}, dtype)
        second, w2 = weights(format, 24, 104), weights(format, experts, 24, width)
        activated = random(batch, 104, dtype=dtype)
        given = random(batch, 24), activated, second[0], chosen, w2[0], logits, lengths, 0.3, second[1], w2[1]
        compare(operators.add_feed_forward, given, {2: second[2], 4: w2[2], 8: None, 9: None}, dtype)


@each
@COLUMNS
def test_several_tokens(columns, format, dtype):
    """Products of verification, of the head, of prompts, and of one token with experts."""
    values, scales, numbers = weights(format, 50, columns)
    x, norm = random(70, columns, dtype=dtype), 1 + random(columns, dtype=dtype)
    compare(TokenOperators.project, (random(5, columns), norm, values, EPS, scales), {2: numbers, 4: None}, dtype)
    compare(score_tokens, (x, values, 3.0, scales), {1: numbers, 3: None}, dtype)
    for is_gated in (False, True):
        compare(multiply_tokens, (x, values, None, is_gated, False, scales), {1: numbers, 5: None}, dtype)
        compare(multiply_rows, (x[:1], values, None, is_gated, scales), {1: numbers, 4: None}, dtype)
    values, scales, numbers = weights(format, 3, 50, columns)
    ids = torch.tensor([2, 0], dtype=torch.int32)
    compare(multiply_rows, (x[:2], values, ids, True, scales), {1: numbers, 4: None}, dtype)


@each
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "ungated"])
def test_experts_of_prompts(is_gated, format, dtype):
    experts, width, columns = 4, 72, 104
    w1, w2 = weights(format, experts, (1 + is_gated) * width, columns), weights(format, experts, columns, width)
    x, ids = random(7, columns, dtype=dtype), torch.stack([torch.randperm(experts)[:2] for _ in range(7)]).int()
    topk_weights = random(7, 2).softmax(-1)
    given = x, w1[0], w2[0], topk_weights, ids, w1[1], w2[1]
    compare(multiply_by_experts, given, {1: w1[2], 2: w2[2], 3: topk_weights, 5: None, 6: None}, dtype)


@pytest.mark.parametrize(("width", "columns"), [(72, 104), (128, 192)])  # the second ones fill tiles, of all dtypes
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("format", GPU_FORMATS)
def test_experts_of_prompts_have_the_bits_of_dequantized_weights(format, is_gated, width, columns):
    """Of any number of tokens, though weights are another operand of the tensor cores' instruction. Where codes fill
    tiles, int8 and FP8 have bits of their own in bfloat16.
    """
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    (x, *others), (w1, w2), quantized = experts_of_prompt(format, is_gated, width, columns, dtype)
    exact = LAUNCHES[multiply_by_experts](x, w1, w2, *others)
    has_its_bits = dtype == torch.float32 or format == "int4" or width == 72
    whole = exact if has_its_bits else launch_quantized(x, others, quantized)
    for part in (slice(0, 150), slice(0, 70), slice(70, 150)):
        y = launch_quantized(x[part], [each[part] for each in others], quantized)
        assert torch.equal(y, whole[part])


@pytest.mark.parametrize(("is_gated", "top_k"), [(True, 2), (False, 1)], ids=["gated", "ungated"])
@pytest.mark.parametrize("format", GPU_FORMATS)
def test_experts_of_prompts_are_as_exact_as_dequantized_weights(format, is_gated, top_k):
    """Where tensor cores take codes that are converted to bfloat16 in registers. An expert has several blocks of
    choices, of both sizes.
    """
    (x, *others), dense, quantized = experts_of_prompt(format, is_gated, 128, 192, torch.bfloat16, tokens=300)
    topk_weights, ids = (each[:, :top_k].contiguous() for each in others)
    numbers = [each.dequantize(torch.float32).double() for each in quantized]
    expected = multiply_by_experts(x.cpu().double(), *numbers, topk_weights.cpu(), ids.cpu())
    ours = launch_quantized(x, (topk_weights, ids), quantized)
    theirs = LAUNCHES[multiply_by_experts](x, *dense, topk_weights, ids)
    error, other_error = ((each.cpu().double() - expected).norm() / expected.norm() for each in (ours, theirs))
    assert error <= 1.02 * other_error <= TOLERANCE[torch.bfloat16]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("exponent", [-62, -61, 62, 64])
def test_scales_of_experts_of_prompts(exponent):
    """In bfloat16 the digits of FP8 are lost with the scales for which a model is refused, and with no others."""
    (x, *others), (_, second), (w1, w2) = experts_of_prompt("fp8", True, 128, 192, torch.bfloat16, tokens=16)
    smallest = torch.where(torch.rand(w1.shape) < 0.5, -(2.0**-9), 2.0**-9).to(w1.values.dtype)
    w1 = replace(w1, values=smallest, scales=2.0**exponent * (1 + torch.rand(w1.scales.shape)))
    x *= 2.0 ** (5 - exponent)  # activations of an ordinary size
    numbers = [each.dequantize(torch.float32).double() for each in (w1, w2)]
    topk_weights, ids = others
    expected = multiply_by_experts(x.cpu().double(), *numbers, topk_weights.cpu(), ids.cpu())
    first = copied(w1.dequantize(torch.bfloat16), DEVICE)
    ours = launch_quantized(x, others, (w1, w2))
    theirs = LAUNCHES[multiply_by_experts](x, first, second, *others)
    error, other_error = ((each.cpu().double() - expected).norm() / expected.norm() for each in (ours, theirs))
    assert other_error <= TOLERANCE[torch.bfloat16]
    assert bool(error <= 1.02 * other_error) != loses_digits(w1)


def experts_of_prompt(format, is_gated, width, columns, dtype, experts=4, tokens=150):
    """Return arguments of `multiply_by_experts` but for the weights, these in dtype, and as they are quantized."""
    shapes = (experts, (1 + is_gated) * width, columns), (experts, columns, width)
    quantized = [GPU_FORMATS[format].quantize(random(*shape) / shape[-1] ** 0.5) for shape in shapes]
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).int()
    others = random(tokens, columns, dtype=dtype), random(tokens, 2), ids
    return (
        [copied(each, DEVICE) for each in others],
        [copied(each.dequantize(dtype), DEVICE) for each in quantized],
        quantized,
    )


def launch_quantized(x, others, quantized):
    (v1, s1), (v2, s2) = ((copied(each.values, DEVICE), copied(each.scales, DEVICE)) for each in quantized)
    return LAUNCHES[multiply_by_experts](x, v1, v2, *others, s1, s2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_fp8(dtype):
    """A row has one number that is not 0, in turn of each place in a word."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = torch.zeros(len(codes), 260, dtype=torch.uint8)
    values[torch.arange(len(codes)), torch.arange(len(codes)) + 3] = codes
    scales = 2.0 ** torch.randint(-12, 0, (len(codes), 3))  # exact: the interpreter truncates to bfloat16
    values = values.view(torch.float8_e4m3fn)
    exact = QuantizedWeight(FP8, values, scales, values.shape).dequantize(dtype)
    assert torch.equal(dequantized(values.to(DEVICE), scales.to(DEVICE), 260, dtype).cpu(), exact)
    for size in (1.0, 2.0**-30, 2.0**90):
        vector = torch.zeros(1, len(codes)), torch.full((1, 260), size, dtype=dtype)
        residual, x, *matrix = (copied(each, DEVICE) for each in (*vector, values, scales))
        outputs = LAUNCHES[OneRowOperators.add_product](residual, x, None, matrix[0], 1.0, EPS, matrix[1])
        assert torch.equal(outputs.cpu()[0].to(dtype), exact.sum(1) * size)
