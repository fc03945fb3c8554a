"""The address that the server listens on, and the names that clients may call it by."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from granite4_neuron.errors import UserError

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address; it does not listen yet.

    Raises:
        UserError: the address is not available.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _listener(family, address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be encoded for the look-up
        raise UserError(f"the server cannot have the address {in_url(host)}:{port} ({error}).") from None


def in_url(host: str) -> str:
    """A name or address as URLs have it."""
    return f"[{host}]" if ":" in host else host


def is_for_this_machine(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def own_names(host: str) -> frozenset[str]:
    """The hosts that requests may name, if the server listens on `host` and only this machine can connect.

    A web page from elsewhere may have its own name lead to this machine, and could then read answers.
    """
    return _LOOPBACK_NAMES | {in_url(host).lower()}


def without_port(host: str) -> str:
    """The name in a Host header, in lower case."""
    end = host.rfind(":") if not host.endswith("]") else -1
    return (host[:end] if end >= 0 else host).lower()


def _listener(family: socket.AddressFamily, address: tuple) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
