"""Requests before they reach the engine: one that waits for a grammar delays no other, and ends with its client."""
# ruff: noqa: E402 (importorskip comes first)

import json
import re
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import load
from granite4_neuron.generation.structured_outputs import Matchers
from granite4_neuron.system.sandbox.grammar_process import GrammarWorker, WorkerEnded
from test.support.serving import serving
from test.support.waiting import until

pytestmark = pytest.mark.versions

GRAMMARS, TOKENIZING = "num_requests_waiting_for_grammar", "num_requests_waiting_for_tokenizing"
WRONG = {"prompt": "x", "structured_outputs": {"regex": "a("}}  # compiling its grammar finds the error
COSTLY = {"prompt": "x", "structured_outputs": {"json": {"type": "integer", "multipleOf": 1_000_003}}}
LONG = {"prompt": "An import", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with serving(*load(dtype=torch.float32), num_sequences=4, max_queue=9) as server:
        yield server


def metric(server, name):
    text = httpx.get(f"{server.address}/metrics").text
    return float(re.search(rf"^(?:granite4_neuron_|vllm:){name}(?:{{.*}})? (.+)$", text, re.MULTILINE)[1])


class Blocked:
    """Replaces a method: records each call, and waits before it continues."""

    def __init__(self, monkeypatch, owner, name):
        self.calls, self.stopped, self.goes_on = [], [], threading.Event()
        method = getattr(owner, name)

        def blocked(*arguments):
            self.calls.append(arguments)
            stops = [each for each in arguments if hasattr(each, "is_set")]
            while not self.goes_on.is_set():
                if any(stop.is_set for stop in stops):
                    self.stopped.append(arguments)
                    return None
                time.sleep(0.01)
            return method(*arguments)

        monkeypatch.setattr(owner, name, blocked)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def grammars(server, pool, monkeypatch):
    """Block compilations. It is set up after the pool, so that its calls end before the pool waits for them."""
    blocked = Blocked(monkeypatch, server.service.maker, "compile")
    yield blocked
    blocked.goes_on.set()
    until(lambda: metric(server, GRAMMARS) == 0)


def post(server, path="/v1/completions", timeout=60, **body):
    return httpx.post(f"{server.address}{path}", json=body, timeout=timeout)


def test_nothing_else_waits_for_a_grammar(server, grammars, pool):
    """Twelve grammars wait; everything else is answered from beginning to end."""
    url = f"{server.address}/v1/completions"
    with httpx.stream("POST", url, json=LONG, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        waiting = [pool.submit(post, server, **WRONG) for _ in range(12)]
        until(lambda: metric(server, GRAMMARS) == 12)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    plain = post(server, prompt="An import", max_tokens=5, logprobs=2, echo=True)
    assert plain.status_code == 200 and plain.json()["usage"]["completion_tokens"] == 5
    messages = [{"role": "user", "content": "Hello"}]
    assert post(server, "/v1/chat/completions", messages=messages, max_tokens=5).status_code == 200
    assert post(server, "/tokenize", prompt="An import").json()["count"] > 1
    assert post(server, "/detokenize", tokens=[5]).status_code == 200
    assert post(server, prompt=[], max_tokens=5).status_code == 400
    assert post(server, **WRONG, temperature=-1).status_code == 400
    assert httpx.get(f"{server.address}/health").status_code == 200
    assert len(grammars.calls) == 1 and not any(each.done() for each in waiting)
    grammars.goes_on.set()
    assert {each.result().status_code for each in waiting} == {400}, "one grammar after another is refused"


def test_the_engine_goes_on_while_it_makes_a_matcher(server, pool, monkeypatch):
    """Texts run and others begin meanwhile; a request whose client has left never begins."""
    matchers = Blocked(monkeypatch, Matchers, "constraint")
    choice = dict(prompt="x", structured_outputs={"choice": ["b"]}, max_tokens=4)
    with pytest.raises(httpx.ReadTimeout):
        post(server, timeout=0.5, **choice)
    until(lambda: len(matchers.calls) == 1 and not server.service.engine.num_requests)
    waiting = [pool.submit(post, server, **choice) for _ in range(2)]
    for _ in range(2):
        assert post(server, prompt="An import", max_tokens=20).json()["usage"]["completion_tokens"] == 20
    assert len(matchers.calls) == 1 and not any(each.done() for each in waiting)
    before = server.engine.stats.generated_tokens
    matchers.goes_on.set()
    assert [each.result().json()["choices"][0]["text"] for each in waiting] == ["b"] * 2
    until(lambda: len(matchers.calls) == 3 and not server.engine.has_work)
    made = sum(each.result().json()["usage"]["completion_tokens"] for each in waiting)
    assert server.engine.stats.generated_tokens - before == made


def test_a_full_queue_of_grammars_refuses_another(server, grammars, pool):
    waiting = [pool.submit(post, server, **WRONG) for _ in range(13)]
    until(lambda: metric(server, GRAMMARS) == 13)
    answer = post(server, **WRONG)
    assert answer.status_code == 429 and "wait for their grammar" in answer.json()["error"]["message"]
    assert int(answer.headers["Retry-After"]) >= 1
    assert post(server, prompt="x", max_tokens=1).status_code == 200
    assert not any(each.done() for each in waiting)


def left_waiting(server, body, number):
    """Send a request `number` times, and close the connections once all requests wait for the grammar."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    port = int(server.address.rpartition(":")[2])
    with ExitStack() as clients:
        for _ in range(number):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(head.encode() + content)
        until(lambda: metric(server, GRAMMARS) == number)
    until(lambda: metric(server, GRAMMARS) == 0)


def test_a_client_that_leaves_takes_its_grammar_along(server, grammars):
    """A waiting grammar is never compiled, and a compilation that runs is told to stop."""
    left_waiting(server, WRONG, 3)
    until(lambda: len(grammars.stopped) == 1)
    grammars.goes_on.set()
    answer = post(server, prompt="x", structured_outputs={"choice": ["a"]})
    assert answer.json()["choices"][0]["text"] == "a"
    assert len(grammars.calls) == 2 and len(grammars.stopped) == 1


def test_a_compilation_ends_with_its_client(server, monkeypatch):
    """Its process is killed before its own limit ends it, and the next grammar is compiled in another."""
    killed, kill = [], GrammarWorker.kill
    monkeypatch.setattr(GrammarWorker, "kill", lambda worker: (killed.append(worker), kill(worker)))
    left_waiting(server, COSTLY, 1)
    until(lambda: killed)
    assert post(server, prompt="x", structured_outputs={"choice": ["a"]}).status_code == 200


@pytest.mark.parametrize("error", [BlockingIOError(11, "Resource temporarily unavailable"), KeyError("x")], ids=repr)
def test_a_failure_of_the_system_is_the_servers(server, monkeypatch, error):
    """No process can be started, also by one that runs, or something is wrong here: the answer says so in JSON."""

    def fail(*_, **__):
        raise error

    server.service.maker.close()  # the processes that run
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", fail)
    chat = dict(messages=[{"role": "user", "content": "x"}], max_tokens=2)
    is_limit = isinstance(error, OSError)
    said = "no further process or thread can be started" if is_limit else "the server failed at this request"
    for path, body in (
        ("/v1/completions", dict(prompt="x", response_format={"type": "json_object"})),
        ("/v1/completions", dict(prompt="x", structured_outputs={"grammar": "start: /a+/"})),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
    ):
        answer = post(server, path, **body)
        assert answer.status_code == (503 if is_limit else 500), answer.text
        assert answer.json()["error"]["message"].startswith(said)
        assert post(server, prompt="x", max_tokens=1).status_code == 200
    monkeypatch.setattr(subprocess, "Popen", started)
    assert post(server, "/v1/chat/completions", **chat).status_code == 200

    def end(_):
        raise WorkerEnded

    choice = dict(prompt="x", structured_outputs={"choice": ["a"]})
    with monkeypatch.context() as patched:
        patched.setattr(GrammarWorker, "fork", end)
        answer = post(server, **choice)
        assert answer.status_code == 503 and "no further process or thread" in answer.json()["error"]["message"]
    assert post(server, **choice).json()["choices"][0]["text"] == "a"


def test_prompts_wait_in_a_queue_too(server, pool, monkeypatch):
    """The queue holds as many requests as may run and wait. Requests for tokens only do not count."""
    prompts = Blocked(monkeypatch, server.service.maker, "completion_requests")
    waiting = [pool.submit(post, server, prompt="x", max_tokens=1) for _ in range(13)]
    until(lambda: metric(server, TOKENIZING) == 13)
    late = post(server, prompt="x", max_tokens=1)
    assert late.status_code == 429 and "the queue is full" in late.json()["error"]["message"]
    assert post(server, "/tokenize", prompt="An import").status_code == 200
    begun = len(prompts.calls)
    assert begun < 13
    prompts.goes_on.set()
    assert {each.result().status_code for each in waiting} == {200}

    texts = Blocked(monkeypatch, server.service.maker, "text_tokens")
    waiting = [pool.submit(post, server, "/tokenize", prompt="x") for _ in range(13)]
    until(lambda: metric(server, TOKENIZING) == 13)
    late = post(server, "/tokenize", prompt="x")
    assert late.status_code == 429 and "wait for tokenizing" in late.json()["error"]["message"]
    assert post(server, prompt=[5, 6], max_tokens=1).status_code == 200
    texts.goes_on.set()
    assert {each.result().status_code for each in waiting} == {200}


def test_a_full_server_does_no_work_for_a_request(server, monkeypatch):
    """It is refused before its body is parsed."""
    url = f"{server.address}/v1/completions"
    with httpx.stream("POST", url, json={**LONG, "n": 13}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        prompts = Blocked(monkeypatch, server.service.maker, "completion_requests")
        answer = httpx.post(url, content=b"{", headers={"Content-Type": "application/json"}, timeout=60)
        assert answer.status_code == 429 and not prompts.calls
        assert post(server, "/tokenize", prompt="x").status_code == 200
    until(lambda: metric(server, "num_requests_running") == 0)
