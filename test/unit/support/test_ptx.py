"""What the helpers of tests read from PTX."""

import pytest

from test.support.ptx import reads_before_wait

DESCRIPTOR = """
    mov.b64 %rd1, _kernel_param_0;
    cvta.param.u64 %rd2, %rd1;
"""
POINTER = """
    ld.param.b64 %rd3, [_kernel_param_5];
    add.s64 %rd4, %rd3, %rd9;
"""
TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
READ_OF_TILE = f"@%p1 {TILE} [%r1], [%rd2, {{%r2, %r3}}], [%r4];"
COPY = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd4 + 0 ], 0x10, %r5;"
WAIT = "griddepcontrol.wait;"


def kernel(*parts):
    return "\n".join([".visible .entry _kernel(.param .u64 _kernel_param_0)", "{", *parts, "ret;", "}"])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((DESCRIPTOR, READ_OF_TILE, WAIT), {(0, TILE)}),
        ((DESCRIPTOR, WAIT, READ_OF_TILE), set()),
        ((POINTER, COPY, WAIT), {(5, "cp.async.cg.shared.global")}),
        ((POINTER, "ld.global.cg.b32 { %r1 }, [ %rd4 + 0 ];", WAIT), {(5, "ld.global.cg.b32")}),
        ((POINTER, "st.global.b32 [ %rd4 + 0 ], { %r1 };", WAIT), set()),
    ],
    ids=["by a descriptor", "after waiting", "a copy", "a load", "no read"],
)
def test_reads_before_waiting(parts, expected):
    assert reads_before_wait(kernel(*parts)) == expected


def test_a_read_from_no_parameter_is_named():
    with pytest.raises(ValueError, match=r"^cp\.async\.bulk\.tensor.* \[%r1\], \[%rd2, .* reads before griddep"):
        reads_before_wait(kernel(READ_OF_TILE, WAIT))
