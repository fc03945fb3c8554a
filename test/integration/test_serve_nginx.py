"""Behind nginx with its default settings, a stream arrives as it is sent, and a client that leaves is noticed."""
# ruff: noqa: E402 (importorskip comes first)

import json
import threading

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from test.support.nginx import nginx
from test.support.scripted import script_tokens
from test.support.serving import serving
from test.support.waiting import until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True}


def behind_nginx(server, folder):
    """Run nginx; yield its address."""
    return nginx(folder, f"server {{ listen PORT; location / {{ proxy_pass {server.address}; }} }}")


def test_each_event_arrives_before_the_next_is_made(tiny, tmp_path, monkeypatch):
    """The model chooses a token only once the client has read the one before."""
    read = []
    with serving(*tiny) as server, behind_nginx(server, tmp_path) as address:

        def choose(tokens):
            made = len(tokens) - prompt
            until(lambda: len(read) >= made)
            return 65 + made % 26

        prompt = httpx.post(f"{address}/tokenize", json=CHAT | {"stream": False}).json()["count"]
        script_tokens(monkeypatch, choose)
        with httpx.stream("POST", f"{address}/v1/chat/completions", json={**CHAT, "max_tokens": 60}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    read.append(line)
        assert len(read) >= 60


def test_a_client_that_leaves_during_its_prompt_frees_its_slot_within_a_step(tiny, tmp_path, monkeypatch):
    """It leaves within a step of its prompt, which lasts until the server has noticed it."""
    has_begun, noticed, after = threading.Event(), threading.Event(), []
    with serving(*tiny, max_length=4096) as server, behind_nginx(server, tmp_path) as address:
        end, step = server.service.engine.end, server.engine.step
        monkeypatch.setattr(server.service.engine, "end", lambda gone: (noticed.set(), end(gone)))

        def step_of_prompt():
            after.append(server.engine.stats.prompt_tokens)
            outputs = step()
            if len(after) == 2:
                assert has_begun.wait(60)
                response.close()
                assert noticed.wait(60)
            return outputs

        monkeypatch.setattr(server.engine, "step", step_of_prompt)
        long = {**CHAT, "messages": [{"role": "user", "content": "word " * 1200}], "max_tokens": 9}
        with httpx.Client() as client:
            request = client.build_request("POST", f"{address}/v1/chat/completions", json=long)
            response = client.send(request, stream=True)
            assert response.status_code == 200, response.read()
            has_begun.set()
            until(lambda: noticed.is_set() and not server.engine.has_work)
        assert len(after) <= 3 and server.engine.stats.prompt_tokens < 3000
