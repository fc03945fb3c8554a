"""A server with adapters: a request names one as its model."""
# ruff: noqa: E402 (importorskip comes first)

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

from granite4_neuron import chat, generate, load
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.generation import bundled_checkpoint
from test.support.adapters import save_adapter
from test.support.serving import MODEL, serving

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

PROMPT = "An assignment statement"
OPTIONS = dict(max_tokens=60, temperature=0)
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
def test_an_unknown_model_is_refused(client, model):
    with pytest.raises(openai.NotFoundError, match=f"there is no model {model}; there are {MODEL}, red, blue"):
        client.completions.create(model=model, prompt=PROMPT)


class TestWhileTheServerRuns:
    """Adapters are loaded and unloaded beside texts that run."""

    @pytest.fixture
    def folders(self, tmp_path):
        return {name: save_adapter(bundled_checkpoint(), tmp_path / name, 10 + seed) for seed, name in enumerate("ab")}

    @pytest.fixture
    def expected(self, folders):
        """Return the text of a model by the name of its folder, from a runtime that has the adapters from the start."""
        runtime = load(dtype=torch.float32, adapters=folders)
        names = {None: None, **{name: name for name in folders}}
        return {name: generate(*runtime, PROMPT, **OPTIONS, ignore_eos=True, adapter=name) for name in names}

    @pytest.fixture
    def changing(self):
        with serving(*load(dtype=torch.float32), updates_adapters=True) as server:
            yield server

    @staticmethod
    def post(server, path, **body):
        return httpx.post(f"{server.address}/v1/{path}", json=body, timeout=60)

    def text(self, server, model):
        body = dict(prompt=PROMPT, **OPTIONS, ignore_eos=True)
        answer = self.post(server, "completions", model=model, **body)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code

    def test_load_and_unload(self, changing, folders, expected):
        """A name that comes again means its new adapter, whatever the prefix cache has of the earlier one."""
        assert self.text(changing, "mine") == 404
        for name, folder in folders.items():
            answer = self.post(changing, "load_lora_adapter", lora_name="mine", lora_path=str(folder))
            assert answer.text == "Success: LoRA adapter 'mine' added successfully."
            assert [self.text(changing, "mine") for _ in range(2)] == [expected[name]] * 2
            assert self.text(changing, MODEL) == expected[None]
            assert self.post(changing, "load_lora_adapter", lora_name="mine", lora_path=str(folder)).status_code == 400
            answer = self.post(changing, "unload_lora_adapter", lora_name="mine")
            assert answer.text == "Success: LoRA adapter 'mine' removed successfully."
            assert (
                self.text(changing, "mine") == self.post(changing, "unload_lora_adapter", lora_name="mine").status_code
            )
        assert len(set(expected.values())) == 3 and not changing.engine.runtime.adapters

    def test_texts_that_run_keep_their_adapter(self, changing, folders, expected):
        for name in "ab":
            self.post(changing, "load_lora_adapter", lora_name=name, lora_path=str(folders[name]))
        with ThreadPoolExecutor() as threads:
            texts = [threads.submit(self.text, changing, name) for name in "ab"]
            while changing.engine.num_running < 2:
                pass
            gone = threads.submit(self.post, changing, "unload_lora_adapter", lora_name="a")
            while "a" in changing.service.models:
                pass
            assert self.text(changing, "a") == 404, "new requests cannot name it"
            assert [each.result() for each in texts] == [expected["a"], expected["b"]]
            assert gone.result().status_code == 200
        assert self.text(changing, "b") == expected["b"] and list(changing.engine.runtime.adapters) == ["b"]

    def test_a_request_whose_adapter_goes_while_it_is_prepared_is_refused(self, changing, folders, monkeypatch):
        self.post(changing, "load_lora_adapter", lora_name="a", lora_path=str(folders["a"]))
        encode = changing.service.maker.text_tokens

        def slow(*arguments):
            assert self.post(changing, "unload_lora_adapter", lora_name="a").status_code == 200
            return encode(*arguments)

        monkeypatch.setattr(changing.service.maker, "text_tokens", slow)
        answer = self.post(changing, "completions", model="a", prompt=PROMPT, **OPTIONS)
        assert answer.status_code == 400, "the model without adapters answers in its name"
        assert answer.json()["error"]["message"] == "there is no adapter 'a'; none is loaded."

    def test_bad_requests_to_load_are_refused(self, changing, server, tmp_path, monkeypatch):
        monkeypatch.setattr(changing.service, "options", replace(changing.service.options, aliases=["small"]))
        for body, message in (
            (dict(lora_name=MODEL, lora_path="x"), "there already is a model tiny"),
            (dict(lora_name="small", lora_path="x"), "there already is a model small"),
            (dict(lora_name="x", lora_path=str(tmp_path / "none")), "is not a folder; an adapter is a folder with"),
            (dict(lora_name="x", lora_path="x", load_inplace=True), "load_inplace: this server supports only false"),
            (dict(lora_name="x"), "lora_path: field required"),
        ):
            answer = self.post(changing, "load_lora_adapter", **body)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        assert changing.service.models == (MODEL, "small")
        for path in ("load_lora_adapter", "unload_lora_adapter"):
            assert self.post(server, path, lora_name="red", lora_path="x").status_code == 404, "it is off"
