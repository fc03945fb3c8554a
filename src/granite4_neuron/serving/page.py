"""A chat for people, as one page."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


def page_route() -> Callable[[Request], Awaitable[Response]]:
    """Read the page; return the endpoint that serves it."""
    html = resources.files("granite4_neuron.serving").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(_: Request) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    return page


def _policy(html: str) -> str:
    """Return a Content-Security-Policy: the page's own script and style, requests to this server, and nothing else; no
    other page may show it.
    """
    return (
        f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(html: str, tag: str) -> str:
    """Return the policy's name for the text of an element."""
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
