"""The listening socket, and how many connections it takes."""

from __future__ import annotations

import logging
import resource
import socket
import time
from contextlib import suppress

MOST_DESCRIPTORS = 4096  # of the process; each connection is one, and takes some memory
RESERVED_DESCRIPTORS = 64  # for files and other processes
SECONDS_BETWEEN_LINES = 60

_LOGGER = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may allow fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Listener(socket.socket):
    """A listening socket that leaves the process some descriptors: it closes each further connection at once.

    Without that, an event loop at the limit of descriptors writes a traceback for every attempt.
    """

    def __init__(self, family: socket.AddressFamily):
        super().__init__(family, proto=socket.IPPROTO_TCP)  # asyncio sends at once only where it is named
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, MOST_DESCRIPTORS)
        self._limit = limit
        self._most = max(limit - RESERVED_DESCRIPTORS, limit // 2)
        self._refused = 0  # since the last line in the log
        self._last_line: float | None = None

    def accept(self) -> tuple[socket.socket, object]:
        """Accept a connection.

        Raises:
            ConnectionAbortedError: it was closed at once. An event loop then goes on to other work, and tries again.
        """
        connection, address = super().accept()
        # A new descriptor gets the lowest free number, so at least that many are in use.
        if connection.fileno() < self._most:
            return connection, address
        connection.close()
        self._refused += 1
        self._log()
        raise ConnectionAbortedError

    def _log(self) -> None:
        now = time.monotonic()
        if self._last_line is not None and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        _LOGGER.warning(
            "Connections are closed as soon as they are made, %d since the last such line: %d descriptors are in use, "
            "of at most %d (ulimit -H -n, and %d).",
            self._refused,
            self._most,
            self._limit,
            MOST_DESCRIPTORS,
        )
        self._refused, self._last_line = 0, now
