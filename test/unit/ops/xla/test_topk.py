"""The likeliest token is that which numpy's argmax finds, from finite logits only."""

import math

import pytest
import torch

from granite4_neuron.ops.xla.topk import likeliest

pytestmark = pytest.mark.versions


def test_of_equal_ones_the_first():
    logits = torch.randint(-3, 3, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    logits[::2, 7] = -math.inf
    tokens = likeliest(logits)
    assert tokens.dtype == torch.int32 and tokens.tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize(
    "row",
    [[1, math.nan, 3], [math.nan] * 3, [1, math.inf, 3], [-math.inf] * 3, [math.nan, math.inf, 1], [5, 3, -math.nan]],
)
def test_not_finite(row):
    assert likeliest(torch.tensor([row, [1.0, 2.0, 0.0]])).tolist() == [-1, 1]


def test_a_large_vocabulary():
    logits = torch.zeros(2, 100_352)
    logits[0, -1] = logits[1, 99_999] = 1
    assert likeliest(logits).tolist() == [100_351, 99_999]
