"""A GPU's stochastic rounding of SSM states has each bit of its definition. It runs as test_kernels.py does."""

import math

import pytest
import torch

from granite4_neuron.ops.stochastic_rounding import Rounding, stochastic_round
from test.unit.devices.cuda.test_kernels import DEVICE, random, seed

pytestmark = pytest.mark.versions

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
from granite4_neuron.devices.cuda.rounding import round_state  # noqa: E402

__all__ = ["seed"]  # a fixture


@triton.jit
def _round_block(values, rounded, position, stream, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, BLOCK: tl.constexpr):
    """Round BLOCK rows of a head's state, [HEAD_DIM, D_STATE]. Grid: (heads, cdiv(HEAD_DIM, BLOCK))."""
    head, block = tl.program_id(0), tl.program_id(1)
    rows = block * BLOCK + tl.reshape(tl.arange(0, BLOCK), [BLOCK // 4, 4, 1])
    columns = tl.arange(0, 128)[None, None]
    mask = (rows < HEAD_DIM) & (columns < D_STATE)
    offs = (head * HEAD_DIM + rows) * D_STATE + columns
    state = tl.load(values + offs, mask, 0.0)
    dtype: tl.constexpr = rounded.dtype.element_ty
    state = round_state(state, head, block, tl.load(position), tl.load(stream), HEAD_DIM, D_STATE, dtype)
    tl.store(rounded + offs, state.to(dtype), mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "d_state"), [(32, 128), (10, 72)], ids=str)
def test_rounding(head_dim, d_state, dtype):
    """Values of all sizes, also ones that a dtype does not have, and those between its smallest normal number and 0."""
    values = random(3, head_dim, d_state) * torch.exp2(torch.randint(-110, 120, (3, head_dim, d_state)).float())
    values[1] = 2.0 ** -random(head_dim, d_state).abs().mul(12)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65519.0, 1e9, 3.3e38, 2.0**-14, 2.0**-25]
    )
    values[0, 0, : len(special)] = special
    values[0, 1, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    position, stream = torch.tensor(2**20 + 5, dtype=torch.int32), torch.tensor(37)
    rounded = torch.empty(values.shape, dtype=dtype, device=DEVICE)
    given = (each.to(DEVICE) for each in (position, stream))
    block = 8
    _round_block[3, triton.cdiv(head_dim, block)](
        values.to(DEVICE), rounded, *given, HEAD_DIM=head_dim, D_STATE=d_state, BLOCK=block
    )
    expected = stochastic_round(values[None], dtype, position[None].long(), Rounding(stream=37))[0]
    torch.testing.assert_close(rounded.cpu(), expected, rtol=0, atol=0, equal_nan=True)
