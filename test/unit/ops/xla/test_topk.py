"""The likeliest token is that which numpy's argmax finds, from finite logits only."""

import math

import numpy as np
import pytest
import torch

from granite4_neuron.neuron.analysis.torch_lowering import aot_backend, lower
from granite4_neuron.ops.xla.topk import candidates, likeliest
from test.support.fx_lint import findings
from test.support.stablehlo import execute
from test.support.stablehlo import findings as stablehlo_findings

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


@pytest.mark.parametrize("choose", [likeliest, lambda logits: candidates(logits, 64)], ids=["likeliest", "candidates"])
def test_what_the_neuron_compiler_gets(choose):
    pytest.importorskip("torch_mlir", reason="torch_mlir is not installed; the extra dev has it")
    pytest.importorskip("jax", reason="jax is not installed; the extra dev has it")
    modules, logits = [], 3 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))

    def keep(module, inputs):
        modules.append(module)
        return module

    [expected] = [torch.compile(choose, backend=aot_backend(keep), fullgraph=True, dynamic=False)(logits)]
    lowered = lower(modules[0])
    assert findings(modules[0], 0) == stablehlo_findings(lowered.text, 0) == []
    np.testing.assert_array_equal(execute(lowered.text, [logits])[0], expected)


class TestCandidates:
    @pytest.mark.parametrize("vocab_size", [1000, 100, 40])
    def test_they_are_the_highest_unless_the_bound_says_no(self, vocab_size):
        logits = 3 * torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        logits[:, ::3] = logits[:, ::3].round()  # some are equal
        logits[3, torch.arange(vocab_size) % 10 > 0] = -math.inf
        count, are_all = 24, 0
        for row, found in zip(logits, candidates(logits, count), strict=True):
            values, tokens, bound = found[:count], found[count:-1].long(), float(found[-1])
            is_token = values > -math.inf
            assert torch.equal(row[tokens[is_token]], values[is_token]) and values[is_token].diff().max() <= 0
            assert len(set(tokens[is_token].tolist())) == is_token.sum()
            others = row.clone()
            others[tokens[is_token]] = -math.inf
            assert others.max() <= bound
            are_all += torch.equal(values, row.topk(count).values)
        assert are_all == 20

    def test_many_among_neighbours(self):
        logits = torch.zeros(1, 6400)
        logits[0, :20] = torch.arange(20.0, 0, -1)
        found = candidates(logits, 16)[0]
        assert found[:8].tolist() == list(range(20, 12, -1)) and found[8] == 0 and found[-1] == 13
