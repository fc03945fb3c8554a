"""The server limits the log-probabilities of prompts that it holds for all requests together."""
# ruff: noqa: E402 (importorskip comes first)

import gc
import json
import socket

import pytest
import torch

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import load
from granite4_neuron.engine import TokenLogprob
from granite4_neuron.serving import prompt_logprobs
from test.support.serving import serving
from test.support.waiting import until

pytestmark = pytest.mark.versions

PROMPT = [5, 6, 7, 8] * 10
BODY = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 4}  # 40 tokens with 5 each
ENDLESS = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with serving(*load(dtype=torch.float32), num_sequences=2, max_queue=6) as server:
        yield server


@pytest.fixture
def held(server, monkeypatch):
    """Allow 500 log-probabilities, and check that all are released at the end."""
    monkeypatch.setattr(prompt_logprobs, "MOST", 500)
    yield server.service.prompt_logprobs
    until(lambda: server.service.prompt_logprobs.number == 0)


@pytest.fixture
def post(server):
    def send(**body):
        return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)

    return send


@pytest.mark.parametrize("more", [{"n": 3}, {"prompt": [PROMPT] * 3}, {"logprobs": 12}], ids=str)
def test_one_request_may_not_ask_for_more(held, post, more):
    answer = post(**{**BODY, **more})
    assert answer.status_code == 400 and "may ask for 500" in answer.json()["error"]["message"]
    assert post(**{**BODY, **more, "echo": False}).status_code == 200, "there are none of the prompt"


def test_requests_together_may_not_hold_more(held, server, post):
    with httpx.stream("POST", f"{server.address}/v1/completions", json={**ENDLESS, "n": 2}, timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        assert held.number == 400
        answer = post(**BODY)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        assert post(**{**BODY, "echo": False}).status_code == 200
        assert post(**{**BODY, "logprobs": 1}).status_code == 200
    until(lambda: held.number == 0)
    assert post(**{**BODY, "n": 2}).status_code == 200


def test_refused_and_failed_requests_release_them(held, post, tiny):
    nothing = {"allowed_token_ids": tiny[1].encode("the"), "bad_words": ["the"]}
    assert post(**BODY, **nothing).status_code == 400
    assert held.number == 0
    assert post(**{**BODY, "prompt": PROMPT[:1], "n": 7, "logprobs": 0}).status_code == 200
    assert post(**{**BODY, "prompt": PROMPT[:1], "n": 9, "logprobs": 0}).status_code == 400


def test_an_answers_log_probabilities_count_until_it_is_sent(held, server):
    """A client that reads slowly does not let the server write ever more answers."""
    content = json.dumps({**BODY, "prompt": PROMPT * 2, "max_tokens": 200, "ignore_eos": True, "logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.address.rpartition(":")[2])))
        client.settimeout(60)

        def connection():  # connections of other tests may still be open
            transports = [each.transport for each in list(server.server_state.connections)]
            return [each for each in transports if each and each.get_extra_info("peername") == client.getsockname()]

        until(connection)
        [transport] = connection()
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(1000)
        client.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: held.number)
        until(lambda: not server.engine.has_work)
        answer = client.recv(1000)
        assert held.number == 480
        while more := client.recv(65536):
            answer += more
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["logprobs"]["tokens"]) == 280


def test_a_connection_that_stays_open_holds_none(held, server):
    with httpx.Client(timeout=60) as client:
        for stream in (False, True):
            assert client.post(f"{server.address}/v1/completions", json={**BODY, "stream": stream}).status_code == 200
            assert server.server_state.connections

            def is_free():
                gc.collect()
                return not any(type(each) is TokenLogprob for each in gc.get_objects())

            until(is_free, seconds=4)  # less than the 5 seconds after which an idle connection is closed
            assert server.server_state.connections
