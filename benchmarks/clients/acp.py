"""A client of the Agent Client Protocol (https://agentclientprotocol.com), by which editors talk to agents."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any


class AcpSession:
    """A session with an agent; it permits all that the agent asks for.

    Args:
        process: the agent, with pipes for its input and output. It is ended if it does not answer.
        project: the folder that it works in.
        model: that it shall use.
        seconds: for an answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], project: Path, model: str, seconds: float):
        self._process = process
        self._seconds = seconds
        self._last_id = 0
        self._text = ""
        self._answer(self._ask("initialize", protocolVersion=1, clientCapabilities={}))
        new = self._answer(self._ask("session/new", cwd=str(project), mcpServers=[]))["result"]
        self._id = new["sessionId"]
        if model not in new["models"]["currentModelId"]:
            self._answer(self._ask("session/set_model", sessionId=self._id, modelId=model))

    def ask(self, said: str) -> int:
        """Begin a turn; return its number."""
        self._text = ""
        return self._ask("session/prompt", sessionId=self._id, prompt=[{"type": "text", "text": said}])

    def cancel(self) -> None:
        """Interrupt the turn."""
        self._send({"method": "session/cancel", "params": {"sessionId": self._id}})

    def end_of(self, turn: int) -> tuple[str, str]:
        """Return how a turn ended, as a reason or an error, and the text that the agent said in it."""
        answer = self._answer(turn)
        return answer["result"]["stopReason"] if "result" in answer else answer["error"]["message"], self._text

    def _ask(self, method: str, **params: Any) -> int:
        self._last_id += 1
        self._send({"id": self._last_id, "method": method, "params": params})
        return self._last_id

    def _send(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, number: int) -> dict[str, Any]:
        timer = threading.Timer(self._seconds, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if not line.startswith(b"{"):
                    continue  # a line of its log
                message = json.loads(line)
                if message.get("method") == "session/request_permission":
                    options = message["params"]["options"]
                    allowed = next(option["optionId"] for option in options if option["kind"].startswith("allow"))
                    outcome = {"outcome": "selected", "optionId": allowed}
                    self._send({"id": message["id"], "result": {"outcome": outcome}})
                elif message.get("method") == "session/update":
                    update = message["params"]["update"]
                    if update["sessionUpdate"] == "agent_message_chunk":
                        self._text += update["content"]["text"]
                elif message.get("id") == number:
                    return message
        finally:
            timer.cancel()
        raise EOFError("the agent has ended")
