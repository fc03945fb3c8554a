"""What the fused kernels refuse before they touch memory, and calls of no rows or no tokens."""

import re
import subprocess
import sys

import pytest
import torch

from granite4_neuron.ops import cpu
from granite4_neuron.ops.cpu.build import kernel

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

HEADS, HEAD_DIM, D_STATE, WIDTH = 4, 8, 16, 4
CHANNELS = HEADS * HEAD_DIM + 2 * D_STATE


def packed(*shape):
    return cpu.pack(torch.randn(shape), torch.float32).packed


def call(name, **changes):
    """An operator with good arguments, of which some are replaced: by name, or by a function of the good one."""
    arguments = GOOD[name]()
    for argument, value in changes.items():
        arguments[argument] = value(arguments[argument]) if callable(value) else value
    return kernel(name)(*arguments.values())


def mixer(paged):
    return {
        "projected": torch.randn(*((3,) if paged else (2, 3)), CHANNELS + HEADS),
        "weights": [torch.randn(CHANNELS, 1, WIDTH), torch.randn(CHANNELS), *torch.rand(3, HEADS)],
        "conv_state": torch.zeros(3, CHANNELS, WIDTH - 1),
        "ssm_state": torch.zeros(3, HEADS, HEAD_DIM, D_STATE),
        "rows": [torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)]
        if paged
        else [torch.tensor([3, 2]), torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0, 0])],
        "sizes": [1, 64, 2],
        "limits": [0.0, 1e9],
    }


GOOD = {
    "weight_rows": lambda: dict(weight=packed(5, 8), ids=torch.tensor([0, 4])),
    "linear": lambda: dict(x=torch.randn(2, 8), weight=packed(5, 8), bias=torch.randn(5)),
    "logits": lambda: dict(x=torch.randn(2, 8), weight=packed(5, 8), scaling=1.0),
    "mlp": lambda: dict(x=torch.randn(2, 8), w1=packed(12, 8), w2=packed(8, 6)),
    "rms_norm": lambda: dict(x=torch.randn(2, 8), z=torch.randn(2, 8), weight=torch.randn(8), eps=1e-5, n_groups=2),
    "silu_and_mul": lambda: dict(x=torch.randn(2, 8)),
    "residual_add": lambda: dict(x=torch.randn(2, 8), y=torch.randn(2, 8), alpha=1.0),
    "mamba_mixer": lambda: mixer(paged=False) | {"rounding": [0, 0, 7]},
    "paged_mamba_mixer": lambda: mixer(paged=True),
    "write_cache": lambda: dict(
        cache=torch.zeros(3, 2, 20, 8), values=torch.randn(2, 3, 2, 8), positions=torch.zeros(2, 1).long(),
        lengths=torch.tensor([3, 1]), slots=torch.tensor([1, 2]),
    ),
    "cached_attention": lambda: dict(
        query=torch.randn(2, 3, 4, 8), key_cache=torch.zeros(3, 2, 20, 8), value_cache=torch.zeros(3, 2, 20, 8),
        positions=torch.zeros(2, 1).long(), lengths=torch.tensor([3, 1]), slots=torch.tensor([1, 2]), scale=1.0,
    ),
    "paged_attention": lambda: dict(
        query=torch.randn(3, 32), key=torch.randn(3, 16), value=torch.randn(3, 16),
        key_pages=torch.zeros(3, 2, 4, 8), value_pages=torch.zeros(3, 2, 4, 8),
        rows=[torch.tensor(n, dtype=torch.int32) for n in ([0, 1, 3], [1, 2], [[1], [2]])], scale=1.0,
    ),
    "fused_experts": lambda: dict(
        x=torch.randn(3, 8), w1=packed(4, 12, 8), w2=packed(4, 8, 6), weights=torch.rand(3, 2),
        ids=torch.tensor([[0, 1], [1, 2], [3, 0]]),
    ),
    "feed_forward_block": lambda: dict(
        x=torch.randn(1, 3, 8), matrices=[packed(12, 8), packed(8, 6)], norm=torch.ones(8), top_k=0, eps=1e-5, by=1.0
    ),
    "packed_bytes": lambda: dict(shape=[5, 8], format="plain", dtype=torch.float32),
}  # fmt: skip


def item(number, value):
    """A list with one of its items replaced."""
    return lambda good: [value if i == number else one for i, one in enumerate(good)]


EMPTY = torch.empty(0)
NO_NUMBERS = EMPTY.long()
# The differences of these are none below 0 in 32 bits.
WRAPPING = torch.tensor([0, 2**31 - 1, -(2**31), -1, 3], dtype=torch.int32)
BAD = [
    ("weight_rows", dict(ids=torch.tensor([5])), "no row 5"),
    ("linear", dict(bias=torch.randn(3)), "bias has the shape"),
    ("linear", dict(weight=packed(2, 5, 8)), "2 matrices where one"),
    ("linear", dict(x=torch.tensor(1.0)), "vectors of no values"),
    ("logits", dict(x=torch.randn(2, 7)), "7 values of a vector and 8 columns"),
    ("mlp", dict(w2=packed(8, 7)), "6 values of a vector and 7 columns"),
    ("rms_norm", dict(n_groups=0), "n_groups is 0 of 8"),
    ("rms_norm", dict(n_groups=7), "n_groups is 7 of 8"),
    ("rms_norm", dict(x=torch.randn(2, 0), z=None, weight=EMPTY), "vectors of no values"),
    ("rms_norm", dict(weight=torch.randn(3)), "weight has the shape"),
    ("rms_norm", dict(z=torch.randn(1, 8)), "z has the shape"),
    ("silu_and_mul", dict(x=torch.randn(2, 0)), "vectors of no values"),
    ("silu_and_mul", dict(x=torch.randn(2, 7)), "even number of channels"),
    ("residual_add", dict(x=torch.randn(2, 0), y=torch.randn(2, 0)), "vectors of no values"),
    ("residual_add", dict(y=torch.randn(1, 8)), "y has the shape"),
    ("write_cache", dict(values=torch.randn(2, 3, 3, 8)), "cache has the shape"),
    ("write_cache", dict(values=torch.randn(2, 3, 2, 9)), "cache has the shape"),
    ("write_cache", dict(values=torch.randn(9, 3, 2, 8)), "lengths has the shape"),
    ("write_cache", dict(cache=EMPTY), "cache has the shape"),
    ("write_cache", dict(positions=NO_NUMBERS), "positions has the shape"),
    ("write_cache", dict(positions=torch.empty(2, 0).long()), "row 0 has no position"),
    ("write_cache", dict(positions=torch.tensor([[2**63 - 1], [0]])), "beyond the cache, which has 20"),
    ("cached_attention", dict(positions=torch.tensor([[30], [0]])), "beyond the cache, which has 20"),
    ("cached_attention", dict(positions=torch.tensor([[-1], [0]])), "beyond the cache, which has 20"),
    ("cached_attention", dict(key_cache=EMPTY), "key_cache has the shape"),
    ("cached_attention", dict(value_cache=torch.zeros(3, 2, 10, 8)), "value_cache has the shape"),
    ("cached_attention", dict(query=torch.randn(2, 3, 3, 8)), "3 query heads do not share 2"),
    ("cached_attention", dict(slots=torch.tensor([1, 3])), "slot 3 of 3"),
    ("paged_attention", dict(query=torch.randn(3, 31)), "31 values of a token|do not share"),
    ("paged_attention", dict(key=torch.randn(2, 16)), "key has the shape"),
    ("paged_attention", dict(key_pages=torch.zeros(3, 2, 4, 0)), "shape"),
    ("paged_attention", dict(rows=item(2, torch.tensor([[1], [3]], dtype=torch.int32))), "page 3 of 3"),
    ("paged_attention", dict(rows=item(0, torch.tensor([0], dtype=torch.int32))), "starts has the shape"),
    ("fused_experts", dict(x=torch.randn(3, 1, 8)), "hidden_states has the shape"),
    ("fused_experts", dict(weights=EMPTY), "topk_weights has the shape"),
    ("fused_experts", dict(ids=torch.full((3, 2), 4)), "no expert 4"),
    ("fused_experts", dict(ids=torch.zeros(9, 2).long()), "topk_ids has the shape"),
    ("feed_forward_block", dict(norm=torch.ones(3)), "weight has the shape"),
    ("packed_bytes", dict(shape=[5, 0]), "a weight has the shape"),
    ("packed_bytes", dict(shape=[2**40, 2**40]), "a weight has the shape"),
    ("paged_mamba_mixer", dict(rows=[WRAPPING, torch.tensor([[1], [2], [1], [2]]).int()]), "ends before it starts"),
    ("mamba_mixer", dict(rounding=[0, 0, 11]), "11 rounds"),
    ("mamba_mixer", dict(ssm_state=torch.zeros(3, HEADS, HEAD_DIM, D_STATE).double()), "ssm_state is Double"),
    ("mamba_mixer", dict(rows=item(0, torch.tensor([3]))), "lengths has the shape"),
    ("mamba_mixer", dict(rows=item(3, NO_NUMBERS)), "starts has the shape"),
    ("mamba_mixer", dict(conv_state=torch.zeros(2, CHANNELS, 3)), "conv_state has the shape"),
    ("paged_mamba_mixer", dict(rows=item(1, torch.zeros(2, 0, dtype=torch.int32))), "no columns"),
    ("paged_mamba_mixer", dict(sizes=[1, 64, 0]), "heads_per_task is 0"),
    *(
        (name, change, words)
        for name in ("mamba_mixer", "paged_mamba_mixer")
        for change, words in (
            (dict(weights=item(1, torch.randn(3))), "conv_bias has the shape"),
            (dict(weights=item(3, torch.rand(1))), "A_log has the shape"),
            (dict(weights=item(4, EMPTY)), "D has the shape"),
            (dict(sizes=[3, 64, 2]), "n_groups is 3 of 4"),
            (dict(sizes=[2, 64, 2]), "channels, which are not"),
            (dict(sizes=[0, 64, 2]), "n_groups is 0 of 4"),
            (dict(ssm_state=EMPTY), "ssm_state has the shape"),
        )
    ),
]


def test_bad_calls_are_refused():
    """In a process of its own: what is not refused may end it."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_bad_calls():
    for name, changes, words in BAD:
        print(name, list(changes), words, flush=True)
        with pytest.raises((RuntimeError, ValueError)) as error:
            call(name, **changes)
        assert re.search(words, str(error.value)), str(error.value)


@pytest.mark.parametrize("name", GOOD)
def test_the_good_calls_are_good(name):
    call(name)


def no_rows(good):
    return good[:0]


@pytest.mark.parametrize(
    "name, changes",
    [
        ("weight_rows", dict(ids=no_rows)),
        ("linear", dict(x=no_rows)),
        ("logits", dict(x=no_rows)),
        ("mlp", dict(x=no_rows)),
        ("rms_norm", dict(x=no_rows, z=no_rows)),
        ("silu_and_mul", dict(x=no_rows)),
        ("residual_add", dict(x=no_rows, y=no_rows)),
        ("fused_experts", dict(x=no_rows, weights=no_rows, ids=no_rows)),
        ("feed_forward_block", dict(x=lambda good: good[:, :0])),
        ("mamba_mixer", dict(projected=no_rows, rows=lambda good: [row[:0] for row in good])),
        ("mamba_mixer", dict(projected=lambda x: x[:, :0], rows=lambda good: [0 * good[0], *good[1:]])),
        ("paged_mamba_mixer", dict(projected=no_rows, rows=lambda good: [good[0][:1], good[1][:0]])),
        ("cached_attention", dict(query=no_rows, positions=no_rows, lengths=no_rows, slots=no_rows)),
        (
            "cached_attention",
            dict(query=lambda x: x[:, :0], positions=lambda good: good[:, :0], lengths=lambda good: 0 * good),
        ),
        (
            "paged_attention",
            dict(query=no_rows, key=no_rows, value=no_rows, rows=lambda good: [0 * good[0], *good[1:]]),
        ),
    ],
)
def test_nothing_gives_nothing(name, changes):
    assert call(name, **changes).numel() == 0


def test_no_tokens_are_written_nowhere():
    cache = torch.zeros(3, 2, 20, 8)
    nothing = dict(values=torch.ones(2, 0, 2, 8), positions=torch.empty(2, 0).long(), lengths=torch.zeros(2).long())
    call("write_cache", cache=cache, **nothing)
    assert not cache.any()


if __name__ == "__main__":
    run_bad_calls()
