"""Errors of requests, as the client sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice

from starlette.responses import Response

_LONGEST_MESSAGE = 500  # characters
RETRY_AFTER_SECONDS = 1
_PIECES = 4096
_ENCODER = json.JSONEncoder(allow_nan=False)
_MESSAGES = "/v1/messages"
_TYPES_OF_MESSAGES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is refused or failed.

    status: of the HTTP response.
    message: one sentence. Its middle is left out if it quotes something very long.
    field: the field of the request's body that is wrong, if any.
    headers: additional headers of the response.
    code: OpenAI's name for the error, if clients look for it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = _cut(message)
        self.field = None if field is None else _cut(field)
        self.headers = headers
        self.code = code

    @property
    def body(self) -> dict[str, object]:
        """The error in the form of OpenAI's API."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}

    @property
    def body_of_messages(self) -> dict[str, object]:
        """The error in the form of Anthropic's API."""
        kind = _TYPES_OF_MESSAGES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body_for(self, path: str) -> dict[str, object]:
        """Return the error in the form of the API that has this path."""
        return self.body_of_messages if path.startswith(_MESSAGES) else self.body

    def response_for(self, path: str) -> Response:
        """Return the response to a request for this path."""
        return json_response(self.body_for(path), self.status, self.headers)


def too_many_requests(message: str) -> RequestError:
    """Return the error for a request that may be tried again."""
    return RequestError(429, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def server_failed() -> RequestError:
    """Return the error for a request at which something went wrong here, and which the log explains."""
    return RequestError(500, "the server failed at this request; its log says why.")


def _cut(text: str) -> str:
    half = _LONGEST_MESSAGE // 2
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:half]}...{text[-half:]}"


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response, encoded by `to_json`."""
    return Response(to_json(value), status, headers, media_type="application/json")


def to_json(value: object) -> str:
    """Encode as JSON in ASCII, because a message may quote invalid text; raise ValueError if a number is not finite."""
    # Piece by piece, because `encode` lets no other thread run. Several together, because each is a text of its own.
    pieces = _ENCODER.iterencode(value)
    return "".join(iter(lambda: "".join(islice(pieces, _PIECES)), ""))


def to_short_json(value: object) -> str:
    """Encode as `to_json` does, in a tenth of the time. No other thread runs meanwhile, so it is for short values."""
    return _ENCODER.encode(value)
