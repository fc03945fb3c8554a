"""Changes that requests make to logits, reports about logits, and cuts of prompts that begin alike."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from granite4_neuron import UserError
from granite4_neuron.engine import Engine, PrefixCache, Request, Sampler, SamplingParams
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.logprobs import reported
from granite4_neuron.engine.sampling import choose
from granite4_neuron.engine.token_rules import TokenRules, bits_of
from granite4_neuron.ops import sampling
from granite4_neuron.runtime.interface import Row
from test.support.engines import VOCAB, ChunkRuntime, generate_one, run
from test.support.stepping import random_tokens

pytestmark = pytest.mark.versions

PROMPT = random_tokens(VOCAB, 40, seed=1).tolist()


def scores_of(sampler, logits, tokens):
    """Return logits with the options that come before the temperature."""
    question = sampler.ask(logits, tokens)
    return sampling.scores(sampling.masked(question.logits, question.choice), question.choice)


def logits_by_hand(runtime, tokens):
    """Return logits after each of some tokens, computed in one step."""
    return runtime.step(runtime.allocate(1, 200), [Row(1, 0, tokens)], all_logits=True)[0]


class TestAdditions:
    @given(
        tokens=st.lists(st.integers(0, 7), min_size=3, max_size=12),
        frequency=st.sampled_from([-2, 0, 0.3, 2]),
        presence=st.sampled_from([-1.5, 0, 0.7]),
        logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-100, 1.5, 100]), max_size=3),
    )
    def test_equal_openais_formula(self, tokens, frequency, presence, logit_bias):
        """logit[j] -> logit[j] - count[j] * frequency - (count[j] > 0) * presence, token by token."""
        logits = torch.linspace(-1, 1, 8)
        expected = [
            value + logit_bias.get(id, 0) - tokens[2:].count(id) * frequency - (id in tokens[2:]) * presence
            for id, value in enumerate(logits.tolist())
        ]
        options = dict(logit_bias=logit_bias, frequency_penalty=frequency, presence_penalty=presence)
        scores = scores_of(Sampler(SamplingParams(temperature=0, **options), 2), logits, tokens)
        assert torch.allclose(scores, torch.tensor(expected), atol=1e-5)

    def test_are_applied_before_the_temperature(self):
        """Biases and penalties are added to the model's logits, before temperature and top_k."""
        params = SamplingParams(temperature=0.5, top_k=2, logit_bias={2: 1.5}, presence_penalty=1.0)
        sampler, logits = Sampler(params, 1), torch.tensor([1.0, 0.5, 0.0, -1.0])
        scores, choice = scores_of(sampler, logits, [9, 0]), sampler.ask(logits, [9, 0]).choice
        logs = sampling.log2_weights(scores, choice.scale)
        assert (logs * math.log(2)).tolist() == pytest.approx([-3, -2, 0, -5])
        assert sampling.kept(scores, logs, choice).tolist() == [False, True, True, False]

    def test_apply_to_their_own_sequence_only(self, runtime):
        """One request has a bias, one has penalties, and one has neither. In a batch each gets its text alone."""
        requests = [
            Request(PROMPT, 12),
            Request(PROMPT, 12, logit_bias={7: 100}),
            Request(PROMPT, 12, frequency_penalty=2.0, presence_penalty=2.0),
        ]
        alone = [generate_one(Engine(runtime, 1), request) for request in requests]
        engine = Engine(runtime, 3)
        ids = [engine.add(request) for request in requests]
        outputs = run(engine)
        assert [[output.token for output in outputs[id]] for id in ids] == alone
        assert alone[1] == [7] * 12 and alone[0] != alone[2]

    @given(
        tokens=st.lists(st.integers(0, 4), min_size=3, max_size=8),
        bad=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4),
        allowed=st.none() | st.sets(st.integers(0, 4), min_size=1),
    )
    def test_bad_words_and_allowed_tokens(self, tokens, bad, allowed):
        """A bad word's last token is not chosen after its other tokens. Only allowed tokens are chosen."""
        forbidden = {word[-1] for word in bad if word[:-1] == tokens[len(tokens) - len(word) + 1 :]}
        forbidden |= set() if allowed is None else set(range(5)) - allowed
        logits = torch.linspace(-1, 1, 5)
        expected = [float("-inf") if token in forbidden else value for token, value in enumerate(logits.tolist())]
        sampler = Sampler(SamplingParams(temperature=0, bad_words_ids=bad, allowed_token_ids=allowed), 0)
        assert bool(forbidden >= set(range(5))) or scores_of(sampler, logits, tokens).tolist() == expected
        assert not sampler.takes_likeliest or not (bad or allowed)

    def test_a_processor_cannot_allow_what_is_forbidden(self):
        options = dict(
            temperature=0, allowed_token_ids={2, 5}, logits_processors=[lambda _, scores: scores.new_ones(1, 8)]
        )
        assert Sampler(SamplingParams(**options), 0)(torch.zeros(8), [1]) == 2

    def test_verification_of_drafts_applies_them(self, runtime):
        request = Request(PROMPT[:8] * 4, 30, frequency_penalty=1.0, presence_penalty=1.0, logit_bias={3: 20, 7: 20})
        engine = Engine(runtime, 1, drafter=NgramDrafter())
        assert generate_one(engine, request) == generate_one(Engine(runtime, 1), request)
        assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens

    @pytest.mark.parametrize(
        "options, message",
        [
            (dict(frequency_penalty=2.1), "frequency_penalty is 2.1, and must be a number from -2 to 2"),
            (dict(presence_penalty="1"), "presence_penalty is '1', and must be a number from -2 to 2"),
            (dict(logit_bias={1: 101}), "logit_bias is {1: 101}, and must be a dictionary of numbers from -100 to 100"),
            (dict(logit_bias={VOCAB: 1}), "logit_bias has a token id outside the vocabulary"),
            (
                dict(allowed_token_ids=[]),
                "allowed_token_ids is .*, and must be a list or a set of token ids, at least one",
            ),
            (dict(allowed_token_ids={VOCAB}), "allowed_token_ids has a token id outside the vocabulary"),
            (dict(bad_words_ids=[[]]), "and must be a list of lists of token ids, none of them empty"),
            (dict(bad_words_ids=[[1, VOCAB]]), "bad_words_ids has a token id outside the vocabulary"),
            (dict(priority=0.5), "priority is 0.5, and must be a whole number"),
            (dict(cache_salt=""), "cache_salt is '', and must be a string that is not empty"),
            (dict(logprobs=21), "logprobs is 21, and must be a whole number from 0 to 20"),
            (dict(prompt_logprobs=-1), "prompt_logprobs is -1, and must be a whole number from 0 to 20"),
            (dict(seed=2**63), "and must be a whole number from 0 to 2"),
            (dict(temperature=-1), "^temperature is -1, and must be a number of at least 0"),
            (dict(top_p=2.0), "^top_p is 2.0, and must be a number above 0 and at most 1"),
            (dict(top_k=-3), "^top_k is -3, and must be a whole number of at least 0"),
            (dict(min_p=1.5), "^min_p is 1.5, and must be a number from 0 to 1"),
            (dict(repetition_penalty=0), "^repetition_penalty is 0, and must be a number above 0"),
        ],
        ids=str,
    )
    def test_ranges(self, runtime, options, message):
        with pytest.raises(UserError, match=message):
            Engine(runtime, 1).add(Request([1], **options))

    def test_a_default_of_the_checkpoint_outside_its_range(self, runtime, monkeypatch):
        monkeypatch.setattr(runtime.generation_config, "temperature", -1)
        with pytest.raises(UserError, match="temperature is -1, and must be a number of at least 0"):
            Engine(runtime, 1).add(Request([1], top_p=0.5))


class TestLogprobs:
    def test_a_report_is_a_list_of_pairs(self):
        report = sampling.logprobs(torch.tensor([1.0, 3, 2]), 2, 2)
        found = reported(2, report)
        assert found.token == found.rank == 2 and found.logprob == report.logprob
        assert found.top == list(zip([1, 2], report.values.tolist(), strict=True))
        assert hash(found.top) == hash(tuple(found.top)) and repr(found.top) == repr(list(found.top))

    @pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
    def test_of_prompt_and_new_tokens(self, model, drafted):
        """Log-probabilities do not depend on other requests, and are those before penalties."""
        runtime = ChunkRuntime(model)
        drafter = NgramDrafter() if drafted else None
        engine = Engine(runtime, 3, prefix_cache=PrefixCache(runtime, None, 16), drafter=drafter)
        generate_one(engine, Request(PROMPT, 3))
        asked = engine.add(Request(PROMPT, 9, logprobs=2, prompt_logprobs=3, presence_penalty=1.0))
        others = [engine.add(Request(PROMPT[:30], 5)), engine.add(Request(PROMPT, 5, logprobs=0))]
        outputs = run(engine)
        new = [output.token for output in outputs[asked]]
        expected = logits_by_hand(runtime, [*PROMPT, *new]).log_softmax(-1)
        reports = [*outputs[asked][0].prompt.logprobs, *[output.logprob for output in outputs[asked]]]
        assert len(reports) == len(PROMPT) + len(new) - 1
        for report, token, row in zip(reports, [*PROMPT, *new][1:], expected[:-1], strict=True):
            assert report.token == token and report.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert report.top[0][1] == pytest.approx(float(row.max()), abs=1e-4)
        assert [len(report.top) for report in reports] == [3] * (len(PROMPT) - 1) + [2] * len(new)
        assert all(output.prompt is None for output in outputs[asked][1:])
        assert outputs[others[0]][0].logprob is None and outputs[others[1]][0].logprob.top == []

    def test_cached_tokens_are_reported_for_each_sequence(self, runtime):
        engine = Engine(runtime, 2, prefix_cache=PrefixCache(runtime, None, 16))
        cached = []
        for request in (Request(PROMPT, 2), Request([*PROMPT, 5], 2), Request(PROMPT, 2, prompt_logprobs=0)):
            id = engine.add(request)
            cached.append(run(engine)[id][0].prompt.cached_tokens)
        assert cached == [0, len(PROMPT), 0]


class TestBranches:
    def cached(self, engine, prompts):
        ids = [engine.add(Request(prompt, 2)) for prompt in prompts]
        outputs = run(engine)
        return [outputs[id][0].prompt.cached_tokens for id in ids]

    def test_a_third_prompt_goes_on_where_two_diverge(self, runtime):
        ends = [random_tokens(VOCAB, 20, seed=seed).tolist() for seed in (2, 3, 4, 5)]
        prompts = [[*PROMPT[:25], *end] for end in ends]
        for num_sequences in (1, 4):
            cache = PrefixCache(runtime, None, None, at_branches=True)
            assert self.cached(Engine(runtime, num_sequences, prefix_cache=cache), prompts) == [0, 0, 25, 25]
        cache = PrefixCache(runtime, None, None)
        assert self.cached(Engine(runtime, 4, prefix_cache=cache), prompts) == [0] * 4

    def test_a_short_common_prefix_gets_no_snapshot(self, runtime):
        cache = PrefixCache(runtime, None, None, at_branches=True)
        prompts = [[*PROMPT[:15], 1, 2], [*PROMPT[:15], 2, 3], [*PROMPT[:15], 3, 4]]
        assert self.cached(Engine(runtime, 1, prefix_cache=cache), prompts) == [0] * 3

    def test_texts_stay_the_same(self, runtime):
        cache = PrefixCache(runtime, None, 16, at_branches=True)
        prompts = [[*PROMPT[:length], *random_tokens(VOCAB, 9, seed=length).tolist()] for length in (40, 25, 30, 25, 5)]
        engine = Engine(runtime, 3, prefix_cache=cache)
        ids = [engine.add(Request(prompt, 10)) for prompt in [*prompts, *prompts]]
        outputs = run(engine)
        for id, prompt in zip(ids, [*prompts, *prompts], strict=True):
            alone = generate_one(Engine(runtime, 1), Request(prompt, 10))
            assert [output.token for output in outputs[id]] == alone


class TestRandomNumbers:
    def test_depend_on_the_seed_and_the_place_only(self):
        """A sampler may be asked in any order and number, also behind drafts; a fork chooses the same tokens."""
        logits, places = torch.zeros(500), [4, 9, 4, 300]
        sampler = Sampler(SamplingParams(temperature=1, seed=11), 1)
        tokens = [sampler(logits, range(place)) for place in places]
        assert tokens[0] == tokens[2] and len(set(tokens)) == 3
        assert [sampler.fork()(logits, range(place)) for place in places] == tokens
        asked = [sampler.ask(logits, range(place - 2), [3, 4]) for place in places]
        assert [each.token for each in choose(asked, sampler.form)] == tokens
        assert [Sampler(SamplingParams(temperature=1, seed=12), 1)(logits, range(place)) for place in places] != tokens

    def test_a_fork_counts_for_itself(self):
        """A drafter's choices are no tokens of the sequence, whose penalties do not count them."""
        logits = torch.tensor([0.0, 1.0, 0.9, 0.8])
        sampler = Sampler(SamplingParams(temperature=0, frequency_penalty=0.15), 1)
        assert sampler(logits, [0, 1]) == 2
        assert sampler.fork()(logits, [0, 1, 2, 2, 2]) == 1
        assert sampler(logits, [0, 1, 1]) == 2

    def test_a_request_without_a_seed_reports_the_one_that_it_gets(self, runtime):
        def first_output(**options):
            engine = Engine(runtime, 1)
            id = engine.add(Request(PROMPT, 8, temperature=1.5, **options))
            outputs = run(engine)[id]
            return outputs[0].prompt.seed, [output.token for output in outputs]

        (seed, tokens), (other, _) = first_output(), first_output()
        assert seed != other and first_output(seed=seed) == (seed, tokens)
        assert SamplingParams(seed=5).with_seed().seed == 5


def test_min_tokens_forbids_no_end_where_a_constraint_allows_ends_only():
    rules = TokenRules(SamplingParams(stop_token_ids=[1, 2], min_tokens=5), 0)
    for allowed, forbidden in ((range(1, 3), []), (range(3), [1, 2])):
        bits = bits_of(np.isin(np.arange(9), allowed))
        assert sorted(rules.forbidden(bits, [], 9)) == forbidden
