"""NxD Inference's own generation: the examples of docs/nxdi-internals.md, and scores beside those that it expects."""

import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.generation import bundled_checkpoint
from test.integration.test_model import cpu_mode  # noqa: F401 (a fixture)
from test.support import nxdi

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("cpu_mode")]

PAGE = Path(__file__).parents[2] / "docs" / "nxdi-internals.md"
CPU_MODE = {
    "tp_degree=4": "tp_degree=1, on_cpu=True",
    "torch.bfloat16": "torch.float32",
    "model.compile(graphs)\n": "",
    "model.load(graphs)": "model.to_cpu()",
}


def test_the_examples_recite_the_text():
    """Without and with fused speculation, in CPU mode with the bundled model."""
    plain, fused = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert all(documented in plain for documented in CPU_MODE)
    generate = plain[plain.index("model.load(graphs)") :]
    fused += generate.replace("max_new_tokens=20", "max_new_tokens=20, prompt_lookup_num_tokens=4")
    folder = str(bundled_checkpoint())
    tokenizer = open_checkpoint(bundled_checkpoint()).load_tokenizer()
    names = dict(folder=folder, draft_folder=folder, graphs=None)
    names |= tokenizer("An assignment statement", return_tensors="pt")
    for example in (plain, fused):
        for documented, here in CPU_MODE.items():
            example = example.replace(documented, here)
        exec(example, names)
        assert "evaluates the expression list (remember that" in tokenizer.decode(names.pop("tokens")[0])


class TestScores:
    BATCH_SIZE, MAX_CONTEXT_LENGTH, NEW_TOKENS = 2, 64, 16

    @pytest.fixture(scope="class")
    def model(self, cpu_mode):  # noqa: F811 (a fixture)
        sizes = dict(max_context_length=self.MAX_CONTEXT_LENGTH, seq_len=2 * self.MAX_CONTEXT_LENGTH)
        return nxdi.cpu_model(bundled_checkpoint(), batch_size=self.BATCH_SIZE, **sizes)

    @pytest.mark.parametrize("length", [1, 40, MAX_CONTEXT_LENGTH + 20])
    def test_scores_are_the_expected_ones(self, model, length):
        """NxD Inference's accuracy check makes the expected ones with transformers. A prompt may be longer than the
        largest graph for context encoding.
        """
        from neuronx_distributed_inference.utils.accuracy import generate_expected_logits
        from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

        options = GenerationConfig(do_sample=False, top_k=1, eos_token_id=None, pad_token_id=0)
        generator = torch.Generator().manual_seed(length)
        input_ids = torch.randint(2, model.config.vocab_size, (self.BATCH_SIZE, length), generator=generator)
        mask = torch.ones_like(input_ids)
        expected = generate_expected_logits(model, input_ids, mask, options, num_tokens=self.NEW_TOKENS)
        output = HuggingFaceGenerationAdapter(model).generate(
            input_ids,
            attention_mask=mask,
            generation_config=options,
            max_new_tokens=self.NEW_TOKENS,
            min_new_tokens=self.NEW_TOKENS,  # as for the expected ones: it makes the logit of the end of the text -inf
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.reset()
        assert torch.equal(output.sequences[:, length:], expected.argmax(-1).T)
        torch.testing.assert_close(torch.stack(output.scores), expected, atol=1e-4, rtol=0)
