"""Calls that the fused kernels refuse before they touch memory, and calls of no rows or no tokens."""

import re
import subprocess
import sys

import pytest
import torch

from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.build import kernel

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

HEADS, HEAD_DIM, D_STATE, WIDTH = 4, 8, 16, 4
CHANNELS = HEADS * HEAD_DIM + 2 * D_STATE


def packed(*shape):
    return cpu.pack(torch.randn(shape), torch.float32).packed


def call(name, **changes):
    """Call an operator or a layer's method with good arguments, some of which `changes` replaces or maps by name."""
    arguments = GOOD[name]()
    for argument, value in changes.items():
        arguments[argument] = value(arguments[argument]) if callable(value) else value
    kind, _, method = name.partition(".")
    if not method:
        return kernel(name)(*arguments.values())
    made_of = {key: arguments.pop(key) for key in MADE_OF[kind]}
    return getattr(getattr(torch.classes.granite4_neuron, kind)(**made_of), method)(**arguments)


MIXER = ("conv_weight", "conv_bias", "dt_bias", "A_log", "D", "n_groups", "dt_min", "dt_max")
MADE_OF = {
    "MambaMixer": (*MIXER, "chunk_size", "heads_per_task", "seed", "stream", "rounds"),
    "MambaLayer": (
        "mixer", "norm", "in_proj", "in_bias", "gated_norm", "out_proj", "out_bias", "eps", "residual_multiplier",
    ),
    "AttentionLayer": (
        "norm", *(f"{x}_{kind}" for x in "qkvo" for kind in ("proj", "bias")), "head_dim", "scale", "eps",
        "residual_multiplier",
    ),
    "FeedForward": (
        "norm", "input", "output", "router", "expert_input", "expert_output", "top_k", "eps", "residual_multiplier",
        "correction_bias", "n_group", "topk_group", "norm_topk_prob", "scaling_factor", "latent_input", "latent_output",
    ),
}  # fmt: skip


def mixer():
    names = ("conv_weight", "conv_bias", "dt_bias", "A_log", "D")
    weights = torch.randn(CHANNELS, 1, WIDTH), torch.randn(CHANNELS), *torch.rand(3, HEADS)
    numbers = dict(n_groups=1, dt_min=0.0, dt_max=1e9, chunk_size=64, heads_per_task=2, seed=0, stream=0, rounds=7)
    return dict(zip(names, weights, strict=True)) | numbers


def states():
    return {
        "conv_state": torch.zeros(3, CHANNELS, WIDTH - 1),
        "ssm_state": torch.zeros(3, HEADS, HEAD_DIM, D_STATE),
    }


def slot_rows():
    rows = dict(offsets=[0, 3], lengths=[3, 2], read_slots=[0, 0], write_slots=[1, 2], starts=[0, 0])
    return {name: torch.tensor(row) for name, row in rows.items()}


def page_rows():
    return dict(
        starts=torch.tensor([0, 1, 3], dtype=torch.int32),
        pages=torch.tensor([[1], [2]], dtype=torch.int32),
        accepted=None,
    )


def mamba_layer():
    inner = HEADS * HEAD_DIM
    return dict(
        hidden_states=torch.randn(3, 8), mixer=torch.classes.granite4_neuron.MambaMixer(**mixer()), norm=torch.ones(8),
        in_proj=packed(inner + CHANNELS + HEADS, 8), in_bias=None, gated_norm=torch.ones(inner),
        out_proj=packed(8, inner), out_bias=None, eps=1e-5, residual_multiplier=1.0, **states(), **page_rows(),
    )  # fmt: skip


def attention_layer():
    return dict(
        hidden_states=torch.randn(3, 8), norm=torch.ones(8), q_proj=packed(32, 8), q_bias=None, k_proj=packed(16, 8),
        k_bias=None, v_proj=packed(16, 8), v_bias=torch.randn(16), o_proj=packed(8, 32), o_bias=None, head_dim=8,
        scale=1.0, eps=1e-5, residual_multiplier=1.0, **cache_pages(), cos=None, sin=None,
    )  # fmt: skip


def cache_pages():
    return dict(
        key_pages=torch.zeros(3, 2, 4, 8), value_pages=torch.zeros(3, 2, 4, 8),
        **{name: torch.tensor(row, dtype=torch.int32) for name, row in
           dict(starts=[0, 1, 3], lengths=[1, 2], pages=[[1], [2]]).items()},
    )  # fmt: skip


GOOD = {
    "weight_rows": lambda: dict(weight=packed(5, 8), ids=torch.tensor([0, 4])),
    "linear": lambda: dict(x=torch.randn(2, 8), weight=packed(5, 8), bias=torch.randn(5)),
    "logits": lambda: dict(x=torch.randn(2, 8), weight=packed(5, 8), scaling=1.0),
    "mlp": lambda: dict(x=torch.randn(2, 8), w1=packed(12, 8), w2=packed(8, 6)),
    "rms_norm": lambda: dict(x=torch.randn(2, 8), z=torch.randn(2, 8), weight=torch.randn(8), eps=1e-5, n_groups=2),
    "silu_and_mul": lambda: dict(x=torch.randn(2, 8)),
    "residual_add": lambda: dict(x=torch.randn(2, 8), y=torch.randn(2, 8), alpha=1.0),
    "MambaMixer.step": lambda: mixer() | states() | slot_rows() | {"projected": torch.randn(6, CHANNELS + HEADS)},
    "MambaMixer.step_paged": lambda: mixer() | states() | page_rows() | {"projected": torch.randn(3, CHANNELS + HEADS)},
    "MambaLayer.step_paged": mamba_layer,
    "AttentionLayer.step_paged": attention_layer,
    "write_cache": lambda: dict(
        cache=torch.zeros(3, 2, 20, 8), values=torch.randn(2, 3, 2, 8), positions=torch.zeros(2, 1).long(),
        lengths=torch.tensor([3, 1]), slots=torch.tensor([1, 2]),
    ),
    "cached_attention": lambda: dict(
        query=torch.randn(2, 3, 4, 8), key_cache=torch.zeros(3, 2, 20, 8), value_cache=torch.zeros(3, 2, 20, 8),
        positions=torch.zeros(2, 1).long(), lengths=torch.tensor([3, 1]), slots=torch.tensor([1, 2]), scale=1.0,
    ),
    "paged_attention": lambda: dict(
        query=torch.randn(3, 32), key=torch.randn(3, 16), value=torch.randn(3, 16), **cache_pages(), scale=1.0,
    ),
    "fused_experts": lambda: dict(
        x=torch.randn(3, 8), w1=packed(4, 12, 8), w2=packed(4, 8, 6), weights=torch.rand(3, 2),
        ids=torch.tensor([[0, 1], [1, 2], [3, 0]]),
    ),
    "FeedForward.step": lambda: dict(
        hidden_states=torch.randn(1, 3, 8), norm=torch.ones(8), input=packed(12, 8), output=packed(8, 6),
        router=packed(4, 8), expert_input=packed(4, 20, 8), expert_output=packed(4, 8, 10), top_k=2, eps=1e-5,
        residual_multiplier=1.0, correction_bias=None, n_group=1, topk_group=1, norm_topk_prob=True, scaling_factor=1.0,
        latent_input=None, latent_output=None,
    ),
    "packed_bytes": lambda: dict(shape=[5, 8], format="plain", dtype=torch.float32),
}  # fmt: skip


EMPTY = torch.empty(0)
NO_NUMBERS = EMPTY.long()
# With differences in 32 bits, none of these would be below 0.
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
    ("paged_attention", dict(pages=torch.tensor([[1], [3]], dtype=torch.int32)), "page 3 of 3"),
    ("paged_attention", dict(starts=torch.tensor([0], dtype=torch.int32)), "starts has the shape"),
    ("fused_experts", dict(x=torch.randn(3, 1, 8)), "hidden_states has the shape"),
    ("fused_experts", dict(weights=EMPTY), "topk_weights has the shape"),
    ("fused_experts", dict(ids=torch.full((3, 2), 4)), "no expert 4"),
    ("fused_experts", dict(ids=torch.zeros(9, 2).long()), "topk_ids has the shape"),
    ("FeedForward.step", dict(norm=torch.ones(3)), "input is .12, 8. and should be .12, 3."),
    (
        "FeedForward.step",
        dict(norm=torch.ones(8).bfloat16()),
        "vectors of Float, and the norm is BFloat16",
    ),
    ("FeedForward.step", dict(output=packed(7, 6)), "output is .7, 6. and should be .8, 6."),
    ("FeedForward.step", dict(expert_output=None), "a router without experts"),
    ("FeedForward.step", dict(expert_input=packed(3, 20, 8)), "matrices of 3 experts, and 4 experts"),
    ("FeedForward.step", dict(expert_output=packed(4, 8, 9)), "expert_input is .20, 8. and should be .18, 8."),
    ("FeedForward.step", dict(latent_input=packed(6, 8)), "one latent projection is there, one is not"),
    (
        "FeedForward.step",
        dict(latent_input=packed(6, 8), latent_output=packed(8, 6)),
        "expert_input is .20, 8. and should be .20, 6.",
    ),
    (
        "FeedForward.step",
        dict(
            expert_input=packed(4, 20, 6),
            expert_output=packed(4, 6, 10),
            latent_input=packed(6, 8),
            latent_output=packed(8, 7),
        ),
        "latent_output is .8, 7. and should be .8, 6.",
    ),
    ("FeedForward.step", dict(top_k=5), "top_k is 5 of 4 experts"),
    ("FeedForward.step", dict(hidden_states=torch.randn(1, 3, 7)), "weight has the shape"),
    ("FeedForward.step", dict(input=torch.zeros(5)), "packed weight|kByte"),
    ("MambaLayer.step_paged", dict(gated_norm=torch.ones(31)), "in_proj is"),
    ("MambaLayer.step_paged", dict(out_proj=packed(8, 31)), "out_proj is .8, 31. and should be .8, 32."),
    ("MambaLayer.step_paged", dict(out_bias=torch.ones(7)), "bias has the shape"),
    ("MambaLayer.step_paged", dict(hidden_states=torch.randn(2, 8)), "starts do not span 2 tokens"),
    ("AttentionLayer.step_paged", dict(head_dim=7), "32 and 16 rows for heads of 7"),
    ("AttentionLayer.step_paged", dict(head_dim=0), "32 and 16 rows for heads of 0"),
    ("AttentionLayer.step_paged", dict(v_proj=packed(8, 8), v_bias=None), "v_proj is .8, 8. and should be .16, 8."),
    ("AttentionLayer.step_paged", dict(cos=torch.zeros(1, 3, 4)), "given together"),
    ("AttentionLayer.step_paged", dict(key_pages=torch.zeros(3, 1, 4, 8)), "shape"),
    ("packed_bytes", dict(shape=[5, 0]), "a weight has the shape"),
    ("packed_bytes", dict(shape=[2**40, 2**40]), "a weight has the shape"),
    ("MambaMixer.step_paged", dict(starts=WRAPPING, pages=torch.tensor([[1], [2], [1], [2]]).int()), "ends before it"),
    ("MambaMixer.step", dict(rounds=11), "11 rounds"),
    ("MambaMixer.step", dict(ssm_state=torch.zeros(3, HEADS, HEAD_DIM, D_STATE).double()), "ssm_state is Double"),
    ("MambaMixer.step", dict(offsets=torch.tensor([3])), "offsets has the shape"),
    ("MambaMixer.step", dict(offsets=torch.tensor([0, 2])), "row 1 begins at token 2 of 6"),
    ("MambaMixer.step", dict(offsets=torch.tensor([0, 7])), "row 1 begins at token 7 of 6"),
    ("MambaMixer.step", dict(offsets=torch.tensor([-1, 3])), "row 0 begins at token -1 of 6"),
    ("MambaMixer.step", dict(lengths=torch.tensor([3, 4])), "row 1 has length 4 of 3 tokens"),
    ("MambaMixer.step", dict(lengths=torch.tensor([2**63 - 1, 2])), "has length 9223372036854775807 of 6 tokens"),
    ("MambaMixer.step", dict(lengths=torch.tensor([-1, 2])), "row 0 has length -1 of 6 tokens"),
    ("MambaMixer.step", dict(read_slots=torch.tensor([-1, 0])), "row 0 is in slot -1 of 3"),
    ("MambaMixer.step", dict(write_slots=torch.tensor([1, 3])), "row 1 is in slot 3 of 3"),
    ("MambaMixer.step", dict(starts=NO_NUMBERS), "starts has the shape"),
    ("MambaMixer.step", dict(conv_state=torch.zeros(2, CHANNELS, 3)), "conv_state has the shape"),
    ("MambaMixer.step_paged", dict(pages=torch.zeros(2, 0, dtype=torch.int32)), "no columns"),
    ("MambaMixer.step_paged", dict(heads_per_task=0), "heads_per_task is 0"),
    *(
        (name, change, words)
        for name in ("MambaMixer.step", "MambaMixer.step_paged")
        for change, words in (
            (dict(conv_bias=torch.randn(3)), "conv_bias has the shape"),
            (dict(A_log=torch.rand(1)), "A_log has the shape"),
            (dict(D=EMPTY), "D has the shape"),
            (dict(n_groups=3), "n_groups is 3 of 4"),
            (dict(n_groups=2), "channels, which are not"),
            (dict(n_groups=0), "n_groups is 0 of 4"),
            (dict(ssm_state=EMPTY), "ssm_state has the shape"),
            (dict(chunk_size=129), "chunk_size is 129"),
            (dict(chunk_size=0), "chunk_size is 0"),
        )
    ),
]


def test_bad_calls_are_refused():
    """The calls run in a separate process, because a call that is not refused may end it."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_bad_calls():
    for name, changes, words in BAD:
        print(name, list(changes), words, flush=True)
        with pytest.raises((RuntimeError, ValueError)) as error:
            call(name, **changes)
        assert re.search(words, str(error.value)), str(error.value)


@pytest.mark.parametrize("name", GOOD)
def test_good_calls_are_accepted(name):
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
        ("FeedForward.step", dict(hidden_states=lambda good: good[:, :0])),
        ("MambaMixer.step", dict.fromkeys(("projected", *slot_rows()), no_rows)),
        ("MambaMixer.step", dict(projected=no_rows, offsets=lambda good: 0 * good, lengths=lambda good: 0 * good)),
        ("MambaMixer.step_paged", dict(projected=no_rows, starts=lambda good: good[:1], pages=no_rows)),
        ("MambaLayer.step_paged", dict(hidden_states=no_rows, starts=lambda good: good[:1], pages=no_rows)),
        ("AttentionLayer.step_paged", dict(hidden_states=no_rows, starts=lambda good: 0 * good)),
        ("cached_attention", dict(query=no_rows, positions=no_rows, lengths=no_rows, slots=no_rows)),
        (
            "cached_attention",
            dict(query=lambda x: x[:, :0], positions=lambda good: good[:, :0], lengths=lambda good: 0 * good),
        ),
        (
            "paged_attention",
            dict(query=no_rows, key=no_rows, value=no_rows, starts=lambda good: 0 * good),
        ),
    ],
)
def test_calls_without_rows_or_tokens(name, changes):
    assert call(name, **changes).numel() == 0


def test_a_write_of_no_tokens_writes_nothing():
    cache = torch.zeros(3, 2, 20, 8)
    nothing = dict(values=torch.ones(2, 0, 2, 8), positions=torch.empty(2, 0).long(), lengths=torch.zeros(2).long())
    call("write_cache", cache=cache, **nothing)
    assert not cache.any()


if __name__ == "__main__":
    run_bad_calls()
