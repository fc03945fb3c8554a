"""State by slot on XLA is copied, saved, restored, verified and committed in graphs whose state is donated."""

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.model.state import MambaState
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import DENSE, small_config
from test.support.stepping import random_tokens
from test.support.verification import LONGEST, Round, streams, verified_error

pytest.importorskip("torch_xla", reason="torch_xla is not installed; the xla backend runs with torch 2.9")
from granite4_neuron.runtime.xla import XLARuntime
from test.integration.test_xla import BUCKETS, FEW_LAYERS, compilations, poison, runtimes


class TestSlots:
    """Copy, snapshot and restore run over poisoned memory, and a sequence continues bit by bit as the original does."""

    LENGTH = 37

    @pytest.fixture
    def runtime(self):
        return XLARuntime(random_model(small_config(**FEW_LAYERS)), GenerationConfig(), BUCKETS)

    @pytest.fixture
    def begun(self, runtime):
        """Return a state with sequences in slots 1 and 2."""
        state = runtime.allocate(3, 60)
        poison(state)
        runtime.step(state, [Row(slot, 0, random_tokens(160, self.LENGTH, seed=slot).tolist()) for slot in (1, 2)])
        return state

    def go_on(self, runtime, state, slot):
        steps = [[3] * 5, [4], [5]]
        starts = [self.LENGTH, self.LENGTH + 5, self.LENGTH + 6]
        return [runtime.step(state, [Row(slot, *step)]) for step in zip(starts, steps, strict=True)]

    def test_copy(self, runtime, begun):
        runtime.copy(begun, 2, 3, self.LENGTH)
        runtime.copy(begun, 1, 1, self.LENGTH)
        before = compilations()
        runtime.copy(begun, 2, 1, self.LENGTH)
        assert compilations() == before, "one graph for all slots"
        expected = self.go_on(runtime, begun, 2)
        for slot in (3, 1):
            assert all(map(torch.equal, self.go_on(runtime, begun, slot), expected))

    def test_snapshot_and_restore(self, runtime, begun):
        snapshot = runtime.snapshot(begun, 2, self.LENGTH)
        chain = [runtime.snapshot(begun, 2, 20), runtime.snapshot(begun, 2, self.LENGTH, start=20)]
        expected = self.go_on(runtime, begun, 2)
        poison(begun)
        for slot, snapshots in ((3, [snapshot]), (1, chain)):
            runtime.restore(begun, snapshots, slot)
            assert all(map(torch.equal, self.go_on(runtime, begun, slot), expected))

    def test_snapshots_are_those_of_the_cpu(self, runtime, begun):
        """A file that one runtime wrote can therefore be read by the other."""
        snapshot = runtime.snapshot(begun, 2, self.LENGTH)
        cpu = CPURuntime(random_model(small_config(**FEW_LAYERS)), GenerationConfig())
        state = cpu.allocate(1, 60)
        cpu.restore(state, [snapshot], 1)
        for ours, theirs in zip(self.go_on(runtime, begun, 2), self.go_on(cpu, state, 1), strict=True):
            assert (ours - theirs).abs().max() <= 1e-5


class TestVerify:
    """These are the checks that test/unit/test_verify.py makes on the CPU."""

    ROUNDS = (
        Round((5, 3, 5, 1), (0, 0, 0, 0)),
        Round((5, 3, 5, 1), (2, 3, 1, 1)),
        Round((4, 1, 2, 4), (4, 1, 2, 0)),
        Round((3, 8, 6, 2), (1, 5, 6, 2)),
    )

    @pytest.mark.parametrize("changes", [{}, DENSE], ids=["moe", "dense"])
    def test_whatever_is_accepted(self, changes):
        cpu, xla = runtimes(lambda: random_model(small_config(**changes, **FEW_LAYERS)))
        rows = [Row(i + 1, 0, tokens) for i, tokens in enumerate(streams(160, 4))]
        uncut = cpu.step(cpu.allocate(4, LONGEST), rows, all_logits=True)
        error = verified_error(
            xla, uncut, (0, 1, 2, 40), self.ROUNDS, prepare=poison, after_commit=lambda state, lengths: None
        )
        assert error <= 1e-5

    def test_the_graphs_are_few_and_the_state_does_not_move(self):
        """Each bucket has one graph that verifies and one that commits, and the state's memory stays in place."""
        runtime = XLARuntime(
            random_model(small_config(**DENSE, **FEW_LAYERS, vocab_size=164)), GenerationConfig(), BUCKETS
        )
        state = runtime.allocate(2, 60)
        runtime.step(state, [Row(1, 0, [3] * 9), Row(2, 0, [4] * 5)])
        before = compilations()
        for counts, accepted in (((4, 2), (3, 0)), ((1, 4), (1, 4)), ((3, 3), (0, 3))):
            rows = [Row(slot, 20, [5] * count) for slot, count in zip((1, 2), counts, strict=True)]
            runtime.commit(state, runtime.verify(state, rows), accepted)
        assert compilations() - before == 2
        runtime.commit(state, runtime.verify(state, [Row(2, 30, [5] * 7)]), [5])
        assert compilations() - before == 4

    def test_a_verification_changes_no_recurrent_state(self):
        runtime = XLARuntime(random_model(small_config(**DENSE, **FEW_LAYERS)), GenerationConfig(), BUCKETS)
        state = runtime.allocate(2, 60)
        runtime.step(state, [Row(1, 0, [3] * 9), Row(2, 0, [4] * 5)])

        def recurrent():
            layers = [layer for layer in state.layers if isinstance(layer, MambaState)]
            return [tensor.cpu() for layer in layers for tensor in vars(layer).values()]

        before = recurrent()
        verification = runtime.verify(state, [Row(1, 9, [5] * 3)])
        assert all(map(torch.equal, before, recurrent()))
        runtime.commit(state, verification, [0])
        assert all(map(torch.equal, before, recurrent()))
        runtime.commit(state, verification, [2])
        for old, new in zip(before, recurrent(), strict=True):
            assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])
