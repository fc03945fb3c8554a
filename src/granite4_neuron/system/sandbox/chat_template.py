"""Runs a checkpoint's chat template in a separate process, with limits on its time and memory.

A template is a program from a download. jinja2's sandbox isolates it from the rest of the process, but does not keep it
from running forever, or from building a text as large as the memory.

This module imports little, and no torch, so its process starts in a tenth of a second.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from granite4_neuron.system.sandbox.limited_process import LimitedProcess, ProcessEnded

_SECONDS = 3
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**24


class TemplateFailed(Exception):
    """The template did not give a text; the message says why."""


class Renderer(LimitedProcess):
    """Runs templates, one at a time. Several threads may share one."""

    def __init__(self) -> None:
        super().__init__("chat_template", _SECONDS, _MEMORY_BYTES)

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render a template with its variables, as transformers' `apply_chat_template` does.

        Args:
            variables: JSON; `messages`, `add_generation_prompt` and the special tokens by name.

        Raises:
            TemplateFailed: it refuses the variables, is wrong, or takes more than 3 seconds or 1 GiB.
        """
        try:
            answer = self.ask({"template": template, "variables": variables})
        except ProcessEnded as error:
            raise TemplateFailed(str(error)) from None
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer["text"]


def answer(question: dict[str, Any]) -> dict[str, str]:
    """Answer a `Renderer`, in its process."""
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
    # Not at the top: the parent process does not need it.
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks an assistant's text for training. Here it has no effect."""

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
