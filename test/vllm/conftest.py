"""Engines of vLLM, each run once a session in another process, with the same prompts."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from granite4_neuron.evaluation.reference import load_reference

ROOT = Path(__file__).parents[2]
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
LENGTHS = (4, 7, 9, 31, 64, 129, 200, 333, 640, 1100, 1600)
# They end shortly before a block of 128 tokens does, so that all of them soon need another block.
SHORT_OF_A_BLOCK = (100, 105, 110, 115, 120, 230, 235, 240)
TOKENS = 64
ONE_PROCESS = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: docs/vllm-on-cpu.md"))


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Return prompts of LENGTHS, then of SHORT_OF_A_BLOCK. Some begin alike, and some repeat the same text."""
    torch.manual_seed(1)
    text = torch.randint(3, vocab_size, (max(LENGTHS),)).tolist()
    prompts = []
    for number, length in enumerate((*LENGTHS, *SHORT_OF_A_BLOCK)):
        period = max(length // 3, 1)
        prompts.append(text[:length] if number % 2 == 0 else (text[number : number + period] * 4)[:length])
    return prompts


ALL = range(len(LENGTHS))
CROWDED = range(len(LENGTHS), len(LENGTHS) + len(SHORT_OF_A_BLOCK))


def run_engines(engines: dict, prompts: list[list[int]], folder: Path, **environment: str) -> dict:
    """Run the engines by worker.py and return {name: result}."""
    job = json.dumps({"engines": engines, "prompts": prompts, "tokens": TOKENS})
    results, log = folder / "results.json", folder / "log.txt"
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", "test.vllm.worker", results],
            input=job,
            text=True,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env={**os.environ, **environment},
            check=False,
        )
    assert results.exists(), log.read_text()[-3000:]
    return {**json.loads(results.read_text()), "log": log.read_text()}


class Greedy:
    """Greedy text of transformers, in float32."""

    def __init__(self, folder):
        self.model = load_reference(folder, torch.float32)

    @torch.inference_mode()
    def says(self, prompt: list[int], tokens: list[int]) -> bool:
        """Return whether each token is the likeliest after those before it."""
        logits = self.model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.argmax(-1).tolist() == tokens

    @torch.inference_mode()
    def logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Return the log-probabilities of a prompt's tokens except the first."""
        logprobs = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    def right(self, prompts: list[list[int]], result: dict) -> list[int]:
        """Return, for each round, the number of prompts for which an engine gave the greedy text."""
        assert "error" not in result, result["error"]
        assert all(len(tokens) == TOKENS for texts in result["tokens"] for tokens in texts)
        return [
            sum(self.says(prompt, tokens) for prompt, tokens in zip(prompts, texts, strict=True))
            for texts in result["tokens"]
        ]
