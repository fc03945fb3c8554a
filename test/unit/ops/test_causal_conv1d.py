"""The convolution against its definition in float64, over widths, cuts and poisoned padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from granite4_neuron import ops
from test.support import oracles

pytestmark = pytest.mark.versions


class TestCausalConv:
    @given(
        width=st.sampled_from([2, 3, 4]),
        pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5),
        with_bias=st.booleans(),
    )
    def test_cuts_and_padding(self, width, pieces, with_bias):
        """A sequence in pieces of any length, each followed by padding, gives the whole sequence."""
        channels = 6
        weight, bias = torch.randn(channels, width), torch.randn(channels) if with_bias else None
        total = sum(length for length, _ in pieces)
        history = torch.randn(total, channels)
        window = torch.zeros(1, channels, width - 1)
        outputs, start = [], 0
        for length, padding in pieces:
            if length + padding == 0:
                continue
            x = torch.full((1, length + padding, channels), 1e3)
            x[0, :length] = history[start : start + length]
            y, window = ops.causal_conv1d(x, window, weight, bias, torch.tensor([length]))
            outputs.append(y[0, :length])
            start += length
            before = torch.cat([torch.zeros(width - 1, channels), history[:start]])
            assert torch.equal(window[0], before[len(before) - (width - 1) :].T)
        if total:
            assert torch.allclose(torch.cat(outputs).double(), oracles.causal_conv(history, weight, bias), atol=1e-5)

    def test_window_keeps_its_dtype(self):
        x = torch.randn(2, 5, 6, dtype=torch.bfloat16)
        window = torch.zeros(2, 6, 3, dtype=torch.bfloat16)
        y, new = ops.causal_conv1d(x, window, torch.randn(6, 4), None, torch.tensor([5, 1]))
        assert y.dtype == torch.float32 and new.dtype == torch.bfloat16 and new.shape == window.shape
