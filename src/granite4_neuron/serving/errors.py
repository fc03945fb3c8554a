"""Errors of requests, as the client sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is refused or failed.

    status: of the HTTP response.
    message: one sentence.
    field: the field of the request's body that is wrong, if any.
    headers: additional headers of the response.
    """

    def __init__(self, status: int, message: str, field: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.headers = headers

    @property
    def body(self) -> dict[str, object]:
        """The error in the form of OpenAI's API."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": None}}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, because a message may quote invalid text."""
    return Response(json.dumps(value), status, headers, media_type="application/json")
