"""Forms of instructions that the emulator takes, and forms that it refuses because no kernel in use has them."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

pytest.importorskip("nki.emulation", reason="the Neuron SDK's own nki is installed")

from nki import emulation

from test.support.nki_bodies import loaded, on_sbuf, out, product, random, refuses, run, stored, tile


class TestRefusals:
    def test_an_operand_over_two_banks(self):
        def read():
            nisa.tensor_copy(dst=tile(8, 1024), src=tile(8, 1024, buffer=nl.psum))

        def written():
            nisa.memset(dst=tile(8, 4, 256, buffer=nl.psum), value=0.0)

        refuses(r"src \(8, 1024\) lies in 2 PSUM banks", read)
        refuses(r"dst \(8, 4, 256\) lies in 2 PSUM banks", written)

    def test_a_product_of_rank_3(self):
        def of(dst, stationary, moving):
            return lambda: nisa.nc_matmul(
                dst=tile(*dst, buffer=nl.psum),
                stationary=tile(*stationary, value=0.0),
                moving=tile(*moving, value=0.0),
            )

        run(lambda: (of((4, 6), (8, 4), (8, 6))(), stored(tile(1, 1, value=0.0)))[1])
        refuses(r"dst \(4, 2, 3\) of a matrix product has 3 dimensions", of((4, 2, 3), (8, 4), (8, 6)))
        refuses(r"stationary \(8, 2, 2\) of", of((4, 6), (8, 2, 2), (8, 6)))
        refuses(r"moving \(8, 2, 3\) of", of((4, 6), (8, 4), (8, 2, 3)))
        refuses(
            r"data \(8, 2, 2\) of a transpose",
            lambda: nisa.nc_transpose(dst=tile(4, 8, buffer=nl.psum), data=tile(8, 2, 2)),
        )

    def test_strided_destinations(self):
        def product():
            dst = tile(4, 6, 2, buffer=nl.psum)
            nisa.nc_matmul(dst=dst[:, :, 0], stationary=tile(8, 4, value=0.0), moving=tile(8, 6, value=0.0))

        def transpose():
            nisa.nc_transpose(dst=tile(4, 8, 2, buffer=nl.psum)[:, :, 0], data=tile(8, 4, value=0.0))

        refuses("of a matrix product is strided", product)
        refuses("of a transpose is strided", transpose)

    @pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum], ids=["SBUF", "PSUM"])
    def test_an_activation_of_repeated_elements(self, buffer):
        def kernel():
            data = tile(8, 4, buffer=buffer, value=0.0).expand_dim(1).broadcast(1, 3)
            nisa.activation(dst=tile(8, 3, 4), op=nl.exp, data=data)

        refuses("of an activation has a stride of 0", kernel)

    @pytest.mark.parametrize(
        ("kept", "message"),
        [
            (lambda: tile(4, 6, value=0.0).expand_dim(1), r"affine_select of \(4, 1, 6\), which has 3 dimensions"),
            (lambda: tile(4, 1, value=0.0).broadcast(1, 6), "affine_select of .* with strides"),
            (lambda: tile(4, 6, dtype=nl.bfloat16, value=0.0), "affine_select of bfloat16"),
            (lambda: tile(4, 6, dtype=nl.int32, value=0), "affine_select of int32"),
        ],
    )
    def test_a_mask_that_is_not_dense_rank_1_and_float32(self, kept, message):
        def kernel():
            tensor = kept()
            dst = tile(*tensor.shape, dtype=tensor.dtype)
            nisa.affine_select(
                dst=dst, pattern=[[1, 6]], channel_multiplier=-1, on_true_tile=tensor, on_false_value=0.0
            )

        refuses(message, kernel)

    @pytest.mark.parametrize("comparison", [nl.less, nl.less_equal, nl.greater])
    def test_a_mask_by_other_comparisons(self, comparison):
        def kernel():
            data = tile(4, 6, value=0.0)
            nisa.affine_select(
                dst=data,
                pattern=[[1, 6]],
                channel_multiplier=-1,
                on_true_tile=data,
                on_false_value=0.0,
                cmp_op=comparison,
            )

        refuses("affine_select compares with greater_equal or equal", kernel)

    def test_unequal_shapes_of_equal_size(self):
        flat, square = (lambda: tile(4, 6, value=0.0)), (lambda: tile(4, 2, 3, value=0.0))
        for body in (
            lambda: nisa.tensor_copy(dst=flat(), src=square()),
            lambda: nisa.tensor_tensor(dst=flat(), data1=flat(), data2=square(), op=nl.add),
            lambda: nisa.scalar_tensor_tensor(flat(), square(), nl.add, 1.0, nl.add, flat()),
            lambda: nisa.tensor_scalar(dst=flat(), data=square(), op0=nl.add, operand0=1.0),
            lambda: nisa.activation(dst=flat(), op=nl.exp, data=square()),
        ):
            refuses("shapes differ", body)

    def test_division(self):
        def kernel():
            data = tile(8, 4, value=1.0)
            nisa.tensor_tensor(dst=data, data1=data, data2=data, op=nl.divide)

        refuses("no engine divides", kernel)

    @pytest.mark.parametrize(
        ("position", "size", "message"),
        [
            ((32, 0), (), "tile_position and tile_size go together"),
            ((0, 0), (48, 128), "48 of TensorE's rows or columns from 0"),
            ((32, 0), (64, 128), "64 of TensorE's rows or columns from 32"),
            ((0, 0), (32, 128), "and the tile of TensorE \\(32, 128\\)"),
        ],
    )
    def test_a_tile_of_the_tensor_engine(self, position, size, message):
        def kernel(position, size):
            product(tile(64, 8, value=0.0), tile(64, 8, value=0.0), tile_position=position, tile_size=size)

        run(lambda: (kernel((64, 0), (64, 128)), stored(tile(1, 1, value=0.0)))[1])
        refuses(message, lambda: kernel(position, size))

    def test_a_dtype_of_the_next_generation(self, monkeypatch):
        operand = lambda: tile(8, 8, dtype=nl.float8_e4m3fn, value=0.0)  # noqa: E731
        refuses("stationary is float8_e4m3fn, which NeuronCore-v4 multiplies", lambda: product(operand(), operand()))
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
        run(lambda: stored(on_sbuf(product(operand(), operand()))))

    def test_options_of_a_copy(self):
        def copy(**options):
            return lambda: nisa.dma_copy(dst=out(4, 4), src=tile(4, 4, value=0.0), **options)

        hardware = nisa.dge_mode.hwdge
        run(copy(dge_mode=hardware, engine=nisa.engine.sync))
        refuses("engine scalar starts no DMA with dge_mode.unknown", copy(engine=nisa.engine.scalar))
        refuses("engine vector starts no DMA with dge_mode.hwdge", copy(dge_mode=hardware, engine=nisa.engine.vector))
        refuses("a priority on NeuronCore-v4 only", copy(priority=0))

    def test_a_transpose_by_dma(self):
        def transpose(*shape, axes=None, **options):
            src = tile(16, 1, 8, dtype=nl.bfloat16, value=0.0)
            return lambda: nisa.dma_transpose(dst=tile(*shape, dtype=nl.bfloat16), src=src, axes=axes, **options)

        run(lambda: transpose(8, 1, 16)())
        refuses(r"dst is \(8, 16\), not \(8, 1, 16\)", lambda: transpose(8, 16)())
        refuses(r"axes \(0, 2, 1\); of 3 dimensions \(2, 1, 0\)", lambda: transpose(16, 8, 1, axes=(0, 2, 1))())
        refuses("dge_mode.swdge does not transpose", lambda: transpose(8, 1, 16, dge_mode=nisa.dge_mode.swdge)())

    def test_access_patterns_of_parts(self):
        """The guide counts the offset from the tensor's beginning, the reference from the part's."""
        whole = lambda: tile(4, 8, value=0.0)  # noqa: E731
        run(lambda: stored(whole()[0:2, 0:4].ap([[8, 2], [1, 2]])))
        refuses("ap of a part", lambda: stored(whole()[:, 4:8].ap([[8, 2], [1, 2]])))

    @pytest.mark.parametrize("buffer", [nl.sbuf, nl.private_hbm], ids=["SBUF", "private HBM"])
    def test_outputs_outside_of_shared_memory(self, buffer):
        refuses("outputs are in nl.shared_hbm", lambda: nl.ndarray((4, 4), dtype=nl.float32, buffer=buffer))

    def test_more_programs_than_cores(self):
        with pytest.raises(emulation.NkiError, match="3 programs"):
            run(lambda: out(1, 1), programs=3)


class TestProgramsTogether:
    """Two programs run at the same time, so what one of them writes is the other's only after a barrier."""

    @staticmethod
    def kernel(rows, reads=None, has_barrier=False, values=(0.0, 1.0)):
        """Return a kernel whose programs write these rows each, with a value each; then one reads some others."""

        def body():
            result, program = out(4, 4), nl.program_id(0)
            nisa.dma_copy(dst=result[rows[program], :], src=tile(2, 4, value=values[program]))
            if has_barrier:
                nisa.core_barrier(data=result, cores=(0, 1))
            if reads is not None and program == 1:
                loaded(result[reads, :])
            return result

        return lambda: run(body, programs=2)

    def test_parts_of_their_own(self):
        for reads in (None, slice(2, 4)):
            np.testing.assert_array_equal(self.kernel([slice(0, 2), slice(2, 4)], reads)()[:, 0], [0, 0, 1, 1])

    def test_one_place_written_twice(self):
        for has_barrier in (False, True):
            with pytest.raises(emulation.NkiError, match="both programs write to one place, without a core_barrier"):
                self.kernel([slice(0, 2), slice(1, 3)], has_barrier=has_barrier)()

        self.kernel([slice(0, 2), slice(0, 2)], values=(1.0, 1.0))()

    def test_a_part_of_the_other(self):
        rows = [slice(0, 2), slice(2, 4)]
        with pytest.raises(emulation.NkiError, match="one program reads what the other has written"):
            self.kernel(rows, slice(0, 3))()
        self.kernel(rows, slice(0, 3), has_barrier=True)()


class TestIntegers:
    LARGE = np.array([[2**24 + 1, 2**31 - 2]], np.int32)

    def test_native_arithmetic_is_exact(self):
        def kernel(x, engine):
            data, one = loaded(x), tile(1, 2, dtype=nl.int32, value=1)
            nisa.tensor_tensor(dst=data, data1=data, data2=one, op=nl.add, engine=engine)
            return stored(data)

        expected = self.LARGE + 1
        np.testing.assert_array_equal(run(lambda x: kernel(x, nisa.engine.unknown), self.LARGE), expected)
        assert emulation.last_launch().count("gpsimd", "tensor_tensor") == 1
        rounded = run(lambda x: kernel(x, nisa.engine.vector), self.LARGE)
        assert rounded[0, 0] == 2**24  # VectorE computes in float32

    def test_constants_and_copies_are_exact(self):
        def kernel(x):
            constant, copied = tile(1, 2, dtype=nl.int32, value=2**24 + 1), tile(1, 2, dtype=nl.int32)
            nisa.tensor_copy(dst=copied, src=loaded(x))
            return stored(constant), stored(copied)

        constant, copied = run(kernel, self.LARGE)
        assert (constant == 2**24 + 1).all()
        np.testing.assert_array_equal(copied, self.LARGE)

    def test_unsigned_integers_saturate(self):
        def kernel(x):
            narrow = tile(1, 2, dtype=nl.uint8)
            nisa.tensor_copy(dst=narrow, src=loaded(x))
            return stored(narrow)

        np.testing.assert_array_equal(run(kernel, np.array([[-3, 300]], np.int32)), [[0, 255]])


class TestAcceptedForms:
    def test_an_integer_in_a_tensor_of_floats(self):
        assert (run(lambda: stored(tile(2, 3, value=1))) == 1.0).all()

    def test_a_bias_in_bfloat16(self):
        bias = np.array([[0.5], [2.0]], ml_dtypes.bfloat16)

        def kernel(bias):
            data = tile(2, 3, value=1.0)
            nisa.activation(dst=data, op=nl.copy, data=data, bias=loaded(bias))
            return stored(data)

        np.testing.assert_array_equal(run(kernel, bias), [[1.5] * 3, [3.0] * 3])

    def test_an_index_keeps_the_last_free_dimension(self):
        def kernel(x):
            column = loaded(x)[:, 1]
            assert column.shape == (4, 1)
            return stored(column)

        x = random(4, 6)
        np.testing.assert_array_equal(run(kernel, x), x[:, 1:2])

    def test_ellipsis(self):
        x = random(2, 3, 4)

        def kernel(x):
            data = loaded(x)
            assert data[...].shape == (2, 3, 4) and data[0:1, ..., 2:3].shape == (1, 3, 1)
            return stored(data[..., 1:2])

        np.testing.assert_array_equal(run(kernel, x), x[:, :, 1:2])

    def test_a_destination_that_repeats_itself(self):
        """Kernels use such a destination if they need only the sum of an activation's results."""
        x = random(4, 6)

        def kernel(x):
            total = tile(4, 1)
            unwanted = tile(4, 1).broadcast(1, 6)
            nisa.activation(
                dst=unwanted,
                op=nl.square,
                data=loaded(x),
                reduce_op=nl.add,
                reduce_res=total,
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )
            return stored(total)

        np.testing.assert_allclose(run(kernel, x), (x**2).sum(1, keepdims=True), rtol=1e-6)

    def test_a_kernel_within_a_kernel(self):
        @nki.jit
        def inner(x):
            return stored(loaded(x))

        x = random(2, 3)
        np.testing.assert_array_equal(run(lambda x: inner(x), x), x)

    def test_number_of_programs_without_axes(self):
        def kernel(x):
            assert nl.num_programs() == 2
            result = out(2, 1)
            nisa.dma_copy(dst=result[nl.program_id() : nl.program_id() + 1, :], src=tile(1, 1, value=1.0))
            return result

        assert (run(kernel, random(1, 1), programs=2) == 1).all()

    def test_patterns(self):
        x = np.arange(24, dtype=np.float32).reshape(2, 12)

        def kernel(x):
            data = loaded(x)
            every_third = tile(2, 4)
            nisa.tensor_copy(dst=every_third, src=data.ap([[12, 2], [3, 4]], offset=1))
            return stored(every_third), stored(loaded(x.ap([[1, 2], [2, 6]])))

        every_third, overlapping = run(kernel, x)
        np.testing.assert_array_equal(every_third, x[:, 1::3])
        np.testing.assert_array_equal(overlapping, [np.arange(0, 12, 2), np.arange(1, 13, 2)])
        refuses("ap ends at element 24 of 24", lambda x: x.ap([[12, 2], [1, 12]], offset=1), x)
        refuses("ap steps 6 elements from partition to partition", lambda: tile(2, 12).ap([[6, 2], [1, 6]]))

    def test_a_transpose_by_a_product(self):
        x = random(4, 6).astype(ml_dtypes.bfloat16)

        def kernel(x):
            identity = tile(4, 4, dtype=nl.bfloat16)
            nisa.tensor_copy(dst=identity, src=nl.shared_identity_matrix(4, nl.bfloat16))
            dst = tile(6, 4, dtype=nl.bfloat16, buffer=nl.psum)
            nisa.nc_matmul(dst=dst, stationary=loaded(x), moving=identity, is_transpose=True)
            return stored(on_sbuf(dst))

        np.testing.assert_array_equal(run(kernel, x), x.T)

    def test_statistics(self):
        x = random(4, 10)

        def kernel(x):
            statistics, moments = tile(4, 6), tile(4, 2)
            nisa.bn_stats(dst=statistics, data=loaded(x))
            nisa.bn_aggr(dst=moments, data=statistics)
            return stored(moments)

        np.testing.assert_allclose(run(kernel, x), np.stack([x.mean(1), x.var(1)], 1), rtol=1e-5, atol=1e-6)


class TestStochasticRounding:
    """Engines round values to 16 bits at random if the runtime's variable asks for it."""

    VALUE = 1 + 2**-9  # a quarter of the way from 1 to bfloat16's next

    def rounded(self, *shape):
        return run(lambda: stored(tile(*shape, dtype=nl.bfloat16, value=self.VALUE))).astype(np.float32)

    def test_mean_and_neighbours(self, monkeypatch):
        assert (self.rounded(128, 100) == 1).all()
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        values = self.rounded(128, 100)
        assert set(np.unique(values)) == {np.float32(1), np.float32(1 + 2**-7)}
        assert values.mean() == pytest.approx(self.VALUE, abs=5 * 2**-7 * (3 / 16 / values.size) ** 0.5)

    def test_seed(self, monkeypatch):
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        first = self.rounded(8, 100)
        np.testing.assert_array_equal(self.rounded(8, 100), first)
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "1")
        assert (self.rounded(8, 100) != first).any()

    def test_what_needs_no_rounding_stays(self, monkeypatch):
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        x = np.array([[0.0, -1.5, np.inf, -np.inf, np.nan]], np.float32)

        def kernel(x):
            data = tile(1, 5, dtype=nl.bfloat16)
            nisa.tensor_copy(dst=data, src=loaded(x))
            return stored(data)

        np.testing.assert_array_equal(run(kernel, x).astype(np.float32), x)


def test_products_stay_products():
    """A transpose in PSUM is not a product that another could be added to."""

    def kernel():
        operand = tile(8, 8, value=1.0)
        dst = product(operand, operand)
        nisa.nc_transpose(dst=dst, data=operand)
        nisa.nc_matmul(dst=dst, stationary=operand, moving=operand, accumulate=True)

    refuses("PSUM that holds no matrix product", kernel)
