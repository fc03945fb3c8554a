"""Messages between two processes."""

import gc
import os
import re
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from granite4_neuron.serving.channel import Channel


@pytest.fixture
def ends():
    ours, theirs = Channel.pair()
    with closing(ours), closing(theirs):
        yield ours, theirs


def test_messages_come_whole_and_in_order_also_those_that_found_no_room(ends):
    ours, theirs = ends
    sent = [(number, "x" * number * 1000) for number in range(100)]
    assert not [ours.send(message) for message in sent][-1], "the other side does not read"
    received = []
    while len(received) < len(sent):
        received += theirs.receive(waits=False)
        ours.flush()
    assert received == sent
    assert ours.flush() and theirs.receive(waits=False) == []


def test_one_thread_waits_while_the_other_sends(ends):
    ours, theirs = ends
    sent = [b"x" * 2**22, None]
    thread = threading.Thread(target=lambda: [ours.send(message, waits=True) for message in sent])
    thread.start()
    received = []
    while len(received) < 2:
        received += theirs.receive()
    thread.join()
    assert received == sent


def test_sockets_in_messages_arrive(ends):
    """Each stays open at the other side, also behind messages that wait, and is not handed to further programs."""
    ours, theirs = ends
    pairs = [socket.socketpair() for _ in range(3)]
    filler = "x" * 2**20
    for number, (_, given) in enumerate(pairs):
        ours.send((filler, number, given, {"again": given}))
    received = []
    while len(received) < 3:
        received += theirs.receive(waits=False)
        ours.flush()
    for (kept, given), (_, number, arrived, again) in zip(pairs, received, strict=True):
        given.close()
        assert again["again"] is arrived and not os.get_inheritable(arrived.fileno())
        arrived.send(bytes([number]))
        arrived.close()
        assert kept.recv(9) == bytes([number]) and kept.recv(9) == b""
        kept.close()


def test_a_message_is_freed_with_its_last_reference(ends):
    """Not by a garbage collection, which an idle process never begins: the other end of a socket waits for it."""
    kept, given = socket.socketpair()
    kept.setblocking(False)
    ends[0].send(given)
    given.close()
    gc.disable()
    try:
        [arrived] = ends[1].receive()
        del arrived
        assert kept.recv(9) == b""
    finally:
        gc.enable()
        kept.close()


@pytest.mark.parametrize("close", [Channel.close, Channel.end])
def test_the_end_comes_behind_the_messages(ends, close):
    ours, theirs = ends
    ours.send("last")
    close(ours)
    assert theirs.receive() == ["last"]
    with pytest.raises(EOFError):
        theirs.receive()
    assert theirs.send("x" * 2**20, waits=True), "nobody reads it, and nothing is left"


def times_slept(thread):
    """Return how often a thread has gone to sleep so far, once it sleeps."""
    while True:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        if "State:\tS" in status:
            return int(re.search(r"^voluntary_ctxt_switches:\t(\d+)", status, re.MULTILINE)[1])


def test_an_end_wakes_a_thread_that_waits_and_what_the_other_side_reads_does_not(ends):
    ours, theirs = ends
    woken = threading.Event()

    def wait():
        with pytest.raises(EOFError):
            ours.receive()
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    before = times_slept(thread)
    for number in range(1000):
        ours.send(number)
        assert theirs.receive() == [number]
    assert times_slept(thread) - before < 20
    ours.end()
    thread.join(60)
    assert woken.is_set()
