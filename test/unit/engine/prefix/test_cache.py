"""Sequences that continue from snapshots of earlier ones: hits, memory, and that texts stay the same."""

import itertools
import random
import re
from pathlib import Path

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.config import published_config
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.engine.prefix.cache import common_length
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, Anywhere, Multiples, Pieces
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Snapshot
from test.support.checkpoints import granite_names
from test.support.engines import (
    CHUNK,
    ENGINE_MODELS,
    VOCAB,
    ChunkRuntime,
    PoisonedPrefixCache,
    cached_bytes,
    engine_model,
    generate_one,
    poison_engine,
    run,
    tokens_of,
)
from test.support.stepping import random_tokens

TOKENS = random_tokens(VOCAB, 150).tolist()
OTHERS = random_tokens(VOCAB, 150, seed=1).tolist()


@pytest.fixture
def cache(runtime):
    return PoisonedPrefixCache(runtime, None, CHUNK)


def engine_with(runtime, cache, num_sequences=1):
    return Engine(runtime, num_sequences, prefix_cache=cache)


def new_tokens(runtime, cache, prompt, max_tokens=4, **options):
    return generate_one(engine_with(runtime, cache), Request(prompt, max_tokens, **options))


def run_tokens(runtime):
    """Return how many tokens were run since the last call."""
    counts = [sum(len(row.tokens) for row in rows) for rows in runtime.steps]
    runtime.steps.clear()
    return sum(counts)


class TestSameNumbers:
    """Logits of a sequence that continues from the cache equal those of one that does not."""

    def logits(self, runtime, cache, prompt, **options):
        runtime.logits.clear()
        tokens = new_tokens(runtime, cache, prompt, 6, **options)
        return tokens, dict(runtime.logits)

    def compare(self, runtime, first, second, hit, **options):
        plain, expected = self.logits(runtime, None, second, **options)
        cache = PoisonedPrefixCache(runtime, None, CHUNK)
        new_tokens(runtime, cache, first, **options)
        tokens, logits = self.logits(runtime, cache, second, **options)
        assert cache.stats.hit_tokens == hit
        assert min(logits) > hit and set(logits) == {length for length in expected if length > hit}
        return tokens == plain, max(float((logits[length] - expected[length]).abs().max()) for length in logits)

    @pytest.mark.parametrize("family", ENGINE_MODELS)
    @pytest.mark.parametrize("kernels", ["torch", "fused"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_logits_are_equal_bit_by_bit_at_the_usual_cuts(self, dtype, kernels, family):
        runtime = ChunkRuntime(ENGINE_MODELS[family](dtype=dtype), kernels)
        assert self.compare(runtime, TOKENS[:40], TOKENS[:32] + OTHERS[:30], hit=32) == (True, 0.0)
        named = dict(snapshots_at=frozenset([21, 37]))
        assert self.compare(runtime, TOKENS[:37], TOKENS[:60], hit=37, **named) == (True, 0.0)
        assert self.compare(runtime, TOKENS[:37] + OTHERS[:9], TOKENS[:39], hit=37, **named) == (True, 0.0)

    @pytest.mark.parametrize(
        ("dtype", "kernels"), [(torch.float32, "torch"), (torch.float32, "fused"), (torch.bfloat16, "fused")], ids=str
    )
    def test_at_the_end_of_a_prompt(self, dtype, kernels):
        """Logits are equal bit by bit with the fused kernels, and close with plain torch."""
        runtime = ChunkRuntime(engine_model(dtype=dtype), kernels)
        same, error = self.compare(runtime, TOKENS[:21], TOKENS[:60], hit=21)
        assert same and error <= (0 if kernels == "fused" else 1e-5)

    def test_logits_after_other_sequences_have_split_the_prefix(self, runtime):
        """Entries of other sequences cut the keys and values between two snapshots of the first prompt into pieces."""
        plain, expected = self.logits(runtime, None, TOKENS[:60])
        cache = PoisonedPrefixCache(runtime, None, CHUNK)
        new_tokens(runtime, cache, TOKENS[:45])
        for shared in (40, 42, 35):
            new_tokens(runtime, cache, TOKENS[:shared] + OTHERS[:9])
        tokens, logits = self.logits(runtime, cache, TOKENS[:60])
        assert min(logits) > 45 and tokens == plain
        assert max(float((logits[length] - expected[length]).abs().max()) for length in logits) <= 1e-5

    def test_a_snapshot_of_another_length_would_be_seen(self, runtime, monkeypatch):
        take = ChunkRuntime.snapshot

        def late(self, state, slot, length, start=0):
            if length == 32:
                runtime.step(state, [type(runtime.steps[0][0])(slot, 32, TOKENS[32:33])])
            return take(self, state, slot, length, start)

        monkeypatch.setattr(ChunkRuntime, "snapshot", late)
        assert self.compare(runtime, TOKENS[:32] + OTHERS[:3], TOKENS[:60], hit=32)[1] > 1e-3


class TestHits:
    def test_a_short_system_message(self, runtime, cache):
        system, positions = TOKENS[:20], frozenset([20])
        new_tokens(runtime, cache, system + OTHERS[:5], snapshots_at=positions)
        run_tokens(runtime)
        for question in (OTHERS[30:37], OTHERS[40:49]):
            new_tokens(runtime, cache, system + question, max_tokens=1, snapshots_at=positions)
            assert run_tokens(runtime) == len(question)

    def test_a_prompt_that_is_the_beginning_of_another(self, runtime, cache):
        new_tokens(runtime, cache, TOKENS[:40])
        expected = new_tokens(runtime, None, TOKENS[:32])
        run_tokens(runtime)
        assert new_tokens(runtime, cache, TOKENS[:32]) == expected and run_tokens(runtime) == 3

    def test_a_conversation_computes_its_new_tokens_only(self, runtime, cache):
        turns, prompt = [TOKENS[:30], OTHERS[:5], OTHERS[20:42], OTHERS[60:61]], []
        for number, turn in enumerate(turns):
            prompt += turn
            answer = new_tokens(runtime, cache, prompt, max_tokens=7)
            assert answer == new_tokens(ChunkRuntime(runtime.model), None, prompt, max_tokens=7)
            # The last token of an answer is chosen but not run before the next turn.
            assert run_tokens(runtime) == len(turn) + (number > 0) + 6
            prompt += answer

    def test_the_same_prompt_again_is_not_run_at_all(self, runtime, cache):
        first = new_tokens(runtime, cache, TOKENS[:45], max_tokens=1)
        run_tokens(runtime)
        assert new_tokens(runtime, cache, TOKENS[:45], max_tokens=1) == first and not runtime.steps
        engine = engine_with(runtime, cache)
        assert len(generate_one(engine, Request(TOKENS[:45], 5))) == 5 and run_tokens(runtime) == 4
        assert engine.stats.cached_tokens == 45 and engine.stats.prompt_tokens == 0
        assert engine.stats.generated_tokens == 5 and engine.stats.decode_tokens == 4

    def test_hits_of_prompts_that_diverge(self, runtime, cache):
        """Each new prompt finds its longest snapshot, in a tree that earlier prompts have split."""
        for shared, expected in ((70, 64), (33, 32), (66, 64), (10, 0), (64, 64), (17, 16)):
            if not cache.stats.queries:
                new_tokens(runtime, cache, TOKENS[:80])
            before = cache.stats.hit_tokens
            prompt = TOKENS[:shared] + OTHERS[shared : shared + 9]
            assert new_tokens(runtime, cache, prompt) == new_tokens(ChunkRuntime(runtime.model), None, prompt)
            assert cache.stats.hit_tokens - before == expected
            assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots)

    @pytest.mark.parametrize(
        ("kernels", "new", "stops"),
        [("fused", 16, [16, 20, 36]), ("fused", 17, [16, 20, 32, 37]), ("torch", 16, [16, 20, 36])],
    )
    def test_a_rest_that_fits_into_a_step_is_not_cut(self, model, kernels, new, stops):
        runtime = ChunkRuntime(model, kernels)
        assert runtime.prompt_cuts == Anywhere(is_exact=kernels == "fused")
        cache = PoisonedPrefixCache(runtime, None, CHUNK, at_branches=True)
        cache.insert(TOKENS[:30], runtime.allocate(1, 40), 1, torch.zeros(VOCAB))
        prompt = TOKENS[:20] + OTHERS[:new]
        new_tokens(runtime, cache, prompt, max_tokens=1)
        assert [row.start + len(row.tokens) for [row] in runtime.steps] == stops
        assert [cache.export(prompt[:length]) is not None for length in stops] == [True] * len(stops)
        assert cache.stats.snapshots == 1 + len(stops)

    @pytest.mark.parametrize(
        ("cuts", "kept", "hits"),
        [
            (Multiples(8), [16, 24, 30], [24, 30, 24, 24]),
            (Pieces((4, CHUNK)), [16, 30], [16, 30, 16, 16]),
            (ANYWHERE, [16, 30, 32, 45], [45, 30, 16, 16]),
        ],
        ids=str,
    )
    def test_a_prompt_goes_on_only_from_its_own_places(self, model, cuts, kept, hits):
        """On devices answers are not kept, and a prompt goes on from another prompt's end only if it is a cut point of
        its own too; then that prompt is not cut before it.
        """
        runtime = ChunkRuntime(model)
        runtime.prompt_cuts = cuts
        cache = PoisonedPrefixCache(runtime, None, CHUNK, at_branches=True)
        first = TOKENS[:30]
        text = [*first, *new_tokens(runtime, cache, first, max_tokens=16)]
        assert [length for length in range(1, len(text)) if cache.export(text[:length]) is not None] == kept
        prompts = [text + OTHERS[:9], first, first[:28] + OTHERS[:9], first[:28] + OTHERS[9:20]]
        found = []
        for prompt in prompts:
            before = cache.stats.hit_tokens
            new_tokens(runtime, cache, prompt, max_tokens=1)
            found.append(cache.stats.hit_tokens - before)
        assert found == hits
        runtime.steps.clear()
        new_tokens(runtime, cache, OTHERS[: 2 * CHUNK], max_tokens=1)
        assert [len(row.tokens) for [row] in runtime.steps] == [CHUNK, CHUNK]

    def test_prompts_that_share_nothing_are_not_cut(self, model):
        """A step and a snapshot for longer prompts are made again as soon as one has come, and not before."""
        runtime = ChunkRuntime(model)
        runtime.prompt_cuts = Multiples(8)
        cache = PoisonedPrefixCache(runtime, None, CHUNK, at_branches=True)

        def ends(prompt):
            runtime.steps.clear()
            before = cache.stats.snapshots
            new_tokens(runtime, cache, prompt, max_tokens=2)
            prompts = [rows[0] for rows in runtime.steps if len(rows[0].tokens) > 1]
            assert cache.stats.snapshots - before == len(prompts)
            return [row.start + len(row.tokens) for row in prompts]

        texts = [[number, *TOKENS[:29]] for number in range(12)]
        assert [ends(text) for text in texts] == 8 * [[16, 24, 30]] + 4 * [[16, 30]]
        assert ends([*texts[-1], *OTHERS[:20]]) == [32, 48, 50]  # it goes on behind one that was not cut
        assert ends(OTHERS[:30]) == [16, 24, 30]

    def test_only_requests_with_the_same_salt_share(self, runtime, cache):
        texts, found = [], []
        for salt in (None, "one", "two", "one", None):
            before = cache.stats.hit_tokens
            texts.append(new_tokens(runtime, cache, TOKENS, cache_salt=salt))
            found.append(cache.stats.hit_tokens - before)
        assert found == [0, 0, 0, len(TOKENS), len(TOKENS)] and texts == [texts[0]] * 5

    def test_prompts_of_one_batch(self, runtime, cache):
        """Prompts that share a beginning wait for the prompt that computes it, also if that one has begun before and is
        longer. Others do not wait.
        """
        shared, positions = TOKENS[:4], frozenset([4])
        prompts = [shared + OTHERS[i : i + 2] for i in range(5)]
        engine = engine_with(runtime, cache, 6)
        ids = [engine.add(Request(prompt, 3, snapshots_at=positions)) for prompt in prompts]
        ids.append(engine.add(Request(OTHERS[90:93], 3)))
        outputs = run(engine, lambda: poison_engine(engine))
        for id, prompt in zip(ids, (*prompts, OTHERS[90:93]), strict=True):
            assert tokens_of(outputs[id]) == new_tokens(ChunkRuntime(runtime.model), None, prompt, max_tokens=3)
        prompt_rows = [rows for rows in runtime.steps if any(len(row.tokens) > 1 for row in rows)]
        assert [len(rows) for rows in prompt_rows] == [2, 5]
        assert engine.stats.cached_tokens == 4 * len(shared)
        engine = engine_with(runtime, cache, 2)
        engine.add(Request(TOKENS[: 2 * CHUNK + 9], 1))
        engine.step()
        before = engine.stats.cached_tokens
        engine.add(Request(TOKENS[: 2 * CHUNK] + OTHERS[:1], 1))
        run(engine)
        assert engine.stats.cached_tokens == before + 2 * CHUNK

    @pytest.mark.parametrize("layer_types", [("mamba", "mamba"), ("attention", "attention")])
    def test_models_of_one_kind_of_layer(self, layer_types):
        runtime = ChunkRuntime(engine_model(layer_types=layer_types))
        cache = PoisonedPrefixCache(runtime, None, CHUNK)
        new_tokens(runtime, cache, TOKENS[:40])
        prompt = TOKENS[:35] + OTHERS[:9]
        assert new_tokens(runtime, cache, prompt) == new_tokens(runtime, None, prompt)
        assert cache.stats.hit_tokens == 32


class TestMemory:
    def test_keys_and_values_are_stored_once(self, runtime, cache):
        new_tokens(runtime, cache, TOKENS[: 10 * CHUNK - 10], max_tokens=1)
        lengths = [*range(CHUNK, 10 * CHUNK - 10, CHUNK), 10 * CHUNK - 10]
        config, itemsize = runtime.config, runtime.dtype.itemsize
        size = 10 * (sequence_bytes(config, itemsize) + 4 * VOCAB) + lengths[-1] * token_bytes(config, itemsize)
        assert cache.stats.snapshots == len(lengths) == 10 and cache.stats.num_bytes == size
        assert cached_bytes(cache) == (size, 10)

    def test_the_least_recently_used_makes_room(self, runtime):
        entry = sequence_bytes(runtime.config, runtime.dtype.itemsize) + 12 * token_bytes(
            runtime.config, runtime.dtype.itemsize
        )
        cache = PoisonedPrefixCache(runtime, 3 * (entry + 4 * VOCAB), None)
        prompts = [OTHERS[i : i + 12] for i in (0, 20, 40, 60)]
        for prompt in prompts[:3]:
            new_tokens(runtime, cache, prompt, max_tokens=1)
        new_tokens(runtime, cache, prompts[0], max_tokens=1)
        new_tokens(runtime, cache, prompts[3], max_tokens=1)
        assert [cache.export(prompt) is not None for prompt in prompts] == [True, False, True, True]
        assert cache.stats.evictions == 1 and cache.stats.snapshots == 3
        assert cached_bytes(cache) == (cache.stats.num_bytes, 3)

    def test_a_snapshot_in_use_is_not_evicted(self, runtime):
        entry = sequence_bytes(runtime.config, runtime.dtype.itemsize) + 20 * token_bytes(
            runtime.config, runtime.dtype.itemsize
        )
        cache = PoisonedPrefixCache(runtime, 2 * (entry + 4 * VOCAB), None)
        new_tokens(runtime, cache, TOKENS[:20], max_tokens=1)
        prefix = cache.match_prefix(TOKENS[:30])
        for start in range(0, 100, 20):
            new_tokens(runtime, cache, OTHERS[start : start + 20], max_tokens=1)
        assert cache.export(TOKENS[:20]) is not None and cache.stats.evictions == 4
        cache.release(prefix)
        for start in range(5, 45, 20):
            new_tokens(runtime, cache, OTHERS[start : start + 20], max_tokens=1)
        assert cache.export(TOKENS[:20]) is None

    def test_nothing_is_evicted_for_an_entry_that_would_still_not_fit(self, runtime):
        """One of two entries is in use, and evicting the other would not make room for the longer prompt."""
        config, itemsize = runtime.config, runtime.dtype.itemsize
        entry = sequence_bytes(config, itemsize) + 20 * token_bytes(config, itemsize) + 4 * VOCAB
        cache = PoisonedPrefixCache(runtime, 2 * entry, None)
        for prompt in (TOKENS[:20], OTHERS[:20]):
            new_tokens(runtime, cache, prompt, max_tokens=1)
        prefix = cache.match_prefix(TOKENS[:30])
        for prompt in (OTHERS[40:61], OTHERS[:19] + TOKENS[:2]):
            new_tokens(runtime, cache, prompt, max_tokens=1)
            assert cache.export(OTHERS[:20]) is not None and cache.stats.evictions == 0
            assert cached_bytes(cache) == (2 * entry, 2)
        new_tokens(runtime, cache, OTHERS[40:60], max_tokens=1)
        assert cache.stats.evictions == 1
        cache.release(prefix)
        new_tokens(runtime, cache, OTHERS[60:81], max_tokens=1)
        assert cached_bytes(cache) == (cache.stats.num_bytes, 1) and cache.stats.evictions == 3

    def test_every_sequence_that_ends_or_is_cancelled_lets_go(self, runtime, cache):
        new_tokens(runtime, cache, TOKENS[:20])
        engine = engine_with(runtime, cache, 3)
        ids = [engine.add(Request(TOKENS[:20] + OTHERS[:n], 5)) for n in (0, 3, 6)]
        for _ in range(3):
            engine.step()
        engine.cancel(ids[1])
        run(engine)
        assert cache.stats.in_use == 0

    def test_a_budget_for_nothing_keeps_nothing(self, runtime):
        cache = PoisonedPrefixCache(runtime, 10, CHUNK)
        assert new_tokens(runtime, cache, TOKENS[:40]) == new_tokens(runtime, None, TOKENS[:40])
        assert cached_bytes(cache) == (0, 0) == (cache.stats.num_bytes, cache.stats.snapshots)

    def test_a_budget_is_kept_to(self, runtime):
        budget = 9 * sequence_bytes(runtime.config, runtime.dtype.itemsize)
        cache = PoisonedPrefixCache(runtime, budget, CHUNK)
        for shared, start in itertools.product((0, 20, 50, 64, 90), (0, 30)):
            prompt = TOKENS[:shared] + OTHERS[start : start + 25]
            assert new_tokens(runtime, cache, prompt) == new_tokens(runtime, None, prompt)
            num_bytes, snapshots = cached_bytes(cache)
            assert num_bytes <= budget and (num_bytes, snapshots) == (cache.stats.num_bytes, cache.stats.snapshots)
        assert cache.stats.evictions > 0 and cache.stats.hit_tokens > 0

    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_comes_a_budget_is_kept_to_and_what_is_in_use_stays(self, runtime, seed):
        """Random sequences of two tokens share beginnings of all lengths. Some continue from a found prefix."""
        chance = random.Random(seed)
        entry = sequence_bytes(runtime.config, runtime.dtype.itemsize) + 4 * VOCAB
        cache = PoisonedPrefixCache(runtime, 8 * entry, None, at_branches=True)
        state, logits, in_use = runtime.allocate(1, 60), torch.zeros(VOCAB), []
        for _ in range(400):
            tokens = chance.choices((0, 1), k=chance.randint(1, 12)) + [2] * chance.randint(0, 40)
            prefix = cache.match_prefix(tokens)
            if prefix is not None and len(in_use) < 3:
                in_use.append((prefix, tokens[: prefix.length]))
            elif prefix is not None:
                cache.release(prefix)
            for length in sorted({len(tokens), *cache.new_cuts(tokens)}):
                cache.insert(tokens[:length], state, 1, logits)
            if in_use and chance.random() < 0.3:
                cache.release(in_use.pop(chance.randrange(len(in_use)))[0])
            assert all(cache.export(used) is not None for _, used in in_use)
            assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots)
            assert cache.stats.num_bytes <= 8 * entry and len(list(cache._entries)) == cache.stats.snapshots
        assert cache.stats.evictions > 100 and cache.stats.hit_tokens

    def test_the_ends_of_earlier_turns_make_room_first(self, runtime):
        """The end of one conversation's last turn outlives newer ends of another conversation's earlier turns."""
        entry = sequence_bytes(runtime.config, runtime.dtype.itemsize) + 4 * VOCAB
        token = token_bytes(runtime.config, runtime.dtype.itemsize)
        cache = PoisonedPrefixCache(runtime, 3 * entry + 100 * token, None)
        state, logits = runtime.allocate(1, 60), torch.zeros(VOCAB)
        for tokens in (OTHERS[:30], TOKENS[:20], TOKENS[:40], TOKENS[:60]):
            cache.insert(tokens, state, 1, logits)
        assert [cache.export(tokens) is not None for tokens in (OTHERS[:30], TOKENS[:60])] == [True, True]
        assert cache.stats.evictions == 1 and cache.export(TOKENS[:20]) is None

    @pytest.mark.parametrize(
        ("kept", "stays", "goes"),
        [
            # The end of a turn is evicted for the end of the next turn, although another entry is older and shorter.
            ([OTHERS[:20], TOKENS[:30], TOKENS[:40]], OTHERS[:20], TOKENS[:30]),
            # The place of divergence stays; the end of the older branch is evicted for the new one.
            ([TOKENS[:60], TOKENS[:40], TOKENS[:40] + OTHERS[:20]], TOKENS[:40], TOKENS[:60]),
        ],
        ids=["the next turn", "a branch"],
    )
    def test_the_parent_of_a_new_entry_is_known_before_an_eviction(self, runtime, kept, stays, goes):
        entry = sequence_bytes(runtime.config, runtime.dtype.itemsize) + 4 * VOCAB
        token = token_bytes(runtime.config, runtime.dtype.itemsize)
        cache = PoisonedPrefixCache(runtime, 2 * entry + 100 * token, None)
        state, logits = runtime.allocate(1, 60), torch.zeros(VOCAB)
        for tokens in kept:
            cache.insert(tokens, state, 1, logits)
        assert [cache.export(tokens) is not None for tokens in (stays, goes, kept[-1])] == [True, False, True]
        assert cached_bytes(cache) == (cache.stats.num_bytes, 2)

    def test_new_tokens_do_not_wait_for_snapshots(self, runtime, cache):
        engine = engine_with(runtime, cache)
        engine.add(Request(TOKENS[:10], 3))
        counts = []
        while engine.has_work:
            assert len(engine.step()) == 1
            counts.append(cache.stats.snapshots)
        assert counts == [0, 1, 2]

    def test_tokens_of_others_do_not_wait_for_the_snapshot_of_one_that_ends(self, runtime, cache):
        """They do not wait even for the snapshot of its whole text, before its slot goes to the next sequence."""
        engine = engine_with(runtime, cache, num_sequences=2)
        ends, goes_on, waits = [engine.add(Request(each, 3)) for each in (TOKENS[:5], OTHERS[:8], TOKENS[60:66])]
        outputs, kept = [], []
        while not any(output.id == ends and output.finish_reason for output in outputs):
            outputs = engine.step()
            kept.append(cache.stats.snapshots)
        assert kept[-1] == 2 and {output.id for output in outputs} == {ends, goes_on}
        engine.step()
        assert cache.stats.snapshots == 4, "of both"
        assert run(engine)[waits][-1].finish_reason == "length" and cache.stats.snapshots == 6
        for prompt in (TOKENS[:5], OTHERS[:8], TOKENS[60:66]):
            text = new_tokens(ChunkRuntime(runtime.model), None, prompt, 3)
            later = [*prompt, *text[:-1], *TOKENS[100:104]]
            assert cache.match_prefix(later).length == len(prompt) + 2
            assert new_tokens(runtime, cache, later) == new_tokens(ChunkRuntime(runtime.model), None, later)

    def test_the_snapshot_of_one_that_has_ended_is_kept_if_the_others_are_cancelled(self, runtime, cache):
        engine = engine_with(runtime, cache, num_sequences=2)
        ends, goes_on = engine.add(Request(TOKENS[:5], 2)), engine.add(Request(OTHERS[:8], 9))
        while not any(output.id == ends and output.finish_reason for output in engine.step()):
            pass
        assert cache.export(TOKENS[:5] + new_tokens(runtime, None, TOKENS[:5], 2)[:1]) is None
        engine.cancel(goes_on)
        assert not engine.has_work
        assert cache.export(TOKENS[:5] + new_tokens(runtime, None, TOKENS[:5], 2)[:1]) is not None

    def test_a_piece_of_a_prompt_whose_logits_are_infinite_leaves_nothing(self, runtime, cache, monkeypatch):
        step = ChunkRuntime.step

        def infinite(self, state, rows, all_logits=False):
            logits = step(self, state, rows, all_logits)
            return torch.full_like(logits, torch.inf) if rows[0].start == 0 else logits

        monkeypatch.setattr(ChunkRuntime, "step", infinite)
        new_tokens(runtime, cache, TOKENS[:40])
        assert cache.export(TOKENS[:16]) is None and cache.export(TOKENS[:32]) is not None

    def test_an_error_leaves_nothing(self, runtime, cache):
        engine = engine_with(runtime, cache)
        id = engine.add(Request(TOKENS[:20], 5))
        engine.step()
        with torch.inference_mode():
            engine._slots.state.layers[0].ssm_state[1] = torch.nan
        assert run(engine)[id][-1].finish_reason == "error"
        assert cache.stats.snapshots == 1 and cache.match_prefix(TOKENS[:20] + OTHERS[:9]).length == 16


def test_the_longest_common_prefix_of_sequences_of_any_type():
    chance = random.Random(0)
    for _ in range(200):
        shared = [chance.randrange(2) for _ in range(chance.randrange(20))]
        some, others = ([*shared, *(chance.randrange(3) for _ in range(chance.randrange(5)))] for _ in range(2))
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))
        assert common_length(some, tuple(others)) == len(list(equal))
    assert common_length(range(9), [*range(5), 9, 6, 7, 8]) == 5


def test_the_documented_sizes_are_those_of_the_state():
    text = (Path(__file__).parents[4] / "docs" / "engine.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (granite\S+)" + 3 * r" \| ([\d,]+) bytes" + r" \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == set(granite_names())
    for name, *documented in rows:
        config = published_config(name)
        recurrent, small, with_keys = (
            slot_bytes(HybridState.allocate(config, 2, 9, torch.bfloat16, "meta", state_dtype=dtype), length)
            for dtype, length in ((torch.float32, 0), (torch.float16, 0), (torch.float32, 9))
        )
        assert [int(size.replace(",", "")) for size in documented] == [recurrent, small, (with_keys - recurrent) / 9]


def slot_bytes(state, length):
    tensors = state.slot_tensors(torch.tensor([1], device="meta"), 0, length)
    return sum(tensor.nbytes for tensor in tensors.values())


class TestFiles:
    def test_a_prompt_goes_on_in_another_process(self, model, runtime, cache, tmp_path):
        expected = new_tokens(runtime, cache, TOKENS[:45])
        cache.export(TOKENS[:45]).save(tmp_path / "prompt")
        other = ChunkRuntime(model)
        loaded = PrefixCache(other, None, None)
        loaded.load(Snapshot.load(tmp_path / "prompt", other))
        assert new_tokens(other, loaded, TOKENS[:45]) == expected and run_tokens(other) == 3
        longer = TOKENS[:45] + OTHERS[:4]
        assert new_tokens(other, loaded, longer, max_tokens=1) == new_tokens(runtime, None, longer, max_tokens=1)
        assert run_tokens(other) == 4

    def test_an_unknown_prefix_is_not_exported(self, runtime, cache):
        new_tokens(runtime, cache, TOKENS[:45])
        for tokens in (TOKENS[:44], TOKENS[:46], OTHERS[:45], []):
            assert cache.export(tokens) is None

    def test_refusals(self, runtime, cache):
        new_tokens(runtime, cache, TOKENS[:20])
        other = ChunkRuntime(engine_model(seed=1))
        with pytest.raises(UserError, match="another checkpoint"):
            PrefixCache(other, None, None).load(cache.export(TOKENS[:20]))
        with pytest.raises(UserError, match="was not made from a prefix cache"):
            cache.load(runtime.snapshot(runtime.allocate(1, 20), 1, 20))
        for interval in (0, 24, -16):
            with pytest.raises(UserError, match="must be a multiple of 16"):
                PrefixCache(runtime, None, interval)
        with pytest.raises(UserError, match="the prompt has 3"):
            engine_with(runtime, cache).add(Request([1, 2, 3], snapshots_at=frozenset([0])))
