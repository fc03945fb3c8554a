"""Messages between the process that runs the engine and the one that talks to clients."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 2**13  # at a time; each call allocates as much
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array("i").itemsize)  # a message has at most one socket


class Channel:
    """One end of a connection.

    A message is anything that can be pickled. A socket in it arrives as another one of the same connection. One thread
    may send while another receives.

    Each direction has a pair of sockets of its own. With one for both, a thread that waits for messages would wake each
    time the other end reads one.

    Args:
        incoming, outgoing: each from a `socket.socketpair` of its own.
    """

    def __init__(self, incoming: socket.socket, outgoing: socket.socket):
        self.incoming = incoming
        self.outgoing = outgoing
        self._unsent: deque[tuple[bytes | memoryview, Sequence[socket.socket]]] = deque()
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a new channel."""
        to_us, from_them = socket.socketpair()
        to_them, from_us = socket.socketpair()
        return cls(to_us, from_us), cls(to_them, from_them)

    def send(self, message: Any, waits: bool = False) -> bool:
        """Send a message behind those before it; return whether nothing is left to send.

        Args:
            waits: for room; otherwise the next call sends what there is no room for.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dump(message)
        content = buffer.getvalue()
        self._unsent.append((_LENGTH.pack(len(content)) + content, pickler.sockets))
        return self.flush(waits)

    def flush(self, waits: bool = False) -> bool:
        """Send what is left of earlier messages; see `send`. Nothing is left once the other end is closed."""
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            while self._unsent:
                data, sockets = self._unsent[0]
                rights = array("i", [each.fileno() for each in sockets])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if sockets else ()
                sent = self.outgoing.sendmsg([data], ancillary, flags)
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = memoryview(data)[sent:], ()
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return True

    def receive(self, waits: bool = True) -> list[Any]:
        """Return the messages that have come.

        Args:
            waits: for a first one.

        Raises:
            EOFError: the other end is closed, and all its messages have been returned.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if waits else socket.MSG_DONTWAIT)
        messages: list[Any] = []
        try:
            while not messages:
                data, ancillary, _, _ = self.incoming.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, flags)
                if not data:
                    raise EOFError
                self._received += data
                for _, _, rights in ancillary:
                    self._descriptors.extend(memoryview(rights).cast("i"))
                messages = self._whole()
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None
        return messages

    def close(self) -> None:
        """Close this end in this process."""
        for each in (self.incoming, self.outgoing):
            each.close()

    def end(self) -> None:
        """Close this end in all processes and threads. What has been sent still arrives."""
        for each in (self.incoming, self.outgoing):
            with suppress(OSError):  # the other end is closed
                each.shutdown(socket.SHUT_RDWR)
        self.close()

    def _whole(self) -> list[Any]:
        """Return the messages that have come to their end."""
        messages, start = [], 0
        while len(self._received) >= start + _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if end > len(self._received):
                break
            content = self._received[start + _LENGTH.size : end]
            # The sockets of a message come with its first bytes.
            if self._descriptors:
                messages.append(_Unpickler(content, self._descriptors).load())
            else:
                messages.append(pickle.loads(content))
            start = end
        del self._received[:start]
        return messages


class _Pickler(pickle.Pickler):
    """Keeps the sockets of a message."""

    sockets: Sequence[socket.socket] = ()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, socket.socket):
            return NotImplemented
        self.sockets = *self.sockets, value
        return _next_socket, ()


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytearray, descriptors: deque[int]):
        super().__init__(io.BytesIO(content))
        self._descriptors = descriptors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_next_socket.__module__, _next_socket.__name__):
            # The pickler keeps this. If it held the pickler, the message would live until a garbage collection.
            descriptors = self._descriptors
            return lambda: socket.socket(fileno=descriptors.popleft())
        return super().find_class(module, name)


def _next_socket() -> socket.socket:
    """Stand in a message for its next socket."""
    raise NotImplementedError
