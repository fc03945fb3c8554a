"""Refuses requests that browsers send for web pages of other origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from granite4_neuron.serving.errors import RequestError


def refusal_of_page(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> RequestError | None:
    """Return the refusal of a request that is from a web page of another origin; None for any other request.

    Browsers send some requests of any page without asking the server first. Programs other than browsers name
    no page.

    Args:
        headers: by name in lower case.
        allowed: origins whose pages may send requests, in lower case; "*" for all.
    """
    origin, host = (headers.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host"))
    if "*" in allowed or origin in allowed:
        return None
    # Browsers say the site only over TLS and on the same machine; no page can change it.
    site = headers.get(b"sec-fetch-site")
    if site in (b"same-origin", b"none") or (site is None and (not origin or origin.partition("://")[2] == host)):
        return None
    page = f"of {origin}" if origin else "of another site"
    return RequestError(403, f"the request is from a web page {page}, and --allowed-origins does not allow it.")
