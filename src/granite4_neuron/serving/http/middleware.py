"""The middleware, which every request passes before it reaches a route."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Set

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from granite4_neuron.serving.apis.endpoints import BY_PATH
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.http.address import without_port
from granite4_neuron.serving.http.origin import refusal_of_page
from granite4_neuron.serving.http.request_log import HEADER, IGNORED_HEADER, RequestLog
from granite4_neuron.serving.http.service import Service
from granite4_neuron.serving.page.page import is_page_file

PATHS = (
    "/v1/models",
    *BY_PATH,
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ping",
    "/version",
    "/load",
    "/metrics",
)
_MOST_TOLD = 256  # names
_LOGGER = logging.getLogger(__name__)
LOG = "granite4_neuron.log"  # a request's `RequestLog` in its scope


class Middleware:
    """Checks host, web page and API key, gives each request an id, and counts and logs responses by path and status.

    What of a request changes nothing is in a header of its answer, and in the log at the first time.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._told: set[str] = set()  # names in the log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in PATHS else "other"
        log = scope[LOG] = RequestLog(path, dict(scope["headers"]).get(HEADER, b""))
        status = None

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._service.metrics.answered(path, scope["method"], status)
                headers = [*message["headers"], (HEADER, log.id.encode())]
                if log.ignored.names:
                    headers.append((IGNORED_HEADER, ", ".join(sorted(log.ignored.names)).encode()))
                    self._tell(path, log.ignored.names)
                message = {**message, "headers": headers}
            await send(message)

        refusal = self._refusal(scope)
        try:
            await (self._app if refusal is None else refusal.response_for(scope["path"]))(scope, receive, counted)
        finally:
            if scope["method"] == "POST":
                log.write(status)
            del scope[LOG]  # a connection keeps its last scope, and a log the whole answer

    def _tell(self, path: str, names: Set[str]) -> None:
        new = names - self._told
        if new and len(self._told) < _MOST_TOLD:
            self._told |= new
            _LOGGER.warning("Requests to %s have what changes nothing here: %s.", path, ", ".join(sorted(new)))

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers, options = dict(scope["headers"]), self._service.options
        host = headers.get(b"host", b"").decode("latin-1")
        if host and options.hosts is not None and without_port(host) not in options.hosts:
            known = " or ".join(sorted(options.hosts))
            way_out = "--allowed-hosts admits another name, and a server with a key (--api-key) takes any"
            return RequestError(403, f"the request's host is {host}, and must be {known}; {way_out}.")
        if scope["method"] == "POST" and (refusal := refusal_of_page(headers, options.allowed_origins)):
            return refusal
        if self._service.is_ending and scope["method"] == "POST":
            return RequestError(
                503, "the server is ending, and takes no new requests.", headers={"Connection": "close"}
            )
        # The page has a field for the key; a browser does not send it when it loads the page.
        is_open = scope["path"] in ("/health", "/ping") or is_page_file(scope["method"], scope["path"])
        if options.api_key is None or is_open:
            return None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [bearer.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:  # of Anthropic's clients
            keys.append(headers[b"x-api-key"])
        if any(hmac.compare_digest(key, options.api_key.encode()) for key in keys):
            return None
        return RequestError(401, "give the server's API key, as Authorization: Bearer KEY or as x-api-key: KEY.")
