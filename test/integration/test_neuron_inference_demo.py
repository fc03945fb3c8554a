"""NxD Inference's own command runs this model: its accuracy check, against transformers, passes in CPU mode."""

import os
import subprocess
import sys

import pytest

from granite4_neuron.devices.neuron import inference_demo
from granite4_neuron.generation import bundled_checkpoint
from test.integration.test_model import free_port
from test.support import nxdi

pytestmark = pytest.mark.versions


def arguments(*options: str) -> list[str]:
    """Return arguments for the bundled model in CPU mode.

    The prompt is long enough to need a continuation. It is not from the training text, which even a model with wrong
    attention recites.
    """
    model = ["--model-type", "granitemoehybrid", "--task-type", "causal-lm", "run"]
    sizes = ["--torch-dtype", "float32", "--max-context-length", "16", "--seq-len", "96", "--on-cpu"]
    prompt = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals"
    return [*model, "--model-path", str(bundled_checkpoint()), *sizes, "--prompt", prompt, *options]


def test_accuracy_check(tmp_path):
    nxdi.skip_unless_importable()
    check = ["--compiled-model-path", str(tmp_path), "--check-accuracy-mode", "token-matching"]
    command = [sys.executable, "-m", "granite4_neuron.devices.neuron.inference_demo", *arguments(*check)]
    environment = dict(os.environ, MASTER_PORT=str(free_port()))
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "is accurate!" in result.stderr
    assert "depend on whether the name occurs" in result.stdout


def test_an_unsupported_option_gives_one_sentence(monkeypatch, tmp_path):
    nxdi.skip_unless_importable()
    unsupported = ["--compiled-model-path", str(tmp_path), "--enable-prefix-caching"]
    monkeypatch.setattr(sys, "argv", ["inference_demo", *arguments(*unsupported)])
    with pytest.raises(SystemExit, match=r"^inference_demo: neuron_config\.is_prefix_caching is True; this model"):
        inference_demo.main()


def test_without_nxd_inference_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(inference_demo, "why_not_importable", lambda: "the Neuron SDK is not installed")
    with pytest.raises(SystemExit, match=r"^inference_demo: the Neuron SDK is not installed\.$"):
        inference_demo.main()
