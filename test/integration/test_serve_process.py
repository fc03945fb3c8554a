"""`granite4-neuron serve` as a process: how it starts and how it ends."""
# ruff: noqa: E402 (importorskip comes first)

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron.commands.cli import main
from test.support.waiting import until

LONG = {"prompt": "An assignment statement", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@contextmanager
def serve_process(*arguments, before=(), **variables):
    """Start `serve` after the words `before`, with environment variables; yield the process and its address."""
    command = [*before, sys.executable, "-m", "granite4_neuron", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            said = process.stdout.readline()
            yield process, re.fullmatch(r"Serving \S+ at (http://\S+)/v1 \(a chat in the browser: \1/\)\n", said)[1]
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def hangups_are_heard():
    """Make SIGHUP take effect even if the tests run under nohup, whose children inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_finishes_what_runs_and_refuses_what_is_new(number):
    with serve_process() as (process, address), httpx.Client(timeout=60) as client, httpx.Client() as idle:
        assert idle.get(f"{address}/health").status_code == 200
        with client.stream("POST", f"{address}/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(number)
            until(lambda: is_ending(address))
            assert httpx.post(f"{address}/v1/completions", json=LONG).status_code == 503
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        last = json.loads(events[-2])
        assert events[-1] == "[DONE]" and last["timings"]["predicted_n"] == LONG["max_tokens"]
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(200) == (130 if number == signal.SIGINT else 0)
        assert "Traceback" not in process.stderr.read()


def is_ending(address):
    # A connection that the server has just accepted when it begins to end is closed.
    with suppress(httpx.TransportError):
        return httpx.get(f"{address}/health").status_code == 503


@contextmanager
def connections(address, number):
    """Open connections that send nothing; yield those that the server leaves open. They are accepted in order."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    with ExitStack() as at_end:
        made = [at_end.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(number)]
        waiting = select.poll()
        waiting.register(made[-1], select.POLLIN)
        assert waiting.poll(60_000), "it is closed"
        for each in made:
            waiting.register(each, select.POLLIN)
        closed = {descriptor for descriptor, _ in waiting.poll(0)}
        is_open = [each.fileno() not in closed for each in made]
        assert is_open == sorted(is_open, reverse=True)
        yield made[: is_open.count(True)]


def limits(soft, hard):
    """Return the prefix of a command that limits its file descriptors."""
    return ["bash", "-c", f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"', "bash"]


@pytest.mark.slow
def test_connections_leave_descriptors_for_other_work():
    """Further connections are closed at once, with one line in the log per minute, and the server goes on."""
    with serve_process(before=limits(200, 300)) as (process, address):
        with connections(address, 400) as first:
            assert 200 < len(first) < 300 - 64, "the limit is the hard one"
            first[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert first[0].recv(100).startswith(b"HTTP/1.1 200 OK")
            schema = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": {}}}  # opens files and a process
            content = json.dumps(schema).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            first[1].sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            assert first[1].recv(100).startswith(b"HTTP/1.1 200 OK")
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        said = process.stderr.read().splitlines()
    assert len(said) == 2 and said[0].startswith("Using the small model")
    assert said[1].startswith("Connections are closed as soon as they are made, 1 since the last such line")


@pytest.mark.slow
def test_it_outlives_its_terminal_under_nohup():
    with serve_process(before=["nohup"]) as (process, address):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait():
    with serve_process() as (process, address), httpx.Client(timeout=60) as client:
        body = {**LONG, "max_tokens": 8000}
        with client.stream("POST", f"{address}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            until(lambda: is_ending(address))
            process.send_signal(signal.SIGINT)
            *_, last = (line for line in lines if line)
            assert "the server's engine has stopped" in last
            assert process.wait(200) == 130
            assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("dead", ["engine", "front end"])
def test_a_process_that_is_killed_ends_the_other(dead):
    with serve_process() as (process, address), httpx.Client(timeout=60) as client:
        engine = psutil.Process(process.pid)
        [front_end] = [each for each in engine.children() if each.cmdline() == engine.cmdline()]  # it was forked
        with client.stream("POST", f"{address}/v1/completions", json={**LONG, "max_tokens": 8000}) as response:
            lines = response.iter_lines()
            next(lines)
            (process if dead == "engine" else front_end).kill()
            if dead == "engine":
                *_, last = (line for line in lines if line)
                assert "the server's engine has stopped" in last
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
        assert process.wait(60) == (-signal.SIGKILL if dead == "engine" else 1)
        psutil.wait_procs([front_end], 60)
        assert not front_end.is_running() and "Traceback" not in process.stderr.read()


class TestAddressAndKey:
    @pytest.fixture
    def started(self, monkeypatch, capsys):
        """Return a function that runs the command and returns the server's options and the output on each stream."""
        given = []

        class Recorded:
            def __init__(self, _):
                pass

            def serve(self, engine, cache, tokenizer, on_start, options):
                given.append(options)
                on_start(1234)
                return True

            def close(self):
                pass

        def start(*arguments):
            assert main(["serve", "--port", "0", *arguments]) == 0
            return given.pop(), *capsys.readouterr()

        monkeypatch.setattr("granite4_neuron.serving.front_end.FrontEnd", Recorded)
        monkeypatch.delenv("GRANITE4_API_KEY", raising=False)
        return start

    def test_on_this_machine(self, started):
        options, said, warned = started()
        assert options.hosts == {"localhost", "127.0.0.1", "[::1]"} and options.api_key is None
        assert "at http://127.0.0.1:1234/v1" in said and "can use the server" not in warned
        assert started("--host", "127.0.0.2")[0].hosts > {"127.0.0.2", "localhost"}

    @pytest.mark.parametrize("host, shown", [("0.0.0.0", "0.0.0.0"), ("::", "[::]")])
    def test_for_other_machines(self, started, monkeypatch, host, shown):
        if host == "::" and not socket.has_dualstack_ipv6():
            pytest.skip("this machine has no IPv6")
        options, said, warned = started("--host", host)
        assert f"at http://{shown}:1234/v1" in said and options.hosts is None
        assert f"Every machine that reaches {host} can use the server" in warned
        monkeypatch.setenv("GRANITE4_API_KEY", "sesame")
        assert "can use the server" not in started("--host", host)[2]

    def test_a_key_from_the_environment(self, started, monkeypatch):
        monkeypatch.setenv("GRANITE4_API_KEY", "sesame")
        options, _, _ = started()
        assert options.api_key == "sesame" and options.hosts is None
        assert started("--api-key", "other")[0].api_key == "other"


class TestRefusals:
    def refused(self, capsys, message, *arguments):
        assert main(["serve", *arguments]) == 2
        said = capsys.readouterr().err
        assert re.search(message, said) and said.count("\n") <= 2, said

    def test_an_unusable_address_is_reported(self, capsys):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            self.refused(capsys, f"cannot listen on 127.0.0.1:{port} ", "--port", port)
        self.refused(capsys, "cannot listen on no.such.host.invalid:8000 ", "--host", "no.such.host.invalid")
        self.refused(capsys, "cannot listen on a..b:8000 ", "--host", "a..b")
        self.refused(capsys, "--port: 70000 is more than 65535", "--port", "70000")

    def test_bad_options_are_refused(self, capsys):
        for arguments in (("--max-num-seqs", "0"), ("--max-model-len", "1"), ("--max-queue", "-1")):
            self.refused(capsys, "is not a whole number of at least", *arguments)
        self.refused(capsys, "0 is not a number above 0", "--max-gap", "0")
        self.refused(capsys, "the model's longest text has 131,072 tokens", "--port", "0", "--max-model-len", "131073")
        self.refused(capsys, "'much' is not a size", "--port", "0", "--max-body", "much")
        self.refused(capsys, "'much' is not a size", "--port", "0", "--prefix-cache", "much")
        self.refused(capsys, "belongs to --prefix-cache-dir", "--port", "0", "--prefix-cache-dir-size", "1GiB")
        self.refused(capsys, "is not a folder", "--port", "0", "--prefix-cache-dir", "/none/kept")
        self.refused(capsys, "must be ngram, ngram:K, mtp or mtp:K", "--port", "0", "--speculate", "eagle")

    @pytest.mark.parametrize("key", ["", " ", "key\n", "k\x00", "\udcff"], ids=repr)
    def test_keys_that_no_client_can_send_are_refused(self, capsys, monkeypatch, key):
        self.refused(capsys, "the API key must be text", "--api-key", key)
        if "\x00" not in key:
            monkeypatch.setenv("GRANITE4_API_KEY", key)
            self.refused(capsys, "the API key must be text")

    def test_missing_packages_are_named(self, capsys, monkeypatch):
        monkeypatch.setattr("granite4_neuron.commands.serve.find_spec", lambda name: None)
        self.refused(capsys, r"serve needs starlette and uvicorn .* pip install 'granite4-neuron\[serve\]'")


@pytest.mark.slow
def test_the_prefix_cache_outlives_the_server(tmp_path):
    folder = ["--prefix-cache-dir", str(tmp_path / "kept")]
    body = {"prompt": "An assignment statement binds a name. " * 8, "max_tokens": 20, "temperature": 0, "logprobs": 3}

    def answer(*options):
        with serve_process(*options) as (process, address):
            got = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
            metrics = httpx.get(f"{address}/metrics").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0 and "prefix cache" not in process.stderr.read()
        details = got["usage"]["prompt_tokens_details"]
        from_files = re.findall(r"^granite4_neuron_prefix_cache_dir_(\w+) (\S+)$", metrics, re.MULTILINE)
        cached = details["cached_tokens"] if details else 0
        return got["choices"], cached, got["usage"]["prompt_tokens"], {name: float(value) for name, value in from_files}

    choices, cached, tokens, from_files = answer(*folder)
    assert cached == from_files["hit_tokens_total"] == 0
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "kept").iterdir())
    assert answer(*folder) == (choices, tokens, tokens, {"hit_tokens_total": tokens, "bytes": num_bytes})
    assert answer("--prefix-cache", "0") == (choices, 0, tokens, {})
