"""Models bound to operators: they run side by side with fixed weights, and unused operators are reported."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.forms import FusedLayers
from granite4_neuron.devices.cpu.runtime import CPURuntime, Row
from granite4_neuron.devices.graphs.operators import XLA
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.model.attention import Attention
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import TORCH
from granite4_neuron.ops.operators import Operators
from test.support.checkpoints import small_config
from test.support.stepping import poisoned_state, random_tokens, run_cuts

pytestmark = pytest.mark.versions

needs_compiler = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
CONFIGS = {
    "experts": small_config(),
    "no experts, no biases": small_config(num_local_experts=0, mamba_conv_bias=False, mamba_proj_bias=True),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return random_model(request.param)


def logits(runtime, tokens=20):
    """Return logits after a prompt and after one more token, of two sequences."""
    state = runtime.allocate(2, tokens + 1)
    prompts = [Row(1, 0, range(tokens)), Row(2, 0, range(1, tokens))]
    more = [Row(1, tokens, [3]), Row(2, tokens - 1, [4])]
    return torch.stack([runtime.step(state, rows) for rows in (prompts, more)])


def other_weights(model):
    return dict(random_model(model.config, seed=1).named_parameters(remove_duplicate=False))


def replace_parameters(model):
    """Replace the parameters with new objects, as loading a checkpoint does."""
    for name, weight in other_weights(model).items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(weight.detach().clone(), requires_grad=False))
    model.tie_weights()


def copy_values(model):
    """Copy values into the existing tensors, also behind autograd's back."""
    others = other_weights(model)
    for name, weight in model.named_parameters():
        weight.data.copy_(others[name])


class TestWeights:
    """A runtime keeps all weights that the model had when it was bound, whatever happens to the model."""

    @pytest.mark.parametrize("kernels", cpu.CPU_KERNELS)
    def test_parameters_that_are_replaced_later_have_no_effect(self, model, kernels):
        runtime = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels)
        before = logits(runtime)
        replace_parameters(model)
        assert torch.equal(logits(runtime), before)
        expected = logits(CPURuntime(random_model(model.config, seed=1), GenerationConfig(), cpu_kernels=kernels))
        assert torch.equal(logits(CPURuntime(model, GenerationConfig(), cpu_kernels=kernels)), expected)
        assert (expected - before).abs().max() > 0.1

    @pytest.mark.parametrize("kernels", cpu.CPU_KERNELS)
    def test_changes_in_place_reach_all_weights_or_none(self, model, kernels):
        """Plain torch shares the model's tensors; fused kernels have copies of all of them."""
        runtime = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels)
        is_packed = runtime.model.operators.pack is not None
        before = logits(runtime)
        for name, weight in model.named_parameters():
            kept = weight.clone()
            weight.data.mul_(1.5).add_(0.1)
            assert torch.equal(logits(runtime), before) == is_packed, name
            weight.data.copy_(kept)
        copy_values(model)
        expected = logits(CPURuntime(random_model(model.config, seed=1), GenerationConfig(), cpu_kernels=kernels))
        assert torch.equal(logits(runtime), before if is_packed else expected)

    @pytest.mark.parametrize("kernels", cpu.CPU_KERNELS)
    def test_a_bound_model_refuses_others(self, model, kernels):
        bound = model.bind(cpu.choose_operators(kernels))
        tokens = random_tokens(model.config.vocab_size, 2, 20)
        before = run_cuts(bound, tokens, [20])
        layer = bound.model.layers[0]
        replacements = [
            (module, name, value)
            for module in (
                bound.lm_head,
                bound.model.norm,
                layer.mamba,
                layer.mamba.in_proj,
                layer.shared_mlp.input_linear,
            )
            for name, value in (*module._parameters.items(), ("weight", module.__dict__.get("weight")))
            if value is not None
        ]
        for module, name, value in replacements:
            with pytest.raises(TypeError, match="a bound model's weights are fixed"):
                setattr(module, name, value)
        for change in (
            lambda: setattr(layer, "mamba", layer.mamba),
            lambda: layer.mamba.in_proj.set_compact_weight(None),
            lambda: bound.to(torch.bfloat16),
            lambda: bound.load_state_dict(model.state_dict()),
            bound.tie_weights,
        ):
            with pytest.raises(TypeError, match="a bound model's weights are fixed"):
                change()
        assert torch.equal(run_cuts(bound, tokens, [20]), before)

    def test_a_bound_model_has_the_same_parameters(self, model):
        bound = model.bind(XLA)
        for (name, ours), (other_name, theirs) in zip(model.named_parameters(), bound.named_parameters(), strict=True):
            assert name == other_name and ours is theirs

    def test_on_a_device_they_are_copies(self):
        model = random_model(small_config())
        bound = model.bind(TORCH, torch.device("meta"))
        assert {weight.device.type for weight in bound.parameters()} == {"meta"}
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}
        assert bound.lm_head.weight is bound.model.embed_tokens.weight


class TestSideBySide:
    def test_binding_leaves_the_model_as_it_is(self, model):
        before = {id(module): dict(vars(module)) for module in model.modules()}
        tokens = random_tokens(model.config.vocab_size, 2, 20)
        expected = run_cuts(model, tokens, [20])
        CPURuntime(model, GenerationConfig())
        model.bind(dataclasses.replace(TORCH, logits=lambda *_: None))
        assert before == {id(module): vars(module) for module in model.modules()}
        assert model.operators is TORCH and torch.equal(run_cuts(model, tokens, [20]), expected)

    @needs_compiler
    def test_a_second_runtime_changes_nothing_in_the_first(self, model, monkeypatch):
        calls = []
        original = FusedLayers.forward_packed
        monkeypatch.setattr(FusedLayers, "forward_packed", lambda *a: calls.append(a) or original(*a))
        fused = CPURuntime(model, GenerationConfig())
        expected = logits(fused)
        calls.clear()
        plain = CPURuntime(model, GenerationConfig(), cpu_kernels="torch")
        assert torch.allclose(logits(plain), expected, atol=1e-4) and not calls
        assert torch.equal(logits(fused), expected) and calls

    def test_a_bound_model_can_be_bound_again(self, model):
        fused = model.bind(cpu.choose_operators())
        tokens = random_tokens(model.config.vocab_size, 2, 20)
        plain = fused.bind(TORCH)
        assert fused.is_fused and not plain.is_fused
        assert (run_cuts(plain, tokens, [20]) - run_cuts(model, tokens, [20])).abs().max() <= 1e-5


@needs_compiler
@pytest.mark.parametrize("cuts", [[20], [7, 1, 12], [1] * 6 + [14]])
@torch.inference_mode()
def test_fused_operators_over_a_state_without_a_null_slot(model, cuts):
    """Slots are in any order and are looked up."""
    fused = model.bind(dataclasses.replace(cpu.choose_operators(), fused_layers=None))
    tokens = random_tokens(model.config.vocab_size, 2, 20)
    expected = run_cuts(model, tokens, [20])
    state = poisoned_state(fused, 2, 20, has_null_slot=False)
    slots, outputs, start = torch.tensor([2, 1]), [], 0
    for size in cuts:
        positions = torch.arange(start, start + size).expand(2, -1)
        step = step_of(positions, torch.full((2,), size), slots, state)
        outputs.append(fused(tokens[:, start : start + size], step, state, all_logits=True))
        start += size
    assert (torch.cat(outputs, 1) - expected).abs().max() <= 1e-5


@needs_compiler
@torch.inference_mode()
def test_fused_layers_refuse_a_state_without_a_null_slot(model):
    fused = model.bind(cpu.choose_operators())
    state = poisoned_state(fused, 1, 20, has_null_slot=False)
    step = step_of(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([1]), state)
    with pytest.raises(ValueError, match="fused layers take a state with a null slot"):
        fused(torch.tensor([[1]]), step, state)


class TestFallbacks:
    """A runtime reports the faster ways that it does not take."""

    @needs_compiler
    def test_nothing_falls_back_by_default(self, model):
        assert CPURuntime(model, GenerationConfig()).fallbacks == ()
        assert CPURuntime(model, GenerationConfig(), cpu_kernels="torch").fallbacks == ()

    @needs_compiler
    def test_another_scan(self, model):
        runtime = CPURuntime(model, GenerationConfig(), prefill_scan="quadratic")
        (fallback,) = runtime.fallbacks
        assert fallback == (
            "the fused decoder layers are not used: they have their own scan, and the prefill scan quadratic and the "
            "decode kernel torch are asked for."
        )
        assert not runtime.model.is_fused
        assert torch.allclose(logits(runtime), logits(CPURuntime(model, GenerationConfig())), atol=1e-4)

    @needs_compiler
    def test_a_part_of_a_model(self):
        config = small_config()
        part = model_of(config, Parallel(0, 2)).bind(cpu.choose_operators())
        assert not part.is_fused
        (fallback,) = part.fallbacks
        assert fallback.startswith("the fused decoder layers are not used: ") and "a part of 2" in fallback

    @needs_compiler
    def test_a_familys_own_attention(self):
        """The fused layers would compute that of its base class."""

        class Sharper(Attention):
            def attend(self, projected, *where):
                query, *others = projected
                return super().attend((8 * query, *others), *where)

        model = random_model(small_config())
        for layer in model.model.layers:
            if not layer.is_mamba:
                layer.self_attn.__class__ = Sharper
        runtime = CPURuntime(model, GenerationConfig())
        assert runtime.fallbacks == ("the fused decoder layers are not used: they do not compute Sharper.",)
        plain = CPURuntime(model, GenerationConfig(), cpu_kernels="torch")
        assert torch.allclose(logits(runtime), logits(plain), atol=1e-4)

    def test_no_compiler(self, model, monkeypatch):
        monkeypatch.setattr(cpu, "load_kernels", lambda: "no C++ compiler (c++) was found")
        runtime = CPURuntime(model, GenerationConfig())
        assert runtime.fallbacks == ("the fused kernels are not used: no C++ compiler (c++) was found.",)
        assert dataclasses.replace(runtime.model.operators, fallbacks=()) == TORCH

    def test_no_fallback_where_there_is_no_faster_way(self):
        assert select_operators(TORCH, small_config(), 2, prefill_scan="quadratic").fallbacks == ()
        assert select_operators(XLA, small_config(), 2, prefill_scan="quadratic").fallbacks == ()


def test_every_field_of_the_backends_has_the_definitions_arguments():
    """Defaults and names may differ. An operator can stand for its definition wherever that is called."""
    for operators in (cpu.choose_operators(), XLA):
        for field in dataclasses.fields(Operators):
            ours, definition = getattr(operators, field.name), getattr(TORCH, field.name)
            if hasattr(definition, "__code__"):
                count = definition.__code__.co_argcount
                code = getattr(ours, "func", ours).__code__  # of a partial, its function's
                assert code.co_argcount == count, field.name
