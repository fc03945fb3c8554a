"""The accuracy report itself, on numbers that are known beforehand."""

import statistics

import pytest
import torch

from granite4_neuron.evaluation.accuracy import AccuracyReport, Difference

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
