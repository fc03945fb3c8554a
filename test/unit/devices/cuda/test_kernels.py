"""The Triton kernels against their definitions: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter."""

import math
import os
from dataclasses import replace

import pytest
import torch

from granite4_neuron.devices.cuda import attention, linear, mamba, sampling
from granite4_neuron.devices.cuda.choices import FOUND, ChoiceTables, reports_of
from granite4_neuron.devices.cuda.experts import choose_experts
from granite4_neuron.devices.cuda.operator import LAUNCHES
from granite4_neuron.devices.graphs.topk import likeliest
from granite4_neuron.engine.token_rules import bits_of
from granite4_neuron.ops import sampling as definition
from granite4_neuron.ops.sampling import Choice, Penalties
from granite4_neuron.runtime.interface import FROM_DEVICE, UNDECIDED, Row
from test.support.oracles import relative_error

pytestmark = pytest.mark.versions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("torch finds no GPU here", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def copied(argument, device):
    if not isinstance(argument, torch.Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=device).copy_(argument)


def compare(operator, *arguments, dtype=torch.float32):
    """Compare results and arguments written in place. Both must have NaN at the same places."""
    theirs, ours = [[copied(each, device) for each in arguments] for device in ("cpu", DEVICE)]
    expected, output = operator(*theirs), LAUNCHES[operator](*ours)
    assert output.dtype == expected.dtype and output.shape == expected.shape
    for mine, other in zip([output, *ours], [expected, *theirs], strict=True):
        if isinstance(other, torch.Tensor) and other.is_floating_point():
            mine = mine.cpu()
            assert torch.equal(mine.isnan(), other.isnan())
            assert relative_error(mine.nan_to_num(), other.nan_to_num()) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)


@DTYPES
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_convolution(has_bias, width, dtype):
    """x is part of a wider tensor. The second sequence is idle, and its window stays bit by bit."""
    x = random(3, 1, 200, dtype=dtype)[..., :140]
    state, weight = random(3, 140, width - 1, dtype=dtype), random(140, width, dtype=dtype)
    bias = random(140, dtype=dtype) if has_bias else None
    compare(mamba.convolve_token, x, state, weight, bias, torch.tensor([1, 0, 1], dtype=torch.int32), dtype=dtype)


@pytest.mark.parametrize(("head_dim", "d_state", "groups"), [(32, 128, 1), (24, 24, 2)])
def test_recurrence(head_dim, d_state, groups):
    """The second sequence is idle, and the third one is NaN."""
    rows, heads = 3, 4
    columns = random(rows, heads * head_dim + 2 * groups * d_state)
    x = columns[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
    B, C = (part.unflatten(-1, (groups, d_state)) for part in columns[:, heads * head_dim :].chunk(2, -1))
    dt = torch.rand(rows, heads)
    dt[1] = 0
    state = random(rows, heads, head_dim, d_state)
    state[2] = math.nan
    log_decay = -dt * torch.rand(heads)
    compare(mamba.advance_token, x, dt, log_decay, B, C, random(heads, dtype=torch.bfloat16).float(), state)


@DTYPES
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("columns", [16, 80, 768])
def test_products(columns, is_gated, dtype):
    x = random(3, columns, dtype=dtype)
    weight = (random(5, 22, columns) / columns**0.5).to(dtype)
    compare(linear.multiply_rows, x[:1], weight[0], None, is_gated, dtype=dtype)
    ids = torch.tensor([4, 1, 0, 4, 2, 2])
    compare(linear.multiply_rows, x, weight, ids, is_gated, dtype=dtype)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 6, 2), (3, 64, 6), (70, 72, 10), (2, 5, 5)])
def test_choice_of_experts(tokens, experts, top_k):
    """Logits are whole numbers, so that some are equal. The last token has a NaN, with a sign."""
    logits = random(tokens, experts).mul(3).round()
    logits[-1, 0] = -torch.tensor(math.nan)
    assert logits[-1, 0].view(torch.int32) < 0
    (expected, expected_ids), (weights, ids) = (
        run(copied(logits, device), top_k)
        for run, device in ((choose_experts, "cpu"), (LAUNCHES[choose_experts], DEVICE))
    )
    weights, ids = weights.cpu(), ids.cpu()
    assert ids.dtype == expected_ids.dtype and torch.equal(ids[:-1], expected_ids[:-1])
    assert ((ids >= 0) & (ids < experts)).all() and weights[-1].isnan().all()
    torch.testing.assert_close(weights[:-1], expected[:-1], rtol=1e-6, atol=0.0)


OPTIONS = {
    "all": dict(temperature=1.3),
    "three of equal weight": dict(temperature=1e30, top_k=3),  # in these two places the seeds show a token too many
    "flat": dict(temperature=1e30),
    "peaked": dict(temperature=1e-6),
    "top_k": dict(temperature=0.7, top_k=50),
    "the first": dict(temperature=1.0, top_k=1),
    "most": dict(temperature=1e30, top_k=200),
    "too many": dict(temperature=1.0, top_k=10**6),
    "top_p": dict(temperature=0.7, top_p=0.8),
    "a low top_p": dict(temperature=1.0, top_p=1e-9),
    "two of equal weight": dict(temperature=1e30, top_k=2),
    "min_p": dict(temperature=1.0, min_p=0.05),
    "each": dict(temperature=1.1, top_k=90, top_p=0.95, min_p=0.02),
    "some of the first": dict(temperature=1e30, top_k=9, top_p=0.4),
}


def logits_of_kinds(vocab_size):
    """Return logits that are different, equal in groups and around 0, all equal, -inf but one, and not finite. In the
    first two rows the highest are 256 places apart.
    """
    logits = random(6, vocab_size).mul(3)
    logits[1] = logits[1].div(3).round()
    logits[:2, 5::256] += 30
    logits[2] = -2.5
    logits[3, torch.arange(vocab_size) != 7] = -math.inf
    logits[4, ::3] = -math.inf
    logits[5, 3] = math.nan
    return logits


def bits(vocab_size, share):
    return torch.from_numpy(bits_of(torch.rand(vocab_size).numpy() < share))


def further_options(vocab_size, number):
    """Return options that change which token is chosen, and reports; all of them for the last number of six."""
    held, biased = torch.randperm(vocab_size)[: vocab_size // 2], torch.randperm(vocab_size)[: vocab_size // 2]
    biases = biased, 6 * torch.randn(len(biased))
    penalties = Penalties(held, torch.randint(0, 3, held.shape).float(), 0.5, 3.0, 1.2)
    groups = [
        {},
        dict(num_logprobs=0),
        dict(mask=bits(vocab_size, 0.3), num_logprobs=20),
        dict(biases=biases, allowed=bits(vocab_size, 0.5)),
        dict(penalties=penalties, num_logprobs=3),
    ]
    return groups[number % 6] if number % 6 < 5 else {name: each for group in groups for name, each in group.items()}


def is_same(report, expected):
    """Return whether two reports are equal bit by bit."""
    are_equal = torch.equal(report.top, expected.top) and torch.equal(report.values, expected.values)
    return are_equal and report[:2] == expected[:2]


def counts_of(choice):
    return None if choice.penalties is None else lambda: choice.penalties[:2]


def counts_by_token(choice, vocab_size):
    """Return the counts of `choices.Tables` for a choice with penalties."""
    counts = torch.zeros(vocab_size, dtype=torch.int32)
    counts[choice.penalties.tokens] = choice.penalties.counts.int() + 1
    return counts


def with_tokens(choice, tokens):
    """Return a choice that counts further tokens of the sequence."""
    if choice.penalties is None:
        return choice
    counts = dict(zip(choice.penalties.tokens.tolist(), choice.penalties.counts.tolist(), strict=True))
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    held = torch.tensor(list(counts)), torch.tensor(list(counts.values()))
    return replace(choice, penalties=choice.penalties._replace(tokens=held[0], counts=held[1]))


@pytest.mark.parametrize(
    ("vocab_size", "sizes"),
    [
        (300, dict(_PART=128, _GROUPS=16, _MOST=256)),
        (300, dict(_PART=128, _MOST=16, _BLOCK=128)),
        pytest.param(40, {}, marks=pytest.mark.slow),
        pytest.param(5000, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_chosen_tokens_are_the_definitions(vocab_size, sizes, monkeypatch):
    """So are reports. The second token follows the first before the host knows it. A row without a choice keeps its
    token. With few tokens that may be among the top k, more of them are found than there is room for.
    """
    for name, value in sizes.items():
        monkeypatch.setattr(sampling, name, value)
    logits = logits_of_kinds(vocab_size)[[*range(6), 0]]
    likely, slots = likeliest(logits), range(8, 1, -1)
    tables, chosen = ChoiceTables(8, vocab_size, torch.device(DEVICE)), torch.zeros(8, dtype=torch.int32, device=DEVICE)
    for number, options in enumerate(OPTIONS.values()):
        further = [further_options(vocab_size, number + row) for row in range(6)]
        choices = [Choice(**options, **each, seed=2**64 - 1 - row) for row, each in enumerate(further)]
        tokens = [[3]] * 7
        for length in (70_000, 70_001)[: 1 + (number < 3)]:
            choices = [replace(choice, place=length + 1) for choice in choices]
            run = [3 if length == 70_000 else FROM_DEVICE]
            rows = [
                Row(slot, length, run, draw=draw, counts=draw and counts_of(draw), sequence=10 * number + slot)
                for slot, draw in zip(slots, [*choices, None], strict=True)
            ]
            chosen[[slot - 1 for slot in slots]] = likely.to(DEVICE)
            arguments = [each.to(DEVICE) for each in (tables.options_of(rows), logits, likely)]
            answers = LAUNCHES[sampling.choose_tokens](*arguments, *tables.tables, chosen).cpu()
            counted = [with_tokens(*each) for each in zip(choices, tokens, strict=False)]
            reports = reports_of(answers[:6], [choice.num_logprobs for choice in choices])
            assert answers[:, FOUND].tolist() == [int(chosen[slot - 1]) for slot in slots]
            assert answers[6, FOUND] == likely[0]
            for row, expected in enumerate(definition.choose(list(logits[:6]), counted)):
                if tokens[row][-1] >= 0:
                    assert answers[row, FOUND] == max(expected.token, UNDECIDED)
                    assert expected.logprobs is None or is_same(reports[row], expected.logprobs)
                if tokens[row][-1] >= 0 <= expected.token and counted[row].penalties is not None:
                    assert torch.equal(tables.tables.counts[7 - row].cpu(), counts_by_token(counted[row], vocab_size))
            tokens = [[*before, int(token)] for before, token in zip(tokens, answers[:, FOUND], strict=True)]


def test_the_best_token_just_beyond_top_k_is_not_drawn():
    logits = logits_of_kinds(1013)[:2]
    for place in range(1, 21):
        flat = [Choice(1e30, seed=seed, place=place) for seed in range(2)]
        winners = torch.tensor([each.token for each in definition.choose(list(logits), flat)])
        ranks = (logits > logits.gather(1, winners[:, None])).sum(1).tolist()  # from 0
        choices = [replace(each, top_k=max(rank, 1)) for each, rank in zip(flat, ranks, strict=True)]
        tables, chosen = ChoiceTables(2, 1013, torch.device(DEVICE)), torch.zeros(2, dtype=torch.int32, device=DEVICE)
        options = tables.options_of([Row(slot, place - 1, [3], draw=each) for slot, each in enumerate(choices, 1)])
        arguments = [each.to(DEVICE) for each in (options, logits, likeliest(logits))]
        answers = LAUNCHES[sampling.choose_tokens](*arguments, *tables.tables, chosen)
        assert answers[:, FOUND].tolist() == [each.token for each in definition.choose(list(logits), choices)]


@DTYPES
@pytest.mark.parametrize("kv_length", [64, 300, 600])
@pytest.mark.parametrize(("max_splits", "slots"), [(128, None), (4, [6, 2, 3, 0])], ids=["in order", "looked up"])
def test_attention(max_splits, slots, kv_length, dtype, monkeypatch):
    """Sequences have one entry, some or all; one is idle. Entries that no sequence has written are NaN."""
    monkeypatch.setattr(attention, "_MAX_SPLITS", max_splits)
    monkeypatch.setattr(attention, "_MOST_PROGRAMS", 24)  # of 8 rows and heads: a program takes each third split
    positions = torch.tensor([[0], [257 % kv_length], [kv_length - 1], [9]], dtype=torch.int32)
    caches = 5 if slots is None else 7
    key, value = random(caches, 2, 640, 24, dtype=dtype), random(caches, 2, 640, 24, dtype=dtype)
    for cache in (key, value):
        for slot, position in zip(slots or range(1, 5), positions[:, 0], strict=True):
            cache[slot, :, position + 1 :] = math.nan
        cache[0] = math.nan
    where = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    lengths = torch.tensor([1, 1, 1, 0], dtype=torch.int32)
    query = random(4, 1, 6, 24, dtype=dtype)
    compare(attention.attend_tokens, query, key, value, positions, lengths, where, 0.3, kv_length, dtype=dtype)


@DTYPES
def test_a_tokens_attention_does_not_depend_on_the_step(dtype):
    """Each token of several sequences has the bits that it has alone, with the shortest cache."""
    key, value = random(4, 2, 640, 24, dtype=dtype), random(4, 2, 640, 24, dtype=dtype)
    starts, tokens = (5, 30, 255), 3
    positions = torch.tensor([[start + token for token in range(tokens)] for start in starts], dtype=torch.int32)
    query, lengths = random(3, tokens, 6, 24, dtype=dtype), torch.tensor([3, 2, 3], dtype=torch.int32)
    launch = LAUNCHES[attention.attend_tokens]
    together = launch(*(each.to(DEVICE) for each in (query, key, value, positions, lengths)), None, 0.3, 640)
    for row, start in enumerate(starts):
        for token in range(lengths[row]):
            caches = [cache[[0, row + 1]] for cache in (key, value)]
            where = torch.tensor([[start + token]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
            arguments = query[row : row + 1, token : token + 1], *caches, *where
            alone = launch(*(each.to(DEVICE) for each in arguments), None, 0.3, start + token + 1)
            assert torch.equal(alone[0, 0], together[row, token])
