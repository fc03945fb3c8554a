"""Configs, on a CPU: every published checkpoint's is taken, and what is not supported is refused."""

import sys
from pathlib import Path

import pytest
import torch

from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.neuron.stand_ins import why_not_importable

if reason := why_not_importable():
    pytest.skip(reason, allow_module_level=True)

from neuronx_distributed_inference.models.config import MoENeuronConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from modeling_granite4_hybrid import GraniteMoeHybridInferenceConfig


def make_config(name, **options):
    sizes = dict(tp_degree=4, batch_size=1, max_context_length=2048, seq_len=16384, torch_dtype=torch.bfloat16)
    neuron_config = MoENeuronConfig(**{**sizes, **options})
    return GraniteMoeHybridInferenceConfig(neuron_config, **GraniteMoeHybridConfig.from_family(name).to_dict())


@pytest.mark.parametrize("name", family_names())
def test_published_checkpoints(name):
    assert make_config(name).granite == GraniteMoeHybridConfig.from_family(name)


@pytest.mark.parametrize(
    "options", [dict(tp_degree=5), dict(seq_len=1_000_000), dict(is_prefix_caching=True), dict(padding_side="left")]
)
def test_what_is_not_supported_is_refused(options):
    with pytest.raises(UserError):
        make_config("granite-4.0-h-small", **options)
