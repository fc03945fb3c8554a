"""DMA of the NKI emulator at places given by indices."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

pytest.importorskip("nki.emulation", reason="the Neuron SDK's own nki is installed")

from nki import emulation

from test.support.nki_bodies import loaded, random, refuses, run, stored, tile

TABLE = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6)


def gathered(index, skips=False, **more):
    """Return a kernel that reads TABLE[index, 1:3, 0:6] onto ones."""

    def kernel(table):
        indices = tile(1, 1, dtype=nl.int32, value=index)
        dst = tile(2, 6, value=1.0)
        src = table.ap(pattern=[[6, 2], [1, 6]], offset=6, scalar_offset=indices, indirect_dim=0)
        oob_mode = nisa.oob_mode.skip if skips else nisa.oob_mode.error
        nisa.dma_copy(dst=dst, src=src, oob_mode=oob_mode, **more)
        return stored(dst)

    return kernel


def rows(skips=False, **more):
    """Return a kernel that reads the rows `indices` of a table onto ones."""

    def kernel(table, indices):
        dst = tile(indices.shape[0], table.shape[1], value=1.0)
        pattern = [[table.shape[1], indices.shape[0]], [1, table.shape[1]]]
        oob_mode = nisa.oob_mode.skip if skips else nisa.oob_mode.error
        nisa.dma_copy(dst=dst, src=table.ap(pattern, vector_offset=loaded(indices)), oob_mode=oob_mode, **more)
        return stored(dst)

    return kernel


@pytest.mark.parametrize("index", [0, 3, 4])
def test_one_index_moves_the_pattern(index):
    np.testing.assert_array_equal(run(gathered(index), TABLE), TABLE[index, 1:3])


def test_the_index_counts_along_its_dimension():
    def kernel(table):
        dst = tile(5, 6)
        src = table.ap([[24, 5], [1, 6]], scalar_offset=tile(1, 1, dtype=nl.int32, value=2), indirect_dim=1)
        nisa.dma_copy(dst=dst, src=src)
        return stored(dst)

    np.testing.assert_array_equal(run(kernel, TABLE), TABLE[:, 2])


def test_a_skipped_index_moves_nothing():
    assert (run(gathered(5, skips=True), TABLE) == 1).all()
    read = sum(instruction.hbm_read for instruction in emulation.last_launch().instructions)
    assert read == 0
    run(gathered(4, skips=True), TABLE)
    read = sum(instruction.hbm_read for instruction in emulation.last_launch().instructions)
    assert read == 2 * 6 * 4


def test_rows_by_index():
    table, indices = random(7, 6), np.array([[6], [0], [6], [3]], np.int32)
    np.testing.assert_array_equal(run(rows(), table, indices), table[[6, 0, 6, 3]])


def test_rows_are_skipped_one_by_one():
    table, indices = random(7, 6), np.array([[6], [7], [99], [3]], np.int32)
    result = run(rows(skips=True), table, indices)
    np.testing.assert_array_equal(result[[0, 3]], table[[6, 3]])
    assert (result[1:3] == 1).all()
    assert emulation.last_launch().hbm_bytes == (4 + 2 * 6 + 4 * 6) * 4


def test_rows_are_written_by_index():
    def kernel(table, indices, rows):
        dst = table.ap([[6, 3], [1, 6]], vector_offset=loaded(indices), indirect_dim=0)
        nisa.dma_copy(dst=dst, src=loaded(rows), oob_mode=nisa.oob_mode.skip)
        return table

    table, rows = np.zeros((7, 6), np.float32), random(3, 6)
    run(kernel, table, np.array([[5], [7], [1]], np.int32), rows)
    np.testing.assert_array_equal(table[[5, 1]], rows[[0, 2]])
    assert not table[[0, 2, 3, 4, 6]].any()
    refuses("two rows are written to one place", kernel, table, np.array([[5], [7], [5]], np.int32), rows)


def test_an_index_out_of_range():
    refuses("index 5 of a dimension of 5", gathered(5), TABLE)
    refuses("index 7 of a dimension of 7", rows(), random(7, 6), np.array([[7]], np.int32))
    refuses("index -1 is negative", gathered(-1, skips=True), TABLE)


def test_a_pattern_that_ends_outside():
    def kernel(table):
        src = table.ap([[6, 4], [1, 6]], offset=6, scalar_offset=tile(1, 1, dtype=nl.int32, value=4))
        nisa.dma_copy(dst=tile(4, 6), src=src, oob_mode=nisa.oob_mode.skip)

    refuses("from index 4 the pattern ends outside", kernel, TABLE)


def test_indices_in_the_wrong_place_are_refused():
    def access(indices, **more):
        return lambda table: table.ap([[6, 2], [1, 6]], scalar_offset=indices(table), **more)

    refuses("the offset is in PSUM", access(lambda t: tile(1, 1, dtype=nl.int32, buffer=nl.psum)), TABLE)
    refuses("the offset is float32", access(lambda t: tile(1, 1, value=1.0)), TABLE)
    refuses(r"the offset is \(1, 2\), not \(1, 1\)", access(lambda t: tile(1, 2, dtype=nl.int32)), TABLE)


def test_invalid_accesses_are_refused():
    def access(prepare, pattern=((6, 2), (1, 6)), **more):
        return lambda table: prepare(table).ap(pattern, **(more or dict(scalar_offset=tile(1, 1, dtype=nl.int32))))

    refuses("indirect access is to HBM", access(lambda t: tile(4, 6)), TABLE)
    refuses("ap addresses a whole tensor", access(lambda t: t[0]), TABLE)
    refuses("dimensions are in order", access(lambda t: t.permute((1, 0, 2))), TABLE)
    offsets = dict(scalar_offset=tile, vector_offset=tile)
    refuses("a scalar_offset or a vector_offset", access(lambda t: t, **offsets), TABLE)

    def by_row(table, **more):
        return table.ap([[6, 2], [1, 6]], vector_offset=tile(2, 1, dtype=nl.int32), **more)

    refuses("first stride is 6, not 24", by_row, TABLE)
    refuses("goes along dimension 0", lambda table: by_row(table, indirect_dim=1), TABLE)


def test_views_and_engines():
    def indirect(table):
        return table.ap([[6, 2], [1, 6]], scalar_offset=tile(1, 1, dtype=nl.int32, value=0))

    refuses("an indirect view has no views", lambda t: indirect(t)[0:1, :], TABLE)
    refuses("an indirect view has no views", lambda t: indirect(t).expand_dim(1), TABLE)
    refuses("src is in shared HBM", lambda t: nisa.tensor_copy(dst=tile(2, 6), src=indirect(t)), TABLE)
    refuses("dst is .* src is", lambda t: nisa.dma_copy(dst=tile(2, 2, 3), src=indirect(t)), TABLE)


def test_descriptors():
    indices = np.array([[1]], np.int32)
    run(gathered(1, dge_mode=nisa.dge_mode.hwdge), TABLE)
    refuses("dge_mode.none does not do this", gathered(1, dge_mode=nisa.dge_mode.none), TABLE)
    refuses("dge_mode.hwdge does not do this", rows(dge_mode=nisa.dge_mode.hwdge), random(7, 6), indices)
    refuses(
        "hwdge does not cast",
        lambda x: nisa.dma_copy(dst=tile(4, 6, dtype=nl.bfloat16), src=x, dge_mode=nisa.dge_mode.hwdge),
        random(4, 6),
    )
    refuses(
        "skip is for an indirect access",
        lambda x: nisa.dma_copy(dst=tile(4, 6), src=x, oob_mode=nisa.oob_mode.skip),
        random(4, 6),
    )


def test_the_indices_stay_in_memory_until_they_are_read():
    def kernel(table):
        indices = tile(1, 1, dtype=nl.int32, value=0)
        src = table.ap([[6, 2], [1, 6]], scalar_offset=indices)
        tile(1, 50000, value=0.0)
        nisa.dma_copy(dst=tile(2, 6), src=src)

    run(kernel, TABLE)
    assert emulation.last_launch().peak_sbuf_bytes == 200004
