import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron import load
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.errors import UserError
from test.support.checkpoints import save_byte_tokenizer
from test.support.engines import engine_model
from test.support.scripted import script_tokens
from test.support.tool_template import TOOL_TEMPLATE


@pytest.fixture(scope="module")
def tiny():
    """Return the bundled model in float32: (runtime, tokenizer)."""
    return load(dtype=torch.float32)


@pytest.fixture(scope="module")
def server(tiny):
    """Serve that model."""
    from test.support.serving import serving  # needs packages that may be absent

    with serving(*tiny) as server:
        yield server


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """Return a random model of one token per byte, whose chat template shows tools: (runtime, tokenizer)."""
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder, TOOL_TEMPLATE)
    model = engine_model(vocab_size=264, eos_token_id=1, max_position_embeddings=4096)
    return CPURuntime(model, GenerationConfig(top_k=None)), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="session")
def byte_server(byte_model):
    """Serve that model, with drafts."""
    from test.support.serving import serving  # needs packages that may be absent

    with serving(*byte_model, max_length=4096, drafter=NgramDrafter(1, 3)) as server:
        yield server


@pytest.fixture(scope="session")
def hasty(byte_model):
    """Return a logit bias with which that model soon closes JSON."""
    ids = map(byte_model[1].convert_tokens_to_ids, '"}],')
    return {**{str(token): 4 for token in ids}, "1": 20}


@pytest.fixture
def say(byte_model, monkeypatch):
    """Return a function that scripts that model's answers as one text after another; None raises an error."""

    def script(*texts):
        tokens = [token for text in texts for token in ([None] if text is None else byte_model[1].encode(text))]

        def choose(past):
            begin = len(past) - past[::-1].index(3)  # after the last <|assistant|>
            token = [*tokens, 1][min(len(past) - begin, len(tokens))]  # past the end there are drafts
            if token is None:
                raise UserError("the logits are wrong.")
            return token

        script_tokens(monkeypatch, choose)

    return script
