"""A chat for people: the page at / and the files that it loads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from importlib import resources
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response

PAGE = "/"
FOLDER = "/page/"  # of the page's files, and of the requests that only the page makes
MARKDOWN = FOLDER + "markdown"

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# The page's own files, requests to this server, and nothing else. No text becomes HTML, and no other page may show this
# one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def page_files() -> Iterator[tuple[str, Endpoint]]:
    """Read the page's files; yield the path of each, with the endpoint that serves it."""
    for file in resources.files("granite4_neuron.serving.page").joinpath("files").iterdir():
        kind = _TYPES[PurePath(file.name).suffix]
        path = PAGE if kind == "text/html" else FOLDER + file.name
        yield path, _endpoint(file.read_bytes(), kind)


def _endpoint(content: bytes, media_type: str) -> Endpoint:
    async def served(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return served


def is_page_file(method: str, path: str) -> bool:
    """Return whether a request is for one of the page's files, which are no secret."""
    return method == "GET" and (path == PAGE or path.startswith(FOLDER))
