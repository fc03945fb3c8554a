"""Logits and greedy tokens equal those of transformers: on a Neuron device, or else in NxD Inference's CPU mode.

    pytest test/integration/test_model.py --capture=tee-sys

Environment variables: GRANITE4_MODEL_PATH names a checkpoint, by default the small one in granite4_neuron;
GRANITE4_TP_DEGREE is the number of ranks on a device, by default 1.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.neuron.stand_ins import why_not_importable

if reason := why_not_importable():
    pytest.skip(reason, allow_module_level=True)

from neuronx_distributed_inference.models.config import MoENeuronConfig
from neuronx_distributed_inference.utils.accuracy import check_accuracy_logits_v2, generate_expected_logits
from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter, load_pretrained_config

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from modeling_granite4_hybrid import GraniteMoeHybridInferenceConfig, NeuronGraniteMoeHybridForCausalLM

ON_DEVICE = Path("/dev/neuron0").exists()
NEW_TOKENS = 16
BATCH_SIZE = 2
MAX_CONTEXT_LENGTH = 64
OPTIONS = GenerationConfig(do_sample=False, top_k=1, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = os.environ.get("GRANITE4_MODEL_PATH", str(bundled_checkpoint()))
    neuron_config = MoENeuronConfig(
        tp_degree=int(os.environ.get("GRANITE4_TP_DEGREE", "1")) if ON_DEVICE else 1,
        batch_size=BATCH_SIZE,
        max_context_length=MAX_CONTEXT_LENGTH,
        seq_len=2 * MAX_CONTEXT_LENGTH,
        torch_dtype=torch.float32,
        on_cpu=not ON_DEVICE,
    )
    config = GraniteMoeHybridInferenceConfig(neuron_config, load_config=load_pretrained_config(path))
    model = NeuronGraniteMoeHybridForCausalLM(path, config)
    if not ON_DEVICE:
        model.to_cpu()
        return model
    compiled = str(tmp_path_factory.mktemp("compiled"))
    model.compile(compiled)
    model.load(compiled)
    return model


@pytest.mark.parametrize("length", [1, 40, MAX_CONTEXT_LENGTH, MAX_CONTEXT_LENGTH + 20])
def test_logits_equal_transformers(model, length):
    """Prompts may be longer than the largest graph for context encoding."""
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(2, model.config.vocab_size, (BATCH_SIZE, length), generator=generator)
    mask = torch.ones_like(input_ids)
    expected = generate_expected_logits(model, input_ids, mask, OPTIONS, num_tokens=NEW_TOKENS)
    if ON_DEVICE:  # the check's comparison is a part of the Neuron SDK
        tolerances = {"all": (1e-5, 0.02)}
        check_accuracy_logits_v2(
            model, expected, input_ids, mask, OPTIONS, tol_map=tolerances, num_tokens_to_check=NEW_TOKENS
        )
        return
    output = HuggingFaceGenerationAdapter(model).generate(
        input_ids,
        attention_mask=mask,
        generation_config=OPTIONS,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,  # as for the expected ones: it makes the logit of the end of the text -inf
        return_dict_in_generate=True,
        output_scores=True,
    )
    model.reset()
    assert torch.equal(output.sequences[:, length:], expected.argmax(-1).T)
    torch.testing.assert_close(torch.stack(output.scores), expected, atol=1e-4, rtol=0)
