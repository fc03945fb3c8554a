"""The address on which the server listens, and the names that clients may use for it."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from granite4_neuron.errors import UserError
from granite4_neuron.serving.http.listener import Listener

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def bind(host: str, port: int) -> Listener:
    """Return a socket bound to this address; it does not listen yet.

    Raises:
        UserError: the address is not available.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _listener(family, address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be encoded for the look-up
        raise UserError(f"the server cannot listen on {in_url(host)}:{port} ({error}).") from None


def in_url(host: str) -> str:
    """Return a name or address in the form that URLs use."""
    return f"[{host}]" if ":" in host else host


def is_for_this_machine(listener: socket.socket) -> bool:
    """Return whether only this machine can connect."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def own_names(host: str) -> frozenset[str]:
    """Return the hosts that requests may name, if the server listens on `host` and only this machine can connect.

    Otherwise a web page from elsewhere could point its own name at this machine and read answers.
    """
    return _LOOPBACK_NAMES | {in_url(host).lower()}


def without_port(host: str) -> str:
    """Return the name in a Host header, without the port and in lower case."""
    end = host.rfind(":") if not host.endswith("]") else -1
    return (host[:end] if end >= 0 else host).lower()


def _listener(family: socket.AddressFamily, address: tuple) -> Listener:
    listener = Listener(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
