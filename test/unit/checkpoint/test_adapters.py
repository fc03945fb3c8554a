"""Adapters as PEFT writes them: logits after a merge, and refusals in one sentence."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid

pytest.importorskip("peft", reason="peft is not installed")

from granite4_neuron.checkpoint.adapters import CONFIG, WEIGHTS, read_adapter
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.commands.cli import main
from granite4_neuron.config import config_from_file
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row
from test.support.adapters import EXPERTS, peft_logits, save_adapter
from test.support.checkpoints import CASES, nemotron_config, save_dense

MOE, DENSE, *_ = CASES
TOKENS = [(7 * place + place * place) % 160 for place in range(40)]
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def logits(model) -> torch.Tensor:
    """Return the logits after every token of a model without adapters, [tokens, vocab_size]."""
    runtime = CPURuntime(model, GenerationConfig(), cpu_kernels="torch")
    return runtime.step(runtime.allocate(1, len(TOKENS)), [Row(1, 0, TOKENS)], all_logits=True)[0]


def config_of(folder):
    return config_from_file(folder / "config.json")


SCALES = {
    "plain": {},
    "rank-stabilised": dict(use_rslora=True),
    "patterns": dict(rank_pattern={"q_proj": 2, "layers.2.mamba.in_proj": 7}, alpha_pattern={"^model.*out_proj": 3}),
    "experts": dict(target_parameters=list(EXPERTS)),
    "first matrices of experts": dict(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj"]),
    "experts, rank-stabilised": dict(target_parameters=list(EXPERTS), use_rslora=True, r=3),
    "experts with patterns": dict(
        target_modules=[],
        target_parameters=["block_sparse_moe.experts.down_proj", *EXPERTS],
        rank_pattern={"down_proj": 5, "layers.1.block_sparse_moe.experts.gate_up_proj": 2},
        alpha_pattern={"experts.gate_up_proj": 3, "experts": 50},
    ),
    "patterns of whole names": dict(alpha_pattern={"proj": 40, "_proj": 50, "k_proj": 2, r".*\.k_proj": 60}),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("changes", SCALES.values(), ids=SCALES)
def test_merged_logits_are_those_of_peft(random_checkpoints, tmp_path, changes):
    folder = random_checkpoints(MOE)
    adapter = save_adapter(folder, tmp_path, **changes)
    expected = peft_logits(folder, adapter, TOKENS)
    merged = load_model(folder, torch.float32, adapters=[read_adapter(adapter, config_of(folder))])
    assert (logits(load_model(folder, torch.float32)) - expected).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)


def test_experts_as_older_versions_write_them(random_checkpoints, tmp_path, monkeypatch):
    """Until 0.18, PEFT took the matrices of experts for transposes, as it does today where a model says that they are.
    In transformers 4.57 they are two modules.
    """
    monkeypatch.setattr(modeling_granitemoehybrid.GraniteMoeHybridExperts, "is_transposed", True, raising=False)
    folder = random_checkpoints(MOE)
    adapter = save_adapter(folder, tmp_path, target_parameters=list(EXPERTS))
    expected = peft_logits(folder, adapter, TOKENS)

    def rename(values):
        for name in [name for name in values if ".experts." in name]:
            module = "input_linear" if ".base_layer." in name else "output_linear"
            values[name.replace(".base_layer.", ".").replace(".experts.", f".{module}.")] = values.pop(name)

    for damage in (lambda folder: None, tensors(rename)):
        damage(adapter)
        merged = load_model(folder, torch.float32, adapters=[read_adapter(adapter, config_of(folder))])
        torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)
        about(target_parameters=["input_linear.weight", "block_sparse_moe.output_linear.weight"])(adapter)


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["up_proj", "k_proj"]])
def test_an_adapter_of_a_dense_granite(tmp_path, targets):
    """Its MLP has two matrices where the hybrids have one."""
    save_dense(tmp_path / "model")
    adapter = save_adapter(tmp_path / "model", tmp_path / "adapter", target_modules=targets)
    merged = load_model(tmp_path / "model", adapters=[read_adapter(adapter, config_of(tmp_path / "model"))])
    torch.testing.assert_close(logits(merged), peft_logits(tmp_path / "model", adapter, TOKENS), atol=1e-4, rtol=0)


def test_convert_merges(random_checkpoints, tmp_path):
    folder = random_checkpoints(DENSE)
    adapter = save_adapter(folder, tmp_path / "adapter")
    output = tmp_path / "merged"
    assert main(["convert", "--model", str(folder), "--adapter", str(adapter), "--output", str(output)]) == 0
    torch.testing.assert_close(logits(load_model(output)), peft_logits(folder, adapter, TOKENS), atol=1e-4, rtol=0)


def test_convert_merges_several(random_checkpoints, tmp_path):
    """Their sum equals PEFT with all of them active. One of them may leave a matrix alone."""
    folder = random_checkpoints(DENSE)
    first = save_adapter(folder, tmp_path / "first")
    second = save_adapter(folder, tmp_path / "second", seed=1, r=2, target_modules=["q_proj", "in_proj"])
    options = [part for each in (first, second) for part in ("--adapter", str(each))]
    output = tmp_path / "merged"
    assert main(["convert", "--model", str(folder), *options, "--output", str(output)]) == 0
    expected = peft_logits(folder, first, TOKENS, second)
    assert min((peft_logits(folder, each, TOKENS) - expected).abs().max() for each in (first, second)) > 0.1
    torch.testing.assert_close(logits(load_model(output)), expected, atol=1e-4, rtol=0)


def test_convert_refuses_an_adapter_twice(random_checkpoints, good, tmp_path, capsys):
    options = ["--adapter", str(good), "--adapter", str(good / ".." / good.name)]
    model, output = random_checkpoints(MOE), tmp_path / "merged"
    assert main(["convert", "--model", str(model), *options, "--output", str(output)]) != 0
    assert "is given twice; each adapter is merged once." in capsys.readouterr().err
    assert not output.exists()


@pytest.fixture(scope="module")
def good(random_checkpoints, tmp_path_factory):
    return save_adapter(random_checkpoints(MOE), tmp_path_factory.mktemp("adapters") / "good")


def about(**changes):
    """Damage: change values of adapter_config.json."""

    def damage(folder):
        values = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**values, **changes}))

    return damage


def tensors(change):
    """Damage: change the tensors."""

    def damage(folder):
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS)

    return damage


def renamed(new):
    return tensors(lambda values: values.update({new: values.pop(Q_PROJ)}))


FAULTS = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "a folder that PEFT wrote"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "not valid JSON"),
    "another method": (about(peft_type="LOHA"), "only LORA"),
    "a rank of another type": (about(r="4"), "a whole number of at least 1"),
    "a rank of 0": (about(r=0), "a whole number of at least 1"),
    "another rank": (about(r=5), "of rank 4, but adapter_config.json says rank 5"),
    "an infinite scale": (about(lora_alpha=float("inf")), "lora_alpha is inf"),
    "an endless scale": (about(lora_alpha=10**400), "lora_alpha is 1000000000"),
    "a scale that is no number": (about(lora_alpha=True), "lora_alpha is True, and must be a number"),
    "a scale beyond float32": (about(lora_alpha=1e300), "that are not finite at a scale of 2.5e+299"),
    "ranks that are a list": (about(rank_pattern=["q_proj"]), "an object of ranks by modules"),
    "an endless scale of a module": (about(alpha_pattern={"q_proj": 10**400}), "an object of numbers by modules"),
    "a pattern that is none": (about(rank_pattern={"(": 3}), "rank_pattern cannot be matched with modules ('(' is no"),
    "a pattern that takes years": (
        about(rank_pattern={r"(?:(.{1,3})(?!\3\3\3))+(?<!oj)": 4}),
        "rank_pattern cannot be matched with modules (it takes more than 3 seconds).",
    ),
    "patterns without end": (
        about(alpha_pattern={f"{number}.*{number}.*": 4 for number in range(400_000)}),
        "alpha_pattern cannot be matched with modules (they have more than 100,000 characters).",
    ),
    "DoRA": (about(use_dora=True), "use_dora True, which is not supported"),
    "biases": (about(bias="all"), "bias 'all', which is not supported"),
    "whole modules": (about(modules_to_save=["lm_head"]), "modules_to_save ['lm_head'], which is not supported"),
    "an unknown field": (about(use_new=1), "use_new 1, which is not supported"),
    "PiSSA": (about(init_lora_weights="pissa"), "changes the base model's weights"),
    "no invocation": (about(alora_invocation_tokens=[]), "a list of token ids below 160"),
    "an invocation of another vocabulary": (about(alora_invocation_tokens=[3, 160]), "a list of token ids below 160"),
    "an invocation in text": (about(alora_invocation_tokens="go"), "a list of token ids below 160"),
    "no tensors": (lambda folder: (folder / WEIGHTS).unlink(), "adapter_model.safetensors does not exist"),
    "damaged tensors": (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 20), "damaged or incomplete"),
    "nothing": (tensors(dict.clear), "holds no weights"),
    "half of a pair": (tensors(lambda values: values.pop(Q_PROJ)), "lacks lora_A of model.layers.1.self_attn.q_proj"),
    "a strange tensor": (renamed("weight"), "holds weight, which is not supported"),
    "a layer too many": (renamed(Q_PROJ.replace(".1.", ".9.")), "which this model does not have"),
    "attention in a Mamba layer": (renamed(Q_PROJ.replace(".1.", ".0.")), "which this model does not have"),
    "the head": (renamed("base_model.model.lm_head.lora_A.weight"), "adapts lm_head, which is not supported"),
    "the router": (
        renamed("base_model.model.model.layers.0.block_sparse_moe.router.layer.lora_A.weight"),
        "router.layer, which is not supported; adapters may change only q_proj",
    ),
    "routed experts that are not named": (
        renamed("base_model.model.model.layers.0.block_sparse_moe.experts.lora_A.weight"),
        "adapts routed experts (model.layers.0.block_sparse_moe.experts) that are not in target_parameters",
    ),
    "one expert": (
        renamed("base_model.model.model.layers.0.block_sparse_moe.experts.3.up_proj.lora_A.weight"),
        "adapts one expert alone (model.layers.0.block_sparse_moe.experts.3.up_proj); train all experts of a layer",
    ),
    "one of two matrices of experts": (
        lambda folder: (
            about(target_parameters=["experts.gate_up_proj", "experts.down_proj"])(folder),
            renamed("base_model.model.model.layers.0.block_sparse_moe.experts.lora_A.weight")(folder),
        ),
        "lacks lora_",
    ),
    "a parameter without a name": (about(target_parameters=[3]), "a list of names of parameters"),
    "another size": (
        tensors(lambda values: values.update({Q_PROJ: torch.zeros(4, 65)})),
        "of shape [4, 65] instead of [4, 64]; the adapter is of another model",
    ),
    "no matrix": (tensors(lambda values: values.update({Q_PROJ: torch.zeros(4)})), "not a matrix"),
    "integers": (tensors(lambda values: values.update({Q_PROJ: torch.zeros(4, 64).int()})), "not a matrix"),
    "NaN": (tensors(lambda values: values[Q_PROJ].fill_(float("nan"))), "not finite"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_adapters_are_refused(random_checkpoints, good, tmp_path, fault):
    damage, message = FAULTS[fault]
    folder = tmp_path / "adapter"
    shutil.copytree(good, folder)
    damage(folder)
    with pytest.raises(UserError) as refusal:
        read_adapter(folder, config_of(random_checkpoints(MOE)))
    assert message in str(refusal.value)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("module", ["mtp.layers.0.mixer.q_proj", "mtp.layers.0.eh_proj"])
def test_an_adapter_of_layers_that_only_draft_is_refused(tmp_path, module):
    """Whether they are loaded or not: the first of them must not be taken for the model's first layer."""
    (tmp_path / CONFIG).write_text(json.dumps(dict(peft_type="LORA", r=4)))
    names = (f"base_model.model.{module}.lora_{which}.weight" for which in "AB")
    save_file({name: torch.ones(4, 4) for name in names}, tmp_path / WEIGHTS)
    config = nemotron_config(layer_types=("attention", "moe"), mtp_layer_types=("attention", "moe"))
    with pytest.raises(UserError, match=f"adapts {module}, which is not supported; adapters may change only q_proj"):
        read_adapter(tmp_path, config)
    with pytest.raises(UserError, match=f"adapts {module}, which this model does not have"):
        read_adapter(tmp_path, config.without_mtp())


def test_convert_writes_nothing_if_it_refuses(random_checkpoints, tmp_path, capsys):
    adapter = save_adapter(random_checkpoints(MOE), tmp_path / "adapter", alora_invocation_tokens=[3, 4])
    output = tmp_path / "merged"
    options = ["--model", str(random_checkpoints(MOE)), "--output", str(output), "--adapter"]
    assert main(["convert", *options, str(adapter)]) != 0
    assert "cannot be merged" in capsys.readouterr().err
    assert main(["convert", *options, str(tmp_path / "none")]) != 0
    assert "is not a folder" in capsys.readouterr().err
    assert not output.exists()
