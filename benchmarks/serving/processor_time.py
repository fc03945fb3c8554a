"""The processor time that a server takes for a token of a stream, beyond its engine's.

    python -m benchmarks.serving.processor_time
    python -m benchmarks.serving.processor_time --clients 1 8 32 --tokens 1000 --turns 5

It starts `granite4-neuron serve` with the bundled model, and as many streams at a time as there are clients, and reads
the processor time of the server's two processes. An engine alone in this process gets the same requests, in turns with
the server. The table has medians over the turns in microseconds a token. What is beyond the engine's is of both
processes.

Two processor cores are needed: the engines have one, and the front end shares the other with the clients, whose time
does not count. Otherwise the times depend on where the system runs whom.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.errors import reports_errors
from granite4_neuron.commands.engine_options import num_bytes
from granite4_neuron.commands.options import at_least
from granite4_neuron.commands.output import print_table
from granite4_neuron.commands.serve import PREFIX_CACHE
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.errors import UserError
from granite4_neuron.generation import load as load_bundled

_MAX_LENGTH = 8192
_PROMPT = [5, 6, 7, 8]
_CPUCLOCK_SCHED = 2  # Linux's kind of clock that counts a process's time in nanoseconds


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError("two processor cores are needed, and this process may use one.")
    table = Table("clients", "engine alone", "engine's process", "front end", "beyond the engine", "tokens/s")
    try:
        os.sched_setaffinity(0, cores[:1])
        with _server(max(options.clients)) as (port, processes):
            engine = _engine(max(options.clients))
            _move(processes[1], cores[1])
            for clients in options.clients:
                load = clients, options.tokens
                turns = [_turn(engine, port, processes, cores, *load) for _ in range(options.turns + 1)]
                medians = [statistics.median(column) for column in zip(*turns[1:], strict=True)]  # the first warms up
                table.add_row(str(clients), *(f"{each:.1f}" for each in medians))
    finally:
        os.sched_setaffinity(0, cores)
    print_table(table)
    return 0


def _turn(
    engine: Engine, port: int, processes: Sequence[int], cores: Sequence[int], clients: int, tokens: int
) -> tuple[float, ...]:
    """Return the microseconds a token of an engine alone, of the server's processes and of both beyond the engine's,
    and the server's tokens per second.
    """
    os.sched_setaffinity(0, cores[:1])
    started = time.process_time()
    for _ in range(clients):
        engine.add(Request(_PROMPT, tokens, temperature=0))
    while engine.has_work:
        engine.step()
    alone = time.process_time() - started
    os.sched_setaffinity(0, cores[1:2])
    before, started = [_processor_seconds(each) for each in processes], time.perf_counter()
    _read_streams(port, clients, tokens)
    seconds = time.perf_counter() - started
    parts = [_processor_seconds(each) - was for each, was in zip(processes, before, strict=True)]
    number = clients * tokens
    return *(1e6 * each / number for each in (alone, *parts, sum(parts) - alone)), number / seconds


def _processor_seconds(process: int) -> float:
    """Return the processor time of all threads of a process, user's and system's."""
    return time.clock_gettime(~process << 3 | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3)


def _move(process: int, core: int) -> None:
    """Have all threads of a process run on this core."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), [core])


def _read_streams(port: int, clients: int, tokens: int) -> None:
    """Read so many streams at a time to their ends.

    Raises:
        UserError: one is not what was asked for.
    """
    body = json.dumps(dict(prompt=_PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True, stream=True))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with ExitStack() as at_end, selectors.DefaultSelector() as waiting:
        for _ in range(clients):
            client = at_end.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(request)
            waiting.register(client, selectors.EVENT_READ, bytearray())
        while waiting.get_map():
            for key, _ in waiting.select():
                part = key.fileobj.recv(2**16)
                key.data.extend(part)
                if not part:
                    waiting.unregister(key.fileobj)
                    if b'"finish_reason": "length"' not in key.data:
                        raise UserError(f"a stream has no end: {bytes(key.data[-500:])!r}")


@contextmanager
def _server(clients: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Start a server; yield its port and the ids of its processes, the engine's and the front end's."""
    limits = f"--port 0 --threads 1 --max-model-len {_MAX_LENGTH} --max-num-seqs {clients}".split()
    command = [sys.executable, "-m", "granite4_neuron", "serve", *limits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.search(r"at http://\S+:(\d+)/v1", process.stdout.readline())
            if found is None:
                raise UserError("the server did not start.")
            [front_end] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield int(found[1]), (process.pid, int(front_end))
        finally:
            process.send_signal(signal.SIGTERM)


def _engine(num_sequences: int) -> Engine:
    """Return an engine like the server's."""
    runtime, tokenizer = load_bundled()
    cache = PrefixCache(runtime, num_bytes(PREFIX_CACHE), runtime.tokens_per_step, at_branches=True)
    engine = Engine(runtime, num_sequences, max_length=_MAX_LENGTH, tokenizer=tokenizer, prefix_cache=cache)
    gc.freeze()  # as the server: collections look at new objects only
    return engine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=at_least(1), nargs="+", default=[1, 8, 32], metavar="N", help="at a time")
    longest = _MAX_LENGTH - len(_PROMPT)
    parser.add_argument("--tokens", type=at_least(1, longest), default=1000, metavar="N", help="of each stream")
    parser.add_argument("--turns", type=at_least(1), default=5, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
