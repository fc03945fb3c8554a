"""The server over the XLA runtime gives the CPU's texts, with prefix cache and speculation, also to several clients."""
# ruff: noqa: E402 (importorskip comes first)

import threading

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is not installed; the xla backend runs with torch 2.9")
pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import generate
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.devices.xla.runtime import XLARuntime
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from test.support.serving import serving

pytestmark = pytest.mark.versions

PROMPTS = ("Names and more names", "Names and nothing", "x")


@pytest.fixture(scope="module")
def server(texting, texting_folder):
    runtime = XLARuntime(load_model(texting_folder), texting[0].generation_config, (16, 32))
    with serving(runtime, texting[1], num_sequences=2, max_length=100, drafter=NgramDrafter(1, 3)) as server:
        yield server


def ask(server, path="completions", **body):
    return httpx.post(f"{server.address}/v1/{path}", json=body, timeout=600)


def test_texts_are_the_cpus(server, texting):
    texts = {}

    def client(prompt):
        texts[prompt] = ask(server, prompt=prompt, max_tokens=12).json()["choices"][0]["text"]

    threads = [threading.Thread(target=client, args=[prompt]) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: generate(*texting, prompt, max_tokens=12) for prompt in PROMPTS}


def test_a_cached_prompt_is_not_run_again(server, texting):
    prompt = "A prompt that comes twice"
    cached = []
    for _ in range(2):
        answer = ask(server, prompt=prompt, max_tokens=4).json()
        assert answer["choices"][0]["text"] == generate(*texting, prompt, max_tokens=4)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, len(texting[1].encode(prompt))]


def test_a_bad_request_changes_nothing(server, texting):
    assert ask(server, prompt="x", temperature=-1).status_code == 400
    assert ask(server, prompt="x", max_tokens=12).json()["choices"][0]["text"] == generate(*texting, "x", max_tokens=12)
