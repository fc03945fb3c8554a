"""The fused CPU kernels against float64, over shapes, dtypes, ragged lengths, cuts and poisoned memory."""

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron import ops
from granite4_neuron.devices.cpu import build
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.errors import UserError
from granite4_neuron.ops import TORCH
from granite4_neuron.ops.formats.int8 import FORMAT as INT8
from granite4_neuron.ops.formats.int8 import Int8
from granite4_neuron.ops.formats.lossless12 import FORMAT as LOSSLESS12
from granite4_neuron.ops.launch_parameters import CHOICES, HEURISTIC, LaunchParameters
from granite4_neuron.ops.layer_weights import FeedForwardWeights, MixerWeights
from granite4_neuron.ops.weight import QuantizedWeight
from test.support import oracles
from test.support.oracles import relative_error

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

# Relative to the largest value. Only the result is rounded: inputs in a reduced dtype add no other error.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES)
every_format = pytest.mark.parametrize("format", [None, *ops.FORMATS.values()], ids=["", *ops.FORMATS])


def weights(*shape, dtype, format):
    """Return random weights in dtype or quantized: (packed, the weights that they stand for in float64)."""
    weight = (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)
    if format is not None:
        weight = format.quantize(weight)
    return cpu.pack(weight, dtype), ops.as_tensor(weight, torch.float64).double()


class TestLinear:
    @every_dtype
    @every_format
    @pytest.mark.parametrize("rows", [*range(1, 14), 40])
    @pytest.mark.parametrize("columns", [1, 16, 96, 131])
    def test_equals_the_definition(self, dtype, rows, columns, format):
        torch.manual_seed(rows)
        x, bias = torch.randn(rows, columns, dtype=dtype), torch.randn(70, dtype=dtype)
        weight, exact_weight = weights(70, columns, dtype=dtype, format=format)
        for b in (None, bias):
            exact = x.double() @ exact_weight.T + (0 if b is None else b.double())
            y = cpu.linear(x, weight, b)
            assert y.dtype == dtype
            assert relative_error(y, exact) <= TOLERANCES[dtype]

    @pytest.mark.parametrize("rows", [1, 40])
    @pytest.mark.parametrize("columns", [4096, 8192])
    def test_the_error_hardly_grows_with_the_columns(self, rows, columns):
        """One sum over all columns would have 3 to 4 times the error of torch's product."""
        torch.manual_seed(rows)
        x = torch.randn(rows, columns)
        weight = torch.randn(512, columns)
        exact = x.double() @ weight.T.double()
        packed = cpu.pack(weight, torch.float32)
        error, torchs = ((y.double() - exact).abs().mean() for y in (cpu.linear(x, packed), F.linear(x, weight)))
        assert error <= 1.3 * torchs

    @every_format
    @pytest.mark.parametrize("rows", [3, 30])
    def test_shapes_and_strides(self, rows, format):
        x = torch.randn(2, 1, rows, 40)[..., :32]
        weight, exact = weights(5, 32, dtype=torch.float32, format=format)
        assert torch.allclose(cpu.linear(x, weight), F.linear(x, exact.float()), atol=1e-5)

    @every_dtype
    @every_format
    @pytest.mark.parametrize("rows", [6, 12])
    def test_a_poisoned_row_stays_alone(self, dtype, rows, format):
        weight, _ = weights(9, 64, dtype=dtype, format=format)
        x = torch.randn(rows, 64, dtype=dtype)
        x[2] = math.nan
        finite = torch.isfinite(cpu.linear(x, weight)).all(1)
        assert finite.tolist() == [row != 2 for row in range(rows)]

    @every_dtype
    @pytest.mark.parametrize("rows", [1, 9, 40])
    def test_large_quantized_weights(self, dtype, rows):
        """Each row has values of the size of its scale."""
        weight = torch.randn(1100, 2050) * torch.logspace(-3, 3, 1100)[:, None]
        quantized = INT8.quantize(weight)
        x, bias = torch.randn(rows, 2050).to(dtype) / 2050, torch.randn(1100).to(dtype)
        exact = x.double() @ quantized.dequantize(torch.float64).T + bias.double()
        y = cpu.linear(x, cpu.pack(quantized, dtype), bias)
        for part in range(0, 1100, 100):
            columns = slice(part, part + 100)
            assert relative_error(y[:, columns], exact[:, columns]) <= TOLERANCES[dtype]

    @every_dtype
    def test_every_quantized_value(self, dtype):
        """Every quantized value stands at every place of a row, and x picks one weight at a time."""
        values = torch.arange(-128, 128).to(torch.int8)[:, None].expand(-1, 130).contiguous()
        weight = cpu.pack(QuantizedWeight(INT8, values, torch.ones(256), values.shape), dtype)
        for first in range(0, 130, 8):
            x = torch.eye(130, dtype=dtype)[first : first + 8]
            assert torch.equal(cpu.linear(x, weight), values.T[: len(x)].to(dtype))

    def test_mismatched_matrices_are_refused(self):
        values, scales = torch.zeros(5, 32, dtype=torch.int8), torch.ones(5)
        for weight in (
            torch.randn(5, 32).half(),
            QuantizedWeight(INT8, values.float(), scales, values.shape),
            QuantizedWeight(INT8, values, scales[:4], values.shape),
        ):
            with pytest.raises(RuntimeError):
                cpu.pack(weight, torch.float32)
        packed = cpu.pack(torch.randn(5, 32), torch.float32)
        for x in (torch.randn(1, 31), torch.randn(1, 32).half()):
            with pytest.raises(RuntimeError):
                cpu.linear(x, packed)


class TestPackedWeights:
    @every_dtype
    @every_format
    @pytest.mark.parametrize("shape", [(1, 1), (32, 8), (70, 131), (3, 33, 17)])
    def test_hold_the_original_values(self, dtype, shape, format):
        packed, exact = weights(*shape, dtype=dtype, format=format)
        assert packed.shape == shape and packed.is_quantized == (format is not None)
        assert torch.equal(packed.dequantize(torch.float32), exact.float())
        rows = exact.flatten(0, -2).float()
        ids = torch.randint(len(rows), (2, 3))
        assert torch.equal(packed.rows(ids), rows[ids])

    def test_a_row_out_of_range_is_refused(self):
        packed = cpu.pack(torch.randn(5, 32), torch.float32)
        for row in (-1, 5):
            with pytest.raises(RuntimeError, match="there is no row"):
                packed.rows(torch.tensor([row]))


class TestLossless12:
    """Products have the bits of the plain ones, also with values of all sizes in the list beside the codes."""

    @staticmethod
    def weight(*shape):
        generator = torch.Generator().manual_seed(shape[-1])
        weight = 0.02 * torch.randn(shape, generator=generator)
        for number, value in enumerate((0.0, -0.0, 1e-39, -1e-12, 3e38, -5.0)):
            weight[..., number::7, number * shape[-1] // 6] = value
        weight[..., 5::11, :] = 0
        return weight.bfloat16()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("shape", [(1, 1), (32, 8), (70, 131), (64, 768), (100, 1000), (7, 4096)])
    def test_the_bits_of_plain_products(self, dtype, shape):
        weight = self.weight(*shape)
        stored = LOSSLESS12.quantize(weight)
        assert LOSSLESS12.holds(stored)
        packed, plain = cpu.pack(stored, dtype), cpu.pack(weight.to(dtype), dtype)
        for vectors in (1, 2, 3, 4, 5, 8, 14, 28, 29, 100):
            x = torch.randn(vectors, shape[-1]).to(dtype)
            assert torch.equal(bits(cpu.linear(x, packed)), bits(cpu.linear(x, plain)))
            assert torch.equal(bits(cpu.logits(x, packed, 3.0)), bits(cpu.logits(x, plain, 3.0)))

    @pytest.mark.parametrize("tokens", [1, 40])
    def test_the_bits_of_plain_experts(self, tokens):
        matrices = self.weight(5, 2 * 33, 50), self.weight(5, 50, 33)
        chosen = ops.topk_softmax(torch.randn(tokens, 5), 2)
        x = torch.randn(tokens, 50).bfloat16()
        packed = [cpu.pack(LOSSLESS12.quantize(matrix), x.dtype) for matrix in matrices]
        plain = [cpu.pack(matrix, x.dtype) for matrix in matrices]
        assert torch.equal(bits(cpu.fused_experts(x, *packed, *chosen)), bits(cpu.fused_experts(x, *plain, *chosen)))

    @pytest.mark.parametrize("shape", [(1, 1), (70, 131), (3, 33, 17), (100, 1000)])
    def test_the_bits_of_rows(self, shape):
        weight = self.weight(*shape)
        packed = cpu.pack(cpu.quantize(weight, LOSSLESS12), torch.bfloat16)
        assert torch.equal(bits(packed.dequantize(torch.float32)), bits(weight.float()))


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@every_dtype
@pytest.mark.parametrize("format", ops.FORMATS.values(), ids=ops.FORMATS)
class TestQuantize:
    @pytest.mark.parametrize("shape", [(1, 1), (50, 32), (70, 131), (3, 33, 2050)])
    @pytest.mark.parametrize("size", [1e-40, 1e-5, 1.0, 1e4])
    def test_equals_the_definition(self, dtype, shape, size, format):
        """Results are equal bit by bit, for rows and groups of very different sizes, with zeros and ties among them."""
        torch.manual_seed(len(shape))
        weight = (torch.randn(shape) * torch.logspace(-2, 0, shape[-1]) * size).to(dtype)
        weight.view(-1, shape[-1])[::7] *= 0
        weight.view(-1, shape[-1])[1::7] = (torch.randint(-8, 8, shape[-1:]) * size).to(dtype)
        self.check(weight, format)
        self.check(weight.transpose(-1, -2), format)

    def check(self, weight, format):
        ours, expected = cpu.quantize(weight, format), format.quantize(weight)
        assert ours.format is format and ours.shape == weight.shape
        assert torch.equal(ours.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(ours.scales, expected.scales)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_value_that_is_not_finite_affects_only_its_row(self, dtype, value, format):
        weight = torch.randn(3, 70).to(dtype)
        weight[1, 69] = value
        if format is LOSSLESS12:
            pytest.skip("the format holds these numbers, with finite scales")
        ours, expected = cpu.quantize(weight, format), format.quantize(weight)
        assert torch.equal(torch.isfinite(ours.scales), torch.isfinite(expected.scales))
        assert torch.isfinite(ours.scales).view(3, -1).all(-1).tolist() == [True, False, True]
        assert not torch.isfinite(ours.dequantize(torch.float32)[1, 69])
        assert torch.equal(ours.values[0], expected.values[0]) and torch.equal(ours.values[2], expected.values[2])


class NoHeader(Int8):
    name = "no_header"


def test_a_format_without_a_header():
    """Plain torch quantizes in the format, and packing is refused."""
    weight = torch.randn(5, 32)
    quantized = cpu.quantize(weight, NoHeader())
    assert torch.equal(quantized.values, INT8.quantize(weight).values)
    for pack in (
        lambda: cpu.pack(quantized, torch.float32),
        lambda: cpu.pack.num_bytes(weight.shape, torch.float32, NoHeader()),
    ):
        with pytest.raises(UserError, match="the fused kernels have no format no_header; choose plain torch"):
            pack()


class TestNorm:
    @every_dtype
    @pytest.mark.parametrize("groups", [1, 3])
    @pytest.mark.parametrize("x_is_float32", [True, False])
    def test_equals_the_definition(self, dtype, groups, x_is_float32):
        x = torch.randn(2, 5, 150, dtype=torch.float32 if x_is_float32 else dtype)
        z, weight = torch.randn(2, 5, 200, dtype=dtype)[..., :150], torch.randn(150, dtype=dtype)
        for y, exact in (
            (cpu.rms_norm(x, weight, 1e-5, groups), x.double()),
            (cpu.rms_norm_gated(x, z, weight, 1e-5, groups), x.double() * F.silu(z.double())),
        ):
            exact = exact.view(2, 5, groups, -1)
            exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            assert y.dtype == dtype
            assert relative_error(y, exact.view(2, 5, 150) * weight.double()) <= TOLERANCES[dtype]

    @every_dtype
    def test_silu_and_mul(self, dtype):
        x = 20 * torch.randn(3, 1, 2 * 75, dtype=dtype)
        gate, up = x.double().chunk(2, -1)
        assert relative_error(cpu.silu_and_mul(x), F.silu(gate) * up) <= TOLERANCES[dtype]


class TestMLP:
    @every_dtype
    @every_format
    @pytest.mark.parametrize("tokens", [1, 8, 9])
    def test_equals_the_definition(self, dtype, tokens, format):
        x = torch.randn(tokens, 1, 48, dtype=dtype)
        w1, exact1 = weights(2 * 50, 48, dtype=dtype, format=format)
        w2, exact2 = weights(48, 50, dtype=dtype, format=format)
        gate, up = (x.double() @ exact1.T).chunk(2, -1)
        y = cpu.mlp(x, w1, w2)
        assert y.dtype == dtype and y.shape == x.shape
        # The activation is rounded before the second product, and so are gate and up.
        assert relative_error(y, (F.silu(gate) * up) @ exact2.T) <= 2 * TOLERANCES[dtype]

    @every_dtype
    def test_residual_add(self, dtype):
        x, y = torch.randn(3, 1, 75), torch.randn(3, 1, 75, dtype=dtype)
        total = cpu.residual_add(x, y, 0.22)
        assert total.dtype == torch.float32
        assert relative_error(total, x.double() + 0.22 * y.double()) <= 1e-6


class Mamba:
    """A mixer with random weights, its state, and the float64 recurrence. Each row has a slot, out of order."""

    def __init__(
        self, rows, heads=4, head_dim=8, groups=1, d_state=16, width=4, bias=True, dtype=torch.float32, A=16.0
    ):
        g = torch.Generator().manual_seed(heads * d_state + width)

        def normal(*shape):
            return torch.randn(shape, generator=g)

        self.sizes = heads, head_dim, groups, d_state, width
        self.channels = heads * head_dim + 2 * groups * d_state
        self.dtype = dtype
        weights = (normal(self.channels, width), normal(self.channels), normal(heads))
        self.conv_weight, self.conv_bias, self.dt_bias = (weight.to(dtype) for weight in weights)
        self.conv_bias = self.conv_bias if bias else None
        self.A_log = torch.empty(heads).uniform_(1, A, generator=g).log().to(dtype)
        self.D = normal(heads).to(dtype)
        self.limit = (0.0, math.inf)
        self.rounding = ops.Rounding(seed=5, stream=3)
        self.launch = HEURISTIC.chunk_size, HEURISTIC.heads_per_task
        self.slots = torch.arange(rows).flip(0) + 1
        self.conv_state = torch.full((rows + 2, self.channels, width - 1), math.nan, dtype=dtype)
        self.ssm_state = torch.full((rows + 2, heads, head_dim, d_state), math.nan)
        self.conv_state[0], self.ssm_state[0] = 0, 0

    def inputs(self, rows, tokens, seed=0):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(rows, tokens, self.channels + self.sizes[0], generator=g).to(self.dtype)

    def run(self, projected, lengths, started):
        """Run projected [rows, tokens, ..] with lengths [rows] real tokens. started: the tokens that rows have run."""
        lengths, started = torch.tensor(lengths), torch.tensor(started)
        slots = self.slots.where(lengths > 0, 0)
        mixer = cpu.layers.mamba_mixer(
            MixerWeights(
                conv_weight=self.conv_weight[:, None],
                conv_bias=self.conv_bias,
                dt_bias=self.dt_bias,
                A_log=self.A_log,
                D=self.D,
                n_groups=self.sizes[2],
                time_step_limit=self.limit,
                rounding=self.rounding,
            ),
            LaunchParameters(*self.launch, HEURISTIC.torch_chunk_size),
        )
        y = mixer.step(
            projected=projected.flatten(0, 1),
            conv_state=self.conv_state,
            ssm_state=self.ssm_state,
            offsets=torch.arange(len(lengths)) * projected.shape[1],
            lengths=lengths,
            read_slots=slots.where(started > 0, 0),
            write_slots=slots,
            starts=started,
        )
        return y.unflatten(0, projected.shape[:2])

    def exact(self, projected):
        """Return (y, final ssm_state) of one sequence from its beginning, [tokens, ..], in float64."""
        heads, head_dim, groups, d_state, _ = self.sizes
        xBC = oracles.causal_conv(projected[:, : self.channels], self.conv_weight, self.conv_bias)
        x, B, C = xBC.split([heads * head_dim, groups * d_state, groups * d_state], dim=1)
        dt = F.softplus(projected[:, self.channels :].double() + self.dt_bias.double()).clamp(*self.limit)
        y, state = oracles.ssm_recurrence(
            x.view(1, -1, heads, head_dim),
            dt[None],
            -self.A_log.double().exp(),
            B.view(1, -1, groups, d_state),
            C.view(1, -1, groups, d_state),
            self.D,
            torch.zeros(1, heads, head_dim, d_state),
        )
        return y[0].flatten(1), state[0]


class TestMambaMixer:
    @given(
        pieces=st.lists(st.lists(st.integers(0, 80), min_size=2, max_size=2), min_size=1, max_size=4),
        groups=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([8, 16, 24, 64]),
        d_state=st.sampled_from([5, 16, 128]),
        width=st.sampled_from([2, 3, 4, 6]),
        bias=st.booleans(),
        launch=st.tuples(*(st.sampled_from(CHOICES[name]) for name in ("chunk_size", "heads_per_task"))),
    )
    def test_cuts_and_ragged_rows_equal_the_recurrence(self, pieces, groups, head_dim, d_state, width, bias, launch):
        """Two rows run in steps of any lengths. Padding and all memory that no row owns is NaN."""
        mamba = Mamba(2, head_dim=head_dim, groups=groups, d_state=d_state, width=width, bias=bias)
        mamba.launch = launch
        totals = [sum(piece[row] for piece in pieces) for row in range(2)]
        history = mamba.inputs(2, max(*totals, 1))
        done, outputs = [0, 0], [[], []]
        for lengths in pieces:
            projected = torch.full((2, max(*lengths, 1), history.shape[-1]), math.nan)
            for row, length in enumerate(lengths):
                projected[row, :length] = history[row, done[row] : done[row] + length]
            y = mamba.run(projected, lengths, done)
            assert torch.isfinite(y).all()
            for row, length in enumerate(lengths):
                outputs[row].append(y[row, :length])
                done[row] += length
        assert mamba.conv_state[0].count_nonzero() == 0 and mamba.ssm_state[0].count_nonzero() == 0
        assert mamba.ssm_state[3].isnan().all() and mamba.conv_state[3].isnan().all()
        for row, total in enumerate(totals):
            if total == 0:
                continue
            exact, exact_state = mamba.exact(history[row, :total])
            assert relative_error(torch.cat(outputs[row]), exact) <= 1e-5
            assert relative_error(mamba.ssm_state[mamba.slots[row]], exact_state) <= 1e-5
            before = torch.cat([torch.zeros(width - 1, mamba.channels), history[row, :total, : mamba.channels]])
            assert torch.equal(mamba.conv_state[mamba.slots[row]], before[-(width - 1) :].T)

    @pytest.mark.parametrize("chunk_size", CHOICES["chunk_size"])
    @pytest.mark.parametrize("chunks, rest", [(0, 31), (1, -1), (1, 0), (1, 1), (2, 13), (3, -13)])
    def test_chunks_of_every_size_equal_the_recurrence(self, chunk_size, chunks, rest):
        """Rows are ragged. Some lengths are multiples of the chunk. A second piece of each row follows."""
        mamba = Mamba(3, head_dim=24, d_state=20)
        mamba.launch = chunk_size, 1
        lengths = [chunks * chunk_size + rest, 7, 2 * chunk_size + 1]
        history = mamba.inputs(3, max(lengths) + chunk_size + 5)
        outputs = mamba.run(history[:, : max(lengths)], lengths, [0, 0, 0])
        for row, length in enumerate(lengths):
            exact, exact_state = mamba.exact(history[row, :length])
            assert relative_error(outputs[row, :length], exact) <= 1e-5
            assert relative_error(mamba.ssm_state[mamba.slots[row]], exact_state) <= 1e-5
        more = torch.stack([history[row, length : length + chunk_size + 5] for row, length in enumerate(lengths)])
        outputs = mamba.run(more, [chunk_size + 5] * 3, lengths)
        for row, length in enumerate(lengths):
            exact, exact_state = mamba.exact(history[row, : length + chunk_size + 5])
            assert relative_error(outputs[row], exact[length:]) <= 1e-5
            assert relative_error(mamba.ssm_state[mamba.slots[row]], exact_state) <= 1e-5

    @pytest.mark.parametrize("heads_per_task", CHOICES["heads_per_task"])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_tasks_of_every_size_equal_the_recurrence(self, heads_per_task, threads):
        mamba = Mamba(3, heads=5)
        mamba.launch = 64, heads_per_task
        history = mamba.inputs(3, 4)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            outputs = [mamba.run(history[:, t : t + 1], [1, 1, 1], [t, t, t]) for t in range(4)]
        finally:
            torch.set_num_threads(before)
        for row in range(3):
            exact, exact_state = mamba.exact(history[row])
            assert relative_error(torch.cat(outputs, 1)[row], exact) <= 1e-5
            assert relative_error(mamba.ssm_state[mamba.slots[row]], exact_state) <= 1e-5

    @pytest.mark.parametrize("cuts", [[150], [1] * 20], ids=["prefill", "decode"])
    def test_bfloat16(self, cuts):
        mamba = Mamba(1, dtype=torch.bfloat16, d_state=64, head_dim=32)
        history = mamba.inputs(1, sum(cuts))
        outputs, start = [], 0
        for length in cuts:
            outputs.append(mamba.run(history[:, start : start + length], [length], [start])[0])
            start += length
        exact, exact_state = mamba.exact(history[0])
        assert mamba.conv_state.dtype == torch.bfloat16
        assert relative_error(torch.cat(outputs), exact) <= 1e-5, "nothing may be rounded to bfloat16 on the way"
        assert relative_error(mamba.ssm_state[1], exact_state) <= 1e-5

    @pytest.mark.parametrize("cuts", [[128], [1] * 128], ids=["prefill", "decode"])
    def test_large_decays_stay_finite_and_right(self, cuts):
        """sum |dt A| of a chunk is far above 100, and slow tokens follow fast ones."""
        mamba = Mamba(1, heads=2, A=1.0)
        mamba.A_log = torch.tensor([16.0, 128.0]).log()
        history = mamba.inputs(1, 128)
        history[:, 32:, mamba.channels :] = -9
        history[:, :32, mamba.channels :] = 3
        dt = F.softplus(history[0, :64, mamba.channels :] + mamba.dt_bias)
        assert (dt * mamba.A_log.exp()).sum(0).min() > 100
        outputs, start = [], 0
        for length in cuts:
            outputs.append(mamba.run(history[:, start : start + length], [length], [start])[0])
            start += length
        exact, exact_state = mamba.exact(history[0])
        assert relative_error(torch.cat(outputs), exact) <= 1e-5
        assert relative_error(mamba.ssm_state[1], exact_state) <= 1e-5

    def test_indices_out_of_range_are_refused(self):
        mamba = Mamba(1)
        with pytest.raises(RuntimeError, match="row 0 has length 3 of 2 tokens"):
            mamba.run(mamba.inputs(1, 2), [3], [0])
        mamba.slots += 2
        with pytest.raises(RuntimeError, match="row 0 is in slot 3 of 3"):
            mamba.run(mamba.inputs(1, 2), [2], [0])

    @pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
    @pytest.mark.parametrize("d_state", [16, 40, 128, 136, 256])
    @pytest.mark.parametrize("cuts", [[1] * 6, [32, 20, 1]], ids=["decode", "prefill"])
    def test_a_16_bit_state_is_the_rounded_one(self, state_dtype, d_state, cuts):
        """After every token the state equals the float32 step from the previous state, rounded, bit by bit."""
        mamba, exact = (Mamba(2, heads=3, head_dim=10, d_state=d_state) for _ in range(2))
        mamba.launch = exact.launch = 32, 2
        mamba.ssm_state = mamba.ssm_state.to(state_dtype)
        started = [0, 0]
        for seed, tokens in enumerate(cuts):
            lengths = [tokens, 17 if tokens == 20 else tokens]
            history = mamba.inputs(2, tokens, seed)
            y = mamba.run(history, lengths, started)
            for t in range(tokens):
                now = [int(t < length) for length in lengths]
                expected_y = exact.run(history[:, t : t + 1], now, [start + t for start in started])
                assert torch.equal(y[:, t : t + 1], expected_y), "outputs must not be rounded"
                for slot, start, is_real in zip(mamba.slots, started, now, strict=True):
                    if is_real:
                        state, position = exact.ssm_state[slot][None], torch.tensor([start + t])
                        exact.ssm_state[slot] = ops.stochastic_round(state, state_dtype, position, mamba.rounding)[0]
            assert torch.equal(mamba.ssm_state[1:3].float(), exact.ssm_state[1:3])
            started = [start + length for start, length in zip(started, lengths, strict=True)]
        assert mamba.ssm_state[3].isnan().all() and mamba.ssm_state[0].count_nonzero() == 0

    @pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
    @pytest.mark.parametrize("cuts", [[0, 20, 100], [0, 80, 100], [0, 1, 17, 34, 99, 100]])
    def test_cuts_do_not_matter_to_a_16_bit_state(self, state_dtype, cuts):
        history = Mamba(1, d_state=40).inputs(1, 100)
        whole, pieces = (Mamba(1, d_state=40) for _ in range(2))
        for mamba, ends in ((whole, [0, 100]), (pieces, cuts)):
            mamba.launch, mamba.ssm_state = (32, 2), mamba.ssm_state.to(state_dtype)
            steps = [mamba.run(history[:, a:b], [b - a], [a]) for a, b in itertools.pairwise(ends)]
            mamba.y = torch.cat(steps, 1)
        assert torch.equal(whole.ssm_state[1], pieces.ssm_state[1])
        assert torch.equal(whole.y, pieces.y)

    @pytest.mark.parametrize("tokens", [1, 30])
    def test_time_step_limit(self, tokens):
        mamba = Mamba(1)
        mamba.limit = (0.2, 0.9)
        history = mamba.inputs(1, tokens)
        y = mamba.run(history, [tokens], [0])
        assert relative_error(y[0], mamba.exact(history[0])[0]) <= 1e-5


@every_dtype
@every_format
@pytest.mark.parametrize("tokens", [1, 4, 30])
@pytest.mark.parametrize("has_experts", [True, False])
def test_feed_forward_equals_its_parts(dtype, tokens, has_experts, format):
    torch.manual_seed(tokens)
    x = torch.randn(2, tokens, 48)
    norm, router = torch.randn(48).to(dtype), torch.randn(6, 48).to(dtype)
    mlp, experts = (
        [weights(*shape, dtype=dtype, format=format)[0] for shape in shapes]
        for shapes in (((2 * 40, 48), (48, 40)), ((6, 2 * 24, 48), (6, 48, 24)))
    )
    normed = cpu.rms_norm(x, norm, 1e-5)
    expected = cpu.residual_add(x, cpu.mlp(normed, *mlp), 0.3)
    if has_experts:
        chosen = ops.topk_softmax(ops.router_logits(normed.flatten(0, 1), router), 2)
        mixed = cpu.fused_experts(normed.flatten(0, 1), *experts, *chosen)
        expected = cpu.residual_add(expected, mixed.view(x.shape), 0.3)
    half = feed_forward(norm, *mlp, *((cpu.pack(router, dtype), *experts) if has_experts else ()), multiplier=0.3)
    assert torch.allclose(half.step(x), expected, atol=1e-5 if dtype == torch.float32 else 1e-2)


@every_dtype
@pytest.mark.parametrize(("n_group", "latent"), [(1, 0), (4, 0), (4, 20)])
def test_feed_forward_without_gates_and_with_a_sigmoid_router(dtype, n_group, latent):
    """One token is NaN; the bias decides which experts are chosen."""
    torch.manual_seed(n_group)
    x = torch.randn(9, 48)
    norm, router, bias = torch.randn(48).to(dtype), torch.randn(8, 48), torch.randn(8)
    inner = latent or 48
    mlp, experts, projections = (
        [cpu.pack(torch.randn(shape).to(dtype) / 7, dtype) for shape in shapes]
        for shapes in (((40, 48), (48, 40)), ((8, 24, inner), (8, inner, 24)), ((inner, 48), (48, inner)))
    )
    choice = dict(n_group=n_group, topk_group=(n_group + 1) // 2, norm_topk_prob=True, scaling_factor=2.5)
    around = dict(zip(("latent_input", "latent_output"), projections, strict=True)) if latent else {}
    packed_router = cpu.pack(router, torch.float32)
    half = feed_forward(norm, *mlp, packed_router, *experts, multiplier=0.3, correction_bias=bias, **choice, **around)
    normed = cpu.rms_norm(x, norm, 1e-5)
    weights, ids = ops.topk_sigmoid(ops.router_logits(normed, router), bias, 2, **choice)
    expected = cpu.residual_add(x, cpu.mlp(normed, *mlp), 0.3)
    routed = cpu.linear(normed, projections[0], None) if latent else normed
    routed = cpu.fused_experts(routed, *experts, weights, ids)
    expected = cpu.residual_add(expected, cpu.linear(routed, projections[1], None) if latent else routed, 0.3)
    assert torch.allclose(half.step(x), expected, atol=1e-5 if dtype == torch.float32 else 2e-2)
    exact = ops.mlp(normed.float(), *(one.dequantize(torch.float32) for one in mlp))
    assert relative_error(cpu.mlp(normed, *mlp), exact) <= TOLERANCES[dtype]
    x[4] = math.nan
    assert torch.isfinite(half.step(x)).all(1).tolist() == [token != 4 for token in range(9)]


def feed_forward(norm, input, output, router=None, expert_input=None, expert_output=None, *, multiplier, **choice):
    return cpu.layers.feed_forward(
        FeedForwardWeights(
            norm=norm,
            input=input,
            output=output,
            router=router,
            expert_input=expert_input,
            expert_output=expert_output,
            top_k=2,
            eps=1e-5,
            residual_multiplier=multiplier,
            **choice,
        )
    )


def test_experts_of_a_poisoned_token():
    """The poisoned token takes some experts, and the other tokens take theirs."""
    shapes = ((24, 16), (16, 12), (5, 16), (5, 24, 16), (5, 16, 12))
    matrices = [cpu.pack(torch.randn(shape), torch.float32) for shape in shapes]
    x = torch.randn(1, 4, 16)
    half = feed_forward(torch.ones(16), *matrices, multiplier=1.0)
    expected, x[0, 2] = half.step(x), math.nan
    output = half.step(x)
    assert output[0, 2].isnan().all() and torch.equal(output[0, [0, 1, 3]], expected[0, [0, 1, 3]])


class TestLogits:
    @every_dtype
    @every_format
    @pytest.mark.parametrize("rows", [1, 4, 13, 40])
    def test_equals_the_definition(self, dtype, rows, format):
        x = torch.randn(rows, 48).to(dtype)
        weight, exact_weight = weights(70, 48, dtype=dtype, format=format)
        y = cpu.logits(x, weight, 3.0)
        assert y.dtype == torch.float32
        exact = x.double() @ exact_weight.T / 3
        assert relative_error(y, exact) <= 1e-5


class TestAttention:
    @every_dtype
    @given(
        rows=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 75)), min_size=1, max_size=4),
        tokens=st.sampled_from([1, 5, 75]),
        kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([8, 32, 64, 80]),
        seed=st.integers(0, 1000),
        poisoned=st.integers(0, 1),
    )
    def test_equals_the_definition(self, dtype, rows, tokens, kv_heads, head_dim, seed, poisoned):
        """Each row is (tokens in the cache already, new ones). Everything else is NaN, and so are `poisoned` rows."""
        torch.manual_seed(seed)
        rows = [(start, min(new, tokens)) for start, new in rows]
        slots = torch.randperm(len(rows)) + 1
        keys, values = (torch.randn(len(rows), 205, kv_heads, head_dim).to(dtype) for _ in range(2))
        keys[:poisoned], values[:poisoned] = math.nan, math.nan
        caches = [torch.full((len(rows) + 1, kv_heads, 210, head_dim), math.nan, dtype=dtype) for _ in range(2)]
        positions = torch.tensor([start for start, _ in rows])[:, None] + torch.arange(tokens)
        lengths = torch.tensor([new for _, new in rows])
        where = (positions, lengths, slots.where(lengths > 0, 0))
        for cache, source in zip(caches, (keys, values), strict=True):
            fresh = torch.full((len(rows), tokens, kv_heads, head_dim), math.nan, dtype=dtype)
            for row, (start, new) in enumerate(rows):
                cache[slots[row], :, :start] = source[row, :start].transpose(0, 1)
                fresh[row, :new] = source[row, start : start + new]
            cpu.write_cache(cache, fresh, *where)
        query = torch.randn(len(rows), tokens, 4, head_dim).to(dtype)
        output = cpu.cached_attention(query, *caches, *where, 0.2, kv_length=205)
        assert output.dtype == dtype and torch.isfinite(output[poisoned:]).all()
        for row, (start, new) in enumerate(rows[poisoned:], start=poisoned):
            for t in range(new):
                seen = start + t + 1
                exact = oracles.attention(query[row, t], keys[row, :seen], values[row, :seen], 0.2)
                assert relative_error(output[row, t], exact) <= TOLERANCES[dtype]

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_large_scores_do_not_overflow(self, tokens):
        cache, one = torch.randn(2, 1, 102, 8), torch.tensor([1])
        query = 300 * torch.randn(1, tokens, 2, 8)
        positions, lengths = torch.arange(99, 99 + tokens)[None], torch.tensor([tokens])
        output = cpu.cached_attention(query, cache, cache, positions, lengths, one, 1.0, 102)
        cache = cache[:, :, :100]
        exact = oracles.attention(query[0, 0], cache[1].transpose(0, 1), cache[1].transpose(0, 1), 1.0)
        assert torch.allclose(output[0, 0].double(), exact, atol=1e-4)


class TestExperts:
    @every_dtype
    @every_format
    @pytest.mark.parametrize("tokens", [1, 2, 9, 40])
    @pytest.mark.parametrize("top_k", [1, 3, 5])
    def test_equals_the_definition(self, dtype, tokens, top_k, format):
        torch.manual_seed(tokens)
        x, router = torch.randn(tokens, 48).to(dtype), torch.randn(5, 48).to(dtype)
        w1, exact1 = weights(5, 80, 48, dtype=dtype, format=format)
        w2, exact2 = weights(5, 48, 40, dtype=dtype, format=format)
        chosen = ops.topk_softmax(x.float() @ router.float().T, top_k)
        output = cpu.fused_experts(x, w1, w2, *chosen)
        assert output.dtype == dtype
        exact = oracles.mixture_of_experts(x, router, exact1, exact2, top_k)
        assert relative_error(output, exact) <= 2 * TOLERANCES[dtype]  # the activation is rounded too

    def test_experts_that_no_token_chose_are_not_read(self):
        x, w1, w2 = torch.randn(3, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
        w1[3:], w2[3:] = math.nan, math.nan
        ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
        chosen = torch.full((3, 2), 0.5), ids
        for quantize in (lambda weight: weight, INT8.quantize):
            packed = [cpu.pack(quantize(weight), torch.float32) for weight in (w1, w2)]
            assert torch.isfinite(cpu.fused_experts(x, *packed, *chosen)).all()

    def test_a_poisoned_token_stays_alone(self):
        x = torch.randn(4, 16)
        w1, w2 = (cpu.pack(torch.randn(shape), torch.float32) for shape in ((5, 24, 16), (5, 16, 12)))
        x[2] = math.nan
        weights, ids = ops.topk_softmax(x @ torch.randn(16, 5), 2)
        finite = torch.isfinite(cpu.fused_experts(x, w1, w2, weights, ids)).all(1)
        assert finite.tolist() == [True, True, False, True]


class TestThreads:
    """Loops of many tasks run in quick succession. Threads enter them late, together or not at all."""

    @pytest.mark.parametrize("threads", [1, 2, 3, 8])
    def test_every_task_is_done_once(self, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for rows, columns in ((1, 64), (7, 64), (700, 64), (5000, 64), (96, 20_000)):
                x, weight = torch.randint(-4, 5, (1, columns)).float(), torch.randint(-4, 5, (rows, columns)).float()
                expected, packed = F.linear(x, weight), cpu.pack(weight, torch.float32)
                for _ in range(50):
                    for sign in (1, -1):  # memory that is used again has the other result
                        assert torch.equal(cpu.linear(sign * x, packed), sign * expected)
        finally:
            torch.set_num_threads(before)

    def test_callers_on_several_threads(self):
        x, weight = torch.randint(-4, 5, (1, 64)).float(), torch.randint(-4, 5, (3000, 64)).float()
        expected, packed = F.linear(x, weight), cpu.pack(weight, torch.float32)
        with ThreadPoolExecutor(4) as pool:
            results = pool.map(lambda _: cpu.linear(x, packed), range(400))
            assert all(torch.equal(result, expected) for result in results)

    def test_after_a_fork(self):
        """The child has none of the threads and computes correctly without them."""
        x, weight = torch.ones(1, 64), cpu.pack(torch.ones(3000, 64), torch.float32)
        cpu.linear(x, weight)
        child = os.fork()
        if child == 0:
            os._exit(0 if cpu.linear(x, weight).eq(64).all() else 1)
        assert os.waitpid(child, 0)[1] == 0


class TestBuild:
    @pytest.fixture
    def empty_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("CXX", raising=False)
        return tmp_path / "cache"

    def test_without_a_compiler_plain_torch_runs(self, empty_cache, monkeypatch, caplog):
        monkeypatch.setenv("PATH", "")
        assert "no C++ compiler" in build.load_kernels.__wrapped__()
        assert "no C++ compiler" in caplog.text
        assert not list((empty_cache / "granite4-neuron").iterdir())

    def test_a_compiler_that_fails_is_named(self, empty_cache, tmp_path, monkeypatch, caplog):
        compiler = tmp_path / "broken"
        compiler.write_text("#!/bin/sh\necho 'kernels.cpp: error: no such dialect' >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert "no such dialect" in build.load_kernels.__wrapped__()
        assert "no such dialect" in caplog.text
        assert not list((empty_cache / "granite4-neuron").iterdir()), "nothing half-built stays"

    def test_torch_kernels_are_the_plain_definitions(self):
        assert cpu.choose_operators("torch") is TORCH

    def test_unknown_kernels(self):
        with pytest.raises(UserError, match="cpu_kernels is 'fast'; it must be one of fused, torch"):
            cpu.choose_operators("fast")
