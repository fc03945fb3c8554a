"""The fused mixer over states in pages, against convolution and recurrence one token after another in float64."""

import math

import pytest
import torch

from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.ops import LaunchParameters
from granite4_neuron.ops.layer_weights import MixerWeights
from test.support import slot_oracles

HEADS, HEAD_DIM, D_STATE, GROUPS = 4, 8, 16, 2
INNER = HEADS * HEAD_DIM
CHANNELS = INNER + 2 * GROUPS * D_STATE
LIMITS = (0.0, math.inf)
LENGTHS = {False: (1, 1, 1, 1, 1), True: (4, 1, 3, 2, 4)}
NUM_SPEC = 3
PADDING_ROW = 3

needs_kernels = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
pytestmark = needs_kernels


def strided(num_pages, *shape, dtype=torch.float32, order=None):
    """Return [num_pages, *shape] of NaN with gaps between pages, and the last two axes swapped in memory on request."""
    count = math.prod(shape)
    memory = torch.full((num_pages, count + 24), math.nan, dtype=dtype)
    if order == "columns first":
        return memory[:, :count].unflatten(1, shape[::-1]).transpose(1, 2)
    return memory[:, :count].unflatten(1, shape)


class Step:
    """Sequences of a decode or verify step, one of them padding. States are NaN wherever no kernel may read."""

    def __init__(self, speculative, order, dtype=torch.float32, width=4):
        torch.manual_seed(1)
        self.speculative, self.width = speculative, width
        lengths = LENGTHS[speculative]
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        columns = 1 + NUM_SPEC if speculative else 1
        num_pages = 2 + len(lengths) * columns
        table = 1 + torch.randperm(num_pages - 2).view(len(lengths), columns)
        self.pages = torch.full((len(lengths), columns + 3), -7, dtype=torch.int32)[:, :columns].copy_(table)
        self.pages[PADDING_ROW] = 0
        self.accepted = torch.tensor([4, 1, 2, 1, 3], dtype=torch.int32) if speculative else None
        self.projected = torch.randn(sum(lengths), INNER + CHANNELS + HEADS).to(dtype)
        self.projected[self.starts[PADDING_ROW] : self.starts[PADDING_ROW + 1]] = math.nan
        weights = (torch.randn(CHANNELS, 1, width), torch.randn(CHANNELS))
        self.conv_weight, self.conv_bias = (weight.to(dtype) for weight in weights)
        self.dt_bias, self.D = (torch.randn(HEADS).to(dtype) for _ in range(2))
        self.A_log = torch.empty(HEADS).uniform_(0, 2.5)
        self.conv_state = strided(num_pages, CHANNELS, width - 2 + columns, dtype=dtype, order=order)
        self.ssm_state = strided(num_pages, HEADS, HEAD_DIM, D_STATE)
        for row, pages in enumerate(self.pages.tolist()):
            if row != PADDING_ROW:
                self.conv_state[pages[0]] = torch.randn(CHANNELS, width - 2 + columns).to(dtype)
                source = int(self.accepted[row]) - 1 if speculative else 0
                self.ssm_state[pages[source]] = torch.randn(HEADS, HEAD_DIM, D_STATE)

    def run(self):
        mixer = cpu.layers.mamba_mixer(
            MixerWeights(
                conv_weight=self.conv_weight,
                conv_bias=self.conv_bias,
                dt_bias=self.dt_bias,
                A_log=self.A_log,
                D=self.D,
                n_groups=GROUPS,
                time_step_limit=LIMITS,
            ),
            LaunchParameters(64, 2, 64),
        )
        return mixer.step_paged(
            projected=self.projected[:, INNER:],
            conv_state=self.conv_state,
            ssm_state=self.ssm_state,
            starts=self.starts,
            pages=self.pages,
            accepted=self.accepted,
        )

    def exact(self, conv_mistake=None, state_mistake=None):
        """Return (y, conv_state, ssm_state) in float64, from the present state."""
        conv_state, ssm_state = self.conv_state.double(), self.ssm_state.double()
        speculative = dict(num_accepted_tokens=self.accepted) if self.speculative else {}
        xBC, dt = self.projected[:, INNER:].split([CHANNELS, HEADS], dim=1)
        weight = self.conv_weight[:, 0]
        xBC = slot_oracles.causal_conv1d_update(
            xBC, conv_state, weight, self.conv_bias, "silu", self.pages[:, 0], query_start_loc=self.starts,
            **speculative, mistake=conv_mistake
        )  # fmt: skip
        x, B, C = xBC.split([INNER, GROUPS * D_STATE, GROUPS * D_STATE], dim=1)
        A = -torch.exp(self.A_log.double())
        y = slot_oracles.selective_state_update(
            ssm_state, x.unflatten(1, (HEADS, -1)), dt[..., None].expand(-1, -1, HEAD_DIM),
            A[:, None, None].expand(-1, HEAD_DIM, D_STATE), B.unflatten(1, (GROUPS, -1)), C.unflatten(1, (GROUPS, -1)),
            self.D[:, None].expand(-1, HEAD_DIM), self.dt_bias[:, None].expand(-1, HEAD_DIM), dt_softplus=True,
            state_batch_indices=self.pages, cu_seqlens=self.starts, **speculative, mistake=state_mistake
        )  # fmt: skip
        return y.flatten(1), conv_state, ssm_state


def agrees(value, exact, tolerance):
    return torch.allclose(value.double(), exact, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("order", [None, "columns first"])
@pytest.mark.parametrize("speculative", [False, True], ids=["decode", "verify"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float32, 2), (torch.bfloat16, 4)], ids=str)
def test_paged_mixer(speculative, order, dtype, width):
    """No other memory is read or written: it is NaN, which reaches no real token."""
    step = Step(speculative, order, dtype, width)
    exact = step.exact()
    y = step.run()
    assert agrees(y, exact[0], 2e-5)
    assert agrees(step.conv_state, exact[1], 0)  # inputs stay unchanged
    assert agrees(step.ssm_state, exact[2], 2e-5)


MISTAKES = [
    ("conv", "shifted twice"),
    ("conv", "accepted tokens ignored"),
    ("conv", "width from the state"),
    ("state", "one state per row"),
    ("state", "first column only"),
    ("state", "every token reads the committed state"),
    ("state", "accepted tokens ignored"),
    ("state", "source is written"),
]


@pytest.mark.parametrize(("half", "mistake"), MISTAKES)
def test_known_mistakes_are_detected(half, mistake):
    step = Step(True, None)
    wrong = step.exact(**{f"{half}_mistake": mistake})
    y = step.run()
    results = zip((y, step.conv_state, step.ssm_state), wrong, strict=True)
    assert not all(agrees(*result, 1e-3) for result in results)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(pages=torch.full((5, 4), 99, dtype=torch.int32)), "has page 99"),
        (dict(accepted=torch.full((5,), 5, dtype=torch.int32)), "needs 5 pages of 4"),
        (dict(starts=torch.tensor([0, 4, 5, 8, 10, 13], dtype=torch.int32)), "do not span"),
        (dict(conv_state=torch.zeros(22, CHANNELS, 3)), "has 3 columns where 6 are needed"),
    ],
)
def test_indices_out_of_range_are_refused(change, said):
    step = Step(True, None)
    vars(step).update(change)
    with pytest.raises(RuntimeError, match=said):
        step.run()
