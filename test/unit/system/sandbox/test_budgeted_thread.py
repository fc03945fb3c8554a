"""Work that is given up once it has had its share of the processor's time."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from granite4_neuron.system.sandbox.budgeted_thread import BudgetedThread, OverBudget


@pytest.fixture
def thread():
    return BudgetedThread("test")


@pytest.fixture
def busy():
    """Return work that takes the processor until the test ends."""
    is_over = threading.Event()

    def work():
        while not is_over.is_set():
            pass
        return "late"

    yield work
    is_over.set()


def test_results_and_errors(thread):
    assert thread.run(lambda: 7, 1)[0] == 7
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0, 1)
    assert thread.run(threading.current_thread, 1)[0] is thread.run(threading.current_thread, 1)[0]


def test_work_beyond_its_share_is_given_up_and_does_not_delay_other_work(thread, busy):
    for number in range(2):
        with pytest.raises(OverBudget):
            thread.run(busy, 0.01)
        result, seconds = thread.run(lambda number=number: sum(range(100_000)) + number, 5)
        assert result == sum(range(100_000)) + number and 0 < seconds < 5


def test_waiting_is_free(thread):
    assert thread.run(lambda: time.sleep(0.2) or 7, 0.01)[0] == 7


@pytest.fixture
def interrupts():
    """Have SIGINT raise KeyboardInterrupt; a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interrupts")
def test_a_late_result_after_an_interrupt_is_dropped(thread, busy):
    def interrupted():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return busy()

    with pytest.raises(KeyboardInterrupt):
        thread.run(interrupted, 60)
    assert thread.run(lambda: "own", 5)[0] == "own"


def test_the_thread_ends_with_its_owner():
    thread = BudgetedThread("test")
    inner, _ = thread.run(threading.current_thread, 1)
    del thread
    inner.join(60)
    assert not inner.is_alive()


def test_the_process_does_not_wait_for_work_that_was_given_up():
    program = """
import time
from granite4_neuron.system.sandbox.budgeted_thread import BudgetedThread, OverBudget
thread = BudgetedThread("test")
try:
    thread.run(lambda: [sum(range(1000)) for _ in range(10**9)], 0.05)
except OverBudget:
    print("given up")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given up\n", "")
    program = program.replace(
        'print("given up")', "from granite4_neuron.system.sandbox.budgeted_thread import leave; leave(3)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 3


@pytest.mark.slow
def test_no_more_work_begins_after_too_much_was_given_up(thread, busy):
    for _ in range(16):
        with pytest.raises(OverBudget):
            thread.run(busy, 0.001)
    with pytest.raises(OverBudget):
        thread.run(lambda: 7, 5)
