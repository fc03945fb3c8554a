"""One call for all decoder layers equals the layers one after another, whose kernels have tests of their own."""

import dataclasses

import pytest
import torch

from granite4_neuron import ops
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.model.step import PackedStep, step_of
from granite4_neuron.ops.layer_weights import FeedForwardWeights, MixerWeights
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import CASES

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler"),
]

NAMED = {case.name: case for case in CASES}


def bound_model(name, dtype, format=None):
    model = random_model(NAMED[name].config(), dtype=dtype)
    for module in model.matrices().values():
        if module.may_be_quantized and format is not None:
            module.set_compact_weight(ops.FORMATS[format].quantize(module.weight))
    return model.bind(cpu.choose_operators())


def poisoned_state(model, num_sequences, max_length):
    state = HybridState.allocate(model.config, num_sequences, max_length, model.dtype)
    for tensor in state.tensors():
        tensor.fill_(float("nan"))
        tensor[0] = 0
    return state


def mix(layer, x, step, state, config):
    """Run a Mamba-2 layer from after its norm to before the residual sum. Return the result and its mixer's inputs."""
    mamba = layer.mamba
    projected = cpu.linear(x, mamba.in_proj.weight, mamba.in_proj.bias)
    z, inputs = projected.split([mamba.d_inner, projected.shape[-1] - mamba.d_inner], dim=-1)
    mixer = cpu.layers.mamba_mixer(
        MixerWeights(
            conv_weight=mamba.conv1d.weight,
            conv_bias=mamba.conv1d.bias,
            dt_bias=mamba.dt_bias,
            A_log=mamba.A_log,
            D=mamba.D,
            n_groups=config.mamba_n_groups,
            time_step_limit=config.time_step_limit,
            rounding=mamba.rounding,
        )
    )
    states = dict(conv_state=state.conv_state, ssm_state=state.ssm_state)
    y = mixer.step(projected=inputs.flatten(0, 1), **states, **step.rows()).unflatten(0, inputs.shape[:2])
    gated = cpu.rms_norm_gated(y, z, mamba.norm.weight, config.rms_norm_eps, config.mamba_n_groups)
    return cpu.linear(gated, mamba.out_proj.weight, mamba.out_proj.bias), inputs


def attend(layer, x, step, state, config):
    attention, where = layer.self_attn, (step.positions, step.lengths, step.slots)
    parts = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (cpu.linear(x, p.weight, p.bias).unflatten(-1, (-1, config.head_dim)) for p in parts)
    if config.uses_rope:
        tables = ops.rotary_tables(step.positions, config.head_dim, config.rope_theta)
        query, key = ops.apply_rotary(query, tables), ops.apply_rotary(key, tables)
    cpu.write_cache(state.key, key, *where)
    cpu.write_cache(state.value, value, *where)
    mixed = cpu.cached_attention(query, state.key, state.value, *where, config.attention_multiplier, step.kv_length)
    return cpu.linear(mixed.flatten(-2), attention.o_proj.weight, attention.o_proj.bias)


def feed_forward(layer, hidden_states, config):
    mlp, experts = layer.shared_mlp, layer.block_sparse_moe
    half = cpu.layers.feed_forward(
        FeedForwardWeights(
            norm=layer.post_attention_layernorm.weight,
            input=mlp.input_linear.weight,
            output=mlp.output_linear.weight,
            router=experts and experts.router.layer.weight,
            expert_input=experts and experts.input_linear.weight,
            expert_output=experts and experts.output_linear.weight,
            top_k=config.num_experts_per_tok if experts else 0,
            eps=config.rms_norm_eps,
            residual_multiplier=config.residual_multiplier,
        )
    )
    return half.step(hidden_states)


def one_after_another(model, hidden_states, step, state):
    """Run all layers one by one. Return [batch, tokens, hidden_size] and the inputs of the Mamba layers' mixers."""
    config, inputs = model.config, []
    for layer, layer_state in zip(model.model.layers, state.layers, strict=True):
        x = cpu.rms_norm(hidden_states, layer.input_layernorm.weight, config.rms_norm_eps)
        if layer.is_mamba:
            mixed, mixer_input = mix(layer, x, step, layer_state, config)
            inputs.append(mixer_input)
        else:
            mixed = attend(layer, x, step, layer_state, config)
        hidden_states = cpu.residual_add(hidden_states, mixed, config.residual_multiplier)
        hidden_states = feed_forward(layer, hidden_states, config)
    return hidden_states, inputs


def steps(state, only_verifies=False):
    """Yield a prompt of two rows, one of them shorter, then one token for each. Rows are not in the order of slots."""
    slots = torch.tensor([2, 1])
    for tokens, start in ((20, [0, 0]), (1, [20, 13])) if not only_verifies else ((5, [0, 0]),):
        positions = torch.tensor(start)[:, None] + torch.arange(tokens)
        lengths = torch.tensor([tokens, 13 if tokens == 20 else tokens])
        yield step_of(positions, lengths, slots, state, kv_length=21, verifies=only_verifies)


def same(tensors, others):
    return all(torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) for a, b in zip(tensors, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMED)
@torch.inference_mode()
def test_layers_one_after_another(name, dtype):
    check(bound_model(name, dtype))


@pytest.mark.parametrize("format", ops.FORMATS)
@torch.inference_mode()
def test_quantized_layers(format):
    check(bound_model("moe", torch.bfloat16, format))


def check(model):
    ours, theirs = (poisoned_state(model, 2, 30) for _ in range(2))
    for step, other in zip(steps(ours), steps(theirs), strict=True):
        x = torch.randn(2, step.positions.shape[1], model.config.hidden_size).masked_fill(~step.is_real[..., None], 0)
        output, _ = model.model.stack(x, step, ours, model.model.rotary(step))
        expected, _ = one_after_another(model, x, other, theirs)
        assert torch.equal(output, expected)
        assert same(ours.tensors(), theirs.tensors())


@torch.inference_mode()
def test_states_advance_by_kept_inputs():
    model = bound_model("moe", torch.float32)
    ours, theirs = (poisoned_state(model, 2, 30) for _ in range(2))
    before = [tensor.clone() for tensor in ours.tensors()]
    (step,), (other,) = steps(ours, only_verifies=True), steps(theirs, only_verifies=True)
    x = torch.randn(2, 5, model.config.hidden_size)
    output, inputs = model.model.stack(x, step, ours, model.model.rotary(step))
    expected, expected_inputs = one_after_another(model, x, other, theirs)
    assert torch.equal(output, expected) and same(inputs, expected_inputs)
    is_recurrent = [tensor.shape[2] != ours.max_length for tensor in ours.tensors()]
    changed = [not same([a], [b]) for a, b in zip(before, ours.tensors(), strict=True)]
    assert not any(change and recurrent for change, recurrent in zip(changed, is_recurrent, strict=True))

    committed = step_of(step.positions, torch.tensor([3, 0]), step.slots, ours)
    model.model.stack.advance(inputs, committed, ours)
    first = step_of(step.positions[:, :3], torch.tensor([3, 0]), step.slots, theirs, kv_length=21)
    one_after_another(model, x[:, :3].contiguous(), first, theirs)
    recurrent = [(a, b) for a, b, is_one in zip(ours.tensors(), theirs.tensors(), is_recurrent, strict=True) if is_one]
    assert all(torch.allclose(a, b, atol=1e-6, equal_nan=True) for a, b in recurrent)


def packed(tokens, starts, slots, state):
    """Return the ids and the step of rows without padding."""
    ids = torch.tensor([[token for row in tokens for token in row]])
    return ids, PackedStep(starts, [len(row) for row in tokens], slots, state.max_length)


def padded(tokens, starts, slots, state):
    """Return the ids and the step of rows that are padded to the longest."""
    lengths = [len(row) for row in tokens]
    ids = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in tokens])
    positions = torch.tensor(starts)[:, None] + torch.arange(max(lengths))
    return ids, step_of(positions, torch.tensor(lengths), torch.tensor(slots), state)


WITHOUT_ROPE = [name for name, case in NAMED.items() if not case.config().uses_rope]


@pytest.mark.slow_cases
@pytest.mark.parametrize("format", [None, *ops.FORMATS])
@pytest.mark.parametrize("name", WITHOUT_ROPE)
@torch.inference_mode()
def test_a_token_of_each_sequence_is_one_call(name, format):
    """Rows begin or go on, with slots in any order. The embedding is tied to the head, or not."""
    model = bound_model(name, torch.bfloat16, format)
    ours, theirs = (poisoned_state(model, 3, 9) for _ in range(2))
    for tokens, starts, slots in (([5, 6], [0, 0], [3, 1]), ([7, 8, 9], [1, 0, 1], [1, 2, 3]), ([4], [2], [3])):
        expected = model(*padded([[token] for token in tokens], starts, slots, theirs), theirs)
        assert torch.equal(model(*packed([[token] for token in tokens], starts, slots, ours), ours), expected)
        assert same(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("name", WITHOUT_ROPE)
@torch.inference_mode()
def test_a_step_of_rows_of_different_lengths_is_one_call(name):
    """A piece of a prompt runs beside next tokens. The result equals that of padded rows, layer by layer."""
    model = bound_model(name, torch.bfloat16)
    ours, theirs = (poisoned_state(model, 3, 9) for _ in range(2))
    for rows, starts, slots in (
        ([[5, 6, 7], [8]], [0, 0], [3, 1]),
        ([[9], [2, 3, 4, 5, 6], [7]], [3, 0, 1], [3, 2, 1]),
    ):
        expected = model(*padded(rows, starts, slots, theirs), theirs)
        assert torch.equal(model(*packed(rows, starts, slots, ours), ours), expected)
        assert same(ours.tensors(), theirs.tensors())


@torch.inference_mode()
def test_bad_calls_are_refused():
    model = bound_model("moe", torch.bfloat16)
    state = poisoned_state(model, 2, 9)
    for tokens, lengths, starts, slots in (
        ([model.config.vocab_size], [1], [0], [1]),
        ([5], [1], [0], [3]),
        ([5, 6], [1, 1, 1], [0, 0, 0], [1, 2, 1]),
        ([5, 6], [2, 0], [0, 0], [1, 2]),
        ([5, 6], [3], [0], [1]),
        ([5, 6], [1, 2], [0, 0], [1, 2]),
    ):
        step = PackedStep(starts, lengths, slots, state.max_length)
        with pytest.raises(RuntimeError):
            model(torch.tensor([tokens]), step, state)


@pytest.mark.parametrize("name", [name for name in NAMED if name not in WITHOUT_ROPE])
@torch.inference_mode()
def test_decode_with_rotary_positions_equals_the_forward(name):
    model = bound_model(name, torch.bfloat16)
    assert model.is_fused
    assert model.fallbacks == ("a step is not one call from tokens to logits: it makes no rotary positions.",)
    ours, theirs = (poisoned_state(model, 2, 9) for _ in range(2))
    for start in range(3):
        rows = [[4], [5]], [start] * 2, [2, 1]
        expected = model(*padded(*rows, theirs), theirs)
        assert torch.equal(model(*packed(*rows, ours), ours), expected)


def test_states_of_other_layers_are_refused():
    model = bound_model("moe", torch.float32)
    step, *_ = steps(state := poisoned_state(model, 2, 30))
    x = torch.randn(2, 20, model.config.hidden_size)
    with pytest.raises(RuntimeError, match="states of 1 mixers of"):
        model.model.stack(x, step, dataclasses.replace(state, layers=state.layers[:1]), None)
    with pytest.raises(RuntimeError, match="inputs of 0 Mamba layers only"):
        model.model.stack.advance([], step, state)


def test_layers_are_not_fused_without_the_operator():
    operators = dataclasses.replace(cpu.choose_operators(), fused_layers=None)
    model = random_model(NAMED["moe"].config()).bind(operators)
    assert not model.is_fused
