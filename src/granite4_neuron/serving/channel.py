"""Messages between the process that runs the engine and the one that talks to clients."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from array import array
from collections import deque
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 2**16  # at a time
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array("i").itemsize)  # a message has at most one socket


class Channel:
    """One end of two connected sockets.

    A message is anything that can be pickled. A socket in it arrives as another one of the same connection. One thread
    may send while another receives.

    Args:
        connection: from `socket.socketpair`.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._unsent: deque[tuple[memoryview, list[socket.socket]]] = deque()
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a new channel."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """Return the descriptor, on which something to receive shows."""
        return self._connection.fileno()

    def send(self, message: Any, waits: bool = False) -> bool:
        """Send a message behind those before it; return whether nothing is left to send.

        Args:
            waits: for room; otherwise the next call sends what there is no room for.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(message)
        content = buffer.getbuffer()
        self._unsent.append((memoryview(_LENGTH.pack(len(content)) + content), pickler.sockets))
        return self.flush(waits)

    def flush(self, waits: bool = False) -> bool:
        """Send what is left of earlier messages; see `send`. Nothing is left once the other end is closed."""
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            while self._unsent:
                data, sockets = self._unsent[0]
                rights = array("i", [each.fileno() for each in sockets])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if sockets else []
                sent = self._connection.sendmsg([data], ancillary, flags)
                self._unsent[0] = data[sent:], []
                if sent == len(data):
                    self._unsent.popleft()
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
                data, ancillary, _, _ = self._connection.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, flags)
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
        self._connection.close()

    def end(self) -> None:
        """Close this end in all processes and threads. What has been sent still arrives."""
        with suppress(OSError):  # the other end is closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _whole(self) -> list[Any]:
        """Return the messages that have come to their end."""
        messages, start = [], 0
        while len(self._received) >= start + _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if end > len(self._received):
                break
            content = bytes(self._received[start + _LENGTH.size : end])
            messages.append(_Unpickler(content, self._descriptors).load())
            start = end
        del self._received[:start]
        return messages


class _Pickler(pickle.Pickler):
    """Keeps the sockets of a message."""

    def __init__(self, buffer: io.BytesIO):
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.sockets: list[socket.socket] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, socket.socket):
            return NotImplemented
        self.sockets.append(value)
        return _next_socket, ()


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, descriptors: deque[int]):
        super().__init__(io.BytesIO(content))
        self._descriptors = descriptors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_next_socket.__module__, _next_socket.__name__):
            return lambda: socket.socket(fileno=self._descriptors.popleft())
        return super().find_class(module, name)


def _next_socket() -> socket.socket:
    """Stand in a message for its next socket."""
    raise NotImplementedError
