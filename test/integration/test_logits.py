"""Logits equal those of transformers, however a sequence is cut, batched, padded or placed."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.selection import select_operators
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import TORCH
from granite4_neuron.state.hybrid_state import NULL_SLOT, MambaState
from test.support.checkpoints import (
    CASES,
    HAS_NEMOTRON,
    NEMOTRON_CASES,
    NEMOTRON_EXPERTS,
    nemotron_config,
    small_config,
)
from test.support.stepping import poisoned_state, random_tokens, reference_logits, run_cuts

# An older transformers computes these differently: it normalises over all groups at once, or lacks time_step_limit.
NOT_IN_REFERENCE = set() if HAS_NEMOTRON else {case.name for case in NEMOTRON_CASES}
if "group_size" not in inspect.signature(GraniteMoeHybridRMSNormGated).parameters:
    NOT_IN_REFERENCE.add("two_groups")
if not hasattr(GraniteMoeHybridConfig(), "time_step_limit"):
    NOT_IN_REFERENCE.add("time_step_limit")

CUTS = {
    "halves": [150, 150],
    "first step of one token": [1, 299],
    "last step of one token": [299, 1],
    "steps of one and two": [1, 1, 2, 1, 2, 93, 1, 1, 2, 196],
    "shorter than the convolution window": [2, 1, 2, 295],
    "at chunk boundaries": [64, 128, 64, 44],
    "around chunk boundaries": [63, 2, 63, 65, 107],
    "decode": [280] + [1] * 20,
    "verify steps": [200] + [4] * 25,
}


def skip_if_not_in_reference(name):
    if name in NOT_IN_REFERENCE:
        pytest.skip(f"transformers {transformers.__version__} computes this differently; the reference is 5.23")


@pytest.fixture
def tokens(case_model):
    return random_tokens(case_model.config.vocab_size, 2, 300)


@pytest.mark.versions
def test_prefill_equals_transformers(request, case_folder, case_model, tokens):
    skip_if_not_in_reference(case_folder.name)
    expected = reference_logits(case_folder, tokens)
    assert expected.std() > 0.1
    assert (run_cuts(case_model, tokens, [300]) - expected).abs().max() <= 1e-4


@pytest.mark.versions
def test_the_reference_is_changed_for_nemotron_only(random_checkpoints):
    """transformers reads the limits of Granite's time steps from config.json by itself."""
    skip_if_not_in_reference("time_step_limit")
    (case,) = (case for case in CASES if case.name == "time_step_limit")
    reference = AutoModelForCausalLM.from_pretrained(random_checkpoints(case))
    assert reference.model.layers[0].mamba.time_step_limit == case.changes["time_step_limit"]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_any_cut_gives_the_uncut_logits(case_model, tokens, cuts):
    uncut = run_cuts(case_model, tokens, [300])
    assert (run_cuts(case_model, tokens, cuts) - uncut).abs().max() <= 1e-5


@pytest.mark.slow_cases
def test_token_by_token_gives_the_uncut_logits(case_model):
    tokens = random_tokens(case_model.config.vocab_size, 2, 90)
    assert (run_cuts(case_model, tokens, [1] * 90) - run_cuts(case_model, tokens, [90])).abs().max() <= 1e-5


@pytest.mark.slow_cases
@pytest.mark.versions
def test_quadratic_scan_gives_the_chunked_logits(case_folder, case_model, tokens):
    plain = load_model(case_folder, torch.float32)
    quadratic = plain.bind(select_operators(TORCH, plain.config, prefill_scan="quadratic"))
    assert (run_cuts(quadratic, tokens, [300]) - run_cuts(case_model, tokens, [300])).abs().max() <= 1e-5


@pytest.mark.slow_cases
@pytest.mark.versions
def test_slots_do_not_matter(case_model, tokens):
    in_order = run_cuts(case_model, tokens, [100, 200])
    assert (run_cuts(case_model, tokens, [100, 200], slots=[7, 3]) - in_order).abs().max() <= 1e-5


@pytest.mark.slow_cases
@pytest.mark.versions
@torch.inference_mode()
def test_ragged_batch_gives_what_each_row_gives_alone(case_model):
    """Three ragged steps run over poisoned memory. One row idles in each step, and slots are out of order."""
    lengths = [[40, 23, 1, 0, 3], [2, 0, 1, 17, 30], [1, 1, 0, 1, 1]]
    slots = torch.tensor([4, 2, 5, 1, 3])
    vocab_size = case_model.config.vocab_size
    tokens = random_tokens(vocab_size, 5, 80)
    alone = [
        run_cuts(case_model, tokens[row : row + 1, :total], [total])[0]
        for row, total in enumerate(map(sum, zip(*lengths, strict=True)))
    ]
    state = poisoned_state(case_model, 5, 100)
    done = [0] * 5
    for counts in lengths:
        width = max(counts)
        ids = random_tokens(vocab_size, 5, width, seed=1)  # padding is not zeros
        for row, length in enumerate(counts):
            ids[row, :length] = tokens[row, done[row] : done[row] + length]
        positions = torch.tensor(done)[:, None] + torch.arange(width)
        step = step_of(positions, torch.tensor(counts), slots, state)
        logits = case_model(ids, step, state, all_logits=True)
        last = case_model_last(case_model, logits, counts)
        assert torch.isfinite(last).all(), "an idle row must stay finite"
        for row, length in enumerate(counts):
            expected = alone[row][done[row] : done[row] + length]
            assert torch.isfinite(logits[row, :length]).all()
            assert (logits[row, :length] - expected).abs().max().item() <= 1e-5 if length else True
            done[row] += length
    for layer in state.layers:
        if isinstance(layer, MambaState):
            assert all(tensor[NULL_SLOT].count_nonzero() == 0 for tensor in vars(layer).values())


def case_model_last(model, logits, lengths):
    """Return logits at each row's last real token, or at its first token if no token is real."""
    return torch.stack([logits[row, max(length - 1, 0)] for row, length in enumerate(lengths)])


@torch.inference_mode()
def test_a_step_leaves_other_slots_alone(case_model):
    """Other slots stay the same bit by bit, also when rows idle and tokens are padding."""
    vocab_size = case_model.config.vocab_size
    state = poisoned_state(case_model, 4, 50)
    everyone = torch.tensor([1, 2, 3, 4])
    positions = torch.arange(20).expand(4, -1)
    step = step_of(positions, torch.full((4,), 20), everyone, state)
    case_model(random_tokens(vocab_size, 4, 20), step, state)
    before = [tensor.clone() for tensor in state.tensors()]

    ids, lengths = random_tokens(vocab_size, 2, 9, seed=1), torch.tensor([5, 0])
    case_model(ids, step_of(torch.arange(20, 29).expand(2, -1), lengths, torch.tensor([3, 2]), state), state)
    for old, new in zip(before, state.tensors(), strict=True):
        untouched = torch.tensor([1, 2, 4])
        assert torch.equal(old[untouched].nan_to_num(), new[untouched].nan_to_num())
        assert not torch.equal(old[3].nan_to_num(), new[3].nan_to_num())


@torch.inference_mode()
def test_a_reused_slot_starts_from_zeros(case_model):
    vocab_size = case_model.config.vocab_size
    first, second = random_tokens(vocab_size, 1, 40), random_tokens(vocab_size, 1, 30, seed=1)
    alone = run_cuts(case_model, second, [30])
    state = poisoned_state(case_model, 1, 64)
    one = torch.tensor([1])
    case_model(first, step_of(torch.arange(40)[None], torch.tensor([40]), one, state), state)
    step = step_of(torch.arange(30)[None], torch.tensor([30]), one, state)
    again = case_model(second, step, state, all_logits=True)
    assert (again - alone).abs().max() <= 1e-5


@torch.inference_mode()
def test_last_logits_are_those_of_the_last_real_token(case_model):
    tokens = random_tokens(case_model.config.vocab_size, 3, 12)
    positions, lengths, slots = torch.arange(12).expand(3, -1), torch.tensor([12, 1, 5]), torch.tensor([1, 2, 3])
    state, other = (poisoned_state(case_model, 3, 12) for _ in range(2))
    step = step_of(positions, lengths, slots, state)
    everything, last = case_model(tokens, step, state, all_logits=True), case_model(tokens, step, other)
    assert last.shape == (3, case_model.config.vocab_size)
    assert (last - everything[torch.arange(3), lengths - 1]).abs().max() <= 1e-5


@pytest.mark.versions
@pytest.mark.parametrize("config", [small_config, nemotron_config], ids=["granite", "nemotron"])
def test_embeddings_of_padding_may_be_nan(kernels, config):
    """NaN in padding does not reach a real token through any layer."""
    model = random_model(config()).bind(kernels)
    tokens = random_tokens(model.config.vocab_size, 2, 20)
    lengths = torch.tensor([20, 7])
    padding = torch.arange(20) >= lengths[:, None]

    def poison(module, arguments, output):
        return output.masked_fill(padding[..., None], math.nan)

    def run():
        state = poisoned_state(model, 2, 20)
        with torch.inference_mode():
            step = step_of(torch.arange(20).expand(2, -1), lengths, torch.tensor([1, 2]), state)
            logits = model(tokens, step, state, all_logits=True)
        return logits[~padding], [tensor[1:] for tensor in state.tensors()]

    clean_logits, clean_state = run()
    hook = model.model.embed_tokens.register_forward_hook(poison)
    poisoned_logits, new_state = run()
    hook.remove()
    # Not bit by bit, because experts see their tokens in groups and the poisoned tokens choose other experts.
    assert (poisoned_logits - clean_logits).abs().max() <= 1e-5
    for clean, poisoned in zip(clean_state, new_state, strict=True):
        assert torch.equal(clean.isnan(), poisoned.isnan())
        assert (clean.nan_to_num() - poisoned.nan_to_num()).abs().max() <= 1e-5


def _error(logits, exact):
    return (logits.double() - exact.double()).abs()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *NEMOTRON_EXPERTS) if case.name != "time_step_limit"], ids=lambda case: case.name
)
def test_bfloat16_error_is_not_above_that_of_transformers(case, random_checkpoints, kernels):
    skip_if_not_in_reference(case.name)
    folder = random_checkpoints(replace(case, name=f"{case.name}_bf16"), dtype=torch.bfloat16)
    model = load_model(folder).bind(kernels)
    assert model.dtype == torch.bfloat16
    tokens = random_tokens(model.config.vocab_size, 4, 300)
    exact = reference_logits(folder, tokens)
    theirs = _error(reference_logits(folder, tokens, torch.bfloat16), exact)
    for cuts in ([300], [200] + [1] * 100):
        ours = _error(run_cuts(model, tokens, cuts), exact)
        assert ours.mean() <= theirs.mean()
