"""The rejection sampler against the distribution that it promises, and the rules of its arguments."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.vllm import rejection_sampler as module
from granite4_neuron.vllm.metadata import SamplerOutput, SamplingMetadata, SpecDecodeMetadata
from granite4_neuron.vllm.rejection_sampler import (
    RejectionSampler,
    expand_batch_to_tokens,
    rejection_sample,
    sample_recovered_tokens,
)

DRAWS = 50_000
VOCAB = 8
DTYPES = dict(top_k=torch.int64, top_p=torch.float32)
GREEDY = SamplingMetadata(None, all_greedy=True, all_random=False)


def sampled(batch_size, **options):
    return SamplingMetadata(torch.ones(batch_size), all_greedy=False, all_random=True, **options)


def one_hot_logits(*tokens, vocab_size=10):
    return 9.0 * torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float()


def judge(drafts, logits, bonus, metadata=GREEDY, draft_probs=None, **options):
    """Run `rejection_sample` on drafts by request, and return lists."""
    about = SpecDecodeMetadata.of(drafts)
    output = rejection_sample(
        about.draft_token_ids,
        about.num_draft_tokens,
        about.max_spec_len,
        about.cu_num_draft_tokens,
        draft_probs,
        logits,
        torch.tensor(bonus)[:, None],
        metadata,
        **options,
    )
    assert output.dtype == torch.int32 and output.shape == (len(drafts), about.max_spec_len + 1)
    return output.tolist()


class TestGreedy:
    def test_up_to_the_first_difference(self):
        logits = one_hot_logits(1, 2, 3, 1, 7, 3, 4)
        output = judge([[1, 2, 3], [1, 2, 3], [], [4]], logits, [5, 6, 8, 9])
        assert output == [[1, 2, 3, 5], [1, 7, -1, -1], [8, -1, -1, -1], [4, 9, -1, -1]]

    def test_no_drafts_at_all(self):
        assert judge([[], []], torch.empty(0, 10), [3, 4]) == [[3], [4]]

    def test_among_sampled_requests(self):
        metadata = SamplingMetadata(torch.tensor([0.0, 1.0]), all_greedy=False, all_random=False)
        probabilities = torch.full((4, 10), 0.1)
        output = judge([[1, 2], [3, 4]], one_hot_logits(1, 5, 3, 4).mul(9), [7, 8], metadata, probabilities)
        assert output == [[1, 5, -1], [3, 4, 8]]


class TestNeverAccepted:
    @pytest.mark.parametrize("metadata", [GREEDY, sampled(200)], ids=["greedy", "sampled"])
    def test_a_draft_that_is_padding(self, metadata):
        """The target may prefer token 0, or the last one, which an index of -1 would read."""
        for likely in (0, 9):
            output = judge([[-1, 3]] * 200, one_hot_logits(likely, 3).mul(9).repeat(200, 1), [5] * 200, metadata)
            assert output == [[likely, -1, -1]] * 200

    def test_a_draft_of_probability_zero(self):
        draft_probs = one_hot_logits(4).div(9).repeat(200, 1)
        output = judge([[3]] * 200, torch.zeros(200, 10), [5] * 200, sampled(200), draft_probs)
        assert all(second == -1 and first != 4 for first, second in output)

    def test_a_token_that_the_target_cannot_say(self):
        logits = torch.zeros(500, 10)
        logits[:, 3] = -math.inf
        assert all(row[0] != 3 and row[1] == -1 for row in judge([[3]] * 500, logits, [5] * 500, sampled(500)))


def draws(target_logits, draft_probs, sampler=judge, positions=2, **options):
    """Return the tokens of DRAWS requests. Drafts come from `draft_probs`, or are all token 2 if that is None."""
    if draft_probs is None:
        drafts = torch.full((DRAWS, positions), 2)
    else:
        drafts = torch.multinomial(draft_probs, DRAWS * positions, replacement=True).view(DRAWS, positions)
        draft_probs = draft_probs.repeat(DRAWS * positions, 1)
    logits = target_logits.repeat(DRAWS * positions, 1)
    return np.array(sampler(drafts.tolist(), logits, [0] * DRAWS, sampled(DRAWS, **options), draft_probs=draft_probs))


def p_value(tokens, probabilities):
    """Return the p-value for tokens that come from a distribution; 0 if one of them is impossible."""
    counts = np.bincount(tokens, minlength=VOCAB)
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible].double()
    expected *= len(tokens) / expected.sum()
    statistic = ((torch.tensor(counts)[possible] - expected) ** 2 / expected).sum()
    # A statistic of chi-square with n degrees of freedom exceeds x with probability Q(n / 2, x / 2).
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


@pytest.fixture
def target_logits():
    return 1.5 * torch.randn(VOCAB)


@pytest.fixture
def draft_probs(request):
    return (2.0 * torch.randn(VOCAB)).softmax(-1) if request.param else None


def constrained(logits, temperature=1.0, top_k=VOCAB, top_p=1.0):
    """Compute by definition, one token after another, the distribution that sampling options leave."""
    order = (logits / temperature).sort(descending=True).indices.tolist()[:top_k]
    probabilities = (logits / temperature)[order].softmax(-1).tolist()
    kept = [token for i, token in enumerate(order) if sum(probabilities[:i]) < top_p]
    result = torch.zeros(VOCAB)
    result[kept] = (logits / temperature)[kept].softmax(-1)
    return result


with_and_without = pytest.mark.parametrize("draft_probs", [True, False], indirect=True, ids=["drawn", "chosen"])


@with_and_without
class TestDistribution:
    @pytest.mark.slow_cases
    def test_is_the_targets(self, target_logits, draft_probs):
        output = draws(target_logits, draft_probs)
        first, second = output[:, 0], output[output[:, 1] >= 0, 1]
        assert p_value(first, target_logits.softmax(-1)) > 1e-3
        assert p_value(second, target_logits.softmax(-1)) > 1e-3 and len(second) > 1000

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("use_fp64_gumbel", [False, True])
    def test_in_both_precisions(self, target_logits, draft_probs, use_fp64_gumbel):
        def sampler(*args, **options):
            return judge(*args, **options, use_fp64_gumbel=use_fp64_gumbel)

        assert p_value(draws(target_logits, draft_probs, sampler)[:, 0], target_logits.softmax(-1)) > 1e-3

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        "options", [dict(temperature=0.6), dict(top_k=3), dict(top_p=0.7), dict(temperature=1.4, top_k=6, top_p=0.8)]
    )
    def test_after_the_requests_options(self, target_logits, draft_probs, options):
        def sampler(drafts, logits, bonus, metadata, draft_probs):
            dtypes = {name: dtype for name, dtype in DTYPES.items() if name in options}
            tensors = {name: torch.full((DRAWS,), options[name], dtype=dtype) for name, dtype in dtypes.items()}
            metadata = sampled(DRAWS, **tensors)
            metadata.temperature = torch.full((DRAWS,), options.get("temperature", 1.0))
            about = SpecDecodeMetadata.of(drafts)
            rows = torch.zeros(len(logits) + DRAWS, VOCAB)
            rows[about.target_logits_indices] = logits
            given = rows.clone()
            sampler = RejectionSampler(lambda **_: SamplerOutput(torch.tensor(bonus)[:, None]))
            output = sampler(about, draft_probs, rows, metadata)
            assert torch.equal(rows, given)
            return output.sampled_token_ids.tolist()

        tokens = draws(target_logits, draft_probs, sampler)[:, 0]
        assert p_value(tokens, constrained(target_logits, **options)) > 1e-3
        assert p_value(tokens, target_logits.softmax(-1)) < 1e-6, "the options must matter for the test to"

    def test_a_wrong_recovered_distribution_is_detected(self, target_logits, draft_probs, monkeypatch):
        def from_the_target(max_spec_len, num, cu, draft_token_ids, draft_probs, target_probs, *_):
            return torch.multinomial(target_probs, 1).view_as(draft_token_ids).to(draft_token_ids.dtype)

        monkeypatch.setattr(module, "sample_recovered_tokens", from_the_target)
        assert p_value(draws(target_logits, draft_probs)[:, 0], target_logits.softmax(-1)) < 1e-6

    def test_a_draft_accepted_too_often_is_detected(self, target_logits, draft_probs, monkeypatch):
        uniform = module.generate_uniform_probs
        monkeypatch.setattr(module, "generate_uniform_probs", lambda *args: 0.9 * uniform(*args))
        assert p_value(draws(target_logits, draft_probs)[:, 0], target_logits.softmax(-1)) < 1e-6


def test_drafts_of_the_same_model_are_always_accepted(target_logits):
    probabilities = target_logits.softmax(-1)
    output = draws(target_logits, probabilities)
    assert (output[:, 2] == 0).all(), "the bonus token must follow accepted drafts"


class TestRandomNumbers:
    def test_uniform_numbers_are_in_float64(self):
        uniform = module.generate_uniform_probs(1000, [1000], {}, torch.device("cpu"))
        assert uniform.dtype == torch.float64 and uniform.float().double().ne(uniform).any()
        assert uniform.min() >= 0 and uniform.max() < 1

    def test_a_generator_makes_its_request_repeatable(self):
        drafts, logits = [[1, 2], [], [3], [4, 5]], torch.zeros(5, 10)
        draft_probs = (3 * torch.eye(10)[[1, 2, 3, 4, 5]]).softmax(-1)
        outputs = []
        for _ in range(20):
            generators = {1: torch.Generator().manual_seed(1), 3: torch.Generator().manual_seed(7)}
            outputs.append(judge(drafts, logits, [6] * 4, sampled(4, generators=generators), draft_probs))
            assert torch.equal(generators[1].get_state(), torch.Generator().manual_seed(1).get_state())
        assert len({tuple(output[3]) for output in outputs}) == 1
        assert len({tuple(output[2]) for output in outputs}) > 1

    def test_synthetic_acceptance(self):
        rates = torch.tensor([1.0, 0.25])
        for metadata in (GREEDY, sampled(4000)):
            output = torch.tensor(
                judge(
                    [[1, 2], [1, -1]] * 2000,
                    torch.zeros(8000, 10),
                    [7] * 4000,
                    metadata,
                    synthetic_mode=True,
                    synthetic_conditional_rates=rates,
                )
            )
            assert (output[:, 0] == 1).all() and (output[1::2, 2] == -1).all()
            assert 0.2 < (output[::2, 2] == 7).float().mean() < 0.3

    def test_synthetic_rates_are_those_of_vllms_configuration(self):
        config = SimpleNamespace(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.4, 0.0, 0.0])
        bonus = SamplerOutput(torch.zeros(4000, 1))
        sampler = RejectionSampler(lambda **_: bonus, config)
        about = SpecDecodeMetadata.of([[1, 1, 1, 1]] * 4000)
        output = sampler(about, None, torch.zeros(20_000, 10), GREEDY).sampled_token_ids
        assert [round(float(share), 1) for share in (output == 1).float().mean(0)] == [0.8, 0.4, 0.0, 0.0, 0.0]
        config.rejection_sample_method = "fly"
        with pytest.raises(UserError, match="standard and synthetic, not fly"):
            RejectionSampler(None, config)


def test_recovered_tokens_of_any_shape_and_of_a_whole_vocabulary():
    target = torch.rand(6, 10_000)
    target[:, 5000:] = 0
    drafts = torch.zeros(6, 1, dtype=torch.int32)
    arguments = (3, [3, 3], torch.tensor([3, 6]), drafts)
    tokens = sample_recovered_tokens(*arguments, None, target, sampled(2), torch.device("cpu"))
    assert tokens.shape == drafts.shape and tokens.dtype == torch.int32 and ((tokens > 0) & (tokens < 5000)).all()
    only_the_draft = torch.zeros(6, 10_000)
    only_the_draft[:, 0] = 1
    tokens = sample_recovered_tokens(*arguments, None, only_the_draft, sampled(2), torch.device("cpu"))
    assert not tokens.any(), "where nothing else is possible it is the draft"


def test_expand_batch_to_tokens():
    x, ends = torch.tensor([0.5, 0.0, 2.0, 3.0]), torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    assert expand_batch_to_tokens(x, ends, 6).tolist() == [0.5, 0.5, 0, 0, 0, 3]
    assert expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1).tolist() == [0.5, 0.5, 1, 1, 1, 3]
    assert x.tolist() == [0.5, 0.0, 2.0, 3.0]


class TestRequestsRules:
    def tokens(self, drafts, target, **options):
        """Return greedy tokens. Token 9 is the second choice everywhere."""
        about = SpecDecodeMetadata.of(drafts)
        logits = torch.zeros(len(target) + len(drafts), 10)
        logits[about.target_logits_indices] = one_hot_logits(*target)
        logits[:, 9] += 8.0
        bonus = SamplerOutput(torch.full((len(drafts), 1), 8))
        sampler = RejectionSampler(lambda **_: bonus)
        metadata = SamplingMetadata(None, True, False, output_token_ids=[[1], [2]], **options)
        return sampler.parse_output(sampler(about, None, logits, metadata).sampled_token_ids, 10)[0]

    def test_penalties_see_the_drafts_before(self):
        off = torch.zeros(2)
        options = dict(no_penalties=False, prompt_token_ids=torch.tensor([[5, 10], [6, 7]]))
        penalties = dict(frequency_penalties=torch.tensor([0.6, 0.0]), presence_penalties=off)
        options |= dict(penalties, repetition_penalties=torch.ones(2))
        assert self.tokens([[1, 1], [1, 1]], [1, 1, 1, 1], **options) == [[1, 9], [1, 1, 8]]
        penalties = dict(frequency_penalties=off, presence_penalties=torch.tensor([0.0, 1.5]))
        options |= dict(penalties)
        assert self.tokens([[1, 1], [1, 1]], [1, 1, 1, 1], **options) == [[1, 1, 8], [1, 9]]
        options |= dict(presence_penalties=off, repetition_penalties=torch.tensor([2.0, 2.0]))
        assert self.tokens([[5], [5, 6]], [5, 5, 6], **options) == [[9], [5, 9]]

    def test_tokens_that_are_not_allowed(self):
        mask = torch.zeros(2, 10, dtype=torch.bool)
        mask[1, 3] = True
        assert self.tokens([[3, 4], [4, 3]], [3, 4, 4, 3], allowed_token_ids_mask=mask) == [[3, 4, 8], [4, 9]]

    def test_bad_words(self):
        assert self.tokens([[3, 4], [3, 4]], [3, 4, 3, 4], bad_words_token_ids={1: [[3, 4]]}) == [[3, 4, 8], [3, 9]]
        assert self.tokens([[3], [3]], [3, 3], bad_words_token_ids={0: [[1, 3]], 1: [[1, 3]]}) == [[9], [3, 8]]

    def test_refusals(self):
        with pytest.raises(UserError, match="gives no log probabilities"):
            self.tokens([[3], [3]], [3, 3], max_num_logprobs=0)
        with pytest.raises(UserError, match="has 129 drafts, and may have 128"):
            self.tokens([[3] * 129, []], [3] * 129)


def test_parse_output_drops_placeholders():
    output = torch.tensor([[1, 2, -1], [3, 12, 4], [5, 6, 7]], dtype=torch.int32)
    assert RejectionSampler.parse_output(output, 10, [2]) == ([[1, 2], [3, 4], []], None)
