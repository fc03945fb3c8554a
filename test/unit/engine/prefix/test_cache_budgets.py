"""Eviction by order of use and by budget, to the byte, in both prefix caches and in slots."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from granite4_neuron import UserError
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import (
    DraftModel,
    Engine,
    PrefixCache,
    Request,
    Sampler,
    SamplingParams,
    SlotPrefixCache,
    spare_slots,
)
from granite4_neuron.engine.drafting.drafters import DraftRequest
from granite4_neuron.engine.prefix.cache import SHORTEST_SHARED
from granite4_neuron.engine.slots import Slots
from granite4_neuron.state.hybrid_state import HybridState
from test.support.engines import CHUNK, VOCAB, ChunkRuntime, cached_bytes, engine_model, generate_one, run
from test.support.stepping import random_tokens

TOKENS = random_tokens(VOCAB, 150).tolist()
OTHERS = random_tokens(VOCAB, 150, seed=1).tolist()
PROMPTS = [tuple(OTHERS[start : start + 12]) for start in range(0, 120, 12)]
LOGITS = torch.zeros(VOCAB)


class WithOwnSlots(ChunkRuntime):
    """A runtime that keeps its own state."""

    own_slots = 9


def held(runtime, *lengths):
    """Return the bytes that sequences of these lengths hold, counted in the tensors of a state."""
    return sum(
        tensor[1].nbytes
        for length in lengths
        for tensor in HybridState.allocate(
            runtime.config, 1, length, runtime.dtype, "meta", state_dtype=runtime.state_dtype
        ).tensors()
    )


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def any_runtime(request, model):
    """Return a runtime with SSM states of each dtype in turn."""
    return CPURuntime(model, GenerationConfig(), cpu_kernels="torch", state_dtype=request.param)


@pytest.fixture
def state(runtime):
    return runtime.allocate(1, 150)


class TestTree:
    def keep(self, cache, state, *prompts):
        for tokens in prompts:
            cache.insert(tokens, state, 1, LOGITS)

    def kept(self, cache, prompts=PROMPTS):
        return [number for number, tokens in enumerate(prompts) if cache.export(tokens) is not None]

    @pytest.fixture
    def cache(self, runtime, state):
        """Return a cache with room for three of the prompts, and the first three of them."""
        cache = PrefixCache(runtime, 3 * (held(runtime, 12) + LOGITS.nbytes), None)
        self.keep(cache, state, *PROMPTS[:3])
        return cache

    def test_a_found_prefix_is_evicted_last(self, cache, state):
        for number in (0, 1):
            cache.release(cache.match_prefix(PROMPTS[number] + (7,)))
        self.keep(cache, state, PROMPTS[3])
        assert self.kept(cache) == [0, 1, 3]
        self.keep(cache, state, PROMPTS[4], PROMPTS[5])
        assert self.kept(cache) == [3, 4, 5] and cache.stats.evictions == 3

    def test_a_prefix_that_is_inserted_again_is_evicted_last(self, cache, state):
        self.keep(cache, state, PROMPTS[0], PROMPTS[3])
        assert self.kept(cache) == [0, 2, 3]

    def test_a_prefix_in_use_stays_and_keeps_its_place_in_the_order(self, cache, state):
        prefix = cache.match_prefix(PROMPTS[1])
        self.keep(cache, state, *PROMPTS[3:6])
        assert self.kept(cache) == [1, 4, 5]
        cache.release(prefix)
        self.keep(cache, state, PROMPTS[6])
        assert self.kept(cache) == [4, 5, 6]

    def test_a_byte_too_little(self, any_runtime):
        """The budget is for one prompt, for two, and for two that share their first tokens."""
        state = any_runtime.allocate(1, 40)
        branch = TOKENS[:12] + OTHERS[:8]
        both = held(any_runtime, 20) + held(any_runtime, 20) - held(any_runtime, 12) + held(any_runtime, 0)
        for prompts, size in (
            ([TOKENS[:20]], held(any_runtime, 20)),
            ([TOKENS[:20], OTHERS[:12]], held(any_runtime, 20, 12)),
            ([TOKENS[:20], branch], both),
        ):
            size += len(prompts) * LOGITS.nbytes
            enough, short = PrefixCache(any_runtime, size, None), PrefixCache(any_runtime, size - 1, None)
            for cache in (enough, short):
                self.keep(cache, state, *prompts)
                assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots)
            assert enough.stats.num_bytes == size and self.kept(enough, prompts) == list(range(len(prompts)))
            assert short.stats.snapshots == len(prompts) - 1 and enough.stats.evictions == 0

    @settings(max_examples=60)
    @given(
        uses=st.lists(
            st.tuples(st.sampled_from(["find", "keep", "release"]), st.integers(0, 3), st.integers(1, 6)), max_size=40
        ),
        entries=st.integers(0, 5),
        more=st.integers(-1, 1),
    )
    def test_any_uses(self, model, uses, entries, more):
        """Bytes are those of distinct prefixes. No more entries are evicted than the budget requires."""
        runtime = ChunkRuntime(model)
        state = runtime.allocate(1, 40)
        entry_bytes, token_bytes = held(runtime, 0) + LOGITS.nbytes, held(runtime, 1) - held(runtime, 0)

        def size(texts):
            prefixes = {text[:length] for text in texts for length in range(1, len(text) + 1)}
            return len(texts) * entry_bytes + len(prefixes) * token_bytes

        budget = entries * entry_bytes + 20 * token_bytes + more
        cache = PrefixCache(runtime, budget, None)
        kept, in_use = [], []
        for use, base, length in uses:
            # Four texts: two that begin alike, and two others.
            text = tuple((TOKENS if base < 2 else OTHERS)[: 2 * length]) + (base,) * length
            before = list(kept)
            if use == "find":
                prefix = cache.match_prefix(text)
                hits = [each for each in kept if text[: len(each)] == each]
                assert (0 if prefix is None else prefix.length) == max(map(len, hits), default=0)
                if hits:
                    in_use.append((max(hits, key=len), prefix))
            elif use == "keep":
                cache.insert(text, state, 1, LOGITS)
                kept = [each for each in kept if each != text] + [text]
                kept = [each for each in kept if cache.export(each) is not None]
            elif in_use:
                cache.release(in_use.pop()[1])
            assert cached_bytes(cache) == (cache.stats.num_bytes, cache.stats.snapshots) == (size(kept), len(kept))
            assert cache.stats.num_bytes <= budget and {each for each, _ in in_use} <= set(kept)
            if evicted := [each for each in before if each not in kept]:
                # Worth decides the order of evictions, so any of them may have been the last.
                assert text in kept and any(size([*kept, each]) > budget for each in evicted)

    def test_a_whole_prompt_in_the_cache_is_reported(self, runtime):
        engine = Engine(runtime, 1, prefix_cache=PrefixCache(runtime, None, CHUNK))
        generate_one(engine, Request(TOKENS[:45], 3))
        id = engine.add(Request(TOKENS[:45], 3))
        assert run(engine)[id][0].prompt.cached_tokens == 45

    def test_only_exported_snapshots_are_loaded(self, runtime, cache):
        exported = cache.export(PROMPTS[0])
        for changes, message in (
            (dict(tokens=PROMPTS[0][:-1]), "has 11 tokens and the state after 12"),
            (dict(tokens=()), "was not made from a prefix cache, with tokens and logits"),
            (dict(start=1), "of shape .* instead of"),
        ):
            with pytest.raises(UserError, match=message):
                PrefixCache(runtime, None, None).load(replace(exported, **changes))
        other = PrefixCache(runtime, None, None)
        other.load(exported)
        assert other.export(PROMPTS[0]).num_bytes == exported.num_bytes == other.stats.num_bytes

    def test_counts(self, cache):
        found = cache.match_prefix(PROMPTS[5]), cache.match_prefix(PROMPTS[0] + (1, 2))
        assert found[0] is None and found[1].length == 12
        assert (cache.stats.queries, cache.stats.hit_tokens, cache.stats.in_use) == (2, 12, 1)

    def test_the_cache_copies_logits(self, runtime, state):
        """The caller's logits may be a view of a step's logits, whose memory is reused."""
        cache, logits = PrefixCache(runtime, None, None), torch.arange(VOCAB).float()
        cache.insert(PROMPTS[0], state, 1, logits)
        logits.zero_()
        assert torch.equal(cache.match_prefix(PROMPTS[0]).logits, torch.arange(VOCAB).float())

    def test_an_engine_goes_on_from_several_pieces(self, any_runtime):
        """This holds for 16-bit states too: only the last piece has states."""
        cache = PrefixCache(any_runtime, None, any_runtime.tokens_per_step)
        engine = Engine(any_runtime, 1, prefix_cache=cache)
        cached = []
        for prompt in (TOKENS[:45], TOKENS[:60], TOKENS[:60] + OTHERS[:5]):
            id = engine.add(Request(prompt, 3))
            cached.append(run(engine)[id][0].prompt.cached_tokens)
        assert cached == [0, 45, 60] and len(cache.match_prefix(TOKENS[:60]).snapshots) > 1

    def test_where_prompts_diverge(self, runtime, state):
        """A snapshot is planned only far enough behind a known prefix, not just behind the beginning."""
        cache = PrefixCache(runtime, None, None, at_branches=True)
        self.keep(cache, state, TOKENS[:20], TOKENS[:60])
        for shared, branches in ((20 + SHORTEST_SHARED, {20 + SHORTEST_SHARED}), (19 + SHORTEST_SHARED, set())):
            assert cache.new_cuts([*TOKENS[:shared], (TOKENS[shared] + 1) % VOCAB]) == branches
        # There is no snapshot where the first two texts diverge.
        self.keep(cache, state, [*TOKENS[:50], (TOKENS[50] + 1) % VOCAB])
        assert cache.new_cuts([*TOKENS[:55], (TOKENS[55] + 1) % VOCAB]) == {55}


class TestReservedSlots:
    @settings(max_examples=60)
    @given(
        uses=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4)), max_size=40),
        slots=st.integers(2, 5),
        pinned=st.booleans(),
    )
    def test_any_uses(self, model, uses, slots, pinned):
        """The test keeps its own list of the prefixes, in the order of use."""
        runtime = ChunkRuntime(model)
        state, pin = runtime.allocate(8, 40), tuple(TOKENS[:5])
        cache = SlotPrefixCache(runtime, range(2, 2 + slots), [pin] if pinned else [])
        cache.attach(state)
        expected, evictions = [], 0  # the least recently used first
        for is_find, base, length in uses:
            text = tuple((TOKENS if base < 2 else OTHERS)[: 5 * length])
            if is_find:
                hits = [each for each in expected if text[: len(each)] == each]
                prefix = cache.match_prefix(text)
                assert (0 if prefix is None else prefix.length) == max(map(len, hits), default=0)
                if hits:
                    text = max(hits, key=len)
                    expected.remove(text)
                    expected.append(text)
                    cache.release(prefix)
                continue
            cache.insert(text, state, 1, LOGITS)
            if text not in expected and len(expected) == slots:
                expected.remove(next(each for each in expected if not pinned or each != pin))
                evictions += 1
            expected = [each for each in expected if each != text] + [text]
            assert list(cache._kept) == expected
            assert len({kept.slot for kept in cache._kept.values()}) == len(expected)
            stats = cache.stats
            assert (stats.snapshots, stats.evictions, stats.in_use) == (len(expected), evictions, 0)
            assert stats.num_bytes == len(expected) * LOGITS.nbytes

    def test_a_whole_prompt_in_the_cache_is_reported(self, runtime):
        engine = Engine(runtime, 1, prefix_cache=SlotPrefixCache(runtime, (2, 3)))
        generate_one(engine, Request(TOKENS[:45], 3))
        id = engine.add(Request(TOKENS[:45], 3))
        assert run(engine)[id][0].prompt.cached_tokens == 45

    def test_the_cache_copies_logits(self, runtime):
        cache, logits = SlotPrefixCache(runtime, (2, 3)), torch.arange(VOCAB).float()
        cache.insert(PROMPTS[0], runtime.allocate(3, 20), 1, logits)
        logits.zero_()
        assert torch.equal(cache.match_prefix(PROMPTS[0]).logits, torch.arange(VOCAB).float())

    def test_counts(self, runtime):
        cache = SlotPrefixCache(runtime, (2, 3))
        cache.insert(PROMPTS[0], runtime.allocate(3, 20), 1, LOGITS)
        found = cache.match_prefix(PROMPTS[1]), cache.match_prefix(PROMPTS[0] + (1, 2))
        assert found[0] is None and found[1].length == 12
        assert (cache.stats.queries, cache.stats.hit_tokens, cache.stats.in_use) == (2, 12, 1)

    def test_where_prompts_diverge(self, runtime):
        """A snapshot is planned only far enough behind a known prefix, not just behind the beginning."""
        cache = SlotPrefixCache(runtime, (2, 3, 4))
        state = runtime.allocate(4, 150)
        for length in (20, 60):
            cache.insert(TOKENS[:length], state, 1, LOGITS)
        for shared, branches in ((20 + SHORTEST_SHARED, {20 + SHORTEST_SHARED}), (19 + SHORTEST_SHARED, set())):
            assert cache.new_cuts([*TOKENS[:shared], (TOKENS[shared] + 1) % VOCAB]) == branches

    def test_spare_slots(self, model):
        """The model has 9 slots. Those that sequences do not use are spare, as many as fit the budget."""
        runtime = WithOwnSlots(model)
        slot_bytes = held(runtime, runtime.max_length)
        assert spare_slots(runtime, 6, 10 * slot_bytes) == range(7, 10)
        assert spare_slots(runtime, 6, 2 * slot_bytes) == range(7, 9)
        assert spare_slots(runtime, 6, 2 * slot_bytes - 1) == range(7, 8)
        assert spare_slots(runtime, 8, slot_bytes) == range(9, 10)
        with pytest.raises(
            UserError, match=f"a slot of the compiled model takes {slot_bytes:,} bytes; .* {slot_bytes - 1:,}"
        ):
            spare_slots(runtime, 6, slot_bytes - 1)
        with pytest.raises(UserError, match="is compiled for 9 sequences, and 9 run at a time"):
            spare_slots(runtime, 9, 10 * slot_bytes)


class TestSlots:
    def test_a_byte_too_little(self, any_runtime):
        budget = held(any_runtime, 30, 20)
        enough, short = (Slots(any_runtime, 3, 40, size) for size in (budget, budget - 1))
        for slots in (enough, short):
            assert slots.take(30, []) == 1
        assert enough.take(20, [1]) == 2 and enough.take(1, [1, 2]) is None
        assert short.take(20, [1]) is None and short.take(19, [1]) == 2

    def test_the_longest_sequence_that_fits(self, any_runtime):
        slots = Slots(any_runtime, 1, 100, held(any_runtime, 30))
        slots.check(30)
        with pytest.raises(UserError, match=f"needs {held(any_runtime, 31):,} bytes .* {held(any_runtime, 30):,}"):
            slots.check(31)

    def test_the_slot_with_the_most_memory_is_used_first(self, runtime):
        slots = Slots(runtime, 3, 100, None)
        assert [slots.take(10, []), slots.take(50, [1])] == [1, 2]
        assert slots.take(5, []) == 2 and slots.take(5, [2]) == 1 and slots.take(5, [1, 2]) == 3
        assert slots.take(5, [1, 2, 3]) is None

    def test_reserved_slots_are_above_the_sequences(self, runtime):
        Slots(runtime, 2, 10, None, (3,))
        with pytest.raises(UserError, match="slot 2 is set aside and 2 sequences"):
            Slots(runtime, 2, 10, None, (3, 2))


class Oracle:
    """A drafter that knows the text to come and drafts as many tokens as it may."""

    def __init__(self, text):
        self.text = text

    def propose(self, requests):
        return [self.text[len(request.tokens) :][: request.most] for request in requests]

    def end(self, id):
        pass


@pytest.mark.slow_cases
@pytest.mark.parametrize("draft_tokens", [1, 6, 9, 40])
def test_no_draft_passes_a_snapshot_that_is_due(runtime, model, draft_tokens):
    prompt = TOKENS[:21]
    text = prompt + generate_one(Engine(ChunkRuntime(model), 1), Request(prompt, 100))
    cache = PrefixCache(runtime, None, CHUNK)
    engine = Engine(runtime, 1, drafter=Oracle(text), draft_tokens=draft_tokens, prefix_cache=cache)
    assert prompt + generate_one(engine, Request(prompt, 100)) == text
    assert engine.stats.acceptance_rate == 1
    kept = [length for length in range(1, len(text) + 1) if cache.export(text[:length]) is not None]
    assert kept == sorted({*range(CHUNK, len(text), CHUNK), len(prompt), len(text) - 1})


def test_no_draft_passes_the_end(runtime, model):
    """For any number of tokens left to generate, no token is verified that could not be used."""
    prompt = TOKENS[:21]
    text = prompt + generate_one(Engine(ChunkRuntime(model), 1), Request(prompt, 40))
    for max_tokens in range(2, 16):
        verified = []

        class Counting(ChunkRuntime):
            def verify(self, state, rows, verified=verified):
                verified.append(rows[0].start + len(rows[0].tokens))
                return super().verify(state, rows)

        engine = Engine(Counting(model), 1, drafter=Oracle(text), draft_tokens=6)
        assert prompt + generate_one(engine, Request(prompt, max_tokens)) == text[: 21 + max_tokens]
        # The last token is chosen but never run.
        assert max(verified, default=0) <= 21 + max_tokens - 1


@pytest.fixture
def few(monkeypatch):
    """The runtime verifies 4 tokens of a row."""
    monkeypatch.setattr(ChunkRuntime, "tokens_per_verification", 4)
    return 4


def test_no_draft_is_more_than_a_verification_takes(runtime, model, few):
    prompt = TOKENS[:21]
    text = prompt + generate_one(Engine(ChunkRuntime(model), 1), Request(prompt, 60))
    for drafter in (Oracle(text), DraftModel(ChunkRuntime(model), VOCAB, 1, 200)):
        engine = Engine(runtime, 1, drafter=drafter, draft_tokens=40)
        assert prompt + generate_one(engine, Request(prompt, 60)) == text
        assert engine.stats.acceptance_rate == 1 and engine.stats.decode_tokens_per_row > few - 0.5


def test_a_draft_model_catches_up_by_any_number_of_tokens(model, few):
    """The draft model never runs its last draft, so it may lag by one token more than a verification takes."""
    chooser = Sampler(SamplingParams(temperature=0), 0)
    for more in range(1, 12):
        begun, fresh = (DraftModel(ChunkRuntime(model), VOCAB, 1, 200) for _ in range(2))
        begun.propose([DraftRequest(0, TOKENS[:20], 2, chooser)])
        asked = [DraftRequest(0, TOKENS[: 20 + more], 40, chooser)]
        [drafts] = begun.propose(asked)
        assert [drafts] == fresh.propose(asked) and len(drafts) == few + 1


def test_a_prefix_that_fills_the_state(runtime, state):
    snapshot = runtime.snapshot(state, 1, 20)
    runtime.restore(runtime.allocate(1, 20), [snapshot], 1)
    with pytest.raises(UserError, match="has 20 tokens and the state has room for 19"):
        runtime.restore(runtime.allocate(1, 19), [snapshot], 1)


def test_a_model_without_mamba_layers_counts_no_recurrent_state():
    runtime = ChunkRuntime(engine_model(layer_types=("attention", "attention")))
    cache = PrefixCache(runtime, held(runtime, 20) + LOGITS.nbytes, None)
    cache.insert(TOKENS[:20], runtime.allocate(1, 40), 1, LOGITS)
    assert cache.stats.num_bytes == cache.max_bytes
