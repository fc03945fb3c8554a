"""The Triton kernels against their definitions: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter."""

import math
import os

import pytest
import torch

from granite4_neuron.devices.cuda import attention, linear, mamba, sampling
from granite4_neuron.devices.cuda.experts import choose_experts
from granite4_neuron.devices.cuda.operator import LAUNCHES
from granite4_neuron.devices.graphs.topk import draws_of, likeliest
from granite4_neuron.ops.sampling import Choice
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
    "most": dict(temperature=1e30, top_k=700),
    "too many": dict(temperature=1.0, top_k=10**6),
    "top_p": dict(temperature=0.7, top_p=0.8),
    "a low top_p": dict(temperature=1.0, top_p=1e-9),
    "two of equal weight": dict(temperature=1e30, top_k=2),
    "min_p": dict(temperature=1.0, min_p=0.05),
    "each": dict(temperature=1.1, top_k=90, top_p=0.95, min_p=0.02),
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


@pytest.mark.parametrize(("vocab_size", "block"), [(1013, 256), (40, 8192)])
def test_drawn_tokens_are_the_definitions(vocab_size, block, monkeypatch):
    """A row that is not drawn keeps its token."""
    monkeypatch.setattr(sampling, "_BLOCK", block)
    logits = logits_of_kinds(vocab_size)
    tokens = likeliest(logits)
    for number, options in enumerate(OPTIONS.values()):
        choices = [Choice(**options, seed=2**64 - 1 - number, place=place) for place in range(3, 8)]
        arguments = draws_of([*choices, Choice(1.0)]), logits, tokens
        expected = sampling.draw_tokens(*arguments)
        found = LAUNCHES[sampling.draw_tokens](*(each.to(DEVICE) for each in arguments))
        assert torch.equal(found.cpu(), expected) and found.dtype == torch.int32 and expected[-1] == -1
    arguments = draws_of([None] * 6), logits, tokens
    assert torch.equal(LAUNCHES[sampling.draw_tokens](*(each.to(DEVICE) for each in arguments)).cpu(), tokens)


def test_the_best_token_just_beyond_top_k_is_not_drawn(monkeypatch):
    monkeypatch.setattr(sampling, "_BLOCK", 256)
    logits = logits_of_kinds(1013)[:2]
    tokens = likeliest(logits)
    for place in range(20):
        flat = [dict(temperature=1e30, seed=seed, place=place) for seed in range(2)]
        winners = sampling.draw_tokens(draws_of([Choice(**each) for each in flat]), logits, tokens).long()
        ranks = (logits > logits.gather(1, winners[:, None])).sum(1).tolist()  # from 0
        choices = [Choice(**each, top_k=max(rank, 1)) for each, rank in zip(flat, ranks, strict=True)]
        arguments = draws_of(choices), logits, tokens
        found = LAUNCHES[sampling.draw_tokens](*(each.to(DEVICE) for each in arguments)).cpu()
        assert torch.equal(found, sampling.draw_tokens(*arguments))


@DTYPES
@pytest.mark.parametrize("kv_length", [64, 300, 600])
@pytest.mark.parametrize(("max_splits", "slots"), [(128, None), (4, [6, 2, 3, 0])], ids=["in order", "looked up"])
def test_attention(max_splits, slots, kv_length, dtype, monkeypatch):
    """Sequences have one entry, some or all; one is idle. Entries that no sequence has written are NaN."""
    monkeypatch.setattr(attention, "_MAX_SPLITS", max_splits)
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
