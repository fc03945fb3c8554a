"""The small trained checkpoint on real text: its tokens are those of transformers, and a bug anywhere changes them."""

import ast
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import GraniteMoeHybridForCausalLM as Reference

from granite4_neuron import generate, load, stream_generate
from granite4_neuron.config.choices import CPU_KERNELS
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.evaluation import accuracy
from granite4_neuron.generation import bundled_checkpoint, chat_prompt
from granite4_neuron.ops import TORCH, rms_norm
from granite4_neuron.state.hybrid_state import KeyValueState, MambaState

PROMPTS = [
    "A *formatted string literal* or *f-string* is a string literal that is prefixed with",
    "Called when the instance is about to be destroyed.  This is also called a",
    "The import statement is used to find a module and",
    "A lambda expression yields an anonymous function, which",
    "When an exception is raised in the body of a loop,",
    "Coroutine objects are awaitable objects. A coroutine's execution",
    "The difference between a list and a tuple is that",
    "Assert statements are a convenient way to insert debugging assertions",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def bundled():
    return load(dtype=torch.float32)


def greedy(runtime, tokenizer, new_tokens=NEW_TOKENS) -> list[list[int]]:
    """Generate new tokens for PROMPTS as one ragged batch."""
    tokens = [[] for _ in PROMPTS]
    for response in stream_generate(runtime, tokenizer, PROMPTS, max_tokens=new_tokens, temperature=0, ignore_eos=True):
        tokens[response.index].append(response.token)
    return tokens


@pytest.fixture(scope="module")
def expected(bundled):
    return greedy(*bundled)


@pytest.mark.versions
def test_greedy_tokens_are_those_of_transformers(bundled, expected):
    reference = Reference.from_pretrained(bundled_checkpoint(), dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        ids = torch.tensor([bundled[1].encode(prompt)])
        output = reference.generate(
            ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
        )
        assert output[0, ids.shape[1] :].tolist() == tokens


@pytest.mark.versions
def test_bfloat16_gives_the_same_tokens(bundled, expected):
    runtime, tokenizer = load()
    assert runtime.dtype == torch.bfloat16
    assert greedy(runtime, tokenizer) == expected


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("kernels", CPU_KERNELS)
def test_int8_gives_nearly_the_same_tokens(expected, kernels):
    """Most tokens of most prompts are the same. A sequence that differs at one token continues from there."""
    runtime, tokenizer = load(dtype=torch.float32, quantize="int8", cpu_kernels=kernels)
    assert runtime.is_quantized
    same = [
        sum(a == b for a, b in zip(ours, theirs, strict=True)) == NEW_TOKENS
        for ours, theirs in zip(greedy(runtime, tokenizer), expected, strict=True)
    ]
    assert sum(same) >= len(PROMPTS) / 2
    text = generate(runtime, tokenizer, "An assignment statement", max_tokens=20)
    assert text.startswith(" evaluates the expression list")


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_passes_the_check(dtype):
    runtime, tokenizer = load(dtype=dtype, quantize="int8")
    report = accuracy.measure(bundled_checkpoint(), accuracy.default_prompts(tokenizer), 16, runtime)
    assert report.passed() and report.overall().top1_agreement >= 0.95
    assert 1e-3 < report.overall().mean < 0.15


@pytest.mark.versions
def test_text_reads_like_text(bundled):
    text = generate(*bundled, "An assignment statement", max_tokens=60)
    assert text.startswith(
        " evaluates the expression list (remember that\nthis can be a single expression or a comma-sep"
    )


@pytest.mark.versions
def test_chat_answers_and_stops(bundled):
    runtime, tokenizer = bundled
    prompt = chat_prompt(tokenizer, "What is the assert statement?")
    *_, last = stream_generate(runtime, tokenizer, prompt, max_tokens=400)
    assert last.finish_reason == "stop"
    assert generate(runtime, tokenizer, prompt, max_tokens=400).startswith("Assert statements are a convenient way")


def drop_state_before_decode(monkeypatch, kind, names):
    """Zero the named state tensors before every step of one token."""
    original = CPURuntime.step

    def step(self, state, rows, all_logits=False):
        if all(len(row.tokens) == 1 for row in rows):
            for layer in state.layers:
                for name in names if isinstance(layer, kind) else ():
                    getattr(layer, name).zero_()
        return original(self, state, rows, all_logits)

    monkeypatch.setattr(CPURuntime, "step", step)


def mamba_layers(runtime):
    return [layer.mamba for layer in runtime.model.model.layers if hasattr(layer, "mamba")]


def zero_weights(name):
    def plant(monkeypatch, runtime):
        for layer in mamba_layers(runtime):
            getattr(layer, name).data.zero_()
        runtime.model = runtime.model.bind(runtime.model.operators)

    return plant


def plant_norm_before_gate(monkeypatch, runtime):
    def norm_first(x, z, weight, eps, n_groups):
        return (rms_norm(x, weight, eps, n_groups).float() * F.silu(z.float())).to(weight.dtype)

    runtime.model = runtime.model.bind(dataclasses.replace(TORCH, rms_norm_gated=norm_first))


def plant_usual_attention_scale(monkeypatch, runtime):
    for layer in runtime.model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.scale = layer.self_attn.head_dim**-0.5
    runtime.model = runtime.model.bind(TORCH)


def plant_softmax_before_top_k(monkeypatch, runtime):
    def softmax_first(logits, k):
        return tuple(logits.float().softmax(-1).topk(k, -1))

    runtime.model = runtime.model.bind(dataclasses.replace(TORCH, topk_softmax=softmax_first))


BUGS = {
    "ssm state dropped": lambda patch, _: drop_state_before_decode(patch, MambaState, ["ssm_state"]),
    "conv window dropped": lambda patch, _: drop_state_before_decode(patch, MambaState, ["conv_state"]),
    "kv cache dropped": lambda patch, _: drop_state_before_decode(patch, KeyValueState, ["key", "value"]),
    "D dropped": zero_weights("D"),
    "dt_bias dropped": zero_weights("dt_bias"),
    "norm before gate": plant_norm_before_gate,
    "attention scale 1/sqrt(head_dim)": plant_usual_attention_scale,
    "router softmax before top-k": plant_softmax_before_top_k,
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_changes_tokens(monkeypatch, expected, plant):
    runtime, tokenizer = load(dtype=torch.float32)
    plant(monkeypatch, runtime)
    changed = [
        sum(a != b for a, b in zip(broken, right, strict=True))
        for broken, right in zip(greedy(runtime, tokenizer), expected, strict=True)
    ]
    print(f"{sum(changed) / (len(PROMPTS) * NEW_TOKENS):.0%} of the tokens changed, by prompt {changed}")
    assert sum(changed) >= 0.1 * len(PROMPTS) * NEW_TOKENS
    assert sum(count > 0 for count in changed) >= 3


@pytest.mark.exhaustive
def test_40000_tokens_of_prompt():
    """Memory grows by the cache of the attention layers and no more, and the text continues."""
    program = """
import pydoc_data.topics, resource, sys, torch
from granite4_neuron import load, stream_generate
from granite4_neuron.state.sizes import token_bytes
length = int(sys.argv[1])
runtime, tokenizer = load(dtype=torch.float32)
text = "\\n\\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
prompt = tokenizer.encode(text[: 4 * length])[:length]
out = "".join(response.text for response in stream_generate(runtime, tokenizer, prompt, max_tokens=60))
cache = length * token_bytes(runtime.config, torch.float32.itemsize)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, cache)
print(repr(out))
"""

    def run(length):
        # A fixed threshold keeps the C library from fragmenting its heap. The fragments would be counted as ours.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        command = [sys.executable, "-c", program, str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        numbers, text = done.stdout.splitlines()
        return *map(int, numbers.split()), ast.literal_eval(text)

    short_peak, short_cache, _ = run(8_000)
    long_peak, long_cache, text = run(40_000)
    # The slack is for the prompt, its text and its tokens; a second cache would take 41 MB.
    assert long_peak - short_peak <= long_cache - short_cache + 30e6
    words = text.split()
    assert len(words) > 15 and len(set(words)) > 10
