"""What a reader of a request's outputs gets."""

import asyncio
import re
import time
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")

from granite4_neuron.engine import Output, PromptReport, Request
from granite4_neuron.serving import engine_client
from granite4_neuron.serving.channel import Channel
from granite4_neuron.serving.engine_client import EngineClient, Generation
from granite4_neuron.serving.engine_loop import EngineFacts
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.metrics import Metrics
from granite4_neuron.serving.work_queue import WorkQueues


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


FACTS = EngineFacts(0, 0, (), None, None)


@asynccontextmanager
async def client_of_engine():
    """Yield a client, the engine's end of its channel, and its metrics."""
    ours, theirs = Channel.pair()
    metrics = Metrics(FACTS, 4, 100, WorkQueues(4), "model")
    client = EngineClient(theirs, 4, (), metrics, lambda: None)
    client.start()
    try:
        yield client, ours, metrics
    finally:
        client.close()
        ours.close()


def send_steps(channel, *steps):
    for rows in steps:
        channel.send(("outputs", rows, len(rows), *FACTS))


def submit(client):
    return client.submit([Request([1], 9)], None, 1, time.perf_counter(), {})


FIRST = (5, "a", None, None, False, None, PromptReport(0), None)


def test_steps_that_come_together_make_one_batch_and_count_one_by_one():
    async def read():
        async with client_of_engine() as (client, channel, metrics):
            generation = submit(client)
            draft = generation.first, 6, "b"
            send_steps(channel, [(generation.first, *FIRST)], [draft, draft], [draft], [(99, 5, "of nobody")])
            [outputs] = (await anext(generation)).values()
            assert [output.text for output in outputs] == ["a", "b", "b", "b"]
            names = "inter_token_latency_seconds|iteration_tokens_total"
            counts = re.findall(rf"({names})_count{{.*}} (\S+)", metrics.text().decode())
            assert dict(counts) == {"inter_token_latency_seconds": "2.0", "iteration_tokens_total": "4.0"}
            assert client.num_requests == 1
            send_steps(channel, [(generation.first, None, "", "error", "failed", False, None, None, None)])
            [batch] = [each async for each in generation]
            assert batch[0][0].error == "failed"
            assert not client.num_requests and generation.times[0].tokens == 4

    asyncio.run(read())


def test_outputs_are_taken_while_the_iteration_waits_and_only_then():
    async def read():
        async with client_of_engine() as (client, channel, _):
            generation, taken = submit(client), []
            generation.take = lambda batch: batch[0][0].finish_reason is None and (taken.append(batch) or True)
            send_steps(channel, [(generation.first, *FIRST)])
            while not channel.flush() or not generation.times:
                await asyncio.sleep(0.001)
            assert not taken, "it has not begun to wait"
            assert (await anext(generation))[0][0].text == "a"
            waiting = asyncio.ensure_future(anext(generation))
            for number in range(3):
                send_steps(channel, [(generation.first, 6, "b")])
                while len(taken) <= number:
                    await asyncio.sleep(0.001)
            assert not waiting.done()
            send_steps(channel, [(generation.first, 7, "c", "stop", None, False, None, None, None)])
            assert (await waiting)[0][0].text == "c"
            assert [each[0][0].text for each in taken] == ["b"] * 3

    asyncio.run(read())


def test_fast_steps_are_read_once_in_a_while(monkeypatch):
    monkeypatch.setattr(engine_client, "READING_SECONDS", 1000)

    async def read():
        async with client_of_engine() as (client, channel, _):
            generation, batches = submit(client), []
            generation.take = lambda batch: batches.append("".join(output.text for output in batch[0])) or True
            waiting = asyncio.ensure_future(anext(generation))
            for number, row in enumerate([(generation.first, *FIRST), (generation.first, 6, "b")]):
                await asyncio.sleep(0)
                send_steps(channel, [row])
                while len(batches) <= number:
                    await asyncio.sleep(0.001)
            for _ in range(2):
                send_steps(channel, [(generation.first, 7, "c")])
                await asyncio.sleep(0.01)
            assert batches == ["a", "b"]
            client._read_on()
            assert batches == ["a", "b", "cc"]
            waiting.cancel()

    asyncio.run(read())


def test_an_error_of_what_takes_outputs_is_its_requests_own():
    def fail(_):
        raise ValueError("a bug")

    async def read():
        async with client_of_engine() as (client, channel, _):
            failing, other = submit(client), submit(client)
            failing.take = fail
            reading = [asyncio.ensure_future(anext(each)) for each in (failing, other)]
            await asyncio.sleep(0)
            send_steps(channel, [(each.first, *FIRST) for each in (failing, other)])
            assert (await reading[1])[0][0].text == "a"
            with pytest.raises(ValueError, match="a bug"):
                await reading[0]

    asyncio.run(read())


def test_the_end_of_the_engine_fails_what_runs():
    async def read():
        async with client_of_engine() as (client, channel, _):
            generation, change = submit(client), asyncio.ensure_future(client.unload_adapter("a"))
            await asyncio.sleep(0)
            channel.end()
            for waiting in (anext(generation), change):
                with pytest.raises(RequestError, match="engine has stopped"):
                    await waiting
            with pytest.raises(RequestError, match="engine has stopped"):
                submit(client)
            with pytest.raises(RequestError, match="engine has stopped"):
                await asyncio.wait_for(client.load_adapter("b", None), 1)

    asyncio.run(read())
