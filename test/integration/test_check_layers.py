"""Hidden states after each layer against transformers': a right model passes, a wrong weight is found in its layer."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands.cli import main
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.cuda.operators import GPU
from granite4_neuron.devices.graphs.operators import LOOPS
from granite4_neuron.devices.torch import runtime as torch_device
from granite4_neuron.evaluation.layers import compare_layers, operators_of_layers
from test.support.checkpoints import save_byte_tokenizer, small_config

pytestmark = pytest.mark.versions

PROMPTS = [[5], list(range(20, 90))]
TOKENS = 3
KERNELS = [
    pytest.param("fused", marks=pytest.mark.skipif(not cpu.has_fused_kernels(), reason="no C++ compiler")),
    "torch",
]


def reports(folder, prompts=PROMPTS, of=None, **options):
    """Compare the checkpoint `of` (default: `folder`) with transformers on the checkpoint in `folder`."""
    runtime, _ = load(of or folder, **options)
    return list(compare_layers(folder, prompts, TOKENS, runtime))


def wrong_copy(folder, copy, name, factor):
    """Copy a checkpoint and multiply one of its tensors by `factor`."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / WEIGHTS)
    tensors[name] *= factor
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    return copy


def first_off(reports):
    return next((number for number, report in enumerate(reports) if report.is_off), None)


@pytest.mark.parametrize("kernels", KERNELS)
class TestCpu:
    @pytest.mark.slow_cases
    def test_a_right_model_passes(self, texting_folder, kernels):
        found = reports(texting_folder, cpu_kernels=kernels)
        assert [report.kind for report in found] == ["mamba", "attention", "mamba", "mamba", "attention", "mamba"]
        for report in found:
            for gap in (report.prefill, report.decode):
                assert 0 < gap.maximum <= 1e-4 and 0 < gap.relative <= 1e-5
            assert not report.is_off and report.r_ratio is None

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        "layer, weight",
        [(0, "mamba.D"), (3, "mamba.A_log"), (4, "self_attn.v_proj.weight"), (5, "post_attention_layernorm.weight")],
    )
    def test_a_wrong_weight_is_found_in_its_layer(self, texting_folder, tmp_path, kernels, layer, weight):
        wrong = wrong_copy(texting_folder, tmp_path / "wrong", f"model.layers.{layer}.{weight}", 1.01)
        found = reports(texting_folder, of=wrong, cpu_kernels=kernels)
        assert first_off(found) == layer and all(report.is_off for report in found[layer:])

    @pytest.mark.slow
    def test_bfloat16_is_judged_by_transformers_own_difference(self, texting_folder, tmp_path, kernels):
        options = dict(cpu_kernels=kernels, dtype=torch.bfloat16)
        right = reports(texting_folder, **options)
        assert first_off(right) is None and all(0 < report.r_ratio < 1.2 for report in right)
        wrong = wrong_copy(texting_folder, tmp_path / "wrong", "model.layers.2.mamba.out_proj.weight", 1.2)
        found = reports(texting_folder, of=wrong, **options)
        assert first_off(found) == 2 and found[1].r_ratio < 1.2 < found[2].r_ratio

    @pytest.mark.slow_cases
    def test_a_wrong_decode_is_found_in_its_layer(self, texting_folder, kernels, monkeypatch):
        """Prompts are right, but a layer carries a wrong state from step to step."""
        runtime, _ = load(texting_folder, cpu_kernels=kernels)
        step = type(runtime).step

        def with_a_wrong_state(self, state, rows, all_logits=False):
            if len(state.layers) > 2:
                state.layers[2].ssm_state.mul_(1.01)
            return step(self, state, rows, all_logits)

        monkeypatch.setattr(type(runtime), "step", with_a_wrong_state)
        found = list(compare_layers(texting_folder, PROMPTS, TOKENS, runtime))
        assert first_off(found) == 2 and found[2].decode.relative > 1e-4 > found[2].prefill.relative

    @pytest.mark.slow_cases
    def test_quantized_weights_are_not_judged(self, texting_folder, kernels):
        found = reports(texting_folder, cpu_kernels=kernels, quantize="int8")
        assert first_off(found) is None and {report.limit for report in found} == {None}


def test_long_prompts_take_several_steps(texting_folder):
    assert first_off(reports(texting_folder, prompts=[[7] * 580])) is None


def test_xla(tmp_path):
    pytest.importorskip("torch_xla", reason="torch_xla is not installed")
    folder = tmp_path / "model"
    save_model(random_model(small_config(vocab_size=264, layer_types=("mamba", "attention"))), folder)
    save_byte_tokenizer(folder)
    found = reports(folder, prompts=PROMPTS[1:], backend="xla")
    assert [report.is_off for report in found] == [False, False]
    wrong = wrong_copy(folder, tmp_path / "wrong", "model.layers.1.self_attn.v_proj.weight", 1.01)
    assert first_off(reports(folder, prompts=PROMPTS[1:], of=wrong, backend="xla")) == 1


class TestCommand:
    @pytest.fixture
    def check(self, capsys):
        def check(folder, *options):
            arguments = ["check", "--layers", "--model", str(folder), "--tokens", "2", "--prompt", "some text"]
            return main([*arguments, *options]), *capsys.readouterr()

        return check

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_fused_layers(self, check, texting_folder):
        status, output, _ = check(texting_folder)
        assert status == 0 and "passed (no layer is off)" in output and "the first" not in output
        assert "mamba layers: devices.cpu.layers" in output

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_fallbacks_have_their_reasons(self, check, texting_folder):
        status, output, _ = check(texting_folder, "--prefill-scan", "quadratic")
        assert status == 0 and "ops.mamba_operators.quadratic_scan" in output
        assert "devices.cpu.functions.linear" in output
        assert "the fused decoder layers are not used: they have their own scan" in output

    def test_a_wrong_layer_is_named(self, check, texting_folder, monkeypatch):
        def with_a_wrong_norm(*arguments, **options):
            model = load_model(*arguments, **options)
            model.model.layers[1].post_attention_layernorm.weight.mul_(1.1)
            return model

        monkeypatch.setattr("granite4_neuron.checkpoint.loading.load_model", with_a_wrong_norm)
        status, output, _ = check(texting_folder, "--cpu-kernels", "torch")
        assert status == 1 and "FAILED (layer 1, attention, is the first that is off)" in output
        (marked,) = [line for line in output.splitlines() if "<-" in line]
        runtime, tokenizer = load(texting_folder, cpu_kernels="torch")
        report = list(compare_layers(texting_folder, [tokenizer.encode("some text")], 2, runtime))[1]
        values = [value for gap in (report.prefill, report.decode) for value in (gap.maximum, gap.relative)]
        assert marked.replace("│", " ").split() == ["1", "attention", *(f"{v:.1e}" for v in values), "1.0e-04", "<-"]

    def test_quantized_weights_are_reported_without_a_verdict(self, check, texting_folder):
        status, output, _ = check(texting_folder, "--cpu-kernels", "torch", "--quantize", "int8")
        assert status == 0 and "not judged" in output

    def test_compiled_graphs_of_nxdi_are_refused(self, check, texting_folder):
        status, output, error = check(texting_folder, "--backend", "nxdi")
        assert status == 2 and output == "" and "--backend nxdi gives no hidden states" in error

    def test_a_split_model_is_refused(self, check, texting_folder, monkeypatch):
        monkeypatch.setattr("granite4_neuron.commands.check.load_runtime", lambda *_: pytest.fail("it was loaded"))
        status, output, error = check(texting_folder, "--backend", "torch", "--tp-degree", "2")
        assert status == 2 and output == "" and "--tp-degree splits it; leave out one of them" in error


class TestOperatorsThatRan:
    """Operators are recorded as they run or as their graph is traced; no list is written by hand."""

    def torch_runtime(self, monkeypatch, base=LOOPS, graphs="layer", **options):
        monkeypatch.setattr(torch_device, "LOOPS", base)
        model = random_model(small_config(layer_types=("mamba", "attention")))
        options = dict(options, compiler="eager", graphs=graphs)
        return torch_device.TorchRuntime(model, GenerationConfig(), [32], **options)

    def test_definitions(self):
        runtime = CPURuntime(random_model(small_config()), GenerationConfig(), cpu_kernels="torch")
        mamba, attention = (operators_of_layers(runtime, kind) for kind in ("mamba", "attention"))
        shared = {"norm.rms_norm", "norm.residual_add", "quantization.linear", "moe.mlp", "moe.router_logits"}
        shared |= {"moe.topk_softmax", "moe.fused_experts"}
        scans = {f"mamba_operators.{name}" for name in ("chunked_scan", "single_token_scan")}
        assert set(mamba) == {f"ops.{name}" for name in shared | scans | {"causal_conv1d.causal_conv1d"}} | {
            "ops.norm.rms_norm_gated"
        }
        caches = {"attention.write_cache", "attention.cached_attention"}
        assert set(attention) == {f"ops.{name}" for name in shared | caches}

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_fused_layers(self):
        runtime = CPURuntime(random_model(small_config()), GenerationConfig())
        layers = ["decoder", "feed_forward", "mamba_layer", "mamba_mixer"]
        assert sorted(operators_of_layers(runtime, "mamba")) == [f"devices.cpu.layers.{name}" for name in layers]

    @pytest.mark.slow
    @pytest.mark.parametrize("graphs", ["layer", "model"])
    def test_graphs(self, graphs, monkeypatch):
        runtime = self.torch_runtime(monkeypatch, graphs=graphs)
        names = operators_of_layers(runtime, "mamba")
        assert {"devices.graphs.mamba._chunked", "devices.graphs.mamba._single_token", "ops.moe.mlp"} <= set(names)

    @pytest.mark.slow
    def test_token_kernels(self, monkeypatch):
        runtime = self.torch_runtime(monkeypatch, GPU)
        mamba, attention = (operators_of_layers(runtime, kind) for kind in ("mamba", "attention"))
        assert {"devices.cuda.token_mixer.advance_mixer", "devices.cuda.mamba._chunked"} <= set(mamba)
        assert (
            "devices.cuda.token_projections.project_heads_of_one" in attention
            and "devices.cuda.mamba._single_token" not in mamba
        )

    def test_nki_kernels(self):
        pytest.importorskip("nki", reason="NKI is not installed")
        model = random_model(small_config(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64))
        options = dict(cpu_kernels="torch", prefill_scan="ssd", decode_kernel="nki")
        runtime = CPURuntime(model, GenerationConfig(), **options)
        names = operators_of_layers(runtime, "mamba")
        assert {"devices.neuron.nki.mamba.mamba_prefill", "devices.neuron.nki.mamba.mamba_decode"} <= set(names)
        assert not any("single_token_scan" in name for name in names)

    @pytest.mark.exhaustive
    def test_hidden_states_of_graphs(self, texting_folder):
        model = load_model(texting_folder)
        compiled = torch_device.TorchRuntime(model, GenerationConfig(), [128], compiler="eager")
        assert first_off(list(compare_layers(texting_folder, PROMPTS, TOKENS, compiled))) is None
        model.model.layers[4].post_attention_layernorm.weight.mul_(1.01)
        assert first_off(list(compare_layers(texting_folder, PROMPTS, TOKENS, compiled))) == 4
