"""The README's usage example with a small model: on a Neuron device, or else in NxD Inference's CPU mode."""

import re
import sys
from pathlib import Path

import pytest

from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.neuron.stand_ins import why_not_importable

if reason := why_not_importable():
    pytest.skip(reason, allow_module_level=True)

FOLDER = Path(__file__).parents[2]
ON_DEVICE = Path("/dev/neuron0").exists()
IN_CPU_MODE = {
    "tp_degree=4": "tp_degree=1, on_cpu=True",
    "torch.bfloat16": "torch.float32",
    "model.compile(compiled_model_path)\n": "",
    "model.load(compiled_model_path)": "model.to_cpu()",
}


def test_usage_example(monkeypatch, capsys, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    paths = {"/path/to/granite-4.0-h-tiny": str(bundled_checkpoint()), "/path/to/compiled": str(tmp_path)}
    for documented, here in {**paths, **({} if ON_DEVICE else IN_CPU_MODE)}.items():
        assert documented in example
        example = example.replace(documented, here)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    exec(example, {})
    assert "evaluates the expression list (remember that" in capsys.readouterr().out
