"""Clients that try to hold up a server: they send slowly, or half a request, or far too much, do not read, or leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST_STALL = 12  # in seconds, longer than a server waits for headers

_STREAM = {"prompt": "An assignment statement", "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 20}


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _many(item: str, times: int, field: str) -> bytes:
    return f'{{"{field}":[{",".join([item] * times)}]}}'.encode()


_STREAM_REQUEST = _request(COMPLETIONS, json.dumps(_STREAM).encode())
_ENORMOUS = [
    _request(COMPLETIONS, json.dumps({"prompt": ["a"] * 60_000, "n": 128}).encode()),
    _request(COMPLETIONS, json.dumps({f"{number:x}": 1 for number in range(350_000)}).encode()),
    _request(COMPLETIONS, _many("5", 2_000_000, "prompt")),
    _request(COMPLETIONS, b"[" * 2**22),
    _request(COMPLETIONS, b"x" * 2**23),
    _request(CHAT, _many('{"role":5}', 350_000, "messages")),
    _request(CHAT, _many('{"role":"user","content":""}', 90_000, "messages")),
]


async def half_sent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    writer.write(_STREAM_REQUEST[: chance.randrange(len(_STREAM_REQUEST))])
    try:
        await asyncio.wait_for(reader.read(), chance.random() * LONGEST_STALL)
    except asyncio.TimeoutError:
        return "left"
    return "closed by the server"


async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    for start in range(0, len(_STREAM_REQUEST), 10):
        writer.write(_STREAM_REQUEST[start : start + 10])
        await asyncio.sleep(chance.random() * 0.1)
    answer = b""
    while part := await reader.read(20_000):
        answer += part
        if b"data: [DONE]" in answer[-100:]:
            return "answered"
        await asyncio.sleep(chance.random() * 0.1)
    return "lost"


async def unread(_: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    writer.transport.pause_reading()
    writer.write(_STREAM_REQUEST)
    await asyncio.sleep(chance.random() * LONGEST_STALL)
    return "left"


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    writer.write(_STREAM_REQUEST)
    await reader.read(100)
    await asyncio.sleep(chance.random() * 0.2)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "left"


async def enormous(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    writer.write(chance.choice(_ENORMOUS))
    line = await reader.readline()
    return "refused" if line.split()[1:2] in ([b"400"], [b"413"]) else "lost"


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    writer.write(chance.randbytes(1000) + b"\r\n\r\n")
    return "refused" if b" 400 " in await reader.readline() else "lost"


KINDS: tuple[Callable[..., Awaitable[str]], ...] = (half_sent, slow, unread, reset, enormous, garbage)


async def attack(address: str, kind: Callable[..., Awaitable[str]], chance: random.Random, outcomes: Counter) -> None:
    """Make one connection of this kind and count how it ended: "lost" if it got another answer than it should."""
    url = urlsplit(address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        outcome = await kind(reader, writer, chance)
    except ConnectionError:
        outcome = "closed by the server"
    finally:
        writer.transport.abort()
    outcomes[f"{kind.__name__}: {outcome}"] += 1
