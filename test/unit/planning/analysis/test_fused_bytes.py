"""The bytes that a graph moves if element-wise operations move nothing, for graphs small enough to count by hand."""

import pytest

from granite4_neuron.planning.analysis.fused_bytes import fused_bytes
from granite4_neuron.planning.analysis.hlo_lint import instructions

pytestmark = pytest.mark.versions

WIDE, NARROW = 8 * 16 * 4, 8 * 16 * 2  # bytes of [8, 16] in float32 and in bfloat16


def moved(*lines):
    """Count a graph of x, f32[8,16], and weight, f32[16,4]; its outputs are the operands of the last line."""
    text = "\n".join(
        f"  {line}" for line in ("%x = f32[8,16] parameter(0)", "%weight = f32[16,4] parameter(1)", *lines)
    )
    graph = instructions(text)
    return fused_bytes(graph, graph["root"].operands)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # One loop: x is read, z is written.
        (
            [
                "%one = f32[] constant(1)",
                "%ones = f32[8,16] broadcast(%one), dimensions={}",
                "%y = f32[8,16] add(%x, %ones)",
                "%z = f32[8,16] multiply(%y, %x)",
                "%root = (f32[8,16]) tuple(%z)",
            ],
            2 * WIDE,
        ),
        # The operand of a product is written and read again: x, y, y, the weight, and the result.
        (
            [
                "%y = f32[8,16] exponential(%x)",
                "%z = f32[8,4] dot(%y, %weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
                "%root = (f32[8,4]) tuple(%z)",
            ],
            3 * WIDE + 16 * 4 * 4 + 8 * 4 * 4,
        ),
        # It is not, if it is an input in another dtype or another order.
        (
            [
                "%y = bf16[8,16] convert(%x)",
                "%t = bf16[16,8] transpose(%y), dimensions={1,0}",
                "%z = f32[8,4] dot(%t, %weight), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
                "%root = (f32[8,4]) tuple(%z)",
            ],
            WIDE + 16 * 4 * 4 + 8 * 4 * 4,
        ),
        # Two sums read y, which is therefore stored: x, y, and y twice more.
        (
            [
                "%zero = f32[] constant(0)",
                "%y = f32[8,16] exponential(%x)",
                "%a = f32[8] reduce(%y, %zero), dimensions={1}, to_apply=%add",
                "%b = f32[16] reduce(%y, %zero), dimensions={0}, to_apply=%add",
                "%root = (f32[8], f32[16]) tuple(%a, %b)",
            ],
            4 * WIDE + 8 * 4 + 16 * 4,
        ),
        # One loop uses y twice, so y need not be stored.
        (
            [
                "%y = f32[8,16] exponential(%x)",
                "%a = f32[8,16] negate(%y)",
                "%z = f32[8,16] multiply(%a, %y)",
                "%root = (f32[8,16]) tuple(%z)",
            ],
            2 * WIDE,
        ),
        # A slice reads only its own part.
        (
            [
                "%half = f32[8,8] slice(%x), slice={[0:8], [0:8]}",
                "%z = f32[8,8] negate(%half)",
                "%root = (f32[8,8]) tuple(%z)",
            ],
            WIDE,
        ),
        # A gather reads and writes only its own rows, and reads its indices.
        (
            [
                "%at = s32[2] parameter(2)",
                "%rows = f32[2,16] gather(%x, %at), offset_dims={1}, slice_sizes={1,16}",
                "%root = (f32[2,16]) tuple(%rows)",
            ],
            2 * 2 * 16 * 4 + 2 * 4,
        ),
        # Constants, and values computed from constants, are not moved. The result is written.
        (
            [
                "%i = s32[8,16] iota(), iota_dimension=1",
                "%f = f32[8,16] convert(%i)",
                "%z = f32[8,16] add(%f, %x)",
                "%n = bf16[8,16] convert(%z)",
                "%root = (bf16[8,16]) tuple(%n)",
            ],
            WIDE + NARROW,
        ),
    ],
    ids=["one loop", "product", "layouts", "two sums", "two ways", "slice", "gather", "constants"],
)
def test_count(lines, expected):
    assert moved(*lines) == expected
