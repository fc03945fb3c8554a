"""Adapters beside the base model in one batch: logits are PEFT's, and no way of serving changes a sequence's text."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

pytest.importorskip("peft", reason="peft is not installed")

from granite4_neuron.checkpoint.adapters import read_adapter
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row
from test.support.adapters import EXPERTS, peft_logits, peft_text, reference, save_adapter
from test.support.checkpoints import CASES
from test.support.engines import run, tokens_of
from test.support.verification import poison

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

NAMED = {case.name: case for case in CASES}
INVOCATION, OTHER_INVOCATION = [7, 11, 13], [5]
ADAPTERS = {
    "all": dict(target_parameters=list(EXPERTS)),
    "some": dict(
        r=3,
        target_modules=["k_proj", "in_proj", "shared_mlp.output_linear"],
        target_parameters=["experts.down_proj"],
    ),
    "activated": dict(alora_invocation_tokens=INVOCATION),
    "also activated": dict(r=2, alora_invocation_tokens=OTHER_INVOCATION),
}
TOKENS = torch.randint(14, 160, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()


class Adapted:
    """A checkpoint with adapters of it, and a runtime that cuts prompts every 32 tokens."""

    def __init__(self, checkpoint, folder):
        self.checkpoint = checkpoint
        self.folders = {
            name: save_adapter(checkpoint, folder / name, seed, **changes)
            for seed, (name, changes) in enumerate(ADAPTERS.items())
        }

    def runtime(self, dtype=torch.float32, quantize=None):
        model = load_model(self.checkpoint, dtype, quantize=quantize)
        adapters = {name: read_adapter(folder, model.config) for name, folder in self.folders.items()}
        runtime = CPURuntime(model, GenerationConfig(top_k=None), adapters=adapters)
        runtime.tokens_per_step = 32
        return runtime

    @torch.inference_mode()
    def expected(self, name, tokens):
        """Return transformers' logits after every token, with PEFT's adapter or without."""
        if name is None:
            return reference(self.checkpoint)(torch.tensor([tokens]), use_cache=False).logits[0]
        return peft_logits(self.checkpoint, self.folders[name], tokens)


@pytest.fixture(scope="module", params=["moe", "projection_bias", "rope"])
def adapted(request, random_checkpoints, tmp_path_factory):
    return Adapted(random_checkpoints(NAMED[request.param]), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(
    scope="module", params=[(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int4")], ids=str
)
def runtime(request, adapted):
    return adapted.runtime(*request.param)


@pytest.mark.slow_cases
def test_logits_are_those_of_peft(adapted):
    """A row of the base model and one of each adapter run in one step."""
    runtime = adapted.runtime()
    state = runtime.allocate(3, 60)
    poison(state)
    rows = [Row(slot, 0, TOKENS[slot], number) for slot, number in ((1, 0), (2, 1), (3, 2))]
    logits = runtime.step(state, rows, all_logits=True)
    for slot, name in enumerate((None, "all", "some"), start=1):
        torch.testing.assert_close(logits[slot - 1], adapted.expected(name, TOKENS[slot]), atol=1e-4, rtol=0)


@pytest.mark.slow_cases
def test_a_long_prompts_logits_are_those_of_peft(adapted):
    """The prompt has more tokens than an adapter's products take at a time."""
    runtime, tokens = adapted.runtime(), [token for row in TOKENS for token in row]
    whole, pieces = (runtime.allocate(1, 240) for _ in range(2))
    logits = runtime.step(whole, [Row(1, 0, tokens, 1)], all_logits=True)[0]
    torch.testing.assert_close(logits, adapted.expected("all", tokens), atol=1e-4, rtol=0)
    cuts = [0, 70, 71, 199, 240]
    for start, stop in itertools.pairwise(cuts):
        last = runtime.step(pieces, [Row(1, start, tokens[start:stop], 1)])
        assert torch.equal(last[0], logits[stop - 1])


@torch.inference_mode()
def alone(runtime, tokens, adapter):
    """Run a prompt alone, and then token by token; return the logits after it and after each further token."""
    state = runtime.allocate(1, 60)
    poison(state)
    logits = [runtime.step(state, [Row(1, 0, tokens[:50], adapter)])]
    return torch.cat(logits + [runtime.step(state, [Row(1, at, [tokens[at]], adapter)]) for at in range(50, 60)])


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "cuts, adapters", [([50], [1, 0, 2, 1]), ([13, 1, 20, 16], [1, 0, 2, 1]), ([50], [1, 1, 0, 1])], ids=str
)
def test_logits_do_not_depend_on_other_rows_and_steps(runtime, cuts, adapters):
    """Four rows run with the base model and one or two adapters. One adapter may serve three of the rows."""
    expected = torch.stack([alone(runtime, tokens, number) for tokens, number in zip(TOKENS, adapters, strict=True)])
    assert not torch.equal(expected[0], alone(runtime, TOKENS[0], 0))
    state, start = runtime.allocate(4, 60), 0
    poison(state)
    for place, count in enumerate([*cuts, *[1] * 10], start=1 - len(cuts)):
        rows = [
            Row(slot + 1, start, TOKENS[slot][start : start + count], number) for slot, number in enumerate(adapters)
        ]
        logits, start = runtime.step(state, rows), start + count
        if place >= 0:
            assert torch.equal(logits, expected[:, place])


@pytest.mark.parametrize("count", [2, 5, 17])
def test_verified_tokens_are_those_of_decode(runtime, count):
    state, one = (runtime.allocate(2, 60) for _ in range(2))
    for each in (state, one):
        poison(each)
        runtime.step(each, [Row(slot, 0, TOKENS[slot][:40], slot) for slot in (1, 2)])
    rows = [Row(slot, 40, TOKENS[slot][40 : 40 + count], slot) for slot in (1, 2)]
    verification = runtime.verify(state, rows)
    for place in range(count):
        decoded = [Row(slot, 40 + place, [TOKENS[slot][40 + place]], slot) for slot in (1, 2)]
        assert torch.equal(verification.logits[:, place], runtime.step(one, decoded))
    runtime.commit(state, verification, [count, count])
    last = [Row(slot, 40 + count, [TOKENS[slot][40 + count]], slot) for slot in (1, 2)]
    assert torch.equal(runtime.step(state, last), runtime.step(one, last))


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [dict(cpu_kernels="torch"), dict(prefill_scan="quadratic")], ids=str)
def test_other_kernels_refuse_adapters(adapted, options):
    adapter = read_adapter(adapted.folders["all"], adapted.runtime().config)
    with pytest.raises(UserError, match="convert --adapter FOLDER merges"):
        CPURuntime(load_model(adapted.checkpoint), GenerationConfig(), adapters={"one": adapter}, **options)


def serve(runtime, requests, **options):
    """Run the requests in one engine; return the new tokens and the log-probabilities of each, and the engine."""
    engine = Engine(runtime, 4, max_length=200, **options)
    ids = [engine.add(request) for request in requests]
    outputs = run(engine)
    return [[(output.token, output.logprob) for output in outputs[id]] for id in ids], engine


INVOKED = [*TOKENS[0], *INVOCATION, *TOKENS[1][:20]]


@pytest.fixture(scope="module")
def served(random_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return Adapted(random_checkpoints(NAMED["untied_head"]), folder).runtime()


@pytest.fixture(scope="module")
def requests():
    return [Request(INVOKED, max_tokens=12, logprobs=3, adapter=name) for name in (None, "all", "some", "activated")]


@pytest.fixture(scope="module")
def texts_alone(served, requests):
    texts = [serve(served, [request])[0][0] for request in requests]
    assert all(one != other for one, other in itertools.combinations(texts, 2))
    return texts


class TestEngine:
    """Texts and log-probabilities are the same alone, beside others, from a cache, and with drafts."""

    def test_texts_beside_others_are_those_alone(self, served, requests, texts_alone):
        assert serve(served, requests)[0] == texts_alone

    def test_drafts_change_no_text(self, served, requests, texts_alone):
        texts, engine = serve(served, requests, drafter=Oracle(texts_alone), draft_tokens=4)
        assert texts == texts_alone
        assert engine.stats.accepted_tokens > 12

    def test_a_draft_model_runs_without_adapters(self, served, requests, texts_alone):
        drafter = DraftModel(served, served.config.vocab_size, 4, 200, PrefixCache(served, None, None))
        for _ in range(2):
            assert serve(served, requests, drafter=drafter)[0] == texts_alone

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
    def test_a_prefix_cache_mixes_no_adapters(self, served, requests, texts_alone, order):
        """Each request runs twice. The second time its own state is restored, and no prompt token is run."""
        cache = PrefixCache(served, None, 32, at_branches=True)
        for place in range(2):
            for number in order:
                texts, engine = serve(served, [requests[number]], prefix_cache=cache)
                assert texts == [texts_alone[number]]
                if place:
                    assert engine.stats.prompt_tokens == 0

    def test_texts_from_one_cache_are_those_alone(self, served, requests, texts_alone):
        cache = PrefixCache(served, None, 32)
        for _ in range(2):
            assert serve(served, requests, prefix_cache=cache)[0] == texts_alone

    def test_an_unknown_adapter_is_refused(self, served):
        with pytest.raises(UserError, match="no adapter 'other'; there are all, some, activated, also activated"):
            Engine(served, 1).add(Request([1], adapter="other"))


class TestActivated:
    """Tokens before the invocation of an activated LoRA run in the base model and share its states."""

    @pytest.mark.slow_cases
    def test_logits_are_those_of_peft(self, adapted):
        """The last invocation counts. Tokens before it run in the base model."""
        runtime = adapted.runtime()
        prompt = [*INVOCATION, *TOKENS[0][:30], *INVOCATION, *TOKENS[1][:10]]
        request = Request(prompt, max_tokens=1, logprobs=0, prompt_logprobs=0, adapter="activated")
        [[output]] = run_all(runtime, request)
        expected = adapted.expected("activated", prompt).log_softmax(-1)
        ours = [each.logprob for each in (*output.prompt.logprobs, output.logprob)]
        following = torch.tensor([*prompt[1:], output.token])
        theirs = expected.gather(1, following[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=0)
        base = adapted.expected(None, prompt).log_softmax(-1).gather(1, following[:, None])[:, 0]
        assert torch.allclose(base[:33], theirs[:33], atol=1e-4) and (base[33:] - theirs[33:]).abs().min() > 1e-3

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("prompt", [INVOKED, TOKENS[0]], ids=["invoked", "not invoked"])
    def test_texts_are_those_of_peft(self, adapted, prompt):
        [outputs] = run_all(adapted.runtime(), Request(prompt, 8, adapter="activated"))
        assert tokens_of(outputs) == peft_text(adapted.checkpoint, adapted.folders["activated"], prompt, 8)

    def test_without_an_invocation_it_is_the_base_model(self, adapted):
        runtime = adapted.runtime()
        [base], [activated] = (run_all(runtime, Request(TOKENS[0], 5, adapter=name)) for name in (None, "activated"))
        assert tokens_of(base) == tokens_of(activated)

    @pytest.mark.slow_cases
    def test_the_state_before_comes_from_the_base_model_and_goes_to_it(self, adapted):
        runtime = adapted.runtime()
        base, activated = (Request(INVOKED, 3, adapter=name) for name in (None, "activated"))
        for first, second in ((base, activated), (activated, base), (activated, activated)):
            cache = PrefixCache(runtime, None, None)
            serve(runtime, [replace(first, tokens=INVOKED[:60] if first is base else INVOKED)], prefix_cache=cache)
            _, engine = serve(runtime, [replace(second, tokens=[*INVOKED[:63], *TOKENS[2]])], prefix_cache=cache)
            assert engine.stats.cached_tokens == 60

    @pytest.mark.slow_cases
    def test_the_base_model_uses_no_state_after_an_invocation(self, adapted):
        runtime = adapted.runtime()
        cache = PrefixCache(runtime, None, None)
        serve(runtime, [Request(INVOKED, 3, adapter="activated")], prefix_cache=cache)
        _, engine = serve(runtime, [Request(INVOKED, 3)], prefix_cache=cache)
        assert engine.stats.cached_tokens == 60

    @pytest.mark.slow_cases
    def test_several_requests_at_once_run_the_prompt_once(self, adapted):
        runtime = adapted.runtime()
        invocations = {"activated": INVOCATION, "also activated": OTHER_INVOCATION, None: [9]}
        requests = [Request([*TOKENS[0], *tokens], 5, adapter=name) for name, tokens in invocations.items()]
        alone = [serve(runtime, [request])[0][0] for request in requests]
        texts, engine = serve(runtime, requests, prefix_cache=PrefixCache(runtime, None, 32))
        assert texts == alone
        assert (engine.stats.cached_tokens, engine.stats.prompt_tokens) == (2 * 60, 60 + 3 + 1 + 1)


class Oracle:
    """A drafter that knows the texts and makes a mistake now and then."""

    def __init__(self, texts):
        self._texts = [[*INVOKED, *(token for token, _ in text)] for text in texts]

    def propose(self, requests):
        drafts = []
        for request in requests:
            size = len(request.tokens)
            text = next(text for text in self._texts if text[:size] == list(request.tokens))
            wrong = [token + (place % 3 == 2) for place, token in enumerate(text[size : size + request.most])]
            drafts.append([min(token, 159) for token in wrong])
        return drafts

    def end(self, id):
        pass


def run_all(runtime, request):
    engine = Engine(runtime, 1, max_length=200)
    engine.add(request)
    return list(run(engine).values())
