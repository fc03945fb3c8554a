"""The NKI emulator: its results, and its refusal of programs that the hardware or the compiler would refuse."""

import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

pytest.importorskip("nki.emulation", reason="the Neuron SDK's own nki is installed")

from nki import emulation

from test.support.nki_bodies import loaded, on_sbuf, out, product, random, refuses, run, stored, tile


class TestArithmetic:
    def test_engines_compute_in_float32_and_cast_on_write(self):
        x = np.full((1, 4000), 0.01, ml_dtypes.bfloat16)

        def kernel(x):
            data = loaded(x)
            sums = tile(1, 4000, dtype=nl.bfloat16)
            ones = tile(1, 4000, dtype=nl.bfloat16, value=1.0)
            nisa.tensor_tensor_scan(dst=sums, data0=ones, data1=data, initial=0.0, op0=nl.multiply, op1=nl.add)
            return stored(sums)

        assert run(kernel, x)[0, -1] == pytest.approx(40, rel=1e-2)  # a bfloat16 sum stops growing at 4

    def test_scan_is_the_recurrence(self):
        a, b, first = random(3, 50), random(3, 50), random(3, 1)

        def kernel(a, b, first):
            dst = tile(3, 50)
            nisa.tensor_tensor_scan(
                dst=dst, data0=loaded(a), data1=loaded(b), initial=loaded(first), op0=nl.multiply, op1=nl.add
            )
            return stored(dst)

        expected, previous = [], first[:, 0]
        for i in range(50):
            previous = a[:, i] * previous + b[:, i]
            expected.append(previous)
        np.testing.assert_array_equal(run(kernel, a, b, first), np.stack(expected, 1))

    def test_matmul_accumulates_and_overwrites(self):
        x, y = random(16, 8), random(16, 32)

        def kernel(x, y):
            dst = product(loaded(x), loaded(y), accumulate=False)
            nisa.nc_matmul(dst=dst, stationary=loaded(x), moving=loaded(y), accumulate=True)
            nisa.nc_matmul(dst=dst, stationary=loaded(x), moving=loaded(y))
            again = product(loaded(x), loaded(y))
            nisa.nc_matmul(dst=again, stationary=loaded(x), moving=loaded(y), accumulate=False)
            return stored(on_sbuf(dst)), stored(on_sbuf(again))

        three_times, once = run(kernel, x, y)
        np.testing.assert_allclose(three_times, 3 * x.T @ y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(once, x.T @ y, rtol=1e-4, atol=1e-5)

    def test_transpose(self):
        x = random(20, 30)

        def kernel(x):
            dst = tile(30, 20, buffer=nl.psum)
            nisa.nc_transpose(dst=dst, data=loaded(x))
            return stored(on_sbuf(dst))

        np.testing.assert_array_equal(run(kernel, x), x.T)

    def test_activation_scales_shifts_and_applies(self):
        x, scale, bias = random(4, 6), random(4, 1), random(4, 1)

        def kernel(x, scale, bias):
            dst = tile(4, 6)
            nisa.activation(dst=dst, op=nl.exp, data=loaded(x), scale=loaded(scale), bias=loaded(bias))
            return stored(dst)

        np.testing.assert_allclose(run(kernel, x, scale, bias), np.exp(x * scale + bias), rtol=1e-6)

    def test_two_operators_and_their_order(self):
        x, column, other = random(4, 6), random(4, 1), random(4, 6)

        def kernel(x, column, other):
            first, second = tile(4, 6), tile(4, 6)
            nisa.tensor_scalar(
                dst=first,
                data=loaded(x),
                op0=nl.subtract,
                operand0=loaded(column),
                reverse0=True,
                op1=nl.multiply,
                operand1=2.0,
            )
            nisa.scalar_tensor_tensor(
                dst=second,
                data=loaded(x),
                op0=nl.multiply,
                operand0=loaded(column),
                op1=nl.subtract,
                operand1=loaded(other),
                reverse1=True,
            )
            return stored(first), stored(second)

        first, second = run(kernel, x, column, other)
        np.testing.assert_allclose(first, (column - x) * 2, rtol=1e-6)
        np.testing.assert_allclose(second, other - x * column, rtol=1e-5, atol=1e-6)

    def test_iota_and_affine_select(self):
        def kernel():
            numbers, upper = tile(3, 2, 4), tile(3, 4)
            nisa.iota(dst=numbers, pattern=[[10, 2], [1, 4]], offset=5, channel_multiplier=100)
            nisa.affine_select(
                dst=upper,
                pattern=[[1, 4]],
                channel_multiplier=-1,
                on_true_tile=tile(3, 4, value=7.0),
                on_false_value=-1.0,
                cmp_op=nl.greater_equal,
            )
            return stored(numbers), stored(upper)

        numbers, upper = run(kernel)
        p, i, j = np.ogrid[:3, :2, :4]
        np.testing.assert_array_equal(numbers, 5 + 100 * p + 10 * i + j)
        np.testing.assert_array_equal(upper, np.where(np.arange(4) >= np.arange(3)[:, None], 7, -1))

    def test_reduction_over_the_last_dimensions(self):
        x = random(3, 4, 5)

        def kernel(x):
            dst = tile(3, 4)
            nisa.tensor_reduce(dst=dst, op=nl.add, data=loaded(x), axis=2)
            return stored(dst)

        np.testing.assert_allclose(run(kernel, x), x.sum(2), rtol=1e-5, atol=1e-6)

    def test_integers_are_rounded_and_saturate(self):
        x = np.array([[0.5, 1.5, -3e10, 3e10]], np.float32)
        expected = [[0, 2, -(2**31), 2**31 - 1]]
        np.testing.assert_array_equal(run(lambda x: stored(loaded(x, nl.int32)), x), expected)


class TestMemory:
    def test_new_memory_is_poisoned(self):
        floats, integers = run(lambda: (stored(tile(2, 3)), stored(tile(2, 3, dtype=nl.int32))))
        assert np.isnan(floats).all()
        assert (integers == emulation.INTEGER_SENTINEL).all()

    def test_kernels_can_write_their_arguments(self):
        x = np.zeros((2, 3), np.float32)

        def kernel(x):
            nisa.dma_copy(dst=x, src=tile(2, 3, value=1.0))
            return x

        run(kernel, x)
        assert (x == 1).all()

    def test_programs_share_hbm(self):
        def kernel(x):
            result = out(2, 3)
            program = nl.program_id(0)
            assert nl.num_programs(0) == 2 and nl.program_ndim() == 1
            nisa.dma_copy(dst=result[program : program + 1, :], src=tile(1, 3, value=float(program)))
            return result

        np.testing.assert_array_equal(run(kernel, random(1, 1), programs=2), [[0, 0, 0], [1, 1, 1]])

    def test_views(self):
        x = random(2, 3, 4)

        def kernel(x):
            data = loaded(x)
            assert data[0, 1, :].shape == (1, 4)  # an integer keeps the partition dimension, and drops a free one
            assert x[0].shape == (3, 4)
            read = tile(2, 3, 5, 4)
            nisa.tensor_copy(dst=read, src=data.expand_dim(2).broadcast(2, 5))
            swapped = tile(2, 4, 3)
            nisa.tensor_copy(dst=swapped, src=data.permute((0, 2, 1)))
            return stored(read), stored(swapped), stored(data.reshape((2, 12))), stored(data.reshape_dim(2, (2, 2)))

        read, swapped, flat, split = run(kernel, x)
        np.testing.assert_array_equal(read, np.broadcast_to(x[:, :, None], (2, 3, 5, 4)))
        np.testing.assert_array_equal(swapped, x.transpose(0, 2, 1))
        np.testing.assert_array_equal(flat, x.reshape(2, 12))
        np.testing.assert_array_equal(split, x.reshape(2, 3, 2, 2))

    def test_view_of_another_dtype(self):
        def kernel():
            halves = tile(2, 4, 6, dtype=nl.bfloat16)
            nisa.memset(dst=halves.view(nl.float32), value=0.0)
            return stored(halves)

        assert (run(kernel) == 0).all() and emulation.last_launch().instructions[0].elements == 12
        refuses("is no view of float32", lambda: tile(2, 3, dtype=nl.bfloat16).view(nl.float32))

    def test_counts_and_bytes(self):
        x = np.zeros((4, 8), ml_dtypes.bfloat16)

        def kernel(x):
            data = loaded(x, nl.float32)
            nisa.tensor_copy(dst=data, src=data, engine=nisa.engine.scalar)
            result = out(2, 4, 8)
            nisa.dma_copy(dst=result[nl.program_id(0)], src=data)
            return result

        run(kernel, x, programs=2)
        launch = emulation.last_launch()
        assert launch.count() == 3 and launch.count(program=1) == 3
        assert launch.count("dma") == 2 and launch.count("scalar", "tensor_copy") == 1 and launch.count("tensor") == 0
        assert launch.hbm_bytes == 2 * (4 * 8 * 2 + 4 * 8 * 4)

    def test_dma_elements_are_contiguous_on_both_sides(self):
        """An element ends at a partition's end, at a gap on either side, and where the order changes."""
        x = np.zeros((4, 6, 8), np.float32)

        def kernel(x):
            whole, columns = tile(4, 6, 8), tile(4, 6, 3)
            nisa.dma_copy(dst=whole, src=x)  # a partition at a time
            nisa.dma_copy(dst=columns, src=x[:, :, 0:3])  # three of each eight
            nisa.dma_copy(dst=whole.permute((0, 2, 1)), src=x.reshape_dim(1, (1, 6)).reshape((4, 8, 6)))
            nisa.dma_copy(dst=tile(24, 4, dtype=nl.bfloat16), src=x[:, 0:6, 2:6])  # of the wider dtype's bytes
            nisa.dma_copy(dst=tile(4, 4), src=x[0:2, 0, 0:1].broadcast(1, 8))  # a repeated entry is read each time
            return stored(columns)

        run(kernel, x)
        elements = [i.dma_elements for i in emulation.last_launch().instructions if i.engine == "dma"]
        assert elements == [((192, 4),), ((12, 24),), ((4, 192),), ((16, 24),), ((4, 16),), ((72, 4),)]

    def test_dma_elements_of_lengths_that_do_not_divide_each_other(self):
        """Rows of 6 go to rows of 4 with gaps: 4, 2, 2, 4 and so on."""

        def kernel(x):
            target = tile(1, 3, 8)
            nisa.dma_copy(dst=target[:, :, 0:4], src=x[:, 0:6])
            return stored(target)

        run(kernel, np.zeros((2, 8), np.float32))
        assert emulation.last_launch().instructions[0].dma_elements == ((8, 2), (16, 2))

    def test_cycles_per_element_of_vector_engine(self):
        def kernel():
            first, second = tile(4, 8, value=0.0), tile(4, 8, value=0.0)
            halves = tile(4, 8, dtype=nl.bfloat16, value=0.0)
            in_psum = tile(4, 8, buffer=nl.psum, value=0.0)
            nisa.tensor_tensor(dst=first, data1=first, data2=second, op=nl.add)
            nisa.tensor_tensor(dst=first, data1=first, data2=in_psum, op=nl.add)
            nisa.tensor_tensor(dst=halves, data1=halves, data2=halves, op=nl.multiply)
            nisa.tensor_tensor(dst=halves, data1=halves, data2=halves, op=nl.maximum)
            repeated = halves[:, 0:1].broadcast(1, 8)
            nisa.tensor_tensor(dst=halves, data1=halves, data2=repeated, op=nl.multiply)
            nisa.tensor_tensor(dst=first, data1=first, data2=second, op=nl.add, engine=nisa.gpsimd_engine)
            nisa.tensor_scalar(dst=first, data=first, op0=nl.add, operand0=1.0)
            return stored(first)

        run(kernel)
        operations = [i for i in emulation.last_launch().instructions if i.op in ("tensor_tensor", "tensor_scalar")]
        assert [i.cycles_per_element for i in operations] == [2, 1, 1, 2, 2, 1, 1]

    def test_peak_memory_is_that_of_live_ranges(self):
        def kernel():
            for _ in range(100):  # programs run one after the other and share their memory
                tile(128, 1024, value=0.0)
                tile(128, 512, buffer=nl.psum, value=0.0)
            kept = [tile(128, 256, value=0.0) for _ in range(3)]
            for tensor in kept:
                nisa.tensor_copy(dst=tensor, src=tensor)
            return stored(tile(1, 1, value=0.0))

        run(kernel)
        assert emulation.last_launch().peak_sbuf_bytes == 4096
        assert emulation.last_launch().peak_psum_banks == 1


class TestRefusals:
    @pytest.mark.parametrize("platform, most", [("trn2", 212728), ("trn3", 245496)])
    def test_sbuf_overflow(self, platform, most, monkeypatch):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
        assert nl.tile_size.total_available_sbuf_size == most
        assert nisa.get_nc_version() == (nisa.nc_version.gen4 if platform == "trn3" else nisa.nc_version.gen3)

        def kernel(rest):
            kept = [tile(128, size, value=0.0) for size in (20000, 20000, most // 4 - 40000 + rest)]
            for tensor in kept:
                nisa.tensor_copy(dst=tensor, src=tensor)
            return stored(tile(1, 1, dtype=nl.float32, value=0.0))

        run(lambda: kernel(0))
        refuses(f"SBUF: {most + 4} bytes per partition, of {most}", lambda: kernel(1))

    def test_psum_overflow(self):
        def kernel():
            kept = [tile(128, 512, buffer=nl.psum, value=0.0) for _ in range(9)]
            for tensor in kept:
                nisa.tensor_copy(dst=tensor, src=tensor)

        refuses("PSUM: 9 banks, of 8", kernel)

    def test_too_many_partitions(self):
        refuses("129 partitions; there are 128", lambda: tile(129, 1))

    @pytest.mark.parametrize(
        ("start", "count", "is_allowed"),
        [(0, 128, True), (32, 96, False), (64, 64, True), (32, 64, False), (96, 32, True), (16, 8, False)],
    )
    def test_start_partition(self, start, count, is_allowed):
        def kernel():
            data = tile(128, 4, value=0.0)
            nisa.memset(dst=data[start : start + count, :], value=1.0)

        if is_allowed:
            run(kernel)
        else:
            refuses(f"{count} partitions start at {start}", kernel)

    @pytest.mark.parametrize(
        ("stationary", "moving", "message"),
        [
            ((128, 129), (128, 8), "stationary has 129 columns"),
            ((128, 8), (128, 513), "one matrix product must fit one PSUM bank|moving has 513 columns"),
            ((64, 8), (128, 8), "64 and 128 partitions"),
        ],
    )
    def test_matmul_sizes(self, stationary, moving, message):
        def kernel():
            dst = tile(min(stationary[1], 128), moving[1], buffer=nl.psum)
            nisa.nc_matmul(dst=dst, stationary=tile(*stationary, value=0.0), moving=tile(*moving, value=0.0))

        refuses(message, kernel)

    def test_matmul_across_banks(self):
        def kernel():
            dst = tile(8, 1024, buffer=nl.psum)
            operand = tile(8, 512, value=0.0)
            nisa.nc_matmul(dst=dst[:, 512:1024], stationary=operand[:, 0:8], moving=operand)
            nisa.nc_matmul(dst=dst[:, 256:768], stationary=operand[:, 0:8], moving=operand)

        refuses("must fit one PSUM bank", kernel)

    def test_matmul_dtypes(self):
        def mixed():
            product(tile(8, 8, value=0.0), tile(8, 8, dtype=nl.bfloat16, value=0.0))

        def rounded():
            dst = tile(8, 8, dtype=nl.bfloat16, buffer=nl.psum)
            nisa.nc_matmul(dst=dst, stationary=tile(8, 8, value=0.0), moving=tile(8, 8, value=0.0))

        def integers():
            product(tile(8, 8, dtype=nl.int32, value=0), tile(8, 8, dtype=nl.int32, value=0))

        refuses("float32 multiplies float32 only", mixed)
        refuses("dst is bfloat16; it must be float32", rounded)
        refuses("stationary is int32; TensorE multiplies floats", integers)

    def test_matmul_places(self):
        def to_sbuf():
            nisa.nc_matmul(dst=tile(8, 8), stationary=tile(8, 8, value=0.0), moving=tile(8, 8, value=0.0))

        def from_psum():
            product(tile(8, 8, buffer=nl.psum, value=0.0), tile(8, 8, value=0.0))

        refuses("dst is in SBUF; it must be in PSUM", to_sbuf)
        refuses("stationary is in PSUM; it must be in SBUF", from_psum)

    @pytest.mark.parametrize("prepare", [lambda dst: None, lambda dst: nisa.memset(dst=dst, value=0.0)])
    def test_accumulating_onto_other_data_than_a_product(self, prepare):
        def kernel():
            dst = tile(8, 8, buffer=nl.psum)
            prepare(dst)
            operand = tile(8, 8, value=0.0)
            nisa.nc_matmul(dst=dst, stationary=operand, moving=operand, accumulate=True)

        refuses("accumulate=True on PSUM that holds no matrix product", kernel)

    def test_accumulation_group_that_is_partly_written(self):
        def kernel():
            dst = tile(8, 8, buffer=nl.psum)
            operand = tile(8, 8, value=0.0)
            nisa.nc_matmul(dst=dst[:, 0:4], stationary=operand, moving=operand[:, 0:4])
            nisa.nc_matmul(dst=dst, stationary=operand, moving=operand)

        refuses("part of dst holds a matrix product", kernel)

    def test_false_hint_of_ones_and_zeros(self):
        def kernel():
            product(tile(8, 8, value=0.5), tile(8, 8, value=1.0), is_stationary_onezero=True)

        refuses("declared to be ones and zeros", kernel)

    def test_transpose_limits(self):
        def large():
            nisa.nc_transpose(dst=tile(64, 64), data=tile(64, 64, value=0.0))

        def wrong_dtype():
            data = tile(8, 8, dtype=nl.bfloat16, value=0.0)
            nisa.nc_transpose(dst=tile(8, 8, buffer=nl.psum), data=data)

        refuses("transposed on vector; at most", large)
        refuses("dst is float32, data is bfloat16", wrong_dtype)

    def test_dma_and_psum(self):
        refuses("DMA does not reach PSUM", lambda: stored(tile(8, 8, buffer=nl.psum, value=0.0)))

    def test_dma_sizes(self):
        refuses("sizes differ", lambda x: nisa.dma_copy(dst=tile(4, 6), src=x), random(6, 5))

    def test_engines_and_hbm(self):
        refuses("src is in shared HBM", lambda x: nisa.tensor_copy(dst=tile(4, 4), src=x), random(4, 4))

    def test_two_inputs_in_psum(self):
        def kernel():
            data = tile(8, 8, buffer=nl.psum, value=0.0)
            nisa.tensor_tensor(dst=tile(8, 8), data1=data, data2=data, op=nl.add)

        refuses("both inputs are in PSUM", kernel)

    def test_gpsimd(self):
        def psum():
            nisa.tensor_copy(dst=tile(8, 8), src=tile(8, 8, buffer=nl.psum, value=0.0), engine=nisa.engine.gpsimd)

        def sum_of_psum():
            data = tile(8, 8, buffer=nl.psum, value=0.0)
            ones = tile(8, 8, value=1.0)
            nisa.tensor_tensor(dst=tile(8, 8), data1=data, data2=ones, op=nl.add, engine=nisa.engine.gpsimd)

        def power_of_psum():
            data = tile(8, 8, buffer=nl.psum, value=1.0)
            nisa.tensor_tensor(dst=tile(8, 8), data1=data, data2=tile(8, 8, value=1.0), op=nl.power)

        for body in (psum, sum_of_psum, power_of_psum):
            refuses("GpSimd does not reach PSUM", body)

    def test_engines_without_an_instruction(self):
        def product():
            data = tile(8, 8, value=0.0)
            nisa.tensor_tensor(dst=data, data1=data, data2=data, op=nl.multiply, engine=nisa.engine.scalar)

        def sum_on_gpsimd():
            data = tile(8, 8, value=0.0)
            nisa.tensor_scalar(dst=data, data=data, op0=nl.add, operand0=1.0, engine=nisa.engine.gpsimd)

        refuses("gpsimd does not do this, only vector or scalar", sum_on_gpsimd)
        refuses("scalar does not do this, only vector or gpsimd", product)
        refuses("scalar does not do this", lambda: nisa.memset(tile(8, 8), 0.0, engine=nisa.engine.scalar))

    def test_scalar_engine_operators(self):
        def kernel():
            data = tile(8, 8, value=0.0)
            nisa.tensor_scalar(dst=data, data=data, op0=nl.subtract, operand0=1.0, engine=nisa.engine.scalar)

        refuses("ScalarE has no tensor_scalar", kernel)

    def test_operands_per_partition(self):
        def rounded():
            column = tile(8, 1, dtype=nl.bfloat16, value=0.0)
            nisa.tensor_scalar(dst=tile(8, 8), data=tile(8, 8), op0=nl.add, operand0=column)

        def wide():
            nisa.activation(dst=tile(8, 8), op=nl.exp, data=tile(8, 8), scale=tile(8, 2, value=0.0))

        refuses("operand0 is bfloat16; it must be float32", rounded)
        refuses(r"scale is \(8, 2\)", wide)

    @pytest.mark.parametrize(("op", "value"), [(nl.reciprocal, 1e-13), (nl.sqrt, 0.0), (nl.rsqrt, 1e30), (nl.log, 0.0)])
    def test_activation_ranges(self, op, value):
        def kernel():
            nisa.activation(dst=tile(1, 1), op=op, data=tile(1, 1, value=value))

        refuses(f"{op.name} of .* valid magnitudes", kernel)

    def test_reduction_axes(self):
        def kernel():
            nisa.tensor_reduce(dst=tile(8, 3), op=nl.add, data=tile(8, 4, 3, value=0.0), axis=1)

        refuses("not its last free dimensions", kernel)

    def test_memset_value(self):
        refuses("memset of int32 with 1.0", lambda: tile(2, 2, dtype=nl.int32, value=1.0))

    def test_elements_per_instruction(self):
        refuses("70000 elements per partition; at most 65536", lambda: tile(1, 70000, dtype=nl.bfloat16, value=0.0))

    def test_access_pattern_dimensions(self):
        refuses("6 dimensions", lambda: tile(1, 1, 1, 1, 1).expand_dim(1))
        refuses("4 free dimensions; at most 3", lambda: nisa.tensor_copy(tile(1, 1, 1, 1, 1), tile(1, 1, 1, 1, 1)))
        run(lambda: (tile(1, 1, 1, 1, 1, value=0.0), stored(tile(1, 1, value=0.0)))[1])

    def test_indices(self):
        refuses("slice 0:5 of a dimension of 4", lambda: tile(4, 4)[0:5, :])
        refuses("partitions cannot be strided", lambda: tile(4, 4)[0:4:2, :])
        refuses("reshape must keep the partition dimension", lambda: tile(4, 4).reshape((2, 8)))
        refuses("partitions cannot be broadcast", lambda: tile(1, 4).broadcast(0, 8))
        refuses("reshape_dim must keep the partition dimension", lambda: tile(4, 4).reshape_dim(0, (2, 2)))

    @pytest.mark.parametrize(
        "view",
        [
            lambda result: result.reshape((4, 2, 2)).permute((1, 0, 2)),
            lambda result: result.reshape_dim(1, (2, 2))[:, 0:2],
            lambda result: result.reshape((16,)),
        ],
    )
    def test_a_reshaped_output_is_not_written(self, view):
        """NKI 0.3 wrote such a copy to a temporary. An access pattern of the same elements is written."""
        data = lambda: tile(4, 4, value=0.0)  # noqa: E731
        refuses("dst is a reshaped tensor in HBM", lambda: nisa.dma_copy(dst=view(out(4, 4)), src=data()))
        run(lambda: nisa.dma_copy(dst=out(4, 4).permute((1, 0))[0:4], src=data()))
        run(lambda: nisa.dma_copy(dst=out(4, 4).ap([[4, 4], [2, 2], [1, 2]]), src=data()))

    def test_programs_that_differ(self):
        def kernel():
            for _ in range(1 + nl.program_id(0)):
                result = out(2, 2)
            return result

        with pytest.raises(emulation.NkiError, match="different shared_hbm tensors"):
            run(kernel, programs=2)


def test_the_example_of_its_readme():
    """It runs in a separate process without this package and without the path of the tests."""
    root = Path(__file__).parents[3]
    (example,) = re.findall(
        r"```python\n(.*?)```", (root / "test/support/nki_emulator/README.md").read_text(), flags=re.DOTALL
    )
    subprocess.run([sys.executable, "-c", example], cwd=root, check=True)
