"""A server with adapters: a request names one as its model."""
# ruff: noqa: E402 (what may not be installed comes first)

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("fastapi", reason="granite4-neuron[serve] is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

from granite4_neuron import chat, generate, load
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.ops import cpu
from test.support.adapters import save_adapter
from test.support.serving import MODEL, serving

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

PROMPT = "An assignment statement"
MODELS = {MODEL: None, "red": "red", "blue": "blue"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: save_adapter(bundled_checkpoint(), folder / name, seed) for seed, name in enumerate(["red", "blue"])
    }
    return load(dtype=torch.float32, adapters=adapters)


@pytest.fixture(scope="module")
def server(tiny):
    with serving(*tiny) as server:
        yield server


def test_models_are_listed(client):
    models = client.models.list().data
    assert [model.id for model in models] == list(MODELS)
    assert [getattr(model, "parent", None) for model in models] == [None, MODEL, MODEL]
    assert client.models.retrieve("red").id == "red"


def test_a_request_names_an_adapter_as_its_model(tiny, client):
    """All run at once, twice: the second time from the prefix cache."""

    def complete(model):
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=20, temperature=0)
        assert answer.model == model
        return answer.choices[0].text

    expected = [generate(*tiny, PROMPT, max_tokens=20, temperature=0, adapter=name) for name in MODELS.values()]
    assert len(set(expected)) == len(expected)
    for _ in range(2):
        with ThreadPoolExecutor() as threads:
            assert list(threads.map(complete, MODELS)) == expected


def test_a_chat_with_an_adapter(tiny, client):
    message = {"role": "user", "content": PROMPT}
    stream = client.chat.completions.create(model="red", messages=[message], max_tokens=20, temperature=0, stream=True)
    chunks = list(stream)
    assert {chunk.model for chunk in chunks} == {"red"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(*tiny, [message], max_tokens=20, temperature=0, adapter="red")


@pytest.mark.parametrize("model", ["green", "", "__base__", "red/"])
def test_a_model_that_is_not_there(client, model):
    with pytest.raises(openai.NotFoundError, match=f"there is no model {model}; there are {MODEL}, red, blue"):
        client.completions.create(model=model, prompt=PROMPT)
