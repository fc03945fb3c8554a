"""A server on a port of its own, whose engine runs in this process, too."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from granite4_neuron.engine import Engine, PrefixCache
from granite4_neuron.generation.structured_outputs import Matchers
from granite4_neuron.serving.channel import Channel
from granite4_neuron.serving.engine_loop import EngineLoop, ServedModel
from granite4_neuron.serving.http.address import bind, own_names
from granite4_neuron.serving.http.server import Server
from granite4_neuron.serving.http.service import ServerOptions
from granite4_neuron.serving.sequences import Limits

MODEL = "tiny"


@contextmanager
def serving(
    runtime,
    tokenizer,
    *,
    num_sequences=4,
    max_length=512,
    max_queue=16,
    engine_class=Engine,
    max_tokens=None,
    drafter=None,
    **options,
) -> Iterator[Server]:
    """Run a server. Its address is `server.address`; `server.loop` runs `server.engine` with `server.cache`.

    Args:
        options: of `ServerOptions`.
    """
    cache = PrefixCache(runtime, 2**28, runtime.tokens_per_step, at_branches=True)
    engine = engine_class(
        runtime, num_sequences, max_length=max_length, tokenizer=tokenizer, prefix_cache=cache, drafter=drafter
    )
    ports, is_up = [], threading.Event()

    def on_start(port):
        ports.append(port)
        is_up.set()

    ours, theirs = Channel.pair()
    matchers = None
    with suppress(ValueError):
        matchers = Matchers(tokenizer, runtime.config.vocab_size)
    loop = EngineLoop(engine, cache, matchers, ours, on_start)
    limits = Limits(engine.max_length, max_tokens, num_sequences + max_queue)
    usual = dict(api_key=None, hosts=own_names("127.0.0.1"), max_body=2**20, keep_alive=5, shutdown_timeout=60)
    server = Server(
        ServedModel.of(engine, cache), tokenizer, theirs, ServerOptions(limits, MODEL, **{**usual, **options})
    )
    server.engine, server.cache, server.loop = engine, cache, loop
    threads = [
        threading.Thread(target=run, name=name)
        for name, run in (("engine", loop.run), ("server", lambda: server.run([bind("127.0.0.1", 0)])))
    ]
    for thread in threads:
        thread.start()
    assert is_up.wait(30)
    server.address = f"http://127.0.0.1:{ports[0]}"
    try:
        yield server
    finally:
        server.should_exit = True
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream in which each is named by its type."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
