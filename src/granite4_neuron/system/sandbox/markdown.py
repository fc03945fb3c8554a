"""Parses Markdown in a separate process, with limits on its time and memory.

The text comes from a model or a client, and 64 kB of brackets take the parser seconds. A separate process also takes no
time from the engine's threads, which share the GIL.

This module imports little, and no torch, so its process starts in a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from granite4_neuron.system.sandbox.limited_process import LimitedProcess, ProcessEnded, Stop

_SECONDS = 2
_MEMORY_BYTES = 2**30
_DEEPEST = 100  # nested elements; json and browsers have limits of their own
_SCHEMES = ("http:", "https:", "mailto:")

Node = str | list[Any]  # a text, or [tag, attributes, nodes]


class MarkdownFailed(Exception):
    """The text cannot be parsed; the message says why."""


class MarkdownProcess(LimitedProcess):
    """Parses texts, one at a time. Several threads may share one."""

    def __init__(self) -> None:
        super().__init__("markdown", _SECONDS, _MEMORY_BYTES)

    def blocks(self, text: str, stop: Stop | None = None) -> list[dict[str, Any]]:
        """Return the blocks of a text: CommonMark with tables and strikethrough. HTML is text, images are links, and
        only links to other sites and to mail addresses are links. A line break is a line break.

        Args:
            stop: ends the work from another thread.

        Returns:
            For each block "line", the line where it begins in the text, and "node", a text or a list of a tag,
            attributes and nodes.

        Raises:
            MarkdownFailed: it takes more than 2 seconds or 1 GiB.
            Stopped: `stop` was set.
        """
        try:
            return self.ask({"text": text}, stop)["blocks"]
        except ProcessEnded as error:
            raise MarkdownFailed(str(error)) from None


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a `MarkdownProcess`, in its process."""
    tokens = _PARSER.parse(question["text"])
    lines = [token.map[0] for token in tokens if token.level == 0 and token.nesting >= 0 and token.map is not None]
    return {"blocks": [{"line": line, "node": node} for line, node in zip(lines, _tree(tokens), strict=True)]}


def _parser() -> MarkdownIt:
    parser = MarkdownIt("js-default", {"html": False})
    parser.validateLink = lambda url: url.lower().startswith(_SCHEMES)  # type: ignore[method-assign]
    return parser


_PARSER = _parser()


def _tree(tokens: Iterable[Token]) -> list[Node]:
    """Convert tokens, which open and close elements, to nodes."""
    root: list[Node] = []
    open_nodes = [root]
    for token in tokens:
        if token.nesting < 0:
            open_nodes.pop()
            continue
        nodes = _nodes(token)
        open_nodes[-1].extend(nodes)
        if token.nesting > 0:
            is_shown = bool(nodes) and len(open_nodes) < _DEEPEST
            open_nodes.append(nodes[0][2] if is_shown else open_nodes[-1])  # type: ignore[arg-type]
    return root


def _nodes(token: Token) -> list[Node]:
    """Return the nodes of one token."""
    if token.type == "inline":
        return _tree(token.children or ())
    if token.hidden:  # a paragraph in an item of a list without blank lines
        return []
    if token.type == "text":
        return [token.content] if token.content else []
    if token.type in ("softbreak", "hardbreak"):
        return [["br", {}, []]]
    if token.type in ("fence", "code_block"):
        return [["pre", {"language": token.info.partition(" ")[0]}, [token.content]]]
    if token.type == "image":
        source = str(token.attrs["src"])
        return [["a", {"href": source}, [token.content or source]]]
    content = [token.content] if token.content else []
    return [[token.tag, _attributes(token), content]]


def _attributes(token: Token) -> dict[str, str | int | float]:
    attributes = {name: value for name, value in token.attrs.items() if name in ("href", "title", "start")}
    if "style" in token.attrs:  # a table cell's
        attributes["align"] = str(token.attrs["style"]).removeprefix("text-align:")
    return attributes
