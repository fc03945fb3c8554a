"""A chat for people, as one page."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_HTML = resources.files("granite4_neuron.serving").joinpath("page.html").read_text(encoding="utf-8")


def _hash(tag: str) -> str:
    """Return the Content-Security-Policy's name for the text of an element."""
    [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", _HTML, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# The page's own script and style, requests to this server, and nothing else; no other page may show it.
_POLICY = (
    f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(_: Request) -> Response:
    """Return the page."""
    return Response(_HTML, headers=_HEADERS, media_type="text/html")
