"""Checks of a copy of the package with the format fp8 in it. `test_new_format.py` runs them."""

import json
import re

import pytest
import torch
from safetensors import safe_open

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model, set_parameter
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands import cli
from granite4_neuron.ops import as_tensor
from test.support.checkpoints import CASES
from test.support.stepping import random_tokens, run_cuts

MODELS = [case for case in CASES if case.name in ("moe", "dense", "untied_head")]


def rounded(weight):
    """Quantize a matrix to float8 e4m3 with a scale per row, and dequantize it."""
    scale = weight.abs().amax(-1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("cuts", [[60], [30] + [1] * 30], ids=["prefill", "decode"])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_logits_equal_those_of_dequantized_weights(case, random_checkpoints, kernels, cuts):
    folder = random_checkpoints(case)
    exact = load_model(folder, torch.float32)
    for name, module in exact.matrices().items():
        if "router" not in name:
            set_parameter(exact, f"{name}.weight", rounded(module.weight.detach()))
    exact.tie_weights()
    tokens = random_tokens(exact.config.vocab_size, 2, 60)
    expected = run_cuts(exact, tokens, [60])
    model = load_model(folder, torch.float32, quantize="fp8", operators=kernels)
    assert model.is_quantized
    assert (run_cuts(model.bind(kernels), tokens, cuts) - expected).abs().max() <= 1e-5


def test_convert_and_info(tmp_path, capsys):
    folder = tmp_path / "quantized"
    assert cli.main(["convert", "--quantize", "fp8", "--output", str(folder)]) == 0
    sizes = [(each / WEIGHTS).stat().st_size for each in (folder, bundled_checkpoint())]
    assert sizes[0] <= 0.6 * sizes[1]
    with safe_open(folder / WEIGHTS, "np") as tensors:
        assert tensors.get_slice("model.embed_tokens.weight").get_dtype() == "F8_E4M3", "it is the head"
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["format"] == "fp8"
    capsys.readouterr()
    assert cli.main(["info", "--model", str(folder)]) == 0
    assert re.search(r"stored in\W+fp8\b", capsys.readouterr().out)
    stored, expected = load_model(folder), load_model(bundled_checkpoint(), quantize="fp8")
    for (name, weight), (_, original) in zip(stored.named_weights(), expected.named_weights(), strict=True):
        assert torch.equal(as_tensor(weight, torch.float32), as_tensor(original, torch.float32)), name
    texts = []
    for options in (["--model", str(folder)], ["--quantize", "fp8"]):
        assert cli.main(["generate", *options, "--max-tokens", "8", "An assignment"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
