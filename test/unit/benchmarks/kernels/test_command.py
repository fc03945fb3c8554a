"""The report of the kernels' costs."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("nki.emulation", reason="the Neuron SDK's own nki is installed, which counts nothing")

from benchmarks.kernels import command as kernels
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.nki.conv1d_prefill import conv1d_prefill
from granite4_neuron.devices.neuron.nki.mamba_prefill import mamba_prefill
from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import ssd_chunk_scan
from granite4_neuron.devices.neuron.nki.tensor_tensor_scan import tensor_tensor_scan
from test.support.nki_cases import conv_inputs, mamba_prefill_inputs, scan_inputs


@pytest.mark.parametrize("kernel", [ssd_chunk_scan, tensor_tensor_scan, conv1d_prefill, mamba_prefill])
def test_extension_is_exact(kernel):
    """Three blocks cost as much as one, plus twice the difference between two blocks and one."""

    def cost(blocks):
        if kernel is conv1d_prefill:
            inputs = conv_inputs(1, blocks * kernels.BLOCK, 64)
        elif kernel is mamba_prefill:
            inputs = mamba_prefill_inputs(1, blocks * kernels.BLOCK, heads=2, head_dim=32)
        else:
            inputs = scan_inputs(1, blocks * kernels.BLOCK, heads=2, head_dim=32)
        return kernels.cost_of(kernel, list(inputs.values()))

    extended, real = cost(1).extended(cost(2), 2), cost(3)
    assert extended.instructions == real.instructions and extended.dma_elements == real.dma_elements
    assert extended.hbm_bytes == real.hbm_bytes and extended.minimum_bytes == real.minimum_bytes
    assert extended.microseconds == pytest.approx(real.microseconds)


def test_report(capsys, tmp_path):
    assert kernels.main(["--model", "h-350m", "--json", str(tmp_path / "report.json")]) == 0
    output = capsys.readouterr().out
    assert "modelled, not timed" in output and "mamba_decode" in output
    rows = json.loads((tmp_path / "report.json").read_text())
    assert len(rows) == 4 * 3 + 2 * 3
    for row in rows:
        assert row["bound_microseconds"] == max(row["microseconds"].values()) > 0
        assert row["dma_elements"] >= row["dma_elements_under_2048"] >= row["dma_elements_under_512"]
        assert 1 <= row["traffic_ratio"] <= 1.5


def test_experts(monkeypatch):
    monkeypatch.setattr(kernels, "EXPERT_PROMPT_LENGTHS", (200,))
    config = replace(published_config("h-tiny"), num_local_experts=8, num_experts_per_tok=2)
    rows = list(kernels.experts(config, config.rank_dimensions(4).intermediate_size))
    assert [row.shape.split(",")[0] for row in rows] == ["batch 1", "batch 4", "batch 8", "batch 128", "length 200"]
    assert all(1 <= row.traffic_ratio <= 1.5 for row in rows)


def test_model_without_mamba_layers(capsys):
    assert kernels.main(["--model", "micro"]) == 2
    assert "has no Mamba layers" in capsys.readouterr().err
