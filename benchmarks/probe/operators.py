"""Each operator of the Neuron device's graphs, beside its definition in plain torch, in float32 at the widths of h-350m
unless said otherwise. Matrices lie with the inputs first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.probe.device import compare, compiled, judge, milliseconds, to_device
from benchmarks.probe.process import FACT, Finding, Place
from granite4_neuron.devices.graphs import topk
from granite4_neuron.devices.graphs.moe import ALL, BLOCKS, CHOSEN, ExpertPath, with_capacity
from granite4_neuron.devices.graphs.moe import fused_experts as fused_experts_of_graphs
from granite4_neuron.devices.graphs.operators import INPUT_FIRST
from granite4_neuron.devices.graphs.topk import draws_of, likeliest
from granite4_neuron.engine import Sampler, SamplingParams
from granite4_neuron.ops import TORCH, apply_rotary, rotary_tables
from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.runtime.interface import UNDECIDED

_HIDDEN, _WIDTH, _EXPERTS, _TOP_K, _VOCAB = 768, 2048, 64, 6, 4096
_HEADS, _KV_HEADS, _HEAD_DIM = 12, 4, 64
_MAMBA_HEADS, _MAMBA_HEAD_DIM, _D_STATE, _CHANNELS, _D_CONV = 48, 32, 128, 1792, 4
_IN_PROJ_OF_H_SMALL = 4096, 4384  # in, out on a rank of four
_EXPERTS_OF_H_SMALL = 72, 4096, 192, 10  # experts, hidden size, width on a rank of four, experts per token
_EPS = 1e-5
_BFLOAT16_TOLERANCE = 2e-2  # for a sum of ten experts, each rounded between its products
_TOKENS = (1, 128)  # a step of decode, and a prompt


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _weight(*shape: int) -> torch.Tensor:
    """Return a matrix that keeps the scale of its input."""
    return _randn(*shape) / shape[-1] ** 0.5


def _exchanged(*shape: int) -> torch.Tensor:
    """Return `_weight` with its last two axes exchanged."""
    return _weight(*shape).transpose(-2, -1).contiguous()


def _of_exchanged(definition: Callable[..., torch.Tensor], number: int) -> Callable[..., torch.Tensor]:
    """Return a definition that takes its first `number` matrices, after x, with their last two axes exchanged."""

    def function(x: torch.Tensor, *values: Any) -> torch.Tensor:
        return definition(x, *(each.transpose(-2, -1) for each in values[:number]), *values[number:])

    return function


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def embedding(place: Place) -> Iterator[Finding]:
    for tokens in _TOKENS:
        ids = torch.randint(_VOCAB, (1, tokens), dtype=torch.int32)
        yield compare(place, f"{tokens} tokens", INPUT_FIRST.embedding, TORCH.embedding, ids, _weight(_VOCAB, _HIDDEN))


def linear(place: Place) -> Iterator[Finding]:
    for tokens in _TOKENS:
        arguments = _randn(1, tokens, _HIDDEN), _exchanged(_WIDTH, _HIDDEN)
        yield compare(place, f"{tokens} tokens", INPUT_FIRST.linear, _of_exchanged(TORCH.linear, 1), *arguments)


def layouts(place: Place) -> Iterator[Finding]:
    """A product of 1 and of 512 tokens with a matrix [out, in] and with one [in, out], in bfloat16, with times."""
    width, rows = _IN_PROJ_OF_H_SMALL
    weight = _weight(rows, width).bfloat16()
    for name, function, stored in (
        ("out, in", TORCH.linear, weight),
        ("in, out", INPUT_FIRST.linear, weight.T.contiguous()),
    ):
        for tokens in (1, 512):
            x = _randn(tokens, width).bfloat16()
            graph, arguments = compiled(place, function), to_device(place, (x, stored))
            with torch.no_grad():
                expected = TORCH.linear(x, weight)
                yield judge(f"{tokens} tokens, [{name}]", graph(*arguments), expected, _BFLOAT16_TOLERANCE)
                time = milliseconds(place, partial(graph, *arguments))
            what, numbers = f"time of {tokens} tokens, [{name}]", {"milliseconds": time}
            yield Finding(what, FACT, message=f"{time:.3f} ms", numbers=numbers)


def rms_norm(place: Place) -> Iterator[Finding]:
    arguments = _randn(1, 128, _HIDDEN), _randn(_HIDDEN), _EPS
    yield compare(place, "128 tokens", INPUT_FIRST.rms_norm, TORCH.rms_norm, *arguments)


def rms_norm_gated(place: Place) -> Iterator[Finding]:
    x, z = (_randn(1, 128, 2 * _HIDDEN) for _ in range(2))
    for groups in (1, 2):
        arguments = x, z, _randn(2 * _HIDDEN), _EPS, groups
        yield compare(place, f"{groups} groups", INPUT_FIRST.rms_norm_gated, TORCH.rms_norm_gated, *arguments)


def residual_add(place: Place) -> Iterator[Finding]:
    arguments = _randn(1, 128, _HIDDEN), _randn(1, 128, _HIDDEN), 0.246
    yield compare(place, "128 tokens", INPUT_FIRST.residual_add, TORCH.residual_add, *arguments)


def mlp(place: Place) -> Iterator[Finding]:
    for tokens in _TOKENS:
        arguments = _randn(1, tokens, _HIDDEN), _exchanged(2 * _WIDTH, _HIDDEN), _exchanged(_HIDDEN, _WIDTH)
        yield compare(place, f"{tokens} tokens", INPUT_FIRST.mlp, _of_exchanged(TORCH.mlp, 2), *arguments)


def router_logits(place: Place) -> Iterator[Finding]:
    arguments = _randn(128, _HIDDEN), _exchanged(_EXPERTS, _HIDDEN)
    yield compare(place, "128 tokens", INPUT_FIRST.router_logits, _of_exchanged(TORCH.router_logits, 1), *arguments)


def topk_softmax(place: Place) -> Iterator[Finding]:
    for tokens in _TOKENS:
        yield compare(
            place, f"{tokens} tokens", INPUT_FIRST.topk_softmax, TORCH.topk_softmax, _randn(tokens, _EXPERTS), _TOP_K
        )


def fused_experts(place: Place, path: str) -> Iterator[Finding]:
    tokens, taken = {
        CHOSEN: (2, ExpertPath(CHOSEN)),
        ALL: (8, ExpertPath(ALL)),
        BLOCKS: (128, with_capacity(128 * _TOP_K, 48)),
    }[path]
    weights = _exchanged(_EXPERTS, 512, _HIDDEN), _exchanged(_EXPERTS, _HIDDEN, 256)
    chosen, experts = TORCH.topk_softmax(_randn(tokens, _EXPERTS), _TOP_K)
    arguments = _randn(tokens, _HIDDEN), *weights, chosen, experts.int()
    ours = partial(fused_experts_of_graphs, path=taken, input_first=True)
    yield compare(place, f"{tokens} tokens", ours, _of_exchanged(TORCH.fused_experts, 2), *arguments)


def experts_decode(place: Place, form: str) -> Iterator[Finding]:
    """The experts of 1 to 8 tokens in one form, in bfloat16 at the widths of h-small's rank of four, with times."""
    if form == "kernel" and importlib.util.find_spec("nki") is None:
        yield Finding("experts", FACT, message="no package nki here")
        return
    experts, hidden, width, top_k = _EXPERTS_OF_H_SMALL
    w1, w2 = (weight.bfloat16() for weight in (_weight(experts, 2 * width, hidden), _weight(experts, hidden, width)))
    ours = _form_of_experts(form)
    own = to_device(place, [weight.transpose(1, 2).contiguous() for weight in (w1, w2)])
    for tokens in (1, 2, 4, 8):
        chosen, ids = TORCH.topk_softmax(_randn(tokens, experts), top_k)
        arguments = _randn(tokens, hidden).bfloat16(), w1, w2, chosen, ids.int()
        graph = compiled(place, ours)
        x, *_, weights, places = to_device(place, arguments)
        with torch.no_grad():
            expected = TORCH.fused_experts(*arguments)
            yield judge(f"{tokens} tokens", graph(x, *own, weights, places), expected, _BFLOAT16_TOLERANCE)
            time = milliseconds(place, partial(graph, x, *own, weights, places))
        yield Finding(f"time of {tokens} tokens", FACT, message=f"{time:.3f} ms", numbers={"milliseconds": time})


def _form_of_experts(form: str) -> Callable[..., torch.Tensor]:
    """Return the operator of one of `choices.EXPERTS_DECODE`."""
    if form != "kernel":
        path = ExpertPath({"all": ALL, "gather": CHOSEN}[form])
        return partial(fused_experts_of_graphs, path=path, input_first=True)
    # Imported here, because the package works without nki.
    from granite4_neuron.devices.neuron.nki.experts import fused_experts as by_kernel

    return by_kernel


def rotary(place: Place) -> Iterator[Finding]:
    def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return apply_rotary(x, rotary_tables(positions, _HEAD_DIM, 10000.0))

    for tokens in _TOKENS:
        positions = torch.arange(500, 500 + tokens, dtype=torch.int32)[None]
        yield compare(place, f"{tokens} tokens", rotated, rotated, _randn(1, tokens, _HEADS, _HEAD_DIM), positions)


def cached_attention(place: Place, rows: str) -> Iterator[Finding]:
    """One token of each of 4 sequences, one of them idle; or 128 tokens, 100 of them real, of a running sequence."""
    if rows == "in_order":
        tokens, slots, lengths, kv_lengths = 1, None, _int32(1, 1, 0, 1), (2048,)
        positions = _int32(0, 70, 90, 1500)[:, None]
    else:
        tokens, slots, lengths, kv_lengths = 128, _int32(3), _int32(100), (1024, 2048)
        positions = torch.arange(200, 328, dtype=torch.int32)[None]
    cache = [_randn(5, _KV_HEADS, 2048, _HEAD_DIM) for _ in range(2)]
    query = _randn(len(lengths), tokens, _HEADS, _HEAD_DIM)
    for kv_length in kv_lengths:
        arguments = query, *cache, positions, lengths, slots, 0.125, kv_length
        what = f"{tokens} tokens, cache of {kv_length}"
        yield compare(place, what, INPUT_FIRST.cached_attention, TORCH.cached_attention, *arguments)


def convolution(place: Place) -> Iterator[Finding]:
    for tokens, length in zip(_TOKENS, (1, 100), strict=True):
        weights = _weight(_CHANNELS, _D_CONV), _randn(_CHANNELS)
        arguments = _randn(1, tokens, _CHANNELS), _randn(1, _CHANNELS, _D_CONV - 1), *weights, _int32(length)
        yield compare(place, f"{tokens} tokens", INPUT_FIRST.mamba_prefill.convolve, causal_conv1d, *arguments)


def _scan_arguments(batch: int, tokens: int) -> tuple:
    """Return the arguments of a scan that starts from a state. The last tokens are padding."""
    dt = _randn(batch, tokens, _MAMBA_HEADS).sigmoid()
    dt[:, 100:] = 0.0
    return (
        _randn(batch, tokens, _MAMBA_HEADS, _MAMBA_HEAD_DIM),
        dt,
        -torch.linspace(1, 16, _MAMBA_HEADS),
        *(_randn(batch, tokens, 1, _D_STATE) for _ in range(2)),
        _randn(_MAMBA_HEADS),
        _randn(batch, _MAMBA_HEADS, _MAMBA_HEAD_DIM, _D_STATE),
        256,
    )


def mamba_prefill(place: Place, scan: str) -> Iterator[Finding]:
    field = {"chunked": "mamba_prefill", "quadratic": "mamba_quadratic"}[scan]
    ours, definition = (getattr(operators, field).scan for operators in (INPUT_FIRST, TORCH))
    for tokens in (128, 256):  # one chunk, and two
        yield compare(place, f"{tokens} tokens", ours, definition, *_scan_arguments(1, tokens))


def mamba_decode(place: Place) -> Iterator[Finding]:
    for batch in (1, 4):
        arguments = _scan_arguments(batch, 1)
        yield compare(place, f"{batch} sequences", INPUT_FIRST.mamba_decode.scan, TORCH.mamba_decode.scan, *arguments)


def logits(place: Place) -> Iterator[Finding]:
    arguments = _randn(4, _HIDDEN), _exchanged(_VOCAB, _HIDDEN), 3.0
    yield compare(place, "4 rows", INPUT_FIRST.logits, _of_exchanged(TORCH.logits, 1), *arguments)


def drawn(place: Place) -> Iterator[Finding]:
    """Sampled tokens: the device draws the host's tokens, and leaves a few draws to the host."""
    rows, params = 64, SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=0)
    logits, sampler = 3 * _randn(rows, _VOCAB), Sampler(params, 0)
    draws = draws_of([replace(sampler.draw((), 0, 0), place=row) for row in range(rows)]).float()
    arguments = to_device(place, (draws, logits, likeliest(logits)))
    with torch.no_grad():
        found = compiled(place, topk.drawn)(*arguments).cpu()
    expected = torch.tensor([sampler(row_logits, range(row)) for row, row_logits in enumerate(logits)])
    is_left = found == UNDECIDED
    yield judge(f"{rows} tokens", torch.where(is_left, expected, found), expected, 0)
    yield Finding("left to the host", FACT, message=f"{int(is_left.sum())} of {rows}")
