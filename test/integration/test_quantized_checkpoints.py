"""Checkpoints that are written quantized, and the effect of quantized weights on the bundled model's predictions."""

import json

import pytest
import torch

from granite4_neuron import load
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model, set_parameter
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands import cli
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.devices.cpu import build
from granite4_neuron.errors import UserError
from granite4_neuron.evaluation.perplexity import measure, one_window
from granite4_neuron.ops import FORMATS, QuantizedWeight
from granite4_neuron.ops.formats.int4 import FORMAT as INT4
from granite4_neuron.ops.formats.int8 import FORMAT as INT8
from granite4_neuron.ops.formats.int8 import Int8
from test.support.stepping import random_tokens, run_cuts

HELD_OUT = bundled_checkpoint() / "LICENSE.txt"  # not in the model's training data
every_quantization = pytest.mark.parametrize("quantize", QUANTIZATIONS)


@pytest.mark.slow_cases
@every_quantization
def test_what_is_written_is_the_model_quantized_on_loading(case_folder, kernels, quantize, tmp_path):
    model = load_model(case_folder, FORMATS[quantize].lossless_dtype, quantize=quantize)
    save_model(model, tmp_path / "quantized")
    stored = load_model(tmp_path / "quantized")
    assert stored.is_quantized and stored.dtype == model.dtype
    tokens = random_tokens(model.config.vocab_size, 2, 30)
    expected = run_cuts(model.bind(kernels), tokens, [30])
    assert torch.equal(run_cuts(stored.bind(kernels), tokens, [30]), expected)
    packed = load_model(tmp_path / "quantized", operators=kernels)
    assert torch.equal(run_cuts(packed.bind(kernels), tokens, [30]), expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize("quantize", [None, *QUANTIZATIONS])
def test_only_weights_that_the_model_keeps_are_laid_out(case_folder, kernels, quantize):
    seen = []
    model = load_model(
        case_folder,
        FORMATS[quantize].lossless_dtype if quantize else None,
        quantize=quantize,
        operators=kernels,
        progress=lambda done, whole: seen.append((done, whole)),
    )
    sizes = [w.nbytes if isinstance(w, torch.Tensor) else w.num_bytes for _, w in model.named_weights()]
    assert seen[-1] == (sum(sizes), sum(sizes)) and len(seen) == len(sizes)


@pytest.mark.slow_cases
def test_each_weight_may_have_another_format(case_folder, kernels, tmp_path):
    """One projection of a layer is in int8, one is plain, and the others are in int4. Head and embedding are plain."""
    original = load_model(case_folder)
    model = load_model(case_folder)
    for name, module in original.matrices().items():
        if "embed" in name or "head" in name or "router" in name or name.endswith(("out_proj", "v_proj")):
            continue
        format = INT8 if name.endswith(("in_proj", "shared_mlp.output_linear")) else INT4
        set_parameter(model, f"{name}.weight", format.quantize(module.weight.detach()))
    save_model(model, tmp_path / "mixed")
    stored = load_model(tmp_path / "mixed", operators=kernels)
    assert model.is_quantized and stored.is_quantized and not original.is_quantized
    tokens = random_tokens(model.config.vocab_size, 2, 30)
    assert torch.equal(run_cuts(stored.bind(kernels), tokens, [30]), run_cuts(model.bind(kernels), tokens, [30]))


class Twice(Int8):
    """A format whose tensors have int8's shapes and dtypes but stand for other values."""

    name = "twice"
    head = INT8

    def dequantize(self, weight, dtype):
        return 2 * super().dequantize(weight, dtype)


@pytest.mark.slow
def test_formats_with_the_same_tensors_are_told_apart(case_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "twice", Twice())
    for module in ("checkpoint.loading", "config.quantization"):
        monkeypatch.setattr(f"granite4_neuron.{module}.QUANTIZATIONS", tuple(FORMATS))
    for quantize in ("int8", "twice"):
        save_model(load_model(case_folder, quantize=quantize), tmp_path / quantize)
        weights = load_model(tmp_path / quantize).named_weights()
        formats = {name: weight.format.name for name, weight in weights if isinstance(weight, QuantizedWeight)}
        assert formats.pop("lm_head.weight") == "int8" and set(formats.values()) == {quantize}


@pytest.mark.slow
def test_head_and_embedding_of_int4_are_one_in_int8(case_folder):
    model = load_model(case_folder, quantize="int4")
    quantized = {name: weight for name, weight in model.named_weights() if isinstance(weight, QuantizedWeight)}
    formats = {name: weight.format.name for name, weight in quantized.items()}
    if model.config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert formats.pop("model.embed_tokens.weight") == "int8"
    else:
        assert formats.pop("lm_head.weight") == "int8"
    assert set(formats.values()) == {"int4"}


@every_quantization
def test_convert(capsys, quantize, tmp_path):
    """The converted checkpoint is smaller than the original, complete without it, and the same as --quantize."""
    folder = tmp_path / "quantized"
    assert cli.main(["convert", "--quantize", quantize, "--output", str(folder)]) == 0
    size, original = ((each / WEIGHTS).stat().st_size for each in (folder, bundled_checkpoint()))
    # The original is in bfloat16. Norms, convolutions and, with some formats, the embedding stay in it.
    of_a_row = FORMATS[quantize].num_bytes(torch.Size([1, 4096])) / (4096 * torch.bfloat16.itemsize)
    most = {"int8": 0.6, "int4": 0.33, "lossless12": 0.8}.get(quantize, of_a_row + 0.1)
    assert size <= most * original
    texts = []
    kernels = "fused" if quantize in build.formats() else "torch"
    for options in (["--model", str(folder)], ["--quantize", quantize]):
        options += ["--cpu-kernels", kernels, "--max-tokens", "8"]
        assert cli.main(["generate", *options, "An assignment"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert cli.main(["check", "--model", str(folder)]) != 0
    assert "check the original with --quantize" in capsys.readouterr().err


@pytest.mark.slow
def test_lossless12_gives_the_logits_of_bfloat16(kernels):
    plain, lossless = (
        load_model(bundled_checkpoint(), torch.bfloat16, quantize=quantize, operators=kernels)
        for quantize in (None, "lossless12")
    )
    tokens = random_tokens(plain.config.vocab_size, 3, 60)
    for cuts in ([60], [1] * 20 + [40]):
        expected = run_cuts(plain.bind(kernels), tokens, cuts)
        assert torch.equal(run_cuts(lossless.bind(kernels), tokens, cuts), expected)


class TestRefusals:
    def test_lossless12_refuses_another_dtype(self):
        with pytest.raises(UserError, match="keeps the numbers of bfloat16, and the dtype is torch"):
            load_model(bundled_checkpoint(), torch.float32, quantize="lossless12")

    def test_a_weight_that_lossless12_cannot_store_is_refused(self, tmp_path):
        model = load_model(bundled_checkpoint())
        with torch.no_grad():
            model.model.embed_tokens.weight[7, :40] = 1e-30
        save_model(model, tmp_path / "wide")
        with pytest.raises(UserError, match=r"embed_tokens.weight has a row .* load it without --quantize"):
            load_model(tmp_path / "wide", torch.bfloat16, quantize="lossless12")

    @pytest.fixture
    def folder(self, tmp_path):
        original = bundled_checkpoint()
        save_model(load_model(original, quantize="int4"), tmp_path / "int4", files_from=original)
        return tmp_path / "int4"

    def test_quantizing_again_is_refused(self, folder):
        with pytest.raises(UserError, match="are in int4; int8 is made from the original"):
            load_model(folder, quantize="int8")

    def test_another_backend_is_refused(self, folder):
        with pytest.raises(UserError, match="int4 weights are for the backend cpu"):
            load(folder, backend="xla")

    def test_an_unknown_format_is_refused(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["format"] = "int3"
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="has the format 'int3', and must have one of int4, int8"):
            load_model(folder)

    def test_weights_of_another_format_are_refused(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["format"] = "int8"
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="do not fit its config"):
            load_model(folder)


def test_predictions_of_a_text_that_the_model_has_never_seen(capsys):
    """Perplexity and the mean divergence of the next token's distribution are measured against bfloat16's."""
    most = {"int8": (1.01, 0.03), "int4": (1.08, 0.4)}
    runtimes = [load(dtype=torch.bfloat16, quantize=quantize)[0] for quantize in (None, *most)]
    tokens = load()[1].encode(HELD_OUT.read_text(encoding="utf-8"))[:3000]
    original, *scores = measure(runtimes, tokens, one_window(len(tokens)))
    for (quantize, (perplexity, divergence)), score in zip(most.items(), scores, strict=True):
        ratio = score.perplexity / original.perplexity
        with capsys.disabled():
            print(f"\n{quantize}: perplexity times {ratio:.4f}, divergence {score.mean_divergence:.4f} nats")
        assert ratio <= perplexity and score.mean_divergence <= divergence
