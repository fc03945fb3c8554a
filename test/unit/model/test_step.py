"""Recurrent state without a null slot, as compiled graphs have it, against state with one."""

import pytest
import torch

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.model.step import step_of
from granite4_neuron.state.hybrid_state import MambaState
from test.support.checkpoints import CASES
from test.support.stepping import poisoned_state, random_tokens

pytestmark = pytest.mark.versions

LENGTHS = ([40, 23, 1, 0, 3], [2, 0, 1, 0, 30], [1, 1, 0, 0, 1], [3, 0, 0, 0, 2])
SLOTS = torch.tensor([4, 2, 5, 1, 3])


def recurrent(state):
    """Return conv_state and ssm_state of all Mamba layers, a row per sequence."""
    layers = [layer for layer in state.layers if isinstance(layer, MambaState)]
    return [tensor[int(state.has_null_slot) :] for layer in layers for tensor in vars(layer).values()]


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.inference_mode()
def test_logits_and_state_are_the_same(case):
    """Ragged steps run over poisoned memory, out of order and looked up, one sequence never begun; then decode."""
    model = random_model(case.config(), max_A=case.max_A)
    states = [poisoned_state(model, 5, 100, has_null_slot) for has_null_slot in (True, False)]
    starts = torch.zeros(5, dtype=torch.int64)

    def step(lengths, slots, dense_rows):
        lengths = torch.tensor(lengths)
        tokens = random_tokens(model.config.vocab_size, 5, int(lengths.max()), seed=int(lengths.sum()))
        positions = starts[slots - 1, None] + torch.arange(tokens.shape[1])
        before = [tensor.clone() for tensor in recurrent(states[1])]
        expected = model(tokens, step_of(positions, lengths, slots, states[0]), states[0])
        logits = model(tokens, step_of(positions, lengths, dense_rows, states[1]), states[1])
        starts[slots - 1] += lengths
        assert (logits - expected)[lengths > 0].abs().max() <= 1e-5
        has_begun, idle = starts > 0, slots[lengths == 0] - 1
        for old, new, same in zip(before, recurrent(states[1]), recurrent(states[0]), strict=True):
            assert (new - same)[has_begun].abs().max() <= 1e-5
            assert torch.equal(new[idle].nan_to_num(), old[idle].nan_to_num())

    for lengths in LENGTHS:
        step(lengths, SLOTS, SLOTS)
    in_order = torch.arange(1, 6)
    for lengths in ([0, 1, 1, 1, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]):
        step(lengths, in_order, None)
    starts[:] = 0
    step([7, 2, 1, 0, 30], in_order, None)  # in order; they start from zeros, whatever the state holds
