"""The definition of the choice of tokens: its order beside transformers' processors, its distribution beside float64,
its numbers beside the real functions, and the CPU's form beside it, token by token.
"""

import math
import random

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from granite4_neuron.devices.cpu import sampling as cpu
from granite4_neuron.devices.cpu.operators import has_fused_kernels
from granite4_neuron.ops import sampling
from granite4_neuron.ops.sampling import ALL_MASKED, NONE_LEFT, NOT_FINITE, Choice, Penalties, choose

pytestmark = pytest.mark.versions

SIZE, DRAWS = 40, 100_000
PROMPT, ANSWER = [3, 5, 7, 3], [5, 11, 5]


def random_logits(size=SIZE, seed=0):
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bits(tokens, size=SIZE):
    is_set = np.zeros(size, bool)
    is_set[tokens] = True
    return torch.from_numpy(np.packbits(is_set, bitorder="little"))


BIASES = torch.tensor([4, 9, 11]), torch.tensor([2.0, -1.5, 3.0])
PENALTIES = Penalties(torch.tensor([3, 5, 7, 11]), torch.tensor([0.0, 2, 0, 1]), repetition=1.4)
ALLOWED = [token for token in range(SIZE) if token % 5]
# The options of choices, and transformers' processors for them, in the order of its generate.
CASES = {
    "temperature": (dict(temperature=1.7), [TemperatureLogitsWarper(1.7)]),
    "top_k": (dict(temperature=1.0, top_k=6), [TopKLogitsWarper(6)]),
    "top_p": (dict(temperature=1.0, top_p=0.8), [TopPLogitsWarper(0.8)]),
    "min_p": (dict(temperature=1.0, min_p=0.05), [MinPLogitsWarper(0.05)]),
    "typical_p": (dict(temperature=1.0, typical_p=0.6), [TypicalLogitsWarper(0.6)]),
    "all": (
        dict(
            temperature=2.0,
            top_k=20,
            top_p=0.9,
            min_p=0.02,
            typical_p=0.7,
            biases=BIASES,
            penalties=PENALTIES,
            allowed=bits(ALLOWED),
            forbidden=torch.tensor([8]),
        ),
        [
            SequenceBiasLogitsProcessor({(4,): 2.0, (9,): -1.5, (11,): 3.0}),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoBadWordsLogitsProcessor([[5, 8]]),
            PrefixConstrainedLogitsProcessor(lambda *_: ALLOWED, 1),
            TemperatureLogitsWarper(2.0),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
            TypicalLogitsWarper(0.7),
        ],
    ),
}


@pytest.fixture(scope="module")
def numbers():
    """Return the numbers of as many tokens as `DRAWS` places have."""
    return sampling.exponentials(5, 1, DRAWS * SIZE).view(DRAWS, SIZE)


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_is_that_of_transformers_processors(name, numbers):
    """100,000 draws, at different places, beside probabilities in float64."""
    options, processors = CASES[name]
    logits = random_logits()
    expected = LogitsProcessorList(processors)(torch.tensor([PROMPT + ANSWER]), logits[None].clone()).double()
    expected = expected.softmax(-1)[0]
    choice = Choice(seed=len(name), **options)
    scores = sampling.scores(logits, choice)
    logs = sampling.log2_weights(scores, choice.scale)
    assert torch.equal(sampling.kept(scores, logs, choice), expected > 0)
    # As `draw` does for one place after another.
    race = torch.where(expected > 0, logs - sampling._log2(numbers), -math.inf)
    counts = race.argmax(1).bincount(minlength=SIZE).double()
    usual = expected * DRAWS > 5
    chi_square = ((counts - expected * DRAWS)[usual] ** 2 / (expected[usual] * DRAWS)).sum()
    freedom = int(usual.sum()) - 1
    assert not counts[expected == 0].any() and freedom > 2
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    drawn = choose([logits] * 50, [Choice(seed=9, place=place, **options) for place in range(50)])
    assert len({each.token for each in drawn}) > 3 and all(expected[each.token] > 0 for each in drawn)


def test_penalties_are_openais():
    logits = random_logits()
    choice = Choice(penalties=PENALTIES._replace(frequency=0.3, presence=0.7, repetition=1.0))
    generated = torch.tensor(ANSWER).bincount(minlength=SIZE)
    expected = logits - 0.3 * generated - 0.7 * (generated > 0)
    assert torch.allclose(sampling.scores(logits, choice), expected, atol=1e-6)


def test_random_numbers_are_exponential_and_functions_are_right():
    """Words of the generator are checked beside the known answers in test_stochastic_rounding.py."""
    numbers = sampling.exponentials(2**64 - 3, 5, 400_000).double()
    words = sampling.philox_4x32(torch.tensor([[1, 5, 0, 0]]), 2**64 - 3, 10)[0].double()
    assert torch.allclose(numbers[4:8], -torch.log2((words + 0.5) / 2**32), rtol=3e-6, atol=0)
    ordered = numbers.sort().values
    expected = -torch.log2(1 - (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000)
    # Kolmogorov and Smirnov's distance of the distribution from the exponential one; 1.95 is a chance in a thousand.
    assert ((2**-ordered - 2**-expected).abs().max()) * math.sqrt(400_000) < 1.95
    assert not torch.equal(*(sampling.exponentials(seed, place, 9) for seed, place in ((1, 2), (2, 1))))
    values = torch.logspace(-9, 1.5, 10_000)
    assert torch.allclose(sampling._log2(values).double(), values.double().log2(), atol=2e-6)
    logs = -torch.linspace(0, 20, 10_000)
    assert torch.allclose(sampling.weights(logs).double() / 2**44, 2 ** logs.double(), rtol=1e-6)
    assert sampling.weights(torch.tensor([0.0, -1, -44, -46, -math.inf])).tolist() == [2**44, 2**43, 1, 0, 0]


def test_the_lowest_of_equal_tokens_counts_first():
    equal = torch.zeros(10)
    assert choose([equal], [Choice()])[0].token == 0
    kept = sampling.kept(equal, equal, Choice(temperature=1.0, top_p=0.35))
    assert kept.tolist() == [True] * 4 + [False] * 6
    assert sampling.kept(equal, equal, Choice(temperature=1.0, top_p=0.0)).tolist() == [True] + [False] * 9
    assert sampling.kept(equal, equal, Choice(temperature=1.0, top_k=3)).all()
    uneven = torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]).log()
    logs = sampling.log2_weights(uneven, math.log2(math.e))
    for share, expected in ((0.0, [1]), (0.5, [1]), (0.65, [0, 1, 2, 3, 4])):
        assert sampling.kept(uneven, logs, Choice(1.0, typical_p=share)).nonzero().flatten().tolist() == expected
    report = sampling.logprobs(equal, 7, 3)
    assert report.top.tolist() == [0, 1, 2] and report.rank == 10
    assert report.logprob == pytest.approx(-math.log(10))


def test_why_no_token_is_chosen():
    logits = torch.tensor([-math.inf, 1.0, 2.0])
    cases = {
        NOT_FINITE: [(torch.tensor([1.0, math.nan, 0.0]), Choice()), (torch.full((3,), -math.inf), Choice())],
        ALL_MASKED: [(logits, Choice(mask=bits([0], 3)))],
        NONE_LEFT: [(logits, Choice(forbidden=torch.tensor([1, 2]))), (logits, Choice(allowed=bits([0], 3)))],
    }
    for form in forms():
        for code, examples in cases.items():
            assert [each.token for each in form.choose(*zip(*examples, strict=True))] in ([code], [code] * 2)
        assert form.choose([logits], [Choice(temperature=1e-6, mask=bits([0, 1], 3))])[0].token == 1


def forms():
    return [sampling, *([cpu] if has_fused_kernels() else [])]


@pytest.mark.skipif(not has_fused_kernels(), reason="the CPU's kernels cannot be compiled here")
class TestOnTheCPU:
    def test_tokens_and_reports_equal_the_definitions(self):
        """Any options over any logits: flat, peaked, many equal, all equal, one left, and sizes of no multiple."""
        generator, chance = torch.Generator().manual_seed(0), random.Random(0)

        def some(size):
            return torch.randperm(size, generator=generator)[: chance.randrange(1, size + 1)]

        def often(value):
            return chance.choice([None, value])

        rows, choices = [], []
        for _ in range(600):
            size = chance.choice([1, 2, 63, 64, 65, 129, 1000, 5003])
            logits = random_logits(size, chance.randrange(2**31)) * chance.choice([0.01, 1, 10])
            kind = chance.randrange(5)
            if kind == 0:
                logits = logits.round() * -0.0 if chance.random() < 0.2 else logits.round()
            elif kind == 1:
                logits[torch.rand(size, generator=generator) < 0.95] = -math.inf
                logits[chance.randrange(size)] = 0
            tokens = some(size)
            counts = torch.randint(0, 4, (len(tokens),), generator=generator).float()
            penalties = Penalties(tokens, counts, 0.3, -0.5, chance.choice([1.0, 1.3, 0.7, 1e38]))
            rows.append(logits)
            choices.append(
                Choice(
                    temperature=chance.choice([0, 0.7, 1, 2, 1e-6, 1e6, 1e-40, 1e40]),
                    top_k=chance.choice([0, 1, 2, 50, size - 1, size, 10 * size]),
                    top_p=chance.choice([1, 0, 1e-9, 0.1, 0.5, 0.95, 0.999999]),
                    min_p=chance.choice([0, 0.01, 0.3, 1]),
                    typical_p=chance.choice([1, 1, 1e-9, 0.2, 0.7, 0.999999]),
                    seed=chance.randrange(2**64),
                    place=chance.randrange(2**20),
                    mask=often(bits(some(size), size)),
                    allowed=often(bits(some(size), size)),
                    biases=often((tokens, torch.randn(len(tokens), generator=generator))),
                    penalties=often(penalties),
                    forbidden=often(tokens[:3]),
                    num_logprobs=often(min(chance.choice([0, 3, 20]), size)),
                )
            )
        for size in {len(row) for row in rows}:
            of_size = [(row, choice) for row, choice in zip(rows, choices, strict=True) if len(row) == size]
            arguments = list(zip(*of_size, strict=True))
            expected = choose(*arguments)
            found = cpu.choose(*arguments)
            assert [each.token for each in found] == [each.token for each in expected]
            assert sum(each.token >= 0 for each in found) > len(found) / 3
            for ours, right in zip(found, expected, strict=True):
                assert (ours.logprobs is None) == (right.logprobs is None)
                if right.logprobs is not None:
                    assert ours.logprobs.logprob == pytest.approx(right.logprobs.logprob, rel=1e-6)
                    assert ours.logprobs.rank == right.logprobs.rank
                    assert torch.equal(ours.logprobs.top, right.logprobs.top)
                    assert torch.allclose(ours.logprobs.values, right.logprobs.values, atol=1e-6)

    @pytest.mark.parametrize("spread", [0, 0.01, 1])
    def test_the_edge_of_top_p(self, spread):
        """Draws at many places show a token too many or too few."""
        logits = spread * random_logits(70)
        for share in (0.03, 0.3, 0.5, 0.97):
            choices = [Choice(1.0, top_p=share, seed=1, place=place) for place in range(50)]
            found, expected = (form.choose([logits] * 50, choices) for form in (cpu, sampling))
            assert [each.token for each in found] == [each.token for each in expected]

    def test_an_unlikely_token_wins_by_a_rare_number(self):
        """A block of tokens is drawn from however far behind its likeliest one is."""
        size = 384
        numbers = -sampling._log2(torch.stack([sampling.exponentials(1, place, size) for place in range(200)]))
        place, token = divmod(int(numbers[:, size // 2 :].argmax()), size // 2)
        token += size // 2
        difference = float(numbers[place, token] - numbers[place, 0])
        assert difference > 13
        for ahead, expected in ((0.1, token), (-0.1, 0)):
            logits = torch.full((size,), -math.inf)
            logits[0], logits[token] = 0, (ahead - difference) * math.log(2)
            choice = Choice(1.0, seed=1, place=place)
            assert [form.choose([logits], [choice])[0].token for form in forms()] == [expected] * 2

    def test_reports_of_given_tokens(self):
        logits, tokens = torch.stack([random_logits(50, seed) for seed in range(3)]), [4, 0, 49]
        expected = (logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)).log()
        for row, token, found in zip(expected, tokens, cpu.token_logprobs(logits, tokens, 5), strict=True):
            order = row.argsort(descending=True)[:5]
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-6)
            assert torch.equal(found.top, order) and torch.allclose(found.values.double(), row[order], atol=1e-6)
            assert found.rank == int((row >= row[token]).sum())

    def test_results_do_not_depend_on_threads_or_rows(self):
        rows = [random_logits(3000, seed) for seed in range(9)]
        choices = [Choice(0.8, 0, 0.9, seed=seed, place=7, num_logprobs=2) for seed in range(9)]
        threads = torch.get_num_threads()
        together = []
        for count in (1, 4):
            torch.set_num_threads(count)
            together.append(cpu.choose(rows, choices))
        torch.set_num_threads(threads)
        alone = [cpu.choose([row], [choice])[0] for row, choice in zip(rows, choices, strict=True)]
        for several in together:
            assert [(each.token, each.logprobs.logprob) for each in several] == [
                (each.token, each.logprobs.logprob) for each in alone
            ]
