"""Drives the server with coding agents, and prints what each of them did.

    npm install @anthropic-ai/claude-code @openai/codex opencode-ai @github/copilot @mariozechner/pi-coding-agent \
        @qwen-code/qwen-code cline @continuedev/cli
    pip install aider-chat
    PATH=$PATH:$PWD/node_modules/.bin python -m benchmarks.clients.agents
    PATH=$PATH:$PWD/node_modules/.bin python -m benchmarks.clients.agents codex pi

The bundled model writes no calls. So a proxy stands before the server and forces them: in the first turn a call that
writes a file, and then a short text. In the second turn the session goes on. The third is interrupted while its answer
comes, and in the fourth the session goes on again. The proxy changes nothing else of requests and answers. Agents see
only the proxy: other hosts are unreachable, and their home is a temporary folder.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients.common import MODEL, serving

CONTEXT = 65_536  # tokens; the longest of the agents' first prompts has 38,000
SECONDS = 600
COMMAND = "echo made > made.txt"
SAID = {"const": "Done."}


@dataclass(frozen=True)
class Agent:
    """How to run an agent. "{url}" stands for the server's address, and "{api}" for that with /v1.

    begin, go_on: its arguments for the first and for further turns; None if a session goes on in a terminal only.
    tool, arguments: a tool that runs `COMMAND`; no name if it calls none.
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
model_context_window = 65536
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
            "models": {"tiny": {"limit": {"context": CONTEXT, "output": 4096}}},
        }
    },
}
_PI = {
    "providers": {
        "local": {
            "baseUrl": "{api}",
            "api": "openai-completions",
            "apiKey": "none",
            "models": [{"id": "tiny", "contextWindow": CONTEXT, "maxTokens": 4096}],
        }
    }
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
        "--auth-type openai -y -p",
        "--auth-type openai -y -c -p",
        "run_shell_command",
        {"command": COMMAND, "is_background": False},
        # It would use the proxy of other hosts for all.
        {"OPENAI_BASE_URL": "{api}", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL, "https_proxy": ""}
        | {"HTTPS_PROXY": ""},
    ),
    "cline": Agent(
        "cline",
        "",
        None,
        "run_commands",
        {"commands": [COMMAND]},
        {"CLINE_SESSION_BACKEND_MODE": "local"},  # no process that outlives it
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
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    if agent.tool and not body.get("tools"):
        return {**body, limit: 16, "max_completion_tokens": None}
    if is_long:
        choice = {"type": "none"} if path.endswith("/messages") else "none"
        return {**body, "tool_choice": choice, limit: 4096, "max_completion_tokens": None, "ignore_eos": True}
    if has_result or not agent.tool:
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


@dataclass
class _Seen:
    """What the proxy has seen.

    statuses: of answers.
    is_long: whether it asks for a long answer.
    has_begun: whether such an answer has begun.
    """

    statuses: list[int] = field(default_factory=list)
    is_long: bool = False
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
            path = self.path.partition("?")[0]
            if content and not path.endswith("count_tokens"):
                content = json.dumps(_forced(path, json.loads(content), agent, seen.is_long)).encode()
            connection = http.client.HTTPConnection(server, timeout=SECONDS)
            connection.request(self.command, path, content or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if self.command == "POST":
                seen.statuses.append(answer.status)
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.end_headers()
            try:
                while part := answer.read1(65_536):
                    self.wfile.write(part)
                    self.wfile.flush()
                    if seen.is_long and b"delta" in part:
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


def run(name: str, server: str, folder: Path) -> str:
    """Run an agent; return what it did."""
    agent = AGENTS[name]
    home, project = folder / name, folder / name / "project"
    project.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    with _proxy(server, agent) as (url, seen):

        def filled(text: str) -> str:
            return text.replace("{url}", url).replace("{api}", f"{url}/v1").replace("{home}", str(home))

        for path, content in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(content))
        nowhere = "http://127.0.0.1:9"
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "NO_PROXY": "127.0.0.1"}
        environment |= {"no_proxy": "127.0.0.1", "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
        environment |= {variable: filled(value) for variable, value in agent.environment.items()}

        def turn(arguments: str, said: str) -> subprocess.Popen[bytes]:
            command = [agent.program, *map(filled, arguments.split()), said]
            return subprocess.Popen(
                command,
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )

        def whole_turn(arguments: str, said: str) -> None:
            with turn(arguments, said) as running:
                output, _ = running.communicate(timeout=SECONDS)
            assert SAID["const"] in output.decode() and running.returncode == 0, output[-2000:]

        whole_turn(agent.begin, "Make a file.")
        if agent.go_on is not None:
            whole_turn(agent.go_on, "Go on.")
            seen.is_long = True
            with turn(agent.go_on, "Tell me more.") as interrupted:
                assert seen.has_begun.wait(SECONDS)
                interrupted.send_signal(signal.SIGINT)
                interrupted.communicate(timeout=SECONDS)
            seen.is_long = False
            whole_turn(agent.go_on, "Go on again.")
    assert set(seen.statuses) == {200}, seen.statuses
    did = "one turn" if agent.go_on is None else "four turns, one of them interrupted"
    called = f", a call whose file says {(project / 'made.txt').read_text().strip()!r}" if agent.tool else ""
    return f"{name}: {did}, {len(seen.statuses)} requests{called}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "agents", nargs="*", choices=[*AGENTS, []], metavar="AGENT", help=f"some of {', '.join(AGENTS)}"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(options.python, Path(folder), CONTEXT) as url:
        for name in options.agents or AGENTS:
            print(run(name, urlsplit(url).netloc, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
