"""The count of a piece of a prompt: its kernels compute what their steps do, and each byte and FLOP counts once."""

import pytest
import torch

pytest.importorskip("nki.emulation", reason="the Neuron SDK's own nki is installed, which counts nothing")

from benchmarks.kernels import projections, prompt
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.ops import rms_norm
from test.support.nki_cases import error

BF16 = torch.bfloat16


def random(*shape, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_kernels_of_the_projections():
    x, update, weight = random(256, 640, dtype=torch.float32), random(256, 640, dtype=torch.float32), random(640)
    total, normed = launch(projections.residual_norm, x, update, weight)
    assert torch.equal(total, x + update)
    assert error(normed, rms_norm((x + update).double(), weight.double(), projections.EPS)) < 1e-2
    x, weight = random(256, 384), random(384, 1200)
    assert error(*launch(projections.in_projection, x, weight), x.double() @ weight.double()) < 1e-2
    y, norm, weight = random(256, 384), random(384), random(384, 640)
    partial, squares = launch(projections.out_projection, y, norm, weight)
    assert error(partial, y.double() * norm.double() @ weight.double()) < 1e-2
    assert error(squares, (y.double() * y.double()).sum(1, keepdim=True)) < 1e-5


def test_bytes_and_flops():
    """Both cores read the inputs of a product; weights, states and results move once."""
    config = published_config("h-350m")
    counts, minimum = prompt.mamba_layer(config, 1, 256)
    by_step = {each.step: each for each in counts}
    hidden, inner, channels, heads = config.hidden_size, config.mamba_intermediate_size, 1792, config.mamba_n_heads
    outputs = inner + channels + heads
    assert by_step["in_proj"].read == 2 * 256 * hidden * 2 + hidden * outputs * 2
    assert by_step["in_proj"].written == 256 * outputs * 2 and by_step["in_proj"].flops == 2 * 256 * hidden * outputs
    flops = 2 * 256 * inner * hidden  # beside the copy of a row
    assert by_step["norm, out_proj"].flops == pytest.approx(flops, rel=2e-3)
    assert by_step["residual sum, norm"].flops < minimum.flops / 100
    total = prompt.totals(counts)
    assert minimum.bytes < total.once < total.read + total.written < 2 * minimum.bytes
    assert minimum.flops < total.flops < 1.5 * minimum.flops


def test_report(capsys):
    assert prompt.main(["--model", "h-350m", "--tp-degree", "1", "--tokens", "256"]) == 0
    printed = capsys.readouterr().out
    assert "mamba_prefill" in printed and "of the minimum" in printed and "experts_prefill" not in printed
