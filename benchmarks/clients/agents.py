"""Drives the server with coding agents, and prints what each of them did in two turns.

    npm install @anthropic-ai/claude-code @openai/codex opencode-ai @github/copilot @mariozechner/pi-coding-agent
    python -m benchmarks.clients.agents --npm FOLDER
    python -m benchmarks.clients.agents codex pi --npm FOLDER

The bundled model writes no calls. So a proxy stands before the server and forces them: in the first turn a call that
writes a file, and then a short text. It changes nothing else of requests and answers. Agents see only the proxy: other
hosts are unreachable, and their home is a temporary folder.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
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

    begin, go_on: its arguments for the first and the second turn.
    tool, arguments: a tool that runs `COMMAND`.
    environment: its variables.
    files: its settings, by their paths in the home.
    """

    program: str
    begin: str
    go_on: str
    tool: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


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
AGENTS = {
    "claude": Agent(
        "claude",
        "--tools Bash --dangerously-skip-permissions -p",
        "--tools Bash --dangerously-skip-permissions -c -p",
        "Bash",
        {"command": COMMAND},
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
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
}


def _forced(path: str, body: dict[str, Any], agent: Agent) -> dict[str, Any]:
    """Return a request whose answer is the agent's call, or behind its result a text. One without tools is short."""
    members = {name: {"const": value} for name, value in agent.arguments.items()}
    schema = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    history = json.dumps(body.get("messages", body.get("input", "")))
    has_result = any(mark in history for mark in ('"tool_result"', '"role": "tool"', '"function_call_output"'))
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    if not body.get("tools"):
        return {**body, limit: 16, "max_completion_tokens": None}
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


@contextmanager
def _proxy(server: str, agent: Agent) -> Iterator[tuple[str, list[int]]]:
    """Run the proxy; yield its address, and the statuses of answers, which grow."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            if content and not path.endswith("count_tokens"):
                content = json.dumps(_forced(path, json.loads(content), agent)).encode()
            connection = http.client.HTTPConnection(server, timeout=SECONDS)
            connection.request(self.command, path, content or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if self.command == "POST":
                statuses.append(answer.status)
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.end_headers()
            while part := answer.read1(65_536):
                self.wfile.write(part)
                self.wfile.flush()
            connection.close()

        do_GET = do_HEAD = do_POST

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}", statuses
        finally:
            proxy.shutdown()


def run(name: str, server: str, npm: Path, folder: Path) -> str:
    """Run an agent; return what it did."""
    agent = AGENTS[name]
    home, project = folder / name, folder / name / "project"
    project.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    with _proxy(server, agent) as (url, statuses):

        def filled(text: str) -> str:
            return text.replace("{url}", url).replace("{api}", f"{url}/v1")

        for path, content in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(content))
        nowhere = "http://127.0.0.1:9"
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "NO_PROXY": "127.0.0.1"}
        environment |= {"no_proxy": "127.0.0.1", "HTTPS_PROXY": nowhere, "https_proxy": nowhere}
        environment |= {variable: filled(value) for variable, value in agent.environment.items()}
        program = str((npm / "node_modules/.bin" / agent.program).absolute())
        ends = []
        for arguments, said in ((agent.begin, "Make a file."), (agent.go_on, "Go on.")):
            command = [program, *arguments.split(), said]
            ran = subprocess.run(
                command, cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
            )
            ends.append(ran.returncode)
            assert SAID["const"] in ran.stdout.decode(), ran.stdout[-2000:] + ran.stderr[-2000:]
    made = (project / "made.txt").read_text().strip()
    assert ends == [0, 0] and set(statuses) == {200}, (ends, statuses)
    return f"{name}: two turns, {len(statuses)} requests, a call whose file says {made!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "agents", nargs="*", choices=[*AGENTS, []], metavar="AGENT", help=f"some of {', '.join(AGENTS)}"
    )
    parser.add_argument("--npm", type=Path, default=Path(), help="the folder with node_modules")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(options.python, Path(folder), CONTEXT) as url:
        for name in options.agents or AGENTS:
            print(run(name, urlsplit(url).netloc, options.npm, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
