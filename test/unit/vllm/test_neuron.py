"""The entry points through which vLLM finds the model."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from granite4_neuron.config import ARCHITECTURE, MODEL_TYPE
from granite4_neuron.vllm import cpu as vllm_cpu
from granite4_neuron.vllm import neuron as vllm_plugin
from test.support import nxdi

pytestmark = pytest.mark.versions


def test_the_entry_points_are_declared():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    entries = [EntryPoint(*entry, group).load() for entry in project["entry-points"][group].items()]
    assert entries == [vllm_plugin.register, vllm_cpu.register]


def test_it_does_nothing_where_nxd_inference_is_absent(monkeypatch):
    monkeypatch.setattr(vllm_plugin.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "granite4_neuron.devices.neuron.nxdi", None)  # importing it would raise
    vllm_plugin.register()


def test_the_model_is_where_nxd_inference_looks():
    nxdi.skip_unless_importable()
    pytest.importorskip("torchvision", reason="NxD Inference's table of models needs torchvision")
    vllm_plugin.register()
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES

    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    assert ARCHITECTURE.partition("For")[0].lower() == MODEL_TYPE  # as vLLM's plugin makes a name of it
    assert MODEL_TYPES[MODEL_TYPE]["causal-lm"] is NeuronGraniteMoeHybridForCausalLM
