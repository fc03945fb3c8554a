"""The prefix cache and speculation on XLA give the CPU's texts from few graphs."""

import pytest
from transformers import GenerationConfig

from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.engine.drafters import NgramDrafter
from test.support.engines import VOCAB, ChunkRuntime, engine_model, generate_one, run, tokens_of
from test.support.stepping import random_tokens

pytest.importorskip("torch_xla", reason="torch_xla is not installed; the xla backend runs with torch 2.9")
import torch_xla.debug.metrics as metrics

from granite4_neuron.runtime.xla import XLARuntime

PROMPTS = [random_tokens(VOCAB, length, seed=length).tolist() for length in (1, 5, 40, 16)]
REPEATED = PROMPTS[1] * 6  # text that repeats, for n-grams to find


@pytest.fixture(scope="module")
def model():
    return engine_model()


def xla_runtime(model):
    return XLARuntime(model, GenerationConfig(top_k=None), (16, 32))


def expected(model, prompt, max_tokens):
    return generate_one(Engine(ChunkRuntime(model), 1), Request(prompt, max_tokens))


def test_a_hit_gives_the_logits_of_a_run_without(model):
    runtime, logits = xla_runtime(model), []
    step = runtime.step

    def recorded(*args, **options):
        logits.append(step(*args, **options))
        return logits[-1]

    runtime.step = recorded
    cache = PrefixCache(runtime, None, 32)
    prompt = PROMPTS[2] + PROMPTS[3]
    plain = generate_one(Engine(runtime, 1), Request(prompt, 4))
    without = logits[-4:]
    generate_one(Engine(runtime, 1, prefix_cache=cache), Request(PROMPTS[2], 1))
    logits.clear()
    assert generate_one(Engine(runtime, 1, prefix_cache=cache), Request(prompt, 4)) == plain
    assert cache.stats.hit_tokens == len(PROMPTS[2]) and len(logits) == 4
    assert max(float((one - other).abs().max()) for one, other in zip(logits, without, strict=True)) <= 1e-5


@pytest.mark.parametrize("kind", ["n-gram", "same model", "other model"])
def test_speculation_prints_the_cpus_texts(model, kind):
    runtime = xla_runtime(model)
    small = model if kind == "same model" else engine_model(seed=1, layer_types=("mamba", "attention", "mamba"))
    drafter = NgramDrafter(1, 3) if kind == "n-gram" else DraftModel(xla_runtime(small), VOCAB, 2, 100)
    engine = Engine(runtime, 2, max_length=100, drafter=drafter, draft_tokens=3)
    prompts = (*PROMPTS, REPEATED)
    ids = [engine.add(Request(prompt, 12)) for prompt in prompts]
    outputs = run(engine)
    for id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(outputs[id]) == expected(model, prompt, 12)
    assert engine.stats.drafted_tokens > 0 and (kind != "same model" or engine.stats.acceptance_rate == 1)


def test_both_add_a_constant_number_of_graphs(model):
    runtime = xla_runtime(model)
    cache = PrefixCache(runtime, None, 32)
    engine = Engine(runtime, 2, max_length=100, prefix_cache=cache, drafter=NgramDrafter(1, 3), draft_tokens=3)

    def texts(*prompts):
        before = metrics.counter_value("UncachedCompile") or 0
        for prompt in prompts:
            engine.add(Request(prompt, 20))
        run(engine)
        return (metrics.counter_value("UncachedCompile") or 0) - before

    texts(REPEATED, PROMPTS[2], REPEATED + PROMPTS[0], PROMPTS[2] + PROMPTS[1])
    assert texts(PROMPTS[3] * 2, REPEATED[:29], PROMPTS[3] + PROMPTS[2], PROMPTS[3] * 3) == 0
    assert cache.stats.hit_tokens > 0 and engine.stats.drafted_tokens > 0
