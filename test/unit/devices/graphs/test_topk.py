"""The likeliest token equals numpy's argmax and needs finite logits. A drawn token equals the host's."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from granite4_neuron.devices.graphs import topk
from granite4_neuron.devices.graphs.topk import (
    MOST_TOP_K,
    UNDECIDED,
    candidates,
    choice_of,
    drawn,
    draws_of,
    exponentials,
    likeliest,
)
from granite4_neuron.engine import Sampler, SamplingParams
from granite4_neuron.ops import sampling
from granite4_neuron.ops.sampling import Choice
from granite4_neuron.planning.analysis.torch_lowering import aot_backend, lower
from test.support.fx_lint import findings
from test.support.stablehlo import execute
from test.support.stablehlo import findings as stablehlo_findings

pytestmark = pytest.mark.versions


def test_the_first_of_equal_logits_is_chosen():
    logits = torch.randint(-3, 3, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    logits[::2, 7] = -math.inf
    tokens = likeliest(logits)
    assert tokens.dtype == torch.int32 and tokens.tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize(
    "row",
    [[1, math.nan, 3], [math.nan] * 3, [1, math.inf, 3], [-math.inf] * 3, [math.nan, math.inf, 1], [5, 3, -math.nan]],
)
def test_logits_that_are_not_finite(row):
    assert likeliest(torch.tensor([row, [1.0, 2.0, 0.0]])).tolist() == [-1, 1]


def test_a_large_vocabulary():
    logits = torch.zeros(2, 100_352)
    logits[0, -1] = logits[1, 99_999] = 1
    assert likeliest(logits).tolist() == [100_351, 99_999]


def draws(rows, **options):
    """Return the argument `draws` of `drawn`: the same options for all rows."""
    choice = Choice(**{"temperature": 1.0, **options}, seed=2**64 - 9)
    return draws_of([replace(choice, place=row) for row in range(rows)]).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    "choose, more",
    [
        (likeliest, ()),
        (lambda logits: candidates(logits, 64), ()),
        (
            lambda logits, draws: drawn(draws, logits, likeliest(logits)),
            (draws(3, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),),
        ),
    ],
    ids=["likeliest", "candidates", "drawn"],
)
def test_the_neuron_compiler_gets_a_graph_that_it_takes(choose, more):
    pytest.importorskip("torch_mlir", reason="torch_mlir is not installed; the extra dev has it")
    pytest.importorskip("jax", reason="jax is not installed; the extra dev has it")
    modules, logits = [], 3 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))

    def keep(module, inputs):
        modules.append(module)
        return module

    [expected] = [torch.compile(choose, backend=aot_backend(keep), fullgraph=True, dynamic=False)(logits, *more)]
    lowered = lower(modules[0])
    assert findings(modules[0], 0) == stablehlo_findings(lowered.text, 0) == []
    np.testing.assert_array_equal(execute(lowered.text, [logits, *more])[0], expected)


class TestCandidates:
    @pytest.mark.parametrize("vocab_size", [1000, 100, 40])
    def test_candidates_are_the_highest_logits(self, vocab_size):
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


OPTIONS = {
    "all": dict(temperature=1.3),
    "top_k": dict(temperature=0.7, top_k=50),
    "top_p": dict(temperature=0.4, top_p=0.8),
    "min_p": dict(min_p=0.05),
    "each": dict(temperature=1.1, top_k=30, top_p=0.95, min_p=0.02),
    "the best": dict(top_k=1, top_p=1e-9, min_p=1),
    "nearly equal": dict(temperature=3e5, top_k=30),
    "equal": dict(temperature=1e38, top_k=30),
}
ROWS, SIZE = 100, 400


def plain(logits, noise, temperature):
    return logits, noise


def coarse(logits, noise, temperature):
    """Return logits like those of a model in bfloat16: many are equal."""
    return logits.bfloat16().float(), noise


def close(logits, noise, temperature):
    """Return noise that makes most tokens as good as the best one, or nearly so."""
    steps = (noise - 1).mul(3).round()
    near = (logits / temperature).softmax(-1) * (1 + 2e-5 * steps)
    return logits, torch.where(noise < 2, near, noise)


class TestDrawn:
    def cases(self, options, kind, device):
        """Return the host's tokens, and a device's tokens from the same logits and from device(logits)."""
        generator = torch.Generator().manual_seed(len(options))
        logits = 3 * torch.randn(ROWS, SIZE, generator=generator) + 9
        noise = torch.empty(ROWS, SIZE).exponential_(1, generator=generator)
        logits, noise = kind(logits, noise, options.get("temperature", 1))
        sampler, expected = Sampler(SamplingParams(**{"temperature": 1, "top_k": 0, **options}), 1), []
        for row_logits, row_noise in zip(logits, noise, strict=True):
            with mock.patch.object(sampling, "exponentials", return_value=row_noise):
                expected.append(sampler(row_logits, [0]))
        with mock.patch.object(topk, "exponentials", return_value=noise):
            found = [drawn(draws(ROWS, **options), each, likeliest(each)) for each in (logits, device(logits))]
        return expected, [each.tolist() for each in found]

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("kind", [plain, coarse, close])
    @pytest.mark.parametrize("name", OPTIONS)
    def test_tokens_equal_the_hosts(self, name, kind):
        """This holds also if the device rounds otherwise. Few tokens are left to the host, unless most are close."""
        sign = torch.rand(ROWS, SIZE, generator=torch.Generator().manual_seed(5)).round() * 2 - 1
        expected, both = self.cases(OPTIONS[name], kind, lambda logits: logits * (1 + 2.0**-22 * sign))
        for found in both:
            wrong = [pair for pair in zip(found, expected, strict=True) if pair[0] not in (pair[1], UNDECIDED)]
            assert not wrong
            many = name == "equal" or (kind is close and name != "the best")
            assert (found.count(UNDECIDED) > ROWS / 10) == many

    def test_some_choices_are_left_to_the_host(self):
        lower = torch.linspace(9, -9, 1300)
        logits = lower[torch.arange(1300) * 563 % 1300].repeat(7, 1)
        options, noise = draws(7, top_k=10), torch.ones(7, 1300)
        logits[1, 3] = math.nan
        options[2, :4] = torch.tensor([0.0, 5, 0.5, 0.5])  # greedy
        logits[2, 7] = 10
        logits[3] = lower  # more than 8 of the highest are among neighbours
        noise[3, 25] = 1e-9
        options[4, :4] = torch.tensor([1, 0, 0.999, 0])  # more tokens than candidates
        noise[5, 1] = 1e-9  # top_k has removed it
        options[6, 1] = MOST_TOP_K + 1
        with mock.patch.object(topk, "exponentials", return_value=noise):
            assert drawn(options, logits, likeliest(logits)).tolist() == [0, -1, 7, UNDECIDED, UNDECIDED, 0, UNDECIDED]

    def test_random_numbers_are_the_definitions(self):
        """They are for seeds and places of all bits. A row's choice can be read back."""
        choices = [Choice(1.0, seed=2**64 - 9, place=2**31 - 2), Choice(0.7, 50, 0.9, 0.1, seed=5, place=70_000)]
        for row, choice in enumerate(choices):
            found = exponentials(draws_of(choices).float(), 1013)[row]
            expected = sampling.exponentials(choice.seed, choice.place, 1013)
            assert ((found - expected).abs() <= 1e-6 * expected).all()
            assert choice_of(draws_of(choices)[row]) == choice
