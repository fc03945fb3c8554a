"""What goes wrong with a request, and how a client is told."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is refused or failed.

    status: of the HTTP response.
    message: one sentence, for a person.
    field: of the request's body, if it is about one.
    headers: of the response, beside the usual ones.
    """

    def __init__(self, status: int, message: str, field: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.headers = headers

    @property
    def body(self) -> dict[str, object]:
        """As OpenAI's API puts it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": None}}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """In ASCII: a message may quote what is no valid text."""
    return Response(json.dumps(value), status, headers, media_type="application/json")
