"""Multi-token prediction: its layers beside transformers', checkpoints with them, and commands that draft with them."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from granite4_neuron import UserError, load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands.cli import main
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, MTPDrafter, PrefixCache, Request
from granite4_neuron.evaluation.reference import load_reference
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.model.families import model_of
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import HAS_NEMOTRON, nemotron_config
from test.support.engines import generate_one, run, tokens_of
from test.support.stepping import random_tokens

KINDS = {
    "attention, experts": dict(mtp_layer_types=("attention", "moe")),
    "experts, attention, MLP": dict(mtp_layer_types=("moe", "attention", "mlp")),
    "MLP, attention": dict(mtp_layer_types=("mlp", "attention")),
    "attention, latent experts": dict(mtp_layer_types=("attention", "moe"), moe_latent_size=40),
}
LENGTH = 50
CUTS = [LENGTH], [1] * LENGTH, [7, 16, 1, 26]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return random_model(nemotron_config(**KINDS[request.param]), seed=3)


@pytest.fixture(scope="module")
def tokens(model):
    return random_tokens(model.config.vocab_size, LENGTH + 1, seed=1).tolist()


def layers_as_a_model(model):
    """Return a model of the layers for multi-token prediction alone, with the whole model's embedding and head."""
    alone = model_of(model.config.mtp_config)
    whole = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        parameter.data = whole[name.replace("model.layers.", "mtp.layers.").replace("model.norm.", "mtp.norm.")].data
    return alone.requires_grad_(False)


@torch.no_grad()
def reference(model, tokens, folder):
    """Return results and logits of transformers' layers, with the formulas of `model.mtp` before them; and the hidden
    states of transformers' model that they read.
    """

    def theirs(name, ours):
        save_model(ours, folder / name)
        return load_reference(folder / name, torch.float32)

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    trunk, layers = theirs("trunk", without_mtp(model)), theirs("layers", layers_as_a_model(model))
    hidden_states = trunk.model(torch.tensor([tokens[:-1]])).last_hidden_state
    embedded = trunk.get_input_embeddings()(torch.tensor([tokens[1:]]))
    mtp = model.mtp
    both = torch.cat([rms(embedded, mtp.enorm.weight), rms(hidden_states, mtp.hnorm.weight)], -1)
    results = layers.model(inputs_embeds=both @ mtp.eh_proj.weight.T).last_hidden_state
    return results[0], layers.lm_head(results)[0], hidden_states[0]


def without_mtp(model):
    alone = model_of(model.config.without_mtp())
    alone.load_state_dict({name: weight for name, weight in model.state_dict().items() if not name.startswith("mtp.")})
    return alone.requires_grad_(False)


@pytest.mark.skipif(not HAS_NEMOTRON, reason="this transformers has no Nemotron models")
@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_beside_transformers(model, tokens, kernels, tmp_path):
    """Any cuts, two sequences beside each other, and what was behind a sequence's end before."""
    results, logits, hidden_states = reference(model, tokens, tmp_path)
    layers = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels).mtp
    for cuts in CUTS:
        state = layers.allocate(2, LENGTH)
        layers.step(state, [Row(2, 0, [5] * LENGTH)], [torch.randn(LENGTH, 64)])
        start = 0
        for size in cuts:
            end = start + size
            rows = [Row(1, start, tokens[start + 1 : end + 1]), Row(2, start, tokens[start + 1 : end + 1])]
            mine = layers.step(state, rows, [hidden_states[start:end]] * 2)
            torch.testing.assert_close(mine, results[end - 1].expand(2, -1), rtol=0, atol=2e-5)
            expected = logits[end - 1].expand(2, -1)
            torch.testing.assert_close(layers.logits(mine), expected, rtol=0, atol=2e-5)
            start = end


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    bundled = open_checkpoint(bundled_checkpoint()).config
    vocabulary = {name: getattr(bundled, name) for name in ("vocab_size", "eos_token_id")}
    config = nemotron_config(mtp_layer_types=("attention", "moe"), moe_latent_size=40, **vocabulary)
    folder = tmp_path_factory.mktemp("mtp") / "checkpoint"
    save_model(random_model(config), folder, files_from=bundled_checkpoint())
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    """Return a copy whose config and tensors may be changed, and a function that writes them."""
    shutil.copytree(folder, tmp_path / "copy")
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)

    def write():
        (tmp_path / "copy" / "config.json").write_text(json.dumps(values))
        save_file(tensors, tmp_path / "copy" / WEIGHTS)
        return tmp_path / "copy"

    return values, tensors, write


def test_published_names(folder):
    """Those of Megatron-Bridge and of vLLM: what comes before and after the layers is in the first and the last."""
    names = {name for name in load_file(folder / WEIGHTS) if name.startswith("mtp.")}
    feed_forwards = "mixer.experts.N", "mixer.shared_experts"
    assert {re.sub(r"experts\.\d+", "experts.N", name) for name in names} == {
        *(f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "norm")),
        *(f"mtp.layers.0.mixer.{name}_proj.weight" for name in "qkvo"),
        *(f"mtp.layers.1.{name}.weight" for name in ("norm", "final_layernorm", "mixer.gate")),
        "mtp.layers.1.mixer.gate.e_score_correction_bias",
        *(f"mtp.layers.1.mixer.{name}_latent_proj.weight" for name in ("fc1", "fc2")),
        *(f"mtp.layers.1.{part}.{name}_proj.weight" for part in feed_forwards for name in ("up", "down")),
    }


def test_they_are_read_only_when_they_are_asked_for(folder):
    remarks = []
    without = load_model(folder, remark=remarks.append)
    sentence = "32 tensors for multi-token prediction are left out; only --speculate mtp uses them."
    assert without.mtp is None and remarks == [sentence]
    whole = load_model(open_checkpoint(folder).with_mtp(), remark=remarks.append)
    assert len(remarks) == 1 and whole.mtp is not None
    assert set(dict(whole.named_parameters())) - set(dict(without.named_parameters())) == {
        name for name, _ in whole.named_parameters() if name.startswith("mtp.")
    }


def test_the_older_pattern(copy, folder):
    values, _, write = copy
    assert values.pop("mtp_layers_block_type") == ["full_attention", "moe"]
    values["mtp_hybrid_override_pattern"] = "*E"
    assert open_checkpoint(write()).with_mtp().config == open_checkpoint(folder).with_mtp().config


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda values, tensors: values.pop("num_nextn_predict_layers"), r"config.json: the model has no layers for"),
        (lambda values, tensors: values.update(num_nextn_predict_layers=2), "is 2, and must be 1 for drafting"),
        (lambda values, tensors: values.update(mtp_layers_block_type=["mamba"]), "of the kind mamba, and must be"),
        (
            lambda values, tensors: values.pop("mtp_layers_block_type"),
            "these fields are missing: mtp_layers_block_type",
        ),
        (lambda values, tensors: tensors.pop("mtp.layers.0.hnorm.weight"), "missing: mtp.layers.0.hnorm.weight"),
        (
            lambda values, tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")],
            "copy: the model has no layers for multi-token prediction",
        ),
    ],
)
def test_refusals_of_checkpoints(copy, change, message):
    """The same checkpoints load without these layers."""
    values, tensors, write = copy
    change(values, tensors)
    assert load_model(write()).mtp is None
    with pytest.raises(UserError, match=message):
        load(write(), mtp=True)


def test_other_refusals(folder):
    with pytest.raises(UserError, match="is for the backend cpu, and the backend here is torch"):
        load(folder, mtp=True, backend="torch")
    with pytest.raises(UserError, match="loaded without layers for multi-token prediction; load it with mtp=True"):
        MTPDrafter(load(folder)[0], 1, 100)
    with pytest.raises(UserError, match=r"config.json: the model has no layers for multi-token prediction"):
        load(mtp=True)


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [[], ["--quantize", "int8"], ["--dtype", "bfloat16"], ["--cpu-kernels", "torch"]])
def test_generate(folder, capsys, options):
    """A command drafts, and prints the same text."""
    arguments = ["generate", "An assignment", "--model", str(folder), "--max-tokens", "40", *options]
    texts = []
    for more in ([], ["--speculate", "mtp:3", "--verbose"]):
        assert main([*arguments, *more]) == 0
        texts.append(capsys.readouterr())
    assert texts[0].out == texts[1].out
    assert "drafts" in texts[1].err
    assert "left out" in texts[0].err and "left out" not in texts[1].err


def test_states_of_prompts_do_not_depend_on_them(folder, tmp_path, capsys):
    """A prompt's state in a file is the same with these layers and without."""
    arguments = ["generate", "An assignment", "--model", str(folder), "--prompt-cache", str(tmp_path / "state")]
    outputs = []
    for more in ([], ["--speculate", "mtp"]):
        assert main([*arguments, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="float32"),
        dict(dtype="float32", quantize="int8", state_dtype="bfloat16"),
        dict(dtype="bfloat16", state_dtype="float16"),
        dict(dtype="bfloat16", quantize="int4"),
        dict(dtype="bfloat16", quantize="lossless12"),
    ],
    ids=lambda options: ", ".join(options.values()),
)
@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="without the fused kernels rounding may change a text")
def test_texts_are_those_without_drafts(folder, options):
    """In every form of the weights and of the state, with hits in the prefix cache, and beside other sequences."""
    runtime, tokenizer = load(folder, mtp=True, remark=lambda sentence: None, **options)
    prompts = [tokenizer.encode(f"An assignment statement {'of a name ' * number}") for number in range(6)]
    # At a high temperature the random numbers choose most tokens, so that random layers are often right.
    requests = [Request(prompt, 30, temperature=4.0, seed=seed) for seed, prompt in enumerate(prompts)]
    requests.append(Request(prompts[0], 30))
    expected = [generate_one(Engine(runtime, 1), request) for request in requests]
    drafter, cache = MTPDrafter(runtime, 3, 200), PrefixCache(runtime, None, None)
    engine = Engine(runtime, 3, drafter=drafter, draft_tokens=3, prefix_cache=cache)
    for _ in range(2):
        ids = [engine.add(request) for request in requests]
        outputs = run(engine)
        assert [tokens_of(outputs[id]) for id in ids] == expected
    assert engine.stats.cached_tokens > 50 and engine.stats.accepted_tokens > 50
