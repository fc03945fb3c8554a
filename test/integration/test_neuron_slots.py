"""Verification, commit and copies of slots in NxD Inference's CPU mode, against transformers' uncut sequences."""

import math
import os

import pytest
import torch
import torch.multiprocessing
from transformers import GenerationConfig

from granite4_neuron import load
from granite4_neuron.config import MAMBA, config_from_file
from granite4_neuron.engine import Engine, Request, SlotPrefixCache
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.runtime.interface import Row, require
from test.integration.test_bundled import PROMPTS as TEXTS
from test.integration.test_model import CASE, TOLERANCE, cpu_mode, free_port, reference_logits  # noqa: F401 (a fixture)
from test.support import nxdi
from test.support.checkpoints import Case
from test.support.engines import KnownText, run
from test.support.verification import Round, streams, verified_error

SLOTS, TOKENS = 3, 4
KERNELS = Case(
    "kernels", dict(layer_types=("mamba", "attention", "mamba"), mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64)
)  # sizes that the NKI kernels take
OPTIONS = dict(batch_size=SLOTS, ctx_batch_size=1, is_continuous_batching=True, speculation_length=TOKENS)

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("cpu_mode")]


def runtime_of(folder, kernels=None, **options):
    from granite4_neuron.devices.neuron.nxdi import NeuronRuntime

    return NeuronRuntime(nxdi.cpu_model(folder, kernels, **{**OPTIONS, **options}), GenerationConfig())


def tokens_and_logits(folder):
    vocab_size = config_from_file(folder / "config.json").vocab_size
    tokens = torch.tensor(streams(vocab_size, SLOTS))
    return tokens.tolist(), reference_logits(folder, tokens)


@pytest.fixture(scope="module")
def folder(random_checkpoints):
    return random_checkpoints(CASE["moe"])


@pytest.fixture(scope="module")
def sequences(folder):
    return tokens_and_logits(folder)


@pytest.fixture(scope="class")
def runtime(cpu_mode, folder):  # noqa: F811
    return runtime_of(folder)


@torch.inference_mode()
def poison(runtime, lengths=None):
    """Fill recurrent state with NaN. Fill caches with large finite numbers, because they are read with the weight 0.

    With `lengths`, fill only the caches behind the ends of sequences.
    """
    manager = runtime.model.models[0].model.kv_mgr
    for idx, kind in enumerate(manager.layer_types):
        for tensor in manager.past_key_values[2 * idx : 2 * idx + 2]:
            if kind != MAMBA:
                for slot, length in enumerate(lengths or [0] * SLOTS):
                    tensor[slot, :, length:] = 1e3
            elif lengths is None:
                tensor.fill_(math.nan)


@pytest.fixture(scope="class")
def with_kernels(cpu_mode, random_checkpoints):  # noqa: F811
    """Return a runtime with the NKI kernels, which run in the emulator, and logits of whole sequences."""
    folder = random_checkpoints(KERNELS)
    return runtime_of(folder, dict(prefill_scan="ssd", decode_kernel="nki")), tokens_and_logits(folder)[1]


@pytest.fixture
def launches(monkeypatch):
    """Record each kernel launch of a Mamba layer: its name, and whether it got a gate and counts."""
    from granite4_neuron.devices.neuron.nki import launch as launching

    seen, correct = [], launching.launch

    def launch(kernel, *arguments):
        last = [argument is not None for argument in arguments[-2:]]
        seen.append((kernel.function.__name__, *last))
        return correct(kernel, *arguments)

    monkeypatch.setattr(launching, "launch", launch)
    return seen


def verification_error(runtime, uncut, prefixes, rounds):
    return verified_error(
        runtime,
        uncut,
        prefixes,
        rounds,
        prepare=lambda state: poison(runtime),
        after_commit=lambda state, lengths: poison(runtime, lengths),
    )


def step_error(runtime, uncut, row, number):
    """Return how far a row's logits are from those of sequence `number`, which counts from 1."""
    logits = runtime.step(None, [row])[0]
    return (logits - uncut[number - 1][row.start + len(row.tokens) - 1]).abs().max().nan_to_num(math.inf).item()


def copy_error(runtime, tokens, uncut, length):
    """Return the largest error of a copied slot and its original as both continue, by several tokens and by one."""
    poison(runtime)
    runtime.step(None, [Row(2, 0, tokens[0][:length])])
    runtime.copy(None, 2, 3, length)
    errors = [step_error(runtime, uncut, Row(3, length, tokens[0][length : length + 9]), 1)]
    for slot, start in ((2, length), (3, length + 9), (2, length + 1)):
        errors.append(step_error(runtime, uncut, Row(slot, start, tokens[0][start : start + 1]), 1))
    return max(errors)


EVERY_COUNT = [[Round((4, 4, 4), (accepted, 4 - accepted, 1))] for accepted in range(5)]
RAGGED = [
    [Round((4, 1, 2), (2, 1, 2)), Round((1, 3, 4), (0, 2, 4)), Round((4, 4, 4), (3, 0, 4))],
    [Round((2, 3, 4), (1, 2, 3))] * 3,
]
PREFIXES = ((20, 1, 7), (0, 40, 2))


class TestVerification:
    @pytest.mark.parametrize("rounds", EVERY_COUNT + RAGGED)
    def test_verification_equals_step(self, rounds, runtime, sequences):
        for prefixes in PREFIXES:
            assert verification_error(runtime, sequences[1], prefixes, rounds) <= TOLERANCE

    @pytest.mark.parametrize("case", ["rope", "conv3_no_bias", "untied_head", "attention_only"])
    def test_every_kind_of_model_verifies(self, case, random_checkpoints):
        cases = {**CASE, "attention_only": Case("attention_only", dict(layer_types=("attention",) * 2))}
        folder = random_checkpoints(cases[case])
        assert verification_error(runtime_of(folder), tokens_and_logits(folder)[1], PREFIXES[0], RAGGED[0]) <= TOLERANCE

    def test_nki_kernels(self, with_kernels, launches):
        """One kernel has three forms (decode, verification and commit) and keeps the rules of the plain path."""
        runtime, uncut = with_kernels
        for rounds in (RAGGED[0], EVERY_COUNT[2]):
            assert verification_error(runtime, uncut, PREFIXES[0], rounds) <= TOLERANCE
        assert {name for name, *_ in launches} == {"mamba_prefill", "mamba_decode"}
        forms = {(has_outputs, counts) for name, has_outputs, counts in launches if name == "mamba_decode"}
        assert forms == {(True, True), (True, False), (False, True)}
        assert runtime.fallbacks == ()

    def test_states_of_16_bits(self, random_checkpoints, with_kernels, monkeypatch):
        """States are rounded at random at each step and commit, as in hardware: logits are near exact, not equal."""
        pytest.importorskip("nki.emulation", reason="a simulator may round as it likes")
        monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        folder = random_checkpoints(KERNELS)
        runtime = runtime_of(folder, dict(prefill_scan="ssd", decode_kernel="nki", state_dtype="bfloat16"))
        assert runtime.state_dtype == torch.bfloat16
        assert runtime.model.models[0].model.kv_mgr.past_key_values[1].dtype == torch.bfloat16
        error = verification_error(runtime, with_kernels[1], PREFIXES[0], RAGGED[0])
        assert TOLERANCE < error <= 5e-2

    def test_at_the_end_of_the_cache(self, runtime, sequences, folder):
        """Tokens fill the cache up to its last place. Tokens that only fill the graph have no place."""
        length = nxdi.MAX_LENGTH
        tokens = torch.tensor(sequences[0][0] * 3)[None, :length]
        expected = reference_logits(folder, tokens)[0]
        row = tokens[0].tolist()
        for left in (1, 2, 3, 4):
            start = length - left
            runtime.step(None, [Row(1, 0, row[:start])])
            verification = runtime.verify(None, [Row(1, start, row[start:])])
            assert (verification.logits[0] - expected[start:]).abs().max() <= TOLERANCE
            runtime.commit(None, verification, [left - 1])
            assert (runtime.step(None, [Row(1, length - 1, row[-1:])])[0] - expected[-1]).abs().max() <= TOLERANCE

    def test_slots_without_a_row_stay(self, runtime, sequences):
        tokens, uncut = sequences
        runtime.step(None, [Row(slot, 0, tokens[slot - 1][:30]) for slot in (1, 2, 3)])
        verification = runtime.verify(None, [Row(2, 30, tokens[1][30:34])])
        runtime.commit(None, verification, [4])
        for slot, start in ((1, 30), (2, 34), (3, 30)):
            row = Row(slot, start, tokens[slot - 1][start : start + 1])
            assert step_error(runtime, uncut, row, slot) <= TOLERANCE

    def test_more_tokens_than_the_graph_takes_are_refused(self, runtime, sequences):
        with pytest.raises(ValueError, match="at most 4 can"):
            runtime.verify(None, [Row(1, 0, sequences[0][0][:5])])


class TestCopies:
    @pytest.mark.parametrize("length", [1, 2, 3, 40, 100])
    def test_a_copy_and_its_original_continue(self, length, runtime, sequences):
        assert copy_error(runtime, *sequences, length) <= TOLERANCE

    def test_further_tokens_of_a_prompt(self, runtime, sequences, folder):
        """Further tokens run in one piece and in several, up to the cache's end."""
        tokens = torch.tensor(sequences[0][0] * 3)[None, : nxdi.MAX_LENGTH]
        expected, row = reference_logits(folder, tokens)[0], tokens[0].tolist()
        for cuts in ((5, 20), (100, nxdi.MAX_LENGTH), (1, 3, 131, 256)):
            poison(runtime)
            for start, end in zip((0, *cuts), cuts, strict=False):
                logits = runtime.step(None, [Row(1, start, row[start:end])])[0]
                assert (logits - expected[end - 1]).abs().max() <= TOLERANCE

    def test_without_a_graph_for_further_tokens(self, folder, sequences):
        """Further tokens are decoded where context encoding takes the longest sequence."""
        runtime = runtime_of(folder, max_context_length=nxdi.MAX_LENGTH)
        assert runtime.model.prefill_continuation_model is None
        assert copy_error(runtime, *sequences, 40) <= TOLERANCE

    def test_unsupported_calls_are_refused(self, folder, runtime):
        assert set(runtime.cannot) == {"all_logits", "hidden_states", "snapshot", "decode", "adapters"}
        single = runtime_of(folder, batch_size=1, speculation_length=0)
        for ability, attempt in {
            "verify": lambda: single.verify(None, [Row(1, 0, [1])]),
            "copy": lambda: single.copy(None, 1, 1, 1),
        }.items():
            for refused in (attempt, lambda ability=ability: require(single, ability)):
                with pytest.raises(UserError) as error:
                    refused()
                assert str(error.value) == single.cannot[ability]


def run_rank(rank, folder, port, results):
    """Run one process: verify sequences 1 and 3, accept part of 1 and all of 3, and copy sequence 1 to slot 2."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NXD_CPU_MODE="1")
    torch.set_num_threads(1)
    assert nxdi.why_not_importable() is None
    runtime, (tokens, uncut) = runtime_of(folder, tp_degree=2), tokens_and_logits(folder)
    poison(runtime)
    runtime.step(None, [Row(1, 0, tokens[0][:20])])
    runtime.step(None, [Row(3, 0, tokens[2][:7])])
    verification = runtime.verify(None, [Row(1, 20, [*tokens[0][20:22], 1, 2]), Row(3, 7, tokens[2][7:10])])
    errors = [
        (verification.logits[0, :2] - uncut[0, 20:22]).abs().max().item(),
        (verification.logits[1, :3] - uncut[2, 7:10]).abs().max().item(),
    ]
    runtime.commit(None, verification, [2, 3])
    runtime.copy(None, 1, 2, 22)
    errors.append(step_error(runtime, uncut, Row(2, 22, tokens[0][22:40]), 1))
    errors.append(step_error(runtime, uncut, Row(1, 22, tokens[0][22:23]), 1))
    errors.append(step_error(runtime, uncut, Row(3, 10, tokens[2][10:11]), 3))
    torch.save(errors, results / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks(folder, tmp_path):
    torch.multiprocessing.start_processes(
        run_rank, args=(folder, free_port(), tmp_path), nprocs=2, start_method="spawn"
    )
    for rank in range(2):
        assert max(torch.load(tmp_path / f"{rank}.pt")) <= TOLERANCE


class TestEngine:
    """Greedy texts of the bundled checkpoint change with a wrong state, and they are those of the CPU runtime."""

    PROMPTS = (TEXTS[0], TEXTS[0] * 2, "A", TEXTS[1] * 8)  # the last is longer than the bucket

    @pytest.fixture(scope="class")
    def runtime(self, cpu_mode):  # noqa: F811
        return runtime_of(bundled_checkpoint())

    @pytest.fixture(scope="class")
    def expected(self):
        ours, tokenizer = load(dtype=torch.float32)
        prompts = [tokenizer.encode(text) for text in self.PROMPTS]
        return prompts, self.texts(Engine(ours, 2), prompts)

    @staticmethod
    def texts(engine, prompts):
        ids = [engine.add(Request(prompt, 60, temperature=0)) for prompt in prompts]
        outputs = run(engine)
        return [[output.token for output in outputs[id]] for id in ids]

    def test_numbers_do_not_depend_on_others(self, runtime, expected):
        """With a fixed number of slots, whatever else runs, tokens are the same and log-probabilities within rounding.
        On some processors a row's place among others rounds its sums otherwise.
        """
        prompts, _ = expected

        def served(prompts, arrivals=0, **options):
            """Return each text's tokens and log-probabilities. A request comes `arrivals` steps after the last."""
            engine = Engine(runtime, SLOTS, max_length=nxdi.MAX_LENGTH, **options)
            ids, outputs = [], {}
            for prompt in prompts:
                ids.append(engine.add(Request(prompt, 20, temperature=0, logprobs=2)))
                for _ in range(arrivals):
                    for output in engine.step():
                        outputs.setdefault(output.id, []).append(output)
            for id, rest in run(engine).items():
                outputs.setdefault(id, []).extend(rest)
            return [[(output.token, output.logprob) for output in outputs[id]] for id in ids]

        def check(texts):
            for text, other in zip(texts, alone, strict=True):
                assert [token for token, _ in text] == [token for token, _ in other]
                differences = [abs(one.logprob - its.logprob) for (_, one), (_, its) in zip(text, other, strict=True)]
                assert max(differences) <= 1e-5

        alone = [served([prompt])[0] for prompt in prompts]
        check(served(prompts))
        check(served(prompts, arrivals=3))
        check(served(prompts, prompts_first=True, max_gap=1e-9))
        check(served(prompts, drafter=NgramDrafter(1, 3), draft_tokens=TOKENS - 1))

    def test_prompt_lookup(self, runtime, expected):
        prompts, texts = expected
        engine = Engine(runtime, 3, max_length=nxdi.MAX_LENGTH, drafter=NgramDrafter(1, 3), draft_tokens=TOKENS - 1)
        engine.warm_up()  # as serve does
        assert self.texts(engine, prompts) == texts
        assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens

    def test_prefixes_in_slots(self, runtime, expected):
        """Each prompt begins like an earlier one, and only its rest is run. The model's slots outlive an engine."""
        prompts, texts = expected
        cache = SlotPrefixCache(runtime, (2, 3), pinned=[prompts[0]])
        for found in (0, len(prompts[0])):
            engine = Engine(runtime, 1, max_length=nxdi.MAX_LENGTH, prefix_cache=cache)
            assert self.texts(engine, prompts[1:2]) == texts[1:2]
            assert engine.stats.cached_tokens >= found
            assert engine.stats.prompt_tokens == len(prompts[1]) - engine.stats.cached_tokens
        assert self.texts(engine, prompts[:1]) == texts[:1]

    def test_drafts_after_a_prefix_in_a_slot(self, runtime, expected):
        prompts, texts = expected
        cache = SlotPrefixCache(runtime, (2, 3), pinned=[prompts[0]])
        drafter = KnownText(prompts[1] + texts[1])
        for found in (0, len(prompts[0])):
            options = dict(prefix_cache=cache, drafter=drafter, draft_tokens=TOKENS - 1)
            engine = Engine(runtime, 1, max_length=nxdi.MAX_LENGTH, **options)
            assert self.texts(engine, prompts[1:2]) == texts[1:2]
            assert engine.stats.cached_tokens >= found
            assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


def commit_of_all_drafts(runtime, patch):
    correct = runtime.model.commit
    patch.setattr(runtime.model, "commit", lambda kept, starts, counts: correct(kept, starts, 0 * counts + TOKENS))


def commit_without_the_window(runtime, patch):
    from granite4_neuron.devices.neuron.nxdi.slot_graphs import CommitModel

    correct = CommitModel.advance

    def advance(self, *args):
        new = correct(self, *args)
        old = self.written_states()
        return [state if i % 2 else old[i].data for i, state in enumerate(new)]

    patch.setattr(CommitModel, "advance", advance)


def verification_that_writes_state(runtime, patch):
    from granite4_neuron.devices.neuron.nxdi.state import NeuronStep

    patch.setattr(NeuronStep, "write", NeuronStep._write)


def verification_without_its_own_tokens(runtime, patch):
    model = runtime.model.verification_model.model
    patch.setattr(model, "_end", lambda ids, mask: mask.sum(1, keepdim=True) + 1)


@pytest.mark.parametrize(
    "bug",
    [
        commit_of_all_drafts,
        commit_without_the_window,
        verification_that_writes_state,
        verification_without_its_own_tokens,
    ],
)
def test_a_bug_of_verification_is_seen(bug, folder, sequences, monkeypatch):
    runtime = runtime_of(folder)
    bug(runtime, monkeypatch)
    assert not verification_error(runtime, sequences[1], PREFIXES[0], RAGGED[1]) <= 3 * TOLERANCE


def change_arguments(change, patch):
    """Launch mamba_decode with its last two arguments, z and the counts, changed."""
    from granite4_neuron.devices.neuron.nki import launch as launching

    correct = launching.launch

    def launch(kernel, *arguments):
        if kernel.function.__name__ == "mamba_decode":
            *first, z, counts = arguments
            arguments = (*first, *change(z, counts))
        return correct(kernel, *arguments)

    patch.setattr(launching, "launch", launch)


def all_stand(z, counts):
    return z, None if counts is None else 0 * counts + TOKENS


def one_more_stands(z, counts):
    return z, counts if counts is None or z is not None else counts + 1


def none_stands(z, counts):
    return z, None if counts is None else 0 * counts


def no_gate(z, counts):
    return None if z is None else 0 * z + 1, counts


@pytest.mark.parametrize("change", [all_stand, one_more_stands, none_stands, no_gate])
def test_a_bug_around_the_kernel_is_seen(change, with_kernels, monkeypatch):
    runtime, uncut = with_kernels
    change_arguments(change, monkeypatch)
    assert not verification_error(runtime, uncut, PREFIXES[0], RAGGED[1]) <= 3 * TOLERANCE


def test_a_copy_that_forgets_the_window_is_seen(folder, sequences, monkeypatch):
    from granite4_neuron.devices.neuron.nxdi.slot_graphs import CopyModel

    runtime, correct = runtime_of(folder), CopyModel.forward

    def forward(self, slots):
        first, *states = correct(self, slots)
        kinds = self.kv_mgr.layer_types
        keep = [kinds[i // 2] == MAMBA and i % 2 == 0 for i in range(len(states))]
        states = zip(keep, self.written_states(), states, strict=True)
        return [first, *(old.data if kept else new for kept, old, new in states)]

    monkeypatch.setattr(CopyModel, "forward", forward)
    assert not copy_error(runtime, *sequences, 40) <= 3 * TOLERANCE
