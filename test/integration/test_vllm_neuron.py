"""vLLM's engine with its NxD Inference plugin and this package's model, in NxD Inference's CPU mode.

The tests are skipped where vLLM, the plugin or NxD Inference is absent (requirements/vllm-neuron.txt).
"""

import json

import pytest
import torch

from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.generation import bundled_checkpoint
from test.integration.test_bundled import PROMPTS as TEXTS
from test.support import vllm_neuron
from test.support.stepping import reference_logits

pytestmark = pytest.mark.versions

NEW_TOKENS = 12
LENGTHS = (40, 7, 90, 2, 1, 130, 17)  # more prompts than sequences at a time
ARGUMENTS = ("--skip-tokenizer-init", "--dtype=float32", "--max-num-seqs=4", "--max-model-len=256")


@pytest.fixture(scope="module")
def prompts():
    """Return prompts of LENGTHS, each from another place of the text."""
    reason = vllm_neuron.why_not_importable()
    if reason:
        pytest.skip(reason)
    folder = bundled_checkpoint()
    tokenizer = open_checkpoint(folder).load_tokenizer()
    tokens = tokenizer(" ".join(TEXTS * 2)).input_ids
    return [tokens[length : 2 * length] for length in LENGTHS]


@pytest.mark.parametrize(
    "options",
    [{}, {"context_encoding_buckets": [32, 64]}],
    ids=["largest context graph as long as the cache", "continued prompts"],
)
def test_texts_equal_transformers_greedy_texts(options, prompts, tmp_path):
    assert tuple(map(len, prompts)) == LENGTHS
    additional = json.dumps(dict(override_neuron_config=dict(options, on_cpu=True)))
    arguments = (*ARGUMENTS, "--additional-config", additional)
    folder = bundled_checkpoint()
    texts = vllm_neuron.generate(folder, prompts, NEW_TOKENS, arguments, compiled=tmp_path / "none")
    for prompt, text in zip(prompts, texts, strict=True):
        logits = reference_logits(folder, torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
        assert text == logits.argmax(-1).tolist(), len(prompt)
