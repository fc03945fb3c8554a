"""Requests that come and go while others run get the text that they get alone, however many drafts are right."""

import random
from pathlib import Path

import pytest
import torch

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import config_from_file
from granite4_neuron.vllm.cpu.sampling import rejecting_placeholders
from test.support.checkpoints import CASES, small_config
from test.support.stepping import run_cuts
from test.vllm import drafter
from test.vllm.conftest import ONE_PROCESS, Greedy, run_engines

VOCAB_SIZE = small_config().vocab_size
# vLLM's attention wants heads of 32 or wider, and blocks of 32 tokens or a multiple; states must fit into a block.
SMALL_STATES = dict(
    hidden_size=128, num_key_value_heads=4, mamba_n_heads=4, mamba_d_head=32, mamba_expand=1, tie_word_embeddings=False
)
LONGEST = 200
CROWD = 60
FEW_TOKENS = dict(max_num_batched_tokens=40)  # per step
FEW_BLOCKS = dict(num_gpu_blocks_override=60)
NO_PREFIXES = dict(enable_prefix_caching=False)


def served_by(model, drafts, acceptance, **options):
    """Return a small model, the largest number of drafts, how many of them are right, and options of the engine."""
    return model, drafts, acceptance, options


FAST = {"experts, 3 drafts": served_by("moe", 3, "some", **FEW_TOKENS)}
SLOW = {
    "experts, 3 drafts, all right": served_by("moe", 3, "all", **FEW_TOKENS),
    "experts, 3 drafts, none right": served_by("moe", 3, "none", **FEW_TOKENS),
    "experts, 1 draft, few blocks": served_by("moe", 1, "some", **FEW_BLOCKS),
    "experts, 5 drafts, few blocks": served_by("moe", 5, "some", **FEW_BLOCKS, **FEW_TOKENS),
    "groups, 5 drafts, no prefixes": served_by("two_groups", 5, "some", **NO_PREFIXES, **FEW_TOKENS),
    "groups, 3 drafts, no prefixes, few blocks": served_by("two_groups", 3, "all", **NO_PREFIXES, **FEW_BLOCKS),
    "groups, 3 drafts, default blocks": served_by("two_groups", 3, "some", block_size=None),
    "groups, 1 draft": served_by("two_groups", 1, "all", **FEW_TOKENS),
    "wide steps, 5 drafts": served_by("dense", 5, "some"),
    "short convolution, 3 drafts": served_by("conv3_no_bias", 3, "some"),
    "attention only, 3 drafts": served_by("attention_only_rope", 3, "some", **FEW_TOKENS),
    "attention only, 5 drafts, few blocks": served_by("attention_only_nope", 5, "all", num_gpu_blocks_override=20),
    "no compiler, 3 drafts": served_by("two_groups", 3, "some", **FEW_TOKENS),
}


def engine(folder, model, drafts, acceptance, options):
    """Return an engine for worker.py."""
    defaults = dict(block_size=32, enable_prefix_caching=True, max_model_len=384, max_num_seqs=16)
    speculation = dict(method="custom_class", model=drafter.NAME, num_speculative_tokens=drafts)
    options = {**defaults, "skip_tokenizer_init": True, "speculative_config": speculation, **options}
    requests = [*SINGLE_TOKENS, *TAILS, *PAUSES, *crowd(f"{model} {drafts} {acceptance} {sorted(options)}", drafts)]
    return dict(model=folder, acceptance=acceptance, options=options, requests=requests)


def request(prompt, tokens, arrives, leaves=None):
    """Return a request for crowd.py."""
    return dict(prompt=prompt, tokens=tokens, arrives=arrives, leaves=leaves)


def random_text(chance):
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(LONGEST)]


TEXT = random_text(random.Random(0))
# Prompts of one token while another sequence runs; vLLM's scheduler adds placeholders for drafts to them.
SINGLE_TOKENS = [
    request(TEXT[:40], 40, 0),
    *(request([token], 12, step) for step, token in zip((4, 7, 10, 10), (5, 17, 99, 150), strict=True)),
]
# With blocks of 32 tokens, all but two tokens of the first prompt are cached, and all but one of the second.
TAILS = [request(prompt, 12, step) for step in (50, 100) for prompt in (TEXT[:98], TEXT[100:133])]
# Long prompts leave so little of a step that sequences which have begun have to pause.
PAUSES = [
    *(request(prompt, 4, 120) for prompt in (TEXT[1:], TEXT[2:])),
    *(request([token, token], 24, 121) for token in range(10, 18)),
]
START = 180  # the step at which the crowd begins to arrive


def crowd(seed, drafts):
    """Return requests of all lengths, many with a common beginning, in bursts. Some leave before their text is done."""
    chance = random.Random(seed)
    texts = [random_text(chance) for _ in range(3)]
    requests, step = [], START
    for _ in range(CROWD):
        step += chance.choice((0, 0, 0, 1, 2, 8))
        few, near_blocks = chance.randint(2, drafts + 3), 32 * chance.randint(1, 6) + chance.randint(-1, drafts + 2)
        length = chance.choice((1, few, near_blocks, near_blocks, chance.randint(1, LONGEST)))
        prompt = chance.choice((*texts, random_text(chance)))[: min(length, LONGEST)]
        leaves = step + chance.randint(1, 12) if chance.random() < 0.15 else None
        requests.append(request(prompt, chance.randint(1, 24), step, leaves))
    return requests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a function that takes a case's name and returns the folder of a small random checkpoint of that case."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def make(name):
        if name not in made:
            (changes,) = (case.changes for case in CASES if case.name == name)
            save_model(random_model(small_config(**{**SMALL_STATES, **changes}), seed=len(name)), folder / name)
            made[name] = str(folder / name)
        return made[name]

    return make


class PlainTorch(Greedy):
    """Greedy text from this package's plain torch in float32. transformers before 5.23 normalises over all groups."""

    def __init__(self, folder):
        self.model = load_model(folder, torch.float32)

    def says(self, prompt, tokens):
        ids = torch.tensor([prompt + tokens[:-1]])
        logits = run_cuts(self.model, ids, [ids.shape[1]])[0, len(prompt) - 1 :]
        return logits.argmax(-1).tolist() == tokens


def check(engine, result):
    assert "error" not in result, result["error"]
    several_groups = config_from_file(Path(engine["model"]) / "config.json").mamba_n_groups > 1
    greedy, said = (PlainTorch if several_groups else Greedy)(engine["model"]), {}
    for number, (request, alone, text) in enumerate(
        zip(engine["requests"], result["alone"], result["tokens"], strict=True)
    ):
        left = request["leaves"] is not None
        assert text == (alone[: len(text)] if left else alone), f"request {number}: {request}"
        said[tuple(request["prompt"])] = max(alone, said.get(tuple(request["prompt"]), []), key=len)
    wrong = [prompt for prompt, text in said.items() if not greedy.says(list(prompt), text)]
    assert not wrong


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW)])
def test_texts_among_others_are_those_of_each_alone(checkpoint, tmp_path, name):
    model, drafts, acceptance, options = {**FAST, **SLOW}[name]
    one = engine(checkpoint(model), model, drafts, acceptance, options)
    environment = dict(CXX="false", XDG_CACHE_HOME=str(tmp_path / "cache")) if "no compiler" in name else {}
    result = run_engines({"one": one}, [], tmp_path, **ONE_PROCESS, **environment)["one"]
    check(one, result)
    metrics = result["metrics"]
    assert (metrics["accepted"] > 0) == (acceptance != "none")
    assert (metrics["preemptions"] > 0) == ("num_gpu_blocks_override" in options)
    assert (result["cached"] > 0) == one["options"]["enable_prefix_caching"]


def test_placeholders_of_sampled_requests():
    """Placeholders are rejected, whatever token lies before them in memory, where another row ends."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    reject = rejecting_placeholders(cpu_triton_utils._rejection_random_sample_kernel_impl)
    texts, last = torch.full((2, 4), -1, dtype=torch.int32), 7
    ends, drafts = torch.tensor([1, 4], dtype=torch.int32), torch.tensor([last, -1, -1, -1], dtype=torch.int32)
    probabilities = torch.eye(last + 1)[[last, 3, 3, 3]]
    bonus, recovered = torch.tensor([[5], [6]], dtype=torch.int32), torch.tensor([0, 3, 3, 3], dtype=torch.int32)
    chance, greedy = torch.full((4,), 0.5, dtype=torch.float64), torch.tensor([False, False])
    reject(
        texts, ends, drafts, None, probabilities, bonus, recovered, chance, greedy, 3,
        vocab_size=last + 1, NO_DRAFT_PROBS=True, SYNTHETIC_MODE=False,
    )  # fmt: skip
    assert texts.tolist() == [[last, 5, -1, -1], [3, -1, -1, -1]]
