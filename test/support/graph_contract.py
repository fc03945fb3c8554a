"""The contract of every runtime of compiled graphs: the CPU runtime's numbers and texts, a fixed set of graphs, and
state that a step changes only where it should.

A test module takes these classes as bases and has the fixture `backend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs.runtime import SHORTEST_CACHE, DecodedOnDevice, GraphRuntime
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request, Sampler, SamplingParams
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.runtime.interface import FROM_DEVICE, Row
from granite4_neuron.runtime.prompt_cuts import Pieces
from granite4_neuron.state.hybrid_state import HybridState, MambaState
from test.support.checkpoints import CASES, DENSE, NEMOTRON_EXPERTS, small_config
from test.support.engines import VOCAB, ChunkRuntime, engine_model, generate_one, run, tokens_of
from test.support.stepping import random_tokens
from test.support.verification import LONGEST, Round, streams, verified_error
from test.unit.engine.test_constraint import STOP, Ladder

BUCKETS = (16, 64)
# Compiling a graph takes a second for each layer, and layers of the same kind behave alike.
FEW_LAYERS = dict(layer_types=("mamba", "attention", "mamba"))

# Prefill of several lengths, one of them in three pieces; decode in any order, with idle slots; a second prefill while
# others decode; a verify step; all at once, with a sequence that begins with a single token.
STEPS = [
    [(2, 5), (1, 150), (3, 16)],
    [(3, 1), (1, 1), (2, 1)],
    [(1, 1)],
    [(4, 33)],
    [(2, 1), (4, 1), (1, 1), (3, 1)],
    [(1, 4)],
    [(1, 1), (2, 1)],
    [(4, 20), (2, 3)],
    [(4, 1), (3, 1)],
    [(3, 1), (5, 1), (1, 6), (2, 1)],
    [(5, 1), (2, 1), (1, 1)],
]


@dataclass(frozen=True)
class Backend:
    """A runtime under test.

    make: makes a runtime from a model and prefill buckets.
    compilations: returns the number of graphs compiled so far, by a runtime or by all of them.
    sync: waits until state that a test wrote is on the device.
    tolerance: the largest difference of logits and states in float32 from the CPU runtime's.
    """

    make: Callable[[HybridForCausalLM, Sequence[int]], GraphRuntime]
    compilations: Callable[[GraphRuntime], int]
    sync: Callable[[], None] = lambda: None
    tolerance: float = 1e-5

    def runtimes(self, make_model: Callable[[], HybridForCausalLM]) -> tuple[CPURuntime, GraphRuntime]:
        """Load the same model on the CPU runtime and on this one."""
        return CPURuntime(make_model(), GenerationConfig()), self.make(make_model(), BUCKETS)

    def poison(self, state: HybridState) -> None:
        """Write NaN into all state, the caches' null slot included."""
        for tensor in state.tensors():
            tensor.fill_(math.nan)
        self.sync()


def run_steps(runtime, steps, num_sequences, max_length, prepare=lambda state: None):
    """Return the logits of each step. A step is a list of (slot, number of tokens); the slot tells sequences apart."""
    vocab_size = runtime.config.vocab_size
    tokens = random_tokens(vocab_size, num_sequences + 1, max_length).tolist()
    done = [0] * (num_sequences + 1)
    state, logits = runtime.allocate(num_sequences, max_length), []
    prepare(state)
    for step in steps:
        rows = [Row(slot, done[slot], tokens[slot][done[slot] : done[slot] + count]) for slot, count in step]
        logits.append(runtime.step(state, rows))
        for slot, count in step:
            done[slot] += count
    return logits


def exhaustive_except(*names: str) -> list:
    """Return all cases as parameters and mark the others exhaustive: the named ones cover all parts of graphs."""
    return [
        pytest.param(case, marks=[] if case.name in names else [pytest.mark.exhaustive], id=case.name)
        for case in (*CASES, *NEMOTRON_EXPERTS)
    ]


class StepContract:
    """Steps have the CPU runtime's logits, from poisoned state, and leave other slots alone."""

    @pytest.mark.parametrize("case", exhaustive_except("moe", "rope", "mamba_only"))
    def test_logits_equal_the_cpu_runtimes(self, backend, case):
        """The models have one layer of each kind; the bundled model has several."""
        kinds = tuple(dict.fromkeys(case.config().layer_types))
        config = replace(case.config(), layer_types=kinds, num_hidden_layers=len(kinds))
        cpu, ours = backend.runtimes(lambda: random_model(config, max_A=case.max_A))
        expected_logits = run_steps(cpu, STEPS, 5, 200)
        for expected, logits in zip(expected_logits, run_steps(ours, STEPS, 5, 200, backend.poison), strict=True):
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() <= backend.tolerance

    def test_a_sequence_of_nan_stays_alone(self, backend):
        """A sequence of NaN decodes in the same steps as others and changes none of their logits."""
        cpu, ours = backend.runtimes(lambda: random_model(small_config(**FEW_LAYERS)))
        states, tokens = [runtime.allocate(4, 50) for runtime in (cpu, ours)], random_tokens(160, 40).tolist()

        def step(*rows):
            return [runtime.step(state, rows) for runtime, state in zip((cpu, ours), states, strict=True)]

        step(*(Row(slot, 0, tokens[:20]) for slot in (1, 2, 3)))
        for layer in states[1].layers:
            if isinstance(layer, MambaState):
                for tensor in vars(layer).values():
                    tensor[1].fill_(math.nan)
        for position in range(20, 24):
            expected, logits = step(*(Row(slot, position, tokens[position : position + 1]) for slot in (3, 2, 1)))
            assert logits[1].isnan().all()
            assert (logits - expected)[[0, 2]].abs().max() <= backend.tolerance

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_step_leaves_other_slots_alone(self, backend, dtype):
        """Other slots stay the same bit by bit while some decode, and while one is prefilled among decoding ones."""
        runtime = backend.make(random_model(small_config(**FEW_LAYERS), dtype=dtype), BUCKETS)
        state, tokens = runtime.allocate(4, 50), random_tokens(160, 40).tolist()

        def bits(slot):
            """Return the bits of a slot in all state tensors."""
            return [tensor.to("cpu", copy=True).view(torch.uint8) for tensor in state.slot_views(slot).values()]

        runtime.step(state, [Row(slot, 0, tokens[: 5 * slot]) for slot in (1, 2, 3, 4)])
        runtime.step(state, [Row(slot, 5 * slot, tokens[:1]) for slot in (1, 2, 3, 4)])
        steps = (
            [Row(2, 11, tokens[:1])],
            [Row(3, 16, tokens[:1]), Row(1, 6, tokens[:1])],
            [Row(3, 17, tokens[:4])],
            [Row(2, 0, tokens[1:9])],
            [Row(4, 0, tokens[1:2])],
        )
        for rows in steps:
            before = {slot: bits(slot) for slot in (1, 2, 3, 4)}
            runtime.step(state, rows)
            for slot, old in before.items():
                are_same = [torch.equal(*pair) for pair in zip(old, bits(slot), strict=True)]
                assert not any(are_same) if slot in {row.slot for row in rows} else all(are_same)

    def test_all_logits(self, backend):
        cpu, ours = backend.runtimes(lambda: random_model(small_config(**FEW_LAYERS)))
        tokens = random_tokens(cpu.config.vocab_size, 100).tolist()
        states = [runtime.allocate(3, 101) for runtime in (cpu, ours)]
        steps = (
            [Row(1, 0, tokens), Row(2, 0, tokens[:7])],
            [Row(2, 7, tokens[:1]), Row(1, 100, tokens[:1])],
            [Row(3, 0, tokens[:1]), Row(2, 8, tokens[:1])],
            [Row(3, 1, tokens[:1]), Row(2, 9, tokens[:3])],
        )
        for rows in steps:
            expected, logits = (
                runtime.step(state, rows, all_logits=True) for runtime, state in zip((cpu, ours), states, strict=True)
            )
            assert logits.shape == expected.shape
            for one, other, row in zip(logits, expected, rows, strict=True):
                assert (one - other)[: len(row.tokens)].abs().max() <= backend.tolerance

    def test_logits_where_sequences_outgrow_a_bucket_of_the_cache(self, backend):
        """Steps end before the bucket's end, at it and after it, beside a short sequence.

        States are random, because running so many tokens would take long. Keys are small, so that all tokens count.
        """
        config = small_config(**DENSE, layer_types=("mamba", "attention"))
        cpu, ours = backend.runtimes(lambda: random_model(config))
        begun = {1: SHORTEST_CACHE - 2, 2: 300, 3: SHORTEST_CACHE - 20, 4: SHORTEST_CACHE - 3}
        states = [runtime.allocate(len(begun), SHORTEST_CACHE + 200) for runtime in (cpu, ours)]
        generator = torch.Generator().manual_seed(0)
        for tensor in states[0].tensors():
            tensor[1:] = 0.1 * torch.randn(tensor[1:].shape, generator=generator)
        backend.poison(states[1])
        for slot, length in begun.items():
            snapshot = cpu.snapshot(states[0], slot, length)
            ours.restore(states[1], [replace(snapshot, fingerprint=ours.fingerprint)], slot)
        tokens, lengths = random_tokens(config.vocab_size, len(begun) + 1, 200).tolist(), dict(begun)

        def step(*counts, accepted=None):
            rows = [Row(slot, lengths[slot], tokens[slot][:count]) for slot, count in counts]
            logits = []
            for runtime, state in zip((cpu, ours), states, strict=True):
                if accepted is None:
                    logits.append(runtime.step(state, rows))
                else:
                    verification = runtime.verify(state, rows)
                    runtime.commit(state, verification, accepted)
                    logits.append(verification.logits)
            for at, (slot, count) in enumerate(counts):
                lengths[slot] += count if accepted is None else accepted[at]
            assert (logits[1] - logits[0]).abs().max() <= backend.tolerance

        for counts in ([(2, 1), (1, 1)], [(1, 1), (2, 1)], [(1, 1), (2, 1)], [(2, 1), (1, 1)]):
            step(*counts)
        assert lengths[1] == SHORTEST_CACHE + 2
        step((3, 30))
        step((3, 90))
        step((4, 4), (2, 4), accepted=[2, 4])
        step((2, 5), (4, 5), accepted=[5, 5])
        step((4, 1), (2, 1))


class DecodeContract:
    """Tokens chosen on the device are those the host would choose, also if the next step runs them without the host."""

    def test_chosen_tokens(self, backend):
        cpu, ours = backend.runtimes(lambda: engine_model(layer_types=FEW_LAYERS["layer_types"]))
        states = [runtime.allocate(4, 60) for runtime in (cpu, ours)]
        backend.poison(states[1])
        lengths, tokens = {3: 9, 1: 5, 4: 7}, dict.fromkeys((3, 1, 4), 3)  # slot 2 is idle
        for runtime, state in zip((cpu, ours), states, strict=True):
            runtime.step(state, [Row(slot, 0, [slot] * length) for slot, length in lengths.items()])
        stops: tuple[int, ...] = ()
        for number in range(5):
            host = [Row(slot, lengths[slot], [tokens[slot]]) for slot in lengths]
            ahead = [replace(row, tokens=[FROM_DEVICE], stops=(150, *stops)) for row in host]
            rows = host if number in (0, 3) else ahead
            decoded = ours.decode(states[1], rows)
            expected = cpu.step(states[0], host)
            assert (decoded.logits(range(3)) - expected).abs().max() <= backend.tolerance
            assert torch.equal(decoded.logits([1]), decoded.logits([0, 1])[1:])
            assert list(decoded.tokens()) == expected.argmax(-1).tolist()
            tokens = dict(zip(lengths, decoded.tokens(), strict=True))
            lengths = {slot: length + 1 for slot, length in lengths.items()}
        # A stop token leaves its row's slot unchanged, and the other rows go on.
        before = {slot: ours.snapshot(states[1], slot, lengths[slot]).tensors for slot in lengths}
        stopped = [slot for slot in lengths if tokens[slot] == tokens[3]]
        decoded = ours.decode(
            states[1],
            [
                replace(row, tokens=[FROM_DEVICE], stops=(tokens[3],))
                for row in (Row(slot, lengths[slot], [0]) for slot in lengths)
            ],
        )
        decoded.tokens()
        for slot, length in lengths.items():
            after = ours.snapshot(states[1], slot, length).tensors
            is_same = all(torch.equal(before[slot][name], after[name]) for name in after)
            assert is_same == (slot in stopped)
        assert 0 < len(stopped) < 3
        # A row whose logits are not finite has no token, and the following step skips it.
        for tensor in states[1].slot_views(4).values():
            tensor.fill_(math.nan)
        backend.sync()
        host = [Row(slot, length, [3]) for slot, length in lengths.items()]
        assert [token < 0 for token in ours.decode(states[1], host).tokens()] == [False, False, True]
        following = ours.decode(states[1], [Row(row.slot, row.start + 1, [FROM_DEVICE]) for row in host])
        assert all(token >= 0 for token in following.tokens()[:2]) and following.logits([0, 1]).isfinite().all()

    def test_drawn_tokens(self, backend, monkeypatch):
        """Tokens are those that the host draws from the same logits, and so texts are the host's."""
        ours = backend.make(engine_model(layer_types=FEW_LAYERS["layer_types"]), BUCKETS)
        state = ours.allocate(4, 60)
        backend.poison(state)
        options = {3: dict(top_k=9, top_p=0.8), 1: dict(temperature=0.5, min_p=0.1), 2: dict(temperature=1e6), 4: {}}
        samplers = {slot: Sampler(SamplingParams(seed=slot, **each), 1) for slot, each in options.items() if each}
        lengths = {slot: 4 + slot for slot in options}
        ours.step(state, [Row(slot, 0, [slot] * length) for slot, length in lengths.items()])
        tokens = dict.fromkeys(options, 3)
        for number in range(8):
            rows = []
            for slot, length in lengths.items():
                draw = samplers[slot].draw((), 0, 0) if slot in samplers else None
                is_known = number in (0, 4)
                rows.append(Row(slot, length, [tokens[slot] if is_known else FROM_DEVICE], draw=draw))
            decoded = ours.decode(state, rows)
            found, logits = decoded.tokens(), decoded.logits(range(4))
            for row, token, row_logits in zip(rows, found, logits, strict=True):
                expected = (
                    samplers[row.slot](row_logits, range(row.start + 1)) if row.draw else int(row_logits.argmax())
                )
                assert token == expected
                tokens[row.slot], lengths[row.slot] = expected, row.start + 1
        requests = [Request([slot] * 5, 9 + slot, seed=slot, **each) for slot, each in options.items()]
        texts = []
        for _ in range(2):
            engine = Engine(ours, 4, max_length=60)
            ids = [engine.add(request) for request in requests]
            outputs = run(engine)
            texts.append([tokens_of(outputs[id]) for id in ids])
            monkeypatch.setattr(RunningSequence, "takes_drawn", False)
        assert texts[0] == texts[1]

    def test_tokens_by_all_options(self, backend, monkeypatch):
        """Texts and reports are those of the host, which a device that knows the options does not ask."""
        check_tokens_by_all_options(
            backend.make(engine_model(layer_types=FEW_LAYERS["layer_types"]), BUCKETS), monkeypatch
        )


NUCLEUS = dict(temperature=0.8, top_p=0.9)
# Requests with all options that a device may know.
CHOSEN = {
    "penalties": dict(**NUCLEUS, seed=1, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=3),
    "greedy": dict(presence_penalty=1.5, logprobs=20),
    "biases": dict(**NUCLEUS, seed=2, top_k=30, logit_bias={3: 5.0, 7: -4.0, 11: 3.5}, logprobs=0),
    "rules": dict(temperature=1.5, seed=3, suppress_tokens=[5, 6], min_tokens=7, stop_token_ids=list(range(60, 110))),
    "words": dict(bad_words_ids=[[9], [4, 4], [30, 31]], no_repeat_ngram_size=1, allowed_token_ids=list(range(3, 70))),
    "a constraint": dict(**NUCLEUS, seed=4, constraint=Ladder(), min_tokens=3, stop_token_ids=[STOP], logprobs=4),
    "none": dict(logprobs=1),
}


def check_tokens_by_all_options(runtime: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a runtime's texts and reports with those that its engine's host chooses."""
    copied: list[int] = []
    logits = DecodedOnDevice.logits
    monkeypatch.setattr(DecodedOnDevice, "logits", lambda decoded, rows: copied.extend(rows) or logits(decoded, rows))
    found = []
    for _ in range(2):
        engine = Engine(runtime, 4, max_length=60)  # some requests begin when others have ended
        ids = [engine.add(Request([slot] * 5, 9 + slot, **options)) for slot, options in enumerate(CHOSEN.values(), 3)]
        outputs = run(engine)
        assert not [each.error for of_one in outputs.values() for each in of_one if each.error]
        found.append([[(each.token, each.finish_reason, each.logprob) for each in outputs[id]] for id in ids])
        assert "choices" in runtime.cannot or not copied
        monkeypatch.setattr(RunningSequence, "takes_drawn", False)
    assert found[0] == found[1]


class SlotContract:
    """Copy, snapshot and restore run over poisoned memory and keep each bit, and a sequence continues as the original.
    On some processors a row's place among others changes how its sums are rounded, so logits have a tolerance.
    """

    LENGTH = 37

    @pytest.fixture
    def runtime(self, backend):
        return backend.make(random_model(small_config(**FEW_LAYERS)), BUCKETS)

    @pytest.fixture
    def begun(self, backend, runtime):
        """Return a state with sequences in slots 1 and 2."""
        state = runtime.allocate(3, 60)
        backend.poison(state)
        runtime.step(state, [Row(slot, 0, random_tokens(160, self.LENGTH, seed=slot).tolist()) for slot in (1, 2)])
        return state

    def go_on(self, runtime, state, slot):
        steps = [[3] * 5, [4], [5]]
        starts = [self.LENGTH, self.LENGTH + 5, self.LENGTH + 6]
        return torch.cat([runtime.step(state, [Row(slot, *step)]) for step in zip(starts, steps, strict=True)])

    def check_has(self, runtime, state, slot, snapshot):
        tensors = runtime.snapshot(state, slot, self.LENGTH).tensors
        assert tensors.keys() == snapshot.tensors.keys()
        assert all(torch.equal(tensor, snapshot.tensors[name]) for name, tensor in tensors.items())

    def test_copy(self, backend, runtime, begun):
        snapshot = runtime.snapshot(begun, 2, self.LENGTH)
        runtime.copy(begun, 2, 3, self.LENGTH)
        runtime.copy(begun, 1, 1, self.LENGTH)
        before = backend.compilations(runtime)
        runtime.copy(begun, 2, 1, self.LENGTH)
        assert backend.compilations(runtime) == before, "one graph for all slots"
        expected = self.go_on(runtime, begun, 2)
        for slot in (3, 1):
            self.check_has(runtime, begun, slot, snapshot)
            assert (self.go_on(runtime, begun, slot) - expected).abs().max() <= backend.tolerance

    def test_snapshot_and_restore(self, backend, runtime, begun):
        snapshot = runtime.snapshot(begun, 2, self.LENGTH)
        chain = [runtime.snapshot(begun, 2, 20), runtime.snapshot(begun, 2, self.LENGTH, start=20)]
        expected = self.go_on(runtime, begun, 2)
        backend.poison(begun)
        for slot, snapshots in ((3, [snapshot]), (1, chain)):
            runtime.restore(begun, snapshots, slot)
            self.check_has(runtime, begun, slot, snapshot)
            assert (self.go_on(runtime, begun, slot) - expected).abs().max() <= backend.tolerance

    def test_snapshots_are_those_of_the_cpu(self, backend, runtime, begun):
        """Snapshots have the CPU's layout. The CPU refuses them, because other kernels made their numbers."""
        snapshot = runtime.snapshot(begun, 2, self.LENGTH)
        cpu = CPURuntime(random_model(small_config(**FEW_LAYERS)), GenerationConfig())
        state = cpu.allocate(1, 60)
        with pytest.raises(UserError, match="was made with other kernels"):
            cpu.restore(state, [snapshot], 1)
        tensors = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
        cpu.restore(state, [replace(snapshot, tensors=tensors, fingerprint=cpu.fingerprint)], 1)
        for ours, theirs in zip(self.go_on(runtime, begun, 2), self.go_on(cpu, state, 1), strict=True):
            assert (ours - theirs).abs().max() <= backend.tolerance


class VerifyContract:
    """Verification and commit pass the checks that test/unit/devices/cpu/test_runtime.py makes on the CPU."""

    ROUNDS = (
        Round((5, 3, 5, 1), (0, 0, 0, 0)),
        Round((5, 3, 5, 1), (2, 3, 1, 1)),
        Round((4, 1, 2, 4), (4, 1, 2, 0)),
        Round((3, 8, 6, 2), (1, 5, 6, 2)),
    )

    @pytest.mark.parametrize("changes", [{}, DENSE], ids=["moe", "dense"])
    def test_whatever_is_accepted(self, backend, changes):
        cpu, ours = backend.runtimes(lambda: random_model(small_config(**changes, **FEW_LAYERS)))
        rows = [Row(i + 1, 0, tokens) for i, tokens in enumerate(streams(160, 4))]
        uncut = cpu.step(cpu.allocate(4, LONGEST), rows, all_logits=True)
        error = verified_error(
            ours, uncut, (0, 1, 2, 40), self.ROUNDS, prepare=backend.poison, after_commit=lambda state, lengths: None
        )
        assert error <= backend.tolerance

    def test_a_verification_changes_no_recurrent_state(self, backend):
        runtime = backend.make(random_model(small_config(**DENSE, **FEW_LAYERS)), BUCKETS)
        state = runtime.allocate(2, 60)
        runtime.step(state, [Row(1, 0, [3] * 9), Row(2, 0, [4] * 5)])

        def recurrent():
            layers = [layer for layer in state.layers if isinstance(layer, MambaState)]
            return [tensor.to("cpu", copy=True) for layer in layers for tensor in vars(layer).values()]

        before = recurrent()
        verification = runtime.verify(state, [Row(1, 9, [5] * 3)])
        assert all(map(torch.equal, before, recurrent()))
        runtime.commit(state, verification, [0])
        assert all(map(torch.equal, before, recurrent()))
        runtime.commit(state, verification, [2])
        for old, new in zip(before, recurrent(), strict=True):
            assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])


PROMPTS = [random_tokens(VOCAB, length, seed=length).tolist() for length in (1, 5, 40, 16)]
REPEATED = PROMPTS[1] * 6  # repeated, so that n-grams find drafts


class EngineContract:
    """The engine gives the CPU's texts, also with the prefix cache and speculation, from a constant set of graphs."""

    @pytest.fixture
    def model(self):
        return engine_model()

    def engine_runtime(self, backend, model):
        runtime = backend.make(model, (16, 32))
        runtime.generation_config = GenerationConfig(top_k=None)
        return runtime

    def expected(self, model, prompt, max_tokens):
        return generate_one(Engine(ChunkRuntime(model), 1), Request(prompt, max_tokens))

    def test_a_hit_gives_the_bits_of_a_run_without(self, backend, model):
        runtime, logits = self.engine_runtime(backend, model), []
        step, decode = runtime.step, runtime.decode

        def recorded(*args, **options):
            logits.append(step(*args, **options))
            return logits[-1]

        def recorded_decode(state, rows):
            decoded = decode(state, rows)
            logits.append(decoded.logits(range(len(rows))))
            return decoded

        runtime.step, runtime.decode = recorded, recorded_decode
        cache = PrefixCache(runtime, None, 32)
        prompt = PROMPTS[2] + PROMPTS[3]
        plain = generate_one(Engine(runtime, 1), Request(prompt, 4))
        without = logits[-4:]
        generate_one(Engine(runtime, 1, prefix_cache=cache), Request(PROMPTS[2], 1))
        logits.clear()
        assert generate_one(Engine(runtime, 1, prefix_cache=cache), Request(prompt, 4)) == plain
        assert cache.stats.hit_tokens == 32, "the last place for a snapshot in the shared prefix"
        assert len(logits) == 4 and all(map(torch.equal, logits, without))

    @pytest.mark.parametrize("kind", ["n-gram", "same model", "other model"])
    def test_speculation_prints_the_cpus_texts(self, backend, model, kind):
        runtime = self.engine_runtime(backend, model)
        small = model if kind == "same model" else engine_model(seed=1, layer_types=("mamba", "attention", "mamba"))
        if kind == "n-gram":
            drafter = NgramDrafter(1, 3)
        else:
            drafter = DraftModel(self.engine_runtime(backend, small), VOCAB, 2, 100)
        engine = Engine(runtime, 2, max_length=100, drafter=drafter, draft_tokens=3)
        prompts = (*PROMPTS, REPEATED)
        ids = [engine.add(Request(prompt, 12)) for prompt in prompts]
        outputs = run(engine)
        for id, prompt in zip(ids, prompts, strict=True):
            assert tokens_of(outputs[id]) == self.expected(model, prompt, 12)
        assert engine.stats.drafted_tokens > 0 and (kind != "same model" or engine.stats.acceptance_rate == 1)

    def test_both_add_a_constant_number_of_graphs(self, backend, model):
        runtime = self.engine_runtime(backend, model)
        cache = PrefixCache(runtime, None, 32)
        engine = Engine(runtime, 2, max_length=100, prefix_cache=cache, drafter=NgramDrafter(1, 3), draft_tokens=3)

        def texts(*prompts):
            before = backend.compilations(runtime)
            for prompt in prompts:
                engine.add(Request(prompt, 20))
            run(engine)
            return backend.compilations(runtime) - before

        texts(REPEATED, PROMPTS[2], REPEATED + PROMPTS[0], PROMPTS[2] + PROMPTS[1])
        assert texts(PROMPTS[3] * 2, REPEATED[:29], PROMPTS[3] + PROMPTS[2], PROMPTS[3] * 3) == 0
        assert cache.stats.hit_tokens > 0 and engine.stats.drafted_tokens > 0


@dataclass(frozen=True)
class Planted(Pieces):
    """A planted bug: prompts are cut anywhere, so states of answers are kept and found."""

    keeps_answers: ClassVar[bool] = True

    def last(self, most: int, length: int) -> int:
        return min(most, length)


class KeepsAnswers(Pieces):
    """A planted bug: places are right, but states of answers are kept at them too."""

    keeps_answers: ClassVar[bool] = True


class OneTextContract:
    """With a fixed number of slots, tokens and log-probabilities have the same bits whatever the arrival, the load, the
    requested cuts and the cache.
    """

    SLOTS, BUCKETS = 3, (16, 32)
    PROMPTS: ClassVar = [random_tokens(VOCAB, length, seed=length).tolist() for length in (40, 41, 70)]
    # Long enough that an answer reaches a place of the next turn. Its state there has other bits than a prompt's.
    NEW_TOKENS = 30

    def test_however_it_is_served(self, backend):
        runtime = backend.make(engine_model(), self.BUCKETS)
        runtime.generation_config = GenerationConfig(top_k=None)
        alone = [self.text(runtime, [prompt])[0] for prompt in self.PROMPTS]
        turns = [
            [*prompt, *(token for token, _ in text), *self.PROMPTS[1][:9]]
            for prompt, text in zip(self.PROMPTS, alone, strict=True)
        ]
        shared = [*self.PROMPTS[0][:35], *self.PROMPTS[2][:30]]
        prompts = [*self.PROMPTS, *turns, shared]
        alone += [self.text(runtime, [prompt])[0] for prompt in prompts[len(alone) :]]

        def is_one_text(**options):
            cache = self.cache(runtime)
            served = self.text(runtime, prompts, prefix_cache=cache, **options)
            return served == alone and cache.stats.hit_tokens

        assert self.text(runtime, prompts) == self.text(runtime, prompts, arrivals=3) == alone
        assert self.text(runtime, prompts, prompts_first=True, max_gap=1e-9) == alone
        assert self.text(runtime, prompts, cuts=(7, 33)) == alone
        assert is_one_text() and is_one_text(arrivals=20) and is_one_text(cuts=(17, 36), arrivals=5)
        for cuts in (Planted(self.BUCKETS), KeepsAnswers(self.BUCKETS)):
            runtime.prompt_cuts = cuts
            assert not is_one_text(arrivals=self.NEW_TOKENS * len(prompts)), f"{cuts} would not be seen"

    @staticmethod
    def cache(runtime):
        return PrefixCache(runtime, None, runtime.tokens_per_step, at_branches=True)

    def text(self, runtime, prompts, arrivals=0, cuts=(), **options):
        """Return each request's tokens and log-probabilities. Requests come `arrivals` steps apart."""
        engine, outputs = Engine(runtime, self.SLOTS, max_length=200, **options), {}
        waiting = [Request(prompt, self.NEW_TOKENS, temperature=0, logprobs=2, snapshots_at=cuts) for prompt in prompts]
        ids, steps = [], 0
        while waiting or engine.has_work:
            while waiting and steps >= arrivals * len(ids):
                ids.append(engine.add(waiting.pop(0)))
            for output in engine.step():
                assert output.error is None
                outputs.setdefault(output.id, []).append((output.token, output.logprob))
            steps += 1
        return [outputs[id] for id in ids]
