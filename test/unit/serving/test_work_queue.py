import asyncio
import threading

import pytest

from granite4_neuron.serving.work_queue import WorkQueue
from granite4_neuron.system.sandbox.limited_process import NoProcess


def test_threads_start_with_the_queue_or_not_at_all(monkeypatch):
    """No request needs another thread, so that the work of one that is refused is not left behind."""
    queue, start, before = WorkQueue("work", 2), threading.Thread.start, set(threading.enumerate())

    def first_only(thread):
        if set(threading.enumerate()) - before:
            raise RuntimeError("can't start new thread")
        start(thread)

    def fail(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", first_only)
        with pytest.raises(NoProcess):
            WorkQueue("more work", 2)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()

    async def both():
        meeting = threading.Barrier(2, timeout=60)
        return await asyncio.gather(*(queue.run(lambda _: meeting.wait()) for _ in range(2)))

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert sorted(asyncio.run(both())) == [0, 1]
    queue.close()
