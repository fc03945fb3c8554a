"""Drives the server with coding agents, and prints what each of them did.

    npm install @anthropic-ai/claude-code @openai/codex opencode-ai @github/copilot @mariozechner/pi-coding-agent \
        @qwen-code/qwen-code cline @continuedev/cli
    pip install aider-chat
    PATH=$PATH:$PWD/node_modules/.bin python -m benchmarks.clients.agents
    PATH=$PATH:$PWD/node_modules/.bin python -m benchmarks.clients.agents codex pi
    PATH=$PATH:$PWD/node_modules/.bin python -m benchmarks.clients.agents --to-the-end cline

The bundled model writes no calls. So a proxy stands before the server and forces them: in the first turn a call that
writes a file, and then a short text. In the second turn the session goes on. The third is interrupted while the server
reads its prompt and the fifth while its answer comes; in the fourth and the sixth the session goes on again. With
--to-the-end long turns follow until the context is full, and a last short one. The proxy changes nothing else of
requests and answers. Agents see only the proxy: other hosts are unreachable, and their home is a temporary folder.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients.acp import AcpSession
from benchmarks.clients.common import MODEL, serving

CONTEXT = 65_536  # tokens; the longest of the agents' first prompts has 38,000
TOLD = 0.8  # of the context, to the agents
SECONDS = 600
MOST_LONG_TURNS = 20
MADE = "made.txt"
COMMAND = f"echo made > {MADE}"
SAID = {"const": "Done."}
# As aider reads a file in an answer.
EDIT = {"const": f"Done.\n\n{MADE}\n```\nmade\n```\n"}


@dataclass(frozen=True)
class Agent:
    """How to run an agent. "{url}" stands for the server's address, "{api}" for that with /v1, and "{context}" for the
    number of tokens that the agent is told.

    begin, go_on: its arguments for the first and for further turns; None if one process has all turns, and gets them by
        the Agent Client Protocol, as from an editor.
    tool, arguments: a tool that runs `COMMAND`; no name if it calls none, and writes the file of `EDIT`.
    environment: its variables.
    files: its settings, by their paths in the home.
    """

    program: str
    begin: str
    go_on: str | None
    tool: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


_CLAUDE = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1",
}
_CODEX = "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
_CODEX_FILE = """\
model = "tiny"
model_provider = "local"
model_context_window = {context}
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{api}"
wire_api = "responses"
[analytics]
enabled = false
"""
_OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "model": "local/tiny",
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{api}", "apiKey": "none"},
            "models": {"tiny": {"limit": {"context": "{context}", "output": 4096}}},
        }
    },
}
_PI = {
    "providers": {
        "local": {
            "baseUrl": "{api}",
            "api": "openai-completions",
            "apiKey": "none",
            "models": [{"id": "tiny", "contextWindow": "{context}", "maxTokens": 4096}],
        }
    }
}
_QWEN = {
    "OPENAI_BASE_URL": "{api}",
    "OPENAI_API_KEY": "none",
    "OPENAI_MODEL": MODEL,
    # It would use the proxy of other hosts for all.
    "https_proxy": "",
    "HTTPS_PROXY": "",
}
_CLINE = {
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "providers": {
        "openai-compatible": {
            "settings": {"provider": "openai-compatible", "apiKey": "none", "model": MODEL, "baseUrl": "{api}"},
            "updatedAt": "2026-01-01T00:00:00.000Z",
            "tokenSource": "manual",
        }
    },
}
_CONTINUE = """\
name: local
version: 0.0.1
schema: v1
models:
  - name: tiny
    provider: openai
    model: tiny
    apiBase: {api}
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
_AIDER = "--model openai/tiny --yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-git -m"
AGENTS = {
    "claude": Agent(
        "claude",
        "--tools Bash --dangerously-skip-permissions -p",
        "--tools Bash --dangerously-skip-permissions -c -p",
        "Bash",
        {"command": COMMAND},
        _CLAUDE,
    ),
    "claude-all-tools": Agent(
        "claude",
        "--dangerously-skip-permissions -p",
        "--dangerously-skip-permissions -c -p",
        "Bash",
        {"command": COMMAND},
        _CLAUDE,
    ),
    "codex": Agent(
        "codex",
        _CODEX,
        f"{_CODEX} resume --last",
        "exec_command",
        {"cmd": COMMAND},
        files={".codex/config.toml": _CODEX_FILE},
    ),
    "opencode": Agent(
        "opencode",
        "run",
        "run -c",
        "bash",
        {"command": COMMAND, "description": "make a file"},
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
    ),
    "copilot": Agent(
        "copilot",
        "--allow-all-tools -p",
        "--allow-all-tools --continue -p",
        "bash",
        {"command": COMMAND, "description": "make a file"},
        {"COPILOT_PROVIDER_BASE_URL": "{api}", "COPILOT_MODEL": MODEL, "COPILOT_OFFLINE": "true"},
    ),
    "pi": Agent(
        "pi",
        "--provider local --model tiny -p",
        "--provider local --model tiny -c -p",
        "bash",
        {"command": COMMAND},
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        {".pi/agent/models.json": json.dumps(_PI)},
    ),
    "qwen": Agent(
        "qwen",
        "--acp --auth-type openai -y",
        None,
        "run_shell_command",
        {"command": COMMAND, "is_background": False},
        _QWEN,
    ),
    "qwen-headless": Agent(
        "qwen",
        "--auth-type openai -y",
        "--auth-type openai -y -c",
        "run_shell_command",
        {"command": COMMAND, "is_background": False},
        _QWEN,
    ),
    "cline": Agent(
        "cline",
        "--acp",
        None,
        "run_commands",
        {"commands": [COMMAND]},
        {"CLINE_SESSION_BACKEND_MODE": "local"}  # no process that outlives it
        | {"CLINE_PROVIDER": "openai-compatible", "CLINE_API_KEY": "none"},
        {".cline/data/settings/providers.json": json.dumps(_CLINE)},
    ),
    "continue": Agent(
        "cn",
        "--config {home}/config.yaml --auto -p",
        "--config {home}/config.yaml --auto --resume -p",
        "Bash",
        {"command": COMMAND},
        files={"config.yaml": _CONTINUE},
    ),
    "aider": Agent(
        "aider",
        _AIDER,
        f"--restore-chat-history {_AIDER}",
        "",
        {},
        {"OPENAI_API_BASE": "{api}", "OPENAI_API_KEY": "none"},
    ),
}


def _forced(path: str, body: dict[str, Any], agent: Agent, is_long: bool) -> dict[str, Any]:
    """Return a request whose answer is the agent's call, or behind its result a text. One without tools is short.

    Args:
        is_long: whether the text is to be long.
    """
    members = {name: {"const": value} for name, value in agent.arguments.items()}
    schema = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    history = json.dumps(body.get("messages", body.get("input", "")))
    has_result = any(mark in history for mark in ('"tool_result"', '"role": "tool"', '"function_call_output"'))
    if not _is_of_turn(body, agent):
        return _limited(path, body, 16)
    if is_long:
        choice = {"type": "none"} if path.endswith("/messages") else "none"
        return {**_limited(path, body, 4096), "tool_choice": choice, "ignore_eos": True}
    if not agent.tool:
        return {**body, "structured_outputs": {"choice": [(SAID if MADE in history else EDIT)["const"]]}}
    if has_result:
        if path.endswith("/messages"):
            named = {"type": "json_schema", "schema": SAID}
            return {**body, "tool_choice": {"type": "none"}, "output_config": {"format": named}}
        if path.endswith("/responses"):
            named = {"type": "json_schema", "name": "said", "schema": SAID}
            return {**body, "tool_choice": "none", "text": {"format": named}}
        named = {"type": "json_schema", "json_schema": {"name": "said", "schema": SAID}}
        return {**body, "tool_choice": "none", "response_format": named}
    for tool in body["tools"]:
        function = tool.get("function", tool)
        if function.get("name") == agent.tool:
            function["input_schema" if path.endswith("/messages") else "parameters"] = schema
    if path.endswith("/messages"):
        return {**body, "tool_choice": {"type": "tool", "name": agent.tool}}
    named = {"type": "function", "name": agent.tool}
    if path.endswith("/chat/completions"):
        named = {"type": "function", "function": {"name": agent.tool}}
    return {**body, "tool_choice": named}


def _limited(path: str, body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Return a request whose answer has this many tokens at most."""
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    return {**body, limit: tokens, "max_completion_tokens": None}


def _prompt_tokens(server: str, path: str, body: Mapping[str, Any]) -> int:
    """Return how many tokens the prompt of a request has, as the server counts them."""
    connection = http.client.HTTPConnection(server, timeout=SECONDS)
    content = json.dumps({**_limited(path, body, 1), "stream": False}).encode()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    usage = json.load(connection.getresponse())["usage"]
    connection.close()
    # In Messages they are without those of the prefix cache.
    return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


def _is_of_turn(body: Mapping[str, Any], agent: Agent) -> bool:
    """Return whether a request is for an answer of the session; agents ask for titles too, without tools."""
    return not agent.tool or bool(body.get("tools"))


@dataclass
class _Seen:
    """What the proxy has seen.

    first: tokens of the first prompt; None before it.
    statuses: of answers.
    sizes: of requests, in characters.
    is_long: whether it asks for a long answer.
    is_read, has_begun: whether the server has begun to read the prompt of such an answer, and the answer has begun.
    """

    first: int | None = None
    statuses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    is_long: bool = False
    is_read: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)


@contextmanager
def _proxy(server: str, agent: Agent) -> Iterator[tuple[str, _Seen]]:
    """Run the proxy; yield its address, and what it sees."""
    seen = _Seen()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, is_long = self.path.partition("?")[0], False
            if content and not path.endswith("count_tokens"):
                body = json.loads(content)
                if seen.first is None and _is_of_turn(body, agent):
                    seen.first = _prompt_tokens(server, path, body)
                is_long = seen.is_long and _is_of_turn(body, agent)
                content = json.dumps(_forced(path, body, agent, is_long)).encode()
            connection = http.client.HTTPConnection(server, timeout=SECONDS)
            connection.request(self.command, path, content or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if self.command == "POST":
                seen.statuses.append(answer.status)
                seen.sizes.append(len(content))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.end_headers()
            try:
                if is_long:
                    seen.is_read.set()
                while part := answer.read1(65_536):
                    self.wfile.write(part)
                    self.wfile.flush()
                    if is_long and b"delta" in part:
                        seen.has_begun.set()
            except ConnectionError:  # the agent is gone
                pass
            connection.close()

        do_GET = do_HEAD = do_POST

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}", seen
        finally:
            proxy.shutdown()


class _Commands:
    """A session of an agent that has a process for each turn."""

    def __init__(self, agent: Agent, arguments: Callable[[str], list[str]], place: Mapping[str, Any]):
        self._agent = agent
        self._arguments = arguments
        self._place = place
        self._next = agent.begin

    def turn(self, said: str, interrupt_at: threading.Event | None = None) -> tuple[bool, str]:
        """Return whether a turn went well, and what the agent wrote; see `_Acp.turn`."""
        command = [self._agent.program, *self._arguments(self._next), said]
        self._next = self._agent.go_on
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **self._place) as running:
            if interrupt_at is not None:
                assert interrupt_at.wait(SECONDS)
                os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
            output, _ = running.communicate(timeout=SECONDS)
        return running.returncode == 0, output.decode()

    def close(self) -> None:
        pass


class _Acp:
    """A session of an agent that has one process."""

    def __init__(self, agent: Agent, arguments: Callable[[str], list[str]], place: Mapping[str, Any]):
        command = [agent.program, *arguments(agent.begin)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, **place)
        self._session = AcpSession(self._process, place["cwd"], MODEL, SECONDS)

    def turn(self, said: str, interrupt_at: threading.Event | None = None) -> tuple[bool, str]:
        """Return whether a turn went well, and what the agent said, or why it ended otherwise.

        Args:
            interrupt_at: when to interrupt it; None for never.
        """
        number = self._session.ask(said)
        if interrupt_at is not None:
            assert interrupt_at.wait(SECONDS)
            self._session.cancel()
        end, text = self._session.end_of(number)
        return end == "end_turn", text if end == "end_turn" else f"{text} [{end}]"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run(name: str, server: str, folder: Path, context: int, to_the_end: bool) -> None:
    """Run an agent, and print what it did."""
    agent = AGENTS[name]
    home, project = folder / name, folder / name / "project"
    project.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    with _proxy(server, agent) as (url, seen):

        def filled(text: str) -> str:
            text = text.replace('"{context}"', str(context)).replace("{context}", str(context))
            return text.replace("{url}", url).replace("{api}", f"{url}/v1").replace("{home}", str(home))

        for path, content in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(content))
        nowhere = "http://127.0.0.1:9"
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "NO_PROXY": "127.0.0.1"}
        environment |= {"no_proxy": "127.0.0.1", "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
        environment |= {variable: filled(value) for variable, value in agent.environment.items()}
        place = {"cwd": project, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        kind = _Acp if agent.go_on is None else _Commands
        with closing(kind(agent, lambda text: [*map(filled, text.split())], place)) as session:

            def whole_turn(said: str) -> None:
                went_well, text = session.turn(said)
                assert SAID["const"] in text and went_well, text[-2000:]

            def interrupted_turn(said: str, at: threading.Event) -> None:
                seen.is_long = True
                at.clear()
                session.turn(said, at)
                seen.is_long = False

            whole_turn("Make a file.")
            made = (project / MADE).read_text().strip()
            whole_turn("Go on.")
            interrupted_turn("Read these words: " + "word " * 1000, seen.is_read)
            whole_turn("Go on again.")
            interrupted_turn("Tell me more.", seen.has_begun)
            whole_turn("Go on to the end.")
            assert set(seen.statuses) == {200}, seen.statuses
            print(
                f"{name}: a first prompt of {seen.first:,} tokens, a file that says {made!r}, six turns, two of them "
                f"interrupted, {len(seen.statuses)} requests",
                flush=True,
            )
            if to_the_end:
                _go_to_the_end(session, seen)


def _go_to_the_end(session: _Commands | _Acp, seen: _Seen) -> None:
    """Go on until the server refuses a request or the agent has shortened one, and once more; print what came."""
    seen.is_long = True
    for _ in range(MOST_LONG_TURNS):
        before = len(seen.sizes)
        _, text = session.turn("Tell me more.")
        statuses, sizes = seen.statuses[before:], seen.sizes[before:]
        print(
            "  a long turn:", *(f"{status} ({size:,} characters)" for status, size in zip(statuses, sizes, strict=True))
        )
        is_shorter = any(size < 0.9 * old for old, size in pairwise(seen.sizes[before - 1 :]))
        if is_shorter or set(statuses) != {200}:
            break
    print(f"  it wrote {text[-300:]!r}", flush=True)
    seen.is_long = False
    went_well, last = session.turn("Go on after the end.")
    what = "goes on" if went_well else "does not go on"
    print(f"  and {what}: {last[-300:]!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "agents", nargs="*", choices=[*AGENTS, []], metavar="AGENT", help=f"some of {', '.join(AGENTS)}"
    )
    parser.add_argument("--to-the-end", action="store_true", help="go on until the context is full")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=CONTEXT,
        metavar="N",
        help=f"the server's context; agents are told {TOLD} of it (default: %(default)s)",
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(options.python, Path(folder), options.max_model_len) as url:
        for name in options.agents or AGENTS:
            context = int(TOLD * options.max_model_len)
            run(name, urlsplit(url).netloc, Path(folder), context, options.to_the_end)


if __name__ == "__main__":
    main()
