"""The accuracy report itself, on numbers that are known beforehand."""

import statistics

import numpy as np
import pytest
import torch

from granite4_neuron.evaluation import accuracy
from granite4_neuron.evaluation.accuracy import AccuracyReport, Difference, r_ratio, top_k_errors

# Errors whose maximum, mean, median and most frequent value all differ.
ERRORS = [0.0, 0.0, 0.0, 0.25, 0.5, 4.0]


@pytest.fixture
def reference():
    return torch.tensor([[1.0, 5.0, 2.0], [7.0, 3.0, 1.0]])


def test_a_difference(reference):
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    logits = reference + (torch.tensor(ERRORS) * signs).view(2, 3)
    difference = Difference.between(logits, reference)
    assert difference.tokens == 2
    assert difference.maximum == max(ERRORS) == 4.0
    assert difference.mean == pytest.approx(statistics.fmean(ERRORS))
    assert difference.top1_agreement == 1.0
    expected = statistics.correlation(logits.flatten().tolist(), reference.flatten().tolist())
    assert difference.pearson == pytest.approx(expected)


def test_top_tokens(reference):
    assert Difference.between(reference.flip(-1), reference).top1_agreement == 0.5
    assert Difference.between(-reference, reference).top1_agreement == 0.0


def report(ours, reference, **changes):
    """Report two sequences of 3 and 4 tokens, of which 2 and 1 are prompt."""
    values = dict(prompt_lengths=[2, 1], ours=ours, reference=reference, reference_in_dtype=None)
    return AccuracyReport(**{**values, **changes})


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, 5, generator=generator) for length in (3, 4)]


def test_phases(sequences):
    """Prompts are off by 1 and later tokens by 10, so the two cannot be mistaken for each other."""
    ours = [logits.clone() for logits in sequences]
    for logits, length in zip(ours, (2, 1), strict=True):
        logits[:length] += 1
        logits[length:] += 10
    measured = report(ours, sequences)
    prefill, decode = measured.phase(prefill=True), measured.phase(prefill=False)
    assert (prefill.tokens, decode.tokens) == (3, 4)
    assert prefill.maximum == pytest.approx(1, abs=1e-5) and decode.maximum == pytest.approx(10, abs=1e-5)
    assert measured.overall().tokens == 7
    assert measured.overall().mean == pytest.approx((3 * 1 + 4 * 10) / 7, abs=1e-5)


def test_positions(sequences):
    ours = [logits + torch.arange(len(logits))[:, None] for logits in sequences]
    measured = report(ours, sequences)
    for position, tokens in ((0, 2), (1, 2), (2, 2), (3, 1)):
        difference = measured.positions(position, position + 1)
        assert difference.tokens == tokens and difference.mean == pytest.approx(position, abs=1e-5)
    assert measured.positions(4, 8) is None


def test_float32_passes_by_its_largest_difference(sequences):
    ours = [logits.clone() for logits in sequences]
    ours[0][0, 0] += 1e-3
    assert not report(ours, sequences).passed(9e-4)
    assert report(ours, sequences).passed(1.1e-3)


def test_other_dtypes_pass_by_the_mean_of_transformers(sequences):
    off = [logits + 0.1 for logits in sequences]
    further_off = [logits + 0.2 for logits in sequences]
    assert report(off, sequences, reference_in_dtype=further_off).passed()
    assert not report(further_off, sequences, reference_in_dtype=off).passed()


def test_quantized_weights_pass_by_their_top_tokens(sequences):
    assert report([logits + 9 for logits in sequences], sequences, is_quantized=True).passed()
    assert not report([-logits for logits in sequences], sequences, is_quantized=True).passed()


def test_r_ratio(sequences):
    """The norm of all tokens' errors, not a mean of their ratios."""
    own = [torch.full_like(logits, float(number)) for number, logits in enumerate(sequences, 1)]
    changes = dict(reference_in_dtype=[a + b for a, b in zip(sequences, own, strict=True)])
    ours = [sequences[0] + 3, sequences[1]]
    expected = (15 * 9 / (15 * 1 + 20 * 4)) ** 0.5  # 15 and 20 logits
    assert report(ours, sequences, **changes).r_ratio() == pytest.approx(expected, rel=1e-5)
    assert report(ours, sequences).r_ratio() is None
    assert r_ratio(ours[0], sequences[0], sequences[0]) == float("inf")


class TestTopK:
    def expected(self, logits, reference, k):
        """Return by definition, token by token: the largest error of the k best logits after a linear regression."""
        errors = []
        for found, right in zip(logits.double().numpy(), reference.double().numpy(), strict=True):
            _, shift = np.linalg.lstsq(np.stack([right, np.ones_like(right)], 1), found, rcond=None)[0]
            likeliest = np.argsort(right)[::-1][:k]
            error = np.abs(found - shift - right)[likeliest].max() - 1e-5
            errors.append(error / np.abs(right[likeliest]).max())
        return errors

    @pytest.mark.parametrize("size", [30, 60, 1200])
    def test_by_its_definition(self, size):
        reference = 5 * torch.randn(12, size, generator=torch.Generator().manual_seed(0)) - 3
        logits = reference * 1.01 + 0.3 + 0.02 * torch.randn(12, size, generator=torch.Generator().manual_seed(1))
        for error, (k, tolerance) in zip(
            top_k_errors(logits, reference), accuracy.TOP_K_TOLERANCES.items(), strict=True
        ):
            expected = self.expected(logits, reference, k)
            assert (error.k, error.tolerance) == (k, tolerance)
            assert error.largest == pytest.approx(max(expected), rel=1e-6)
            assert error.within == pytest.approx(np.mean(np.array(expected) <= tolerance))
            assert error.passed == (max(expected) <= tolerance)

    def test_a_shift_is_no_error(self):
        reference = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
        assert all(error.passed and error.within == 1 for error in top_k_errors(reference + 7, reference))
        reversed_logits = top_k_errors(-reference, reference)
        assert not any(error.passed for error in reversed_logits) and reversed_logits[0].within == 0

    def test_logits_that_are_not_numbers(self):
        reference = torch.randn(3, 100)
        assert not any(error.passed for error in top_k_errors(reference * torch.nan, reference))

    def test_only_logits_after_prompts_count(self, sequences):
        """The prompts have 2 tokens and 1. Logits after the first token of the first one do not count."""
        ours = [logits.clone() for logits in sequences]
        ours[0][0] *= -1
        assert all(error.passed for error in report(ours, sequences).top_k_errors())
        ours[0][1] *= -1
        assert not any(error.passed for error in report(ours, sequences).top_k_errors())
        assert report(ours, sequences).transformers_top_k_errors() is None
        from_the_last = dict(ours=[ours[0][1:], ours[1]], reference=[sequences[0][1:], sequences[1]])
        measured = report(**from_the_last, is_last_of_prompt=True).top_k_errors()
        assert [error.within for error in measured] == [pytest.approx(5 / 6)] * 4
