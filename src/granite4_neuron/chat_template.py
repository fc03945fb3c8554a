"""Runs a checkpoint's chat template in a process of its own, with bounds on its time and memory.

A template is a program that came with a download. jinja2's sandbox keeps it from the rest of the process; it does not
keep it from running for ever, or from building a text as large as the memory.

This module imports nothing of the package, nor torch: its process is there in a tenth of a second.
"""

from __future__ import annotations

import datetime
import json
import resource
import subprocess
import sys
from typing import Any

_SECONDS = 3
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**24
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import granite4_neuron.chat_template as t; t.main()"


class TemplateFailed(Exception):
    """The template did not give a text; the message says why."""


def render(template: str, variables: dict[str, Any]) -> str:
    """The text that a template makes of its variables, as transformers' `apply_chat_template` runs it.

    Args:
        variables: JSON; `messages`, `add_generation_prompt` and the special tokens by name.

    Raises:
        TemplateFailed: it refuses them, is wrong, or takes more than 3 seconds or 1 GiB.
    """
    command = [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path)]
    question = json.dumps({"template": template, "variables": variables})
    try:
        # The limits are the processor's time; this one is for a template that waits.
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=6 * _SECONDS)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise TemplateFailed(f"it takes more than {_SECONDS} seconds") from None
    except ValueError:
        # Killed by a limit, in the middle of its work.
        raise TemplateFailed(f"it takes more than {_SECONDS} seconds or {_MEMORY_BYTES // 2**30} GiB") from None
    if "error" in answer:
        raise TemplateFailed(answer["error"])
    return answer["text"]


def main() -> None:
    """The other side of `render`: a question on standard input, an answer on standard output."""
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    question = json.loads(sys.stdin.read())
    try:
        text = _rendered(question["template"], question["variables"])
        answer = {"text": text}
        if len(text) > _MOST_CHARACTERS:
            answer = {"error": f"it makes a text of {len(text):,} characters"}
    except Exception as error:  # the template is somebody's program: it may raise anything
        answer = {"error": str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}
    print(json.dumps(answer))


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
        """Unlike jinja2's, it does not escape what HTML would need escaped."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render(**variables)
