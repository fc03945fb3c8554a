"""Bodies of requests as bytes: compressed or not, and in which encoding of text."""

from __future__ import annotations

import json
import zlib

from granite4_neuron.serving.errors import RequestError

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


def in_utf8(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body in JSON as a text in UTF-8, without a byte order mark.

    Args:
        encoding: its Content-Encoding; empty for none.
        most: its longest, in bytes.

    Raises:
        RequestError: 415, the encoding is not gzip or deflate; 413, it is too long; 400, it is not what it is said to
            be.
    """
    encoding = encoding.strip().lower()
    if encoding in ("gzip", "x-gzip", "deflate"):
        body = _decompressed(body, encoding, most)
    elif encoding not in ("", "identity"):
        raise RequestError(415, f"the body's Content-Encoding is {encoding}, and may be gzip, deflate or none.")
    kind = json.detect_encoding(body)
    if kind == "utf-8":
        return body
    try:
        return body.decode(kind).encode()
    except UnicodeError:
        raise RequestError(400, f"the body begins like {kind}, and is not valid in it; send JSON in UTF-8.") from None


def _decompressed(body: bytes, encoding: str, most: int) -> bytes:
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        text = decompressor.decompress(body, most + 1)
    except zlib.error:
        raise RequestError(400, f"the body's Content-Encoding is {encoding}, and the body is not.") from None
    if len(text) > most:
        raise too_long(most)
    if not decompressor.eof:
        raise RequestError(400, f"the body's Content-Encoding is {encoding}, and its end is missing.")
    return text


def too_long(most: int) -> RequestError:
    """Return the error for a body that is longer than the server takes."""
    return RequestError(413, f"the body is longer than {most} bytes (--max-body).")
