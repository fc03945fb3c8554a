"""The model with NKI kernels against the model in torch, however a sequence is cut, batched and padded."""

import re
import sys

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.neuron import sdk
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import TORCH, MixerConstants, causal_conv1d
from test.support.checkpoints import small_config
from test.support.nki_cases import conv_inputs, mamba_decode_inputs, mamba_decode_oracle, scan_inputs
from test.support.nki_checks import check
from test.support.stepping import poisoned_state, random_tokens, run_cuts

SIZES = dict(layer_types=("mamba", "attention", "mamba"), mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64)
CONFIGS = {
    "one group": small_config(**SIZES),
    "two groups": small_config(**SIZES, mamba_n_groups=2),
    "three taps, no bias": small_config(**SIZES, mamba_d_conv=3, mamba_conv_bias=False),
    "head_dim 64, d_state 128": small_config(**(SIZES | dict(mamba_n_heads=2, mamba_d_head=64, mamba_d_state=128))),
}
CHOICES = [("ssd", "nki"), ("scan", "nki"), ("ssd", "torch"), ("chunked", "nki"), ("quadratic", "nki")]


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "model"
    save_model(random_model(request.param, seed=1, dtype=torch.float32), path)
    return path


def load(folder, prefill_scan, decode_kernel, dtype=torch.float32):
    model = load_model(folder, dtype)
    return model.bind(select_operators(TORCH, model.config, 1, prefill_scan, decode_kernel))


@pytest.mark.slow_cases
@pytest.mark.parametrize(("prefill_scan", "decode_kernel"), CHOICES)
@pytest.mark.parametrize("cuts", [[140], [2, 131, 1, 1, 5]], ids=["whole", "cut"])
def test_logits(folder, prefill_scan, decode_kernel, cuts):
    plain = load_model(folder, torch.float32)
    tokens = random_tokens(plain.config.vocab_size, 2, 140)
    expected = run_cuts(plain, tokens, [140])
    assert expected.std() > 0.1
    assert (run_cuts(load(folder, prefill_scan, decode_kernel), tokens, cuts) - expected).abs().max() <= 1e-4


@pytest.mark.slow_cases
@torch.inference_mode()
def test_ragged_batch(folder):
    """Rows have different lengths, some are idle, and slots are out of order over poisoned memory, step after step."""
    models = [load_model(folder, torch.float32), load(folder, "ssd", "nki")]
    states = [poisoned_state(model, 3, 60) for model in models]
    slots, starts = torch.tensor([2, 3, 1]), torch.zeros(3, dtype=torch.int64)
    for lengths in ([40, 7, 1], [1, 0, 1], [0, 1, 1], [3, 2, 0], [1, 1, 1]):
        tokens = random_tokens(models[0].config.vocab_size, 3, max(lengths), seed=sum(lengths))
        positions = starts[:, None] + torch.arange(max(lengths))
        counts = torch.tensor(lengths)
        outputs = [
            model(tokens, step_of(positions, counts, slots, state), state)
            for model, state in zip(models, states, strict=True)
        ]
        is_real = counts > 0
        assert (outputs[0] - outputs[1])[is_real].abs().max() <= 1e-4
        starts += counts


@pytest.mark.slow
def test_bfloat16_stays_near(folder):
    """The error against float32 logits is at most twice that of the plain model in bfloat16."""
    exact = load_model(folder, torch.float32)
    tokens = random_tokens(exact.config.vocab_size, 2, 60)
    expected = run_cuts(exact, tokens, [60])
    plain = (run_cuts(load_model(folder, torch.bfloat16), tokens, [50] + [1] * 10) - expected).abs().max()
    kernels = run_cuts(load(folder, "ssd", "nki", torch.bfloat16), tokens, [50] + [1] * 10)
    assert (kernels - expected).abs().max() <= 2 * plain


def test_state_is_allocated_in_the_kernels_layout(folder):
    model = load(folder, "ssd", "nki")
    dimensions = model.config.rank_dimensions(1)
    expected = (3, model.config.mamba_d_state, dimensions.mamba_heads, model.config.mamba_d_head)
    assert poisoned_state(model, 2, 8).layers[0].ssm_state.shape == expected


def test_a_row_without_tokens_keeps_its_state():
    """The kernels themselves keep the state, because not every runtime has a null slot."""
    kernels = select_operators(TORCH, CONFIGS["one group"], 1, "ssd", "nki").mamba_prefill
    x, conv_state, weight, bias, _ = conv_inputs(2, 3, 64).values()
    lengths = torch.tensor([3, 0])
    y, new_conv_state = kernels.convolve(x, conv_state, weight, bias, lengths)
    expected_y, expected_state = causal_conv1d(x, conv_state, weight, bias, lengths)
    assert (y - expected_y)[0].abs().max() <= 1e-5
    assert torch.equal(new_conv_state, expected_state) and torch.equal(new_conv_state[1], conv_state[1])

    inputs = scan_inputs(2, 3, heads=2, head_dim=32)
    inputs["dt"][1] = 0.0
    _, ssm_state = kernels.scan(*inputs.values(), chunk_size=64)
    assert torch.equal(ssm_state[1], inputs["initial_states"][1])


def test_a_row_without_tokens_keeps_its_state_in_decode():
    decode = select_operators(TORCH, CONFIGS["one group"], 1, "ssd", "nki").mamba_decode.fused_mixer
    inputs = mamba_decode_inputs(2, 1, heads=2, head_dim=32, accepted=[1, 0])
    states, conv_states, xBC, dt, taps, A_D, z, accepted = inputs.values()
    results = decode.mix(xBC, dt, MixerConstants(taps[:, :-1], taps[:, -1], *A_D), conv_states, states, z, accepted)
    check(results, mamba_decode_oracle(inputs))
    assert torch.equal(results[1][1], states[1]) and torch.equal(results[2][1], conv_states[1])


def test_dimensions_that_the_kernels_do_not_take():
    with pytest.raises(UserError, match="head_dim 32, 64 or 128; here are 8 heads in 1 groups, and head_dim 16"):
        select_operators(TORCH, small_config(), prefill_scan="ssd")
    with pytest.raises(UserError, match=r"decode takes 1 to 16 tokens.* Here are 1 heads in 1 groups"):
        select_operators(TORCH, CONFIGS["one group"], tp_degree=4, decode_kernel="nki")
    cut_groups = small_config(hidden_size=96, **(SIZES | dict(mamba_n_heads=6, mamba_n_groups=3)))
    with pytest.raises(UserError, match=r"whole groups of heads or equal parts of one.* Here are 6 heads in 3 groups"):
        select_operators(TORCH, cut_groups, 1, "ssd", "nki")
    select_operators(TORCH, small_config(layer_types=("attention",)), decode_kernel="nki")
    narrow = small_config(**(SIZES | dict(mamba_d_state=32)))
    select_operators(TORCH, narrow, decode_kernel="nki")
    with pytest.raises(UserError, match="take d_state 64 or 128 and up to 340 heads; here are d_state 32"):
        select_operators(TORCH, narrow, prefill_scan="scan", decode_kernel="nki")
    select_operators(TORCH, small_config())


def test_steps_of_a_few_tokens_are_one_kernel():
    taken = select_operators(TORCH, CONFIGS["one group"], 1, "ssd", "nki")
    assert taken.mamba_decode.fused_mixer.max_tokens == 16 and taken.fallbacks == ()


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="prefill_scan is 'fast'; it must be one of chunked, quadratic, scan, ssd"):
        select_operators(TORCH, small_config(), prefill_scan="fast")
    with pytest.raises(UserError, match="decode_kernel is 'fast'; it must be one of torch, nki"):
        select_operators(TORCH, small_config(), decode_kernel="fast")


def test_without_nki(monkeypatch):
    monkeypatch.setitem(sys.modules, "nki", None)
    select_operators(TORCH, CONFIGS["one group"])
    with pytest.raises(UserError, match="need the package nki"):
        select_operators(TORCH, CONFIGS["one group"], prefill_scan="scan")


@pytest.mark.parametrize(
    ("version", "is_taken"), [("0.3.0+2131.a1", False), ("0.4.1", False), ("0.5.0", True), ("0.10", True)]
)
def test_an_nki_that_is_too_old_is_refused(version, is_taken, monkeypatch):
    monkeypatch.setattr(sdk.importlib.metadata, "version", lambda name: version)
    if is_taken:
        select_operators(TORCH, CONFIGS["one group"], prefill_scan="scan")
        return
    message = f"need NKI 0.5 or later, which came with Neuron SDK 2.31; NKI {version} is installed here"
    with pytest.raises(UserError, match=re.escape(message)):
        select_operators(TORCH, CONFIGS["one group"], decode_kernel="nki")
