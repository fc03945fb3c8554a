"""Runs a checkpoint's chat template in a process of its own, with bounds on its time and memory.

A template is a program that came with a download. jinja2's sandbox keeps it from the rest of the process; it does not
keep it from running forever, or from building a text as large as the memory.

This module imports nothing of the package, nor torch: its process is there in a tenth of a second.
"""

from __future__ import annotations

import datetime
import json
import math
import resource
import subprocess
import sys
import threading
import time
from typing import Any

_SECONDS = 3
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**24
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import granite4_neuron.chat_template as t; t.main()"


class TemplateFailed(Exception):
    """The template did not give a text; the message says why."""


class Renderer:
    """Runs templates, one at a time, in a process that starts with the first one and stays until it is closed.

    Several threads may share one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render a template with its variables, as transformers' `apply_chat_template` does.

        Args:
            variables: JSON; `messages`, `add_generation_prompt` and the special tokens by name.

        Raises:
            TemplateFailed: it refuses them, is wrong, or takes more than 3 seconds or 1 GiB.
        """
        with self._lock:
            answer = self._ask(json.dumps({"template": template, "variables": variables}))
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the process, even while it renders; a later rendering starts another."""
        # A rendering that was asked for before may start a process at any time until its answer is there.
        while not self._lock.acquire(timeout=0.05):
            process = self._process
            if process is not None:
                process.kill()
        try:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None
        finally:
            self._lock.release()

    def _ask(self, question: str) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        process = self._process
        # The limit in the process is of the processor's time; this one is for a template that waits.
        timer = threading.Timer(6 * _SECONDS, process.kill)
        timer.start()
        answer = None
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (ValueError, BrokenPipeError):  # it was killed by a limit
            raise TemplateFailed(f"it takes more than {_SECONDS} seconds or {_MEMORY_BYTES // 2**30} GiB") from None
        finally:
            timer.cancel()
            if answer is None:  # after Ctrl-C, its late answer would be taken for the next one
                process.kill()
                process.wait()
        return answer


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    # A session of its own: Ctrl-C in the terminal is not meant for it.
    return subprocess.Popen(command, **pipes, text=True, encoding="utf-8", start_new_session=True)


def main() -> None:
    """Serve a `Renderer`: read a request from each line of standard input, and write an answer to a line of standard
    output.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + _SECONDS, most))
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(question: dict[str, Any]) -> dict[str, str]:
    try:
        text = _rendered(question["template"], question["variables"])
    except Exception as error:  # the template is an arbitrary program: it may raise anything
        return {"error": str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}
    if len(text) > _MOST_CHARACTERS:
        return {"error": f"it makes a text of {len(text):,} characters"}
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"error": "it makes half a character, a surrogate"}
    return {"text": text}


def _rendered(template: str, variables: dict[str, Any]) -> str:
    # Not at the top: the process that asks does not need it.
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what an assistant said, for training; here it is a block like any other."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's attribute)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Encode as JSON; unlike jinja2's filter, without escapes for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render(**variables)
