"""The fused kernels give a sequence logits of the same bits beside any others, in any steps and with any threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron import ops
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import ModelConfig, published_config
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.ops import FORMATS
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import nemotron_config, small_config
from test.support.engines import run, tokens_of
from test.support.verification import poison

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

PROMPT, STEPS = 150, 8


def h_350m() -> ModelConfig:
    """Return three layers of h-350m with a small vocabulary."""
    config = published_config("h-350m")
    return replace(config, num_hidden_layers=3, layer_types=("mamba", "attention", "mamba"), vocab_size=1000)


# Sizes that are no multiples of a vector or a tile, two groups, an even window, rotary positions, and an untied head.
ODD = dict(
    hidden_size=72, intermediate_size=34, shared_intermediate_size=50, vocab_size=163, mamba_n_heads=6, mamba_d_head=24,
    mamba_d_state=21, mamba_n_groups=2, mamba_d_conv=3, tie_word_embeddings=False, position_embedding_type="rope",
    layer_types=("mamba", "attention", "mamba"),
)  # fmt: skip
MODELS = {
    "bundled": lambda: load_model(bundled_checkpoint(), torch.float32),
    "h-350m": lambda: random_model(h_350m()),
    "experts": lambda: random_model(small_config(num_local_experts=16, num_experts_per_tok=4)),
    "odd sizes": lambda: random_model(small_config(**ODD)),
    "nemotron": lambda: random_model(nemotron_config()),
    "nemotron, latent": lambda: random_model(nemotron_config(moe_latent_size=40)),
}
NUMBERS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    **{name: (torch.bfloat16, name) for name in QUANTIZATIONS},
    "float32, int8": (torch.float32, "int8"),
}
STATES = [torch.float16, torch.bfloat16]
REAL = ("float32", "bfloat16", *QUANTIZATIONS)
OF_MODELS = {"bundled": REAL, "h-350m": REAL} | dict.fromkeys(
    ("nemotron", "nemotron, latent"), ("float32", "bfloat16", "int8")
)
CASES = [(model, numbers) for model in MODELS for numbers in OF_MODELS.get(model, NUMBERS)]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def runtime(request):
    model, numbers = request.param
    weights, (dtype, quantization) = MODELS[model](), NUMBERS[numbers]
    weights.to(dtype)
    if quantization is not None:
        quantize(weights, quantization)
    return CPURuntime(weights, GenerationConfig(top_k=None))


def quantize(model: HybridForCausalLM, name: str) -> None:
    for module in model.modules():
        if getattr(module, "may_be_quantized", False):
            module.set_compact_weight(FORMATS[name].quantize(module.weight))


@pytest.fixture(scope="module")
def tokens(runtime):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, runtime.config.vocab_size, (64, PROMPT + STEPS), generator=generator).tolist()


@pytest.fixture(scope="module")
def alone(runtime, tokens):
    """Run the first sequences alone, and return logits after each prompt and after each later token."""
    return [serve_alone(runtime, tokens[number]) for number in range(3)]


@torch.inference_mode()
def serve_alone(runtime, tokens):
    state = runtime.allocate(1, PROMPT + STEPS)
    poison(state)
    logits = [runtime.step(state, [Row(1, 0, tokens[:PROMPT])])]
    logits += [runtime.step(state, [Row(1, at, [tokens[at]])]) for at in range(PROMPT, PROMPT + STEPS)]
    return torch.cat(logits)


def begin(runtime, tokens, sequences, cuts=(PROMPT,)):
    """Run prompts in steps of the given sizes; return the state and the logits after the last step."""
    state = runtime.allocate(sequences, PROMPT + STEPS)
    poison(state)
    start = 0
    for size in cuts:
        rows = [Row(number + 1, start, tokens[number][start : start + size]) for number in range(sequences)]
        logits = runtime.step(state, rows)
        start += size
    return state, logits


@pytest.mark.slow_cases
@pytest.mark.parametrize("sequences", [2, 5, 13, 33, 64])
def test_beside_others(runtime, tokens, sequences):
    """All prompts run in one step, then all sequences' tokens run in one step each."""
    few = [one[:40] + one[PROMPT:] for one in tokens]
    state = runtime.allocate(sequences, 40 + STEPS)
    poison(state)
    first = runtime.step(state, [Row(number + 1, 0, few[number][:40]) for number in range(sequences)])
    one = runtime.allocate(1, 40 + STEPS)
    assert torch.equal(first[:1], runtime.step(one, [Row(1, 0, few[0][:40])]))
    for at in range(40, 40 + STEPS):
        together = runtime.step(state, [Row(number + 1, at, [few[number][at]]) for number in range(sequences)])
        assert torch.equal(together[:1], runtime.step(one, [Row(1, at, [few[0][at]])]))


def test_an_order_of_sums_that_depends_on_the_rows_would_be_seen():
    """The planted product comes from another library for more than eight rows."""
    config = small_config(
        vocab_size=1000, position_embedding_type="rope"
    )  # without rotary positions, a step is one call
    runtime = CPURuntime(random_model(config), GenerationConfig())

    def planted(x, weight, scaling):
        return (cpu if x.numel() <= 8 * x.shape[-1] else ops).logits(x, weight, scaling)

    runtime.model = runtime.model.bind(replace(runtime.model.operators, logits=planted))
    rows = [Row(slot, 0, [slot, slot]) for slot in range(1, 14)]
    assert not torch.equal(*(runtime.step(runtime.allocate(13, 2), rows[:count])[:1] for count in (8, 13)))


@pytest.mark.slow_cases
@pytest.mark.parametrize("cuts", [[64, 64, 22], [1, 149], [149, 1], [7, 8, 9, 16, 17, 31, 33, 29], [1] * 20 + [130]])
def test_a_prompt_in_any_steps(runtime, tokens, alone, cuts):
    state, logits = begin(runtime, tokens, 3, cuts)
    assert torch.equal(logits, torch.stack([one[0] for one in alone]))
    for at in range(PROMPT, PROMPT + STEPS):
        rows = [Row(number + 1, at, [tokens[number][at]]) for number in range(3)]
        assert torch.equal(runtime.step(state, rows), torch.stack([one[at - PROMPT + 1] for one in alone]))


@pytest.mark.slow_cases
@pytest.mark.parametrize("pieces", [[40, 1, 70, 39], [1, 2, 3, 100, 44]])
def test_pieces_of_a_prompt_beside_tokens_of_others(runtime, tokens, alone, pieces):
    """A prompt's pieces run in the same steps as other sequences' tokens: one of each first, then two at a time."""
    state = runtime.allocate(3, PROMPT + STEPS)
    poison(state)
    runtime.step(state, [Row(slot, 0, tokens[slot - 1][:PROMPT]) for slot in (1, 2)])
    start, at = 0, PROMPT
    for number, size in enumerate(pieces):
        piece, more = Row(3, start, tokens[2][start : start + size]), 1 + number % 2
        others = [Row(slot, at, tokens[slot - 1][at : at + more]) for slot in (2, 1)]
        logits = runtime.step(state, [others[0], piece, others[1]])
        start, at = start + size, at + more
        assert torch.equal(logits[[2, 0]], torch.stack([one[at - PROMPT] for one in alone[:2]]))
    assert torch.equal(logits[1], alone[2][0])


@pytest.mark.slow_cases
@pytest.mark.parametrize("count", range(1, 17))
def test_verified_tokens_are_those_of_decode(runtime, tokens, count):
    """A row of `count` tokens runs beside a shorter one. Half of them are accepted, and the sequence goes on."""
    start = 40
    state, one = (runtime.allocate(2, start + count + 1) for _ in range(2))
    for each in (state, one):
        poison(each)
        runtime.step(each, [Row(slot, 0, tokens[slot][:start]) for slot in (1, 2)])
    counts = {1: count, 2: (count + 1) // 2}
    rows = [Row(slot, start, tokens[slot][start : start + count]) for slot, count in counts.items()]
    verification = runtime.verify(state, rows)
    accepted = count // 2
    for slot, number in counts.items():
        for place in range(number):
            expected = runtime.step(one, [Row(slot, start + place, [tokens[slot][start + place]])])
            assert torch.equal(verification.logits[slot - 1, place], expected[0])
            if slot == 1 and place == accepted:
                after = expected
    runtime.commit(state, verification, [accepted, 0])
    assert torch.equal(runtime.step(state, [Row(1, start + accepted, [tokens[1][start + accepted]])]), after)


@pytest.mark.slow_cases
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_any_number_of_threads(runtime, tokens, alone, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(serve_alone(runtime, tokens[0]), alone[0])
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[("experts", "float32"), ("h-350m", "int4")], ids=", ".join)
def weights(request):
    model, numbers = request.param
    weights, (dtype, quantization) = MODELS[model](), NUMBERS[numbers]
    weights.to(dtype)
    if quantization is not None:
        quantize(weights, quantization)
    return weights


@pytest.mark.parametrize("state_dtype", STATES, ids=str)
class TestStatesIn16Bits:
    """States are rounded after every token, wherever a step ends."""

    @staticmethod
    def runtime_and_tokens(weights, state_dtype):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, weights.config.vocab_size, (110,), generator=generator).tolist()
        return CPURuntime(weights, GenerationConfig(top_k=None), state_dtype=state_dtype), tokens

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("cuts", [[80, 20], [7, 8, 16, 17, 33, 19], [1, 99]])
    def test_a_prompt_in_any_steps(self, weights, state_dtype, cuts):
        runtime, tokens = self.runtime_and_tokens(weights, state_dtype)
        whole, pieces = (runtime.allocate(1, 110) for _ in range(2))
        expected, start = runtime.step(whole, [Row(1, 0, tokens[:100])]), 0
        for count in cuts:
            logits = runtime.step(pieces, [Row(1, start, tokens[start : start + count])])
            start += count
        assert torch.equal(logits, expected)

    def test_a_prefix_hit_changes_no_bits(self, weights, state_dtype):
        runtime, tokens = self.runtime_and_tokens(weights, state_dtype)
        state, restored = (runtime.allocate(1, 110) for _ in range(2))
        expected = runtime.step(state, [Row(1, 0, tokens[:100])])
        runtime.step(state, [Row(1, 0, tokens[:80])])
        runtime.restore(restored, [runtime.snapshot(state, 1, 80)], 1)
        assert torch.equal(runtime.step(restored, [Row(1, 80, tokens[80:100])]), expected)

    @pytest.mark.parametrize("count", [2, 17, 20, 60])
    def test_verified_tokens_are_those_of_decode(self, weights, state_dtype, count):
        runtime, tokens = self.runtime_and_tokens(weights, state_dtype)
        state, one = (runtime.allocate(1, 110) for _ in range(2))
        for each in (state, one):
            runtime.step(each, [Row(1, 0, tokens[:40])])
        verification = runtime.verify(state, [Row(1, 40, tokens[40 : 40 + count])])
        for place in range(count):
            expected = runtime.step(one, [Row(1, 40 + place, [tokens[40 + place]])])
            assert torch.equal(verification.logits[:, place], expected)
        runtime.commit(state, verification, [count])
        last = [Row(1, 40 + count, [tokens[40 + count]])]
        assert torch.equal(runtime.step(state, last), runtime.step(one, last))


class RecordingRuntime(CPURuntime):
    """A runtime that cuts prompts every 32 tokens and keeps logits by their sequence's length and last token."""

    tokens_per_step = 32

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.logits = {}

    def step(self, state, rows, all_logits=False):
        logits = super().step(state, rows, all_logits)
        for row, row_logits in zip(rows, logits, strict=True):
            self.logits[row.start + len(row.tokens), row.tokens[-1]] = row_logits.clone()
        return logits


@pytest.mark.slow_cases
def test_in_the_engine(runtime, tokens):
    """Sequences run alone, beside others, and after prefix hits: at a prompt's end, within another, and in a text."""
    recording = RecordingRuntime(runtime.model, runtime.generation_config)
    prompts = [tokens[0][:90], tokens[0][:60] + tokens[1][:50], tokens[2][:70], tokens[0][:90] + tokens[3][:40]]
    requests = [Request(prompt, max_tokens=6, snapshots_at=frozenset([60])) for prompt in prompts]

    def serve(requests, **options):
        """Serve the requests and return their new tokens and all logits on the way."""
        engine = Engine(recording, 4, max_length=200, **options)
        recording.logits = {}
        ids = [engine.add(request) for request in requests]
        outputs = run(engine)
        return [tokens_of(outputs[id]) for id in ids], recording.logits

    alone = [serve([request]) for request in requests]
    texts, expected = [one[0] for one, _ in alone], {}
    for _, logits in alone:
        expected |= logits
    last = {
        (len(prompt) + place, text[place - 1])
        for prompt, text in zip(prompts, texts, strict=True)
        for place in range(1, 6)
    }

    def check(served, ids):
        ours, logits = served
        assert ours == [texts[id] for id in ids]
        shared = logits.keys() & expected.keys()
        assert len(shared & last) == 5 * len(ids)
        assert all(torch.equal(logits[key], expected[key]) for key in shared)

    check(serve(requests), range(4))
    cache = PrefixCache(recording, None, 32)
    for id in (0, 1, 2, 3, 1, 0, 3):
        check(serve(requests[id : id + 1], prefix_cache=cache), [id])
    assert cache.stats.hit_tokens > 300
