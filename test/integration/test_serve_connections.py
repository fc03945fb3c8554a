"""Clients that stall or leave: the server waits for each for a limited time, and none blocks the server's exit."""
# ruff: noqa: E402 (importorskip comes first)

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron.serving.http import connection
from test.support.serving import serving
from test.support.waiting import until

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
# Its stream is some hundred kilobytes long.
LONG = dict(prompt="An assignment statement", max_tokens=400, ignore_eos=True, stream=True, logprobs=20)


@pytest.fixture
def server(tiny):
    with serving(*tiny) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch):
    """Set every limit to half a second."""
    monkeypatch.setattr(connection, "SECONDS", dict.fromkeys(connection.SECONDS, 0.5))
    monkeypatch.setattr(connection, "ENDING_SECONDS", 0.5)


def connect(server) -> socket.socket:
    """Connect with little room for data that the client does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(server.address.rpartition(":")[2])))
    client.settimeout(30)
    until(lambda: server.server_state.connections)
    for each in server.server_state.connections:
        each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return client


def test_an_event_does_not_wait_until_the_headers_are_acknowledged(server):
    """Nagle's algorithm would hold it back until then, for some 40 ms."""
    with connect(server):
        [connection] = server.server_state.connections
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def everything(client: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def request_of(body: dict) -> bytes:
    content = json.dumps(body).encode()
    return HEAD % len(content) + content


@pytest.mark.parametrize("start", [b"", b"GET /hea", HEAD[:40]], ids=["nothing", "half a line", "half the headers"])
def test_headers_must_come_in_time(impatient, server, start):
    with connect(server) as client:
        client.sendall(start)
        assert everything(client) == b""


def test_single_bytes_do_not_extend_the_time(impatient, server):
    with connect(server) as client, pytest.raises(OSError):
        for _ in range(1000):
            client.sendall(b"G")
            time.sleep(0.03)


def test_a_body_must_come_in_time(impatient, server):
    with connect(server) as client:
        client.sendall(HEAD % 100 + b'{"prompt"')
        head, _, content = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and f"Content-Length: {len(content)}".encode() in head
    assert "body did not come within 0.5 seconds" in json.loads(content)["error"]["message"]


def test_an_ignored_body_must_come_in_time(impatient, server):
    with connect(server) as client:
        client.sendall(HEAD.replace(b"completions", b"nothing") % 1000)
        assert client.recv(4096).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(OSError):
            for _ in range(900):
                client.sendall(b"x")
                time.sleep(0.03)


def test_a_stream_must_be_read(impatient, server):
    with connect(server) as client:
        client.sendall(request_of(LONG))
        until(lambda: server.engine.num_running)
        until(lambda: not server.server_state.connections)
        until(lambda: not server.engine.has_work and not server.server_state.tasks)


def test_a_slow_client_within_each_limit_is_served(server, monkeypatch):
    """A client is served even if the whole request takes longer than the limit of any part. It gets every token, of
    many steps together: what it does not read waits as tokens, not as bytes.
    """
    limits = dict.fromkeys((connection.HEADERS, connection.BODY), 3)
    monkeypatch.setattr(connection, "SECONDS", {**connection.SECONDS, **limits})
    request = request_of(LONG)
    with connect(server) as client:
        for part in (request[:20], request[20:-10], request[-10:]):
            client.sendall(part)
            time.sleep(1.2)
        until(lambda: server.engine.stats.generated_tokens == 400)
        answer = b""
        while b"[DONE]" not in answer and (more := client.recv(4096)):
            answer += more
            time.sleep(0.01)
    *events, end = events_of(answer)
    tokens = [len(event["choices"][0]["logprobs"]["tokens"]) for event in events]
    assert sum(tokens) == 400 and max(tokens) > 100
    whole = httpx.post(f"{server.address}/v1/completions", json={**LONG, "stream": False}, timeout=60)
    assert "".join(event["choices"][0]["text"] for event in events) == whole.json()["choices"][0]["text"]
    assert events[-1]["timings"]["predicted_n"] == 400 and end == "[DONE]"


def answers_of(content: bytes) -> list[bytes]:
    """Return the responses that a server sent, except interim ones (100)."""
    return [each for each in content.split(b"HTTP/1.1 ") if each and not each.startswith(b"100 ")]


def events_of(content: bytes) -> list[dict | str]:
    """Return the data of events, of a response in chunks that are whole events."""
    data = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


SHORT = {"prompt": "An assignment statement", "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "close"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(server, monkeypatch, stream, more):
    """Even if the answer takes longer than the server waits before it checks whether the client is still there."""
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.001)
    request = request_of({**SHORT, "stream": stream}).replace(b"Host:", more + b"Host:")
    with connect(server) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        [answer] = answers_of(everything(client))
    assert answer.startswith(b"200 ")
    expected = httpx.post(f"{server.address}/v1/completions", json=SHORT, timeout=60).json()["choices"][0]["text"]
    if stream:
        text = "".join(event["choices"][0]["text"] for event in events_of(answer)[:-1])
    else:
        text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    assert text == expected
    until(lambda: not server.server_state.connections)


def test_several_requests_before_the_end_are_all_answered(server):
    with connect(server) as client:
        client.sendall(request_of(SHORT) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + request_of(SHORT))
        client.shutdown(socket.SHUT_WR)
        assert [each[:4] for each in answers_of(everything(client))] == [b"200 "] * 3


@pytest.mark.parametrize(
    "start", [b"", HEAD[:40], HEAD % 100 + b"{"], ids=["nothing", "half the headers", "half a body"]
)
def test_half_a_request_before_the_end_is_given_up(server, start):
    with connect(server) as client:
        client.sendall(start)
        client.shutdown(socket.SHUT_WR)
        everything(client)
    until(lambda: not server.server_state.connections, seconds=5)


@pytest.mark.parametrize("way", ["closed", "reset", "ended and closed"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_is_gone_is_noticed(tiny, monkeypatch, way, stream):
    """Even while its request waits, when nothing of an answer has been written yet but a stream's headers."""
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.01)
    endless = dict(prompt="An assignment statement", ignore_eos=True, max_tokens=8000)
    with serving(*tiny, num_sequences=1, max_length=8192) as server, connect(server) as running:
        running.sendall(request_of({**endless, "stream": True}))
        until(lambda: server.engine.num_running)
        with connect(server) as client:
            client.sendall(request_of({**endless, "stream": stream}))
            until(lambda: server.engine.num_waiting)
            if way == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if way == "ended and closed":
                client.shutdown(socket.SHUT_WR)
                received = b""
                while (b":\n\n" if stream else b"HTTP/1.1 100 Continue\r\n") not in received:
                    received += client.recv(100)
        until(lambda: not server.engine.num_waiting)
        assert server.engine.num_running, "the other request still runs"


def test_an_http_1_0_client_that_closes_its_sending_side_is_gone(server):
    """The server may write nothing to such a client before the answer, so it cannot probe it. One that stays gets a
    stream without chunks.
    """
    with connect(server) as client:
        client.sendall(request_of({**LONG, "stream": False}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        until(lambda: server.engine.num_running)
        client.shutdown(socket.SHUT_WR)
        assert everything(client) == b""
        until(lambda: not server.engine.has_work)
    with connect(server) as client:
        client.sendall(request_of({**SHORT, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        _, _, body = everything(client).partition(b"\r\n\r\n")
    assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("start", [HEAD % 100 + b"{", request_of(LONG)], ids=["half a body", "a stream"])
def test_shutdown_does_not_wait_for_a_client(tiny, monkeypatch, start):
    monkeypatch.setattr(connection, "ENDING_SECONDS", 0.5)
    with serving(*tiny) as server, connect(server) as client:
        client.sendall(start)
        until(lambda: server.server_state.tasks and not server.engine.has_work)
        server.should_exit = True
        until(lambda: not server.server_state.connections, seconds=20)


def test_shutdown_has_a_limit(tiny):
    with serving(*tiny, max_length=8192, shutdown_timeout=0.5) as server:
        with httpx.stream("POST", f"{server.address}/v1/completions", json={**LONG, "max_tokens": 8000}) as response:
            lines = response.iter_lines()
            next(lines)
            server.should_exit = True
            *_, last = (line for line in lines if line)
        assert "the server's engine has stopped" in last


def test_nothing_is_written_after_a_write_that_failed(caplog):
    async def write():
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        theirs.close()
        lost = SimpleNamespace(transport=transport, scope={"http_version": "1.1"})
        for _ in range(9):
            connection.Connection.write(lost, b"x")

    asyncio.run(write())
    assert not caplog.records


def test_nothing_is_written_to_a_lost_connection(server, caplog):
    """The client leaves while the loop is busy and several parts of its stream are waiting."""
    is_blocked, may_go_on = threading.Event(), threading.Event()

    def block():
        is_blocked.set()
        may_go_on.wait(60)

    port = int(server.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client, caplog.at_level(logging.WARNING, "asyncio"):
        client.sendall(request_of({**LONG, "logprobs": None}))
        client.recv(100)
        server.service.engine._loop.call_soon_threadsafe(block)
        is_blocked.wait(60)
        before = server.engine.stats.generated_tokens
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        client.close()
        until(lambda: server.engine.stats.generated_tokens > before + 50)
        may_go_on.set()
        until(lambda: not server.server_state.connections)
    assert not caplog.records
