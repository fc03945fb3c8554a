"""Perplexity of numbers that are known beforehand, and transformers' perplexity on the bundled model."""

import math
import pydoc_data.topics
import types

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from transformers import GraniteMoeHybridForCausalLM as Reference

from granite4_neuron import load
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.errors import UserError
from granite4_neuron.evaluation.perplexity import Window, decode_seconds, measure, one_window, sliding_windows
from test.support.engines import ChunkRuntime, engine_model

HELD_OUT = bundled_checkpoint() / "LICENSE.txt"  # not in the model's training data
VOCAB = 5


class TableRuntime:
    """A runtime whose logits after a token are that token's row of a table, and NaN where no logits are asked for."""

    tokens_per_step = 4
    cannot = {}  # noqa: RUF012

    def __init__(self, seed):
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.rows = []

    def allocate(self, num_sequences, max_length):
        self.max_length = max_length

    def step(self, state, rows, all_logits=False):
        (row,) = rows
        assert all_logits and 1 <= len(row.tokens) <= self.tokens_per_step
        assert row.start + len(row.tokens) <= self.max_length
        self.rows.append((row.start, list(row.tokens)))
        padding = torch.full((3, VOCAB), math.nan)
        return torch.cat([self.table[list(row.tokens)], padding])[None]


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (11,), generator=torch.Generator().manual_seed(1)).tolist()


def expected_nats(table, tokens, positions):
    """Sum one token after another in Python's floating point, exactly."""
    terms = []
    for position in positions:
        row = table[tokens[position - 1]].tolist()
        terms.append(math.log(math.fsum(map(math.exp, row))) - row[tokens[position]])
    return math.fsum(terms)


def test_one_context(tokens):
    runtime = TableRuntime(0)
    (score,) = measure([runtime], tokens, one_window(len(tokens)))
    assert runtime.rows == [(0, tokens[:4]), (4, tokens[4:8]), (8, tokens[8:10])], "the last one need not be run"
    assert (score.tokens, score.run_tokens) == (10, 10)
    assert score.nats == pytest.approx(expected_nats(runtime.table, tokens, range(1, 11)), rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(score.nats / 10))
    assert score.perplexity_per_byte(25) == pytest.approx(math.exp(score.nats / 25))
    assert score.tokens_per_second > 0


def test_windows():
    assert sliding_windows(11, 6, 2) == [Window(0, 1, 6), Window(2, 6, 8), Window(4, 8, 10), Window(6, 10, 11)]
    assert sliding_windows(11, 5, 5) == [Window(0, 1, 5), Window(5, 6, 10)], "another window would have one token only"
    assert sliding_windows(5, 8, 2) == [Window(0, 1, 5)]
    assert sliding_windows(1, 8, 2) == sliding_windows(0, 8, 2) == []
    for stride in (0, 6):
        with pytest.raises(UserError, match=f"the stride is {stride}; it must be at least 1 and at most the window, 5"):
            sliding_windows(11, 5, stride)
    with pytest.raises(UserError, match="at least 2 tokens"):
        sliding_windows(11, 1, 1)


@pytest.mark.parametrize(("window", "stride"), [(6, 2), (6, 1), (5, 5), (9, 4), (40, 20)])
def test_sliding_windows(tokens, window, stride):
    runtime = TableRuntime(0)
    windows = sliding_windows(len(tokens), window, stride)
    calls = []
    (score,) = measure([runtime], tokens, windows, lambda *numbers: calls.append(numbers))
    unscored = {0, 5, 10} if stride == window else {0}
    positions = [position for position in range(11) if position not in unscored]
    assert score.tokens == len(positions)
    assert score.nats == pytest.approx(expected_nats(runtime.table, tokens, positions), rel=1e-12)
    assert calls[-1] == (score.run_tokens, score.run_tokens)


def test_divergence_from_the_first(tokens):
    runtimes = [TableRuntime(0), TableRuntime(1), TableRuntime(0)]
    first, other, same = measure(runtimes, tokens, one_window(len(tokens)))
    tables = [Categorical(logits=runtime.table[tokens[:-1]].double()) for runtime in runtimes]
    assert other.divergence == pytest.approx(kl_divergence(tables[0], tables[1]).sum().item(), rel=1e-9)
    assert abs(other.divergence - kl_divergence(tables[1], tables[0]).sum().item()) > 0.1, "the direction matters"
    assert first.divergence == same.divergence == 0
    assert other.mean_divergence == other.divergence / 10
    assert other.nats == pytest.approx(expected_nats(runtimes[1].table, tokens, range(1, 11)), rel=1e-12)


def test_refusals(tokens):
    for length in (0, 1):
        with pytest.raises(UserError, match=f"the text has {length} tokens; at least 2"):
            measure([TableRuntime(0)], tokens[:length], sliding_windows(length, 4, 2))
    runtime = TableRuntime(0)
    runtime.table[tokens[3]] = math.nan
    with pytest.raises(UserError, match="not finite"):
        measure([runtime], tokens, one_window(11))
    refusing = types.SimpleNamespace(cannot={"all_logits": "It has none."})
    with pytest.raises(UserError, match="It has none"):
        measure([refusing], tokens, one_window(11))


def test_speed_of_single_tokens(tokens):
    runtimes = [ChunkRuntime(engine_model(seed)) for seed in (0, 1)]
    assert all(seconds > 0 for seconds in decode_seconds(runtimes, tokens))
    assert [[row.start for row in rows] for rows in runtimes[1].steps] == [[position] for position in range(11)]


@pytest.fixture(scope="module")
def texts():
    """Return a text that the bundled model has never seen, and one that it knows by heart."""
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return {"held out": HELD_OUT.read_text(encoding="utf-8"), "known": topics[:12_000]}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("dtype", "text", "tolerance"),
    [
        (torch.float32, "held out", 1e-5),
        (torch.bfloat16, "known", 1e-3),
        # Its perplexity is in the hundreds, and rounding to bfloat16 alone moves it by up to half a percent.
        (torch.bfloat16, "held out", 1e-2),
    ],
)
def test_the_bundled_model_has_the_perplexity_of_transformers(texts, dtype, text, tolerance):
    runtime, tokenizer = load(dtype=dtype)
    reference = Reference.from_pretrained(bundled_checkpoint(), dtype=dtype).eval()
    tokens = tokenizer.encode(texts[text])
    assert len(tokens) > 6 * runtime.tokens_per_step, "many chunks, whose state is carried"
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    log_probabilities = torch.log_softmax(logits.double(), -1)
    mean = -log_probabilities.gather(1, torch.tensor(tokens[1:])[:, None]).mean().item()
    (score,) = measure([runtime], tokens, one_window(len(tokens)))
    assert score.perplexity == pytest.approx(math.exp(mean), rel=tolerance)
