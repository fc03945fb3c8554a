"""Requests made to delay others: each is answered, and other requests are answered meanwhile."""
# ruff: noqa: E402 (importorskip comes first)

import json
import socket
import threading
import time

import pytest
import torch

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import load
from granite4_neuron.serving.apis.chat.answers import CompletionAnswer
from test.support.serving import serving

JSON = {"Content-Type": "application/json"}
LONGEST_WAIT = 2  # in seconds; an answer should take 0.1, and without the server's limits it took 3 to 60


@pytest.fixture(scope="module")
def server():
    with serving(*load(dtype=torch.float32), max_length=8192, num_sequences=8, max_queue=64, max_body=2**22) as server:
        yield server


def many(item: str, times: int, field: str) -> bytes:
    return f'{{"{field}": [{",".join([item] * times)}]}}'.encode()


PARTS = "over 65536 lists, objects, names and texts, or over 589824 token ids"
ENORMOUS = {
    "prompts with choices": ("completions", {"prompt": ["a"] * 70_000, "n": 128, "max_tokens": 1}, PARTS),
    "prompts": (
        "completions",
        {"prompt": ["a"] * 20_000, "max_tokens": 1},
        "for 20000 texts; this server takes 72",
    ),
    "choices": ("completions", {"prompt": ["a"] * 72, "n": 2, "max_tokens": 1}, "asks for 144 texts"),
    "choices of a chat": ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 73}, "asks for 73"),
    "token ids": ("completions", many("5", 2_000_000, "prompt"), PARTS),
    "a batch's token ids": ("completions", {"prompt": [[5] * 8192] * 72}, "at least one new one must fit"),
    "lists": ("completions", many("[]", 1_300_000, "prompt"), PARTS),
    "wrong messages": ("chat/completions", many('{"role":5}', 350_000, "messages"), PARTS),
    "fewer wrong messages": ("chat/completions", many('{"role": 5}', 16_000, "messages"), "messages.0.role: input"),
    "empty messages": ("chat/completions", many('{"role": "user", "content": ""}', 90_000, "messages"), PARTS),
    "fields": ("completions", {f"{number:x}": 1 for number in range(350_000)}, PARTS),
    "fewer fields": ("completions", {f"{n}": 1 for n in range(60_000)}, "prompt: field required"),
    "a schema": (
        "completions",
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 4_000_000}}},
        },
        "the JSON schema has 4,000",
    ),
    "a costly schema": (
        "completions",
        {"prompt": "a", "structured_outputs": {"json": {"type": "integer", "multipleOf": 99_999_989}}},
        "it is nested too deep, or takes more than 4 seconds or 1 GiB",
    ),
    "tools": ("chat/completions", many('{"type":"function","function":{"name":"a"}}', 60_000, "tools"), PARTS),
    "fewer tools": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}] * 9_000},
        "tools.0.function: field required",
    ),
    "a document": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "documents": [{"text": "a" * 4_000_000}]},
        "documents has 4000004 characters",
    ),
    "arguments": (
        "chat/completions",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 4_000_000}}]},
                {"role": "robot"},
            ]
        },
        "messages.1.role: input should be",
    ),
    "deep lists": (
        "completions",
        b'{"prompt": "a", "structured_outputs": {"json": {"enum": ' + b"[" * 30_000 + b"]" * 30_000 + b"}}}",
        "recursion limit",
    ),
    "biases": ("completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, "by token id, 1024 at"),
    "stop tokens": ("completions", {"prompt": "a", "stop_token_ids": [5] * 500_000}, "stop_token_ids: list should"),
    "tokens of a text": ("../detokenize", {"tokens": [5] * 500_000}, "tokens has 500000 token ids; this model's"),
    "tokens of a huge number": ("../detokenize", b'{"tokens": [' + b"9" * 4_000_000 + b"]}", "not a request in JSON"),
}


def check_others(server, ask):
    """Check that other requests are answered while `ask` runs."""
    asking = threading.Thread(target=ask)
    with httpx.Client(timeout=300) as others:
        others.get(f"{server.address}/health")
        asking.start()
        while asking.is_alive():
            started = time.monotonic()
            assert others.get(f"{server.address}/health").status_code == 200
            assert time.monotonic() - started < LONGEST_WAIT
            time.sleep(0.01)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path, body, message", ENORMOUS.values(), ids=ENORMOUS.keys())
def test_others_are_answered_meanwhile(server, path, body, message):
    content, answers = body if isinstance(body, bytes) else json.dumps(body).encode(), []
    url = f"{server.address}/v1/{path}"
    check_others(server, lambda: answers.append(httpx.post(url, content=content, headers=JSON, timeout=300)))
    assert answers[0].status_code == 400 and message in answers[0].json()["error"]["message"]


def test_others_are_answered_while_a_long_text_is_encoded(server):
    answers = []
    body = {"prompt": "é1 " * 30_000, "return_token_strs": True}
    check_others(server, lambda: answers.append(httpx.post(f"{server.address}/tokenize", json=body, timeout=300)))
    assert answers[0].status_code == 200 and answers[0].json()["count"] > 100_000


def test_others_are_answered_during_a_body_of_single_bytes(server):
    """h11 takes seconds to parse the chunks of one byte that fit into one read of a socket."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    content = b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
    port, answers = int(server.address.rpartition(":")[2]), []

    def ask():
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + content)
            answers.append(client.recv(4096))

    check_others(server, ask)
    assert answers[0].startswith(b"HTTP/1.1 400 ")


def test_texts_may_have_any_punctuation(server):
    """Brackets and quotes inside a string do not count as lists and names."""
    prompt = '[{"a\\": 1, \\\\' * 4_000
    answer = httpx.post(f"{server.address}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60)
    assert answer.status_code == 400 and "at least one new one must fit" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_long_answers_are_written_outside_the_event_loop(server, monkeypatch, stream):
    threads, write = set(), CompletionAnswer._logprobs

    def logprobs(self, index, new, prompt):
        if prompt is not None:
            threads.add(threading.current_thread().name)
        return write(self, index, new, prompt)

    monkeypatch.setattr(CompletionAnswer, "_logprobs", logprobs)
    body = {"prompt": ["The import", "A class"], "max_tokens": 3, "echo": True, "logprobs": 2, "stream": stream}
    assert httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).status_code == 200
    assert threads and all(name.startswith("answers") for name in threads)
