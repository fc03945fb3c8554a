"""What a reader of a request's outputs gets."""

import asyncio
import time

import pytest

from granite4_neuron.engine import Output, Request
from granite4_neuron.serving import engine_client
from granite4_neuron.serving.engine_client import Generation


def test_a_reader_gets_nothing_once_in_a_pause(monkeypatch):
    """A pause begins with the last outputs, or with the request."""
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", 0)

    async def read():
        generation = Generation([Request([1], 9)], 1, 0.0, {})
        assert await anext(generation) == {}
        generation.add({0: [Output(0, 5, "a")]}, time.perf_counter() + 1000)
        assert list(await anext(generation)) == [0]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(generation), 0.05)
        generation.close()

    asyncio.run(read())


def test_a_slow_reader_gets_several_steps_together_and_an_error_behind_them():
    async def read():
        generation = Generation([Request([1], 9)] * 2, 2, 0.0, {})
        for step in {0: "a", 1: "b"}, {1: "c"}:
            generation.add({index: [Output(index, 5, text)] for index, text in step.items()}, 1.0)
        yield await anext(generation)
        generation.add({0: [Output(0, 5, "d", "stop")]}, 2.0)
        generation.fail(ValueError("failed"))
        yield await anext(generation)
        with pytest.raises(ValueError, match="failed"):
            await anext(generation)
        generation.close()

    async def texts():
        return [{index: [each.text for each in outputs] for index, outputs in got.items()} async for got in read()]

    assert asyncio.run(texts()) == [{0: ["a"], 1: ["b", "c"]}, {0: ["d"]}]
