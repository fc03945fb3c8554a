"""A client's connection, with limits on how long the server waits for the client."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from granite4_neuron.serving.errors import RequestError

# How long the server waits for what it needs from a client, in seconds.
HEADERS, BODY, READER = "headers", "body", "reader"
SECONDS = {HEADERS: 10, BODY: 60, READER: 60}
ENDING_SECONDS = 5  # for each of them, once the server is ending

# How long after a client's end of sending the server first makes sure that the client still reads; then ten times that.
PROBE_SECONDS = 0.05

# In a request's scope: whether its answer is a stream of events, and its connection.
IS_EVENT_STREAM = "granite4_neuron.is_event_stream"
CONNECTION = "granite4_neuron.connection"

READ_BYTES = 4096  # at a time: h11 takes a hundredth of a second for that many in chunks of one byte


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1, which by itself has a limit only for the time between two requests.

    A connection is closed if a request's headers or body do not come in time, or if the client does not read what the
    server sends: if nothing can be sent although much is waiting, or the rest of the last answer cannot be sent.

    A client that has sent its request may end its own side of the connection and read on. What the server receives is
    the same if the client is gone, but then writing fails. So the server writes what clients must ignore: responses
    until the answer begins (RFC 9110, 15.2), and comments within a stream of events.
    """

    _buffer = bytearray(READ_BYTES)  # of all connections; what is read is taken out at once
    _waits_for: tuple[str, int] | None = None
    _timer: asyncio.TimerHandle | None = None
    _is_ending = False
    _has_all = False  # whether the client sends nothing more
    _prober: asyncio.TimerHandle | None = None

    # A server's transport is one for both directions.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope[CONNECTION] = self  # type: ignore[literal-required]

    @property
    def has_room(self) -> bool:
        """Whether a part can be written now."""
        return not self.flow.write_paused

    async def room(self) -> None:
        """Wait until there is room."""
        if self.flow.write_paused:
            await self.flow.drain()

    def write(self, part: bytes) -> None:
        """Write a part of a body without a Content-Length, as ASGI's `send` does in ten times the time: h11 keeps no
        state between such parts, and only frames them.
        """
        # Also after a write that failed, of which this object hears in a later turn of the loop.
        if not self.transport.is_closing():
            is_framed = self.scope["http_version"] >= "1.1"  # as h11
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_framed else part)

    # uvicorn's returns nothing; asyncio asks for what this one says.
    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open."""
        # HTTP/1.0 has no responses to ignore.
        if not self._is_answering or self.scope["http_version"] < "1.1":
            return False
        if not self._has_all:
            self._has_all = True
            self._probe(PROBE_SECONDS)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_all and not self._is_answering:
            self.transport.close()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def shutdown(self) -> None:
        super().shutdown()
        self._is_ending = True
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.scope is not None:
            self.scope.pop(CONNECTION, None)  # type: ignore[misc]  # it would keep this object until a garbage collection
        self._wait_for(None)
        if self._prober is not None:
            self._prober.cancel()

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request has come and its response has not been written."""
        return self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and not self.cycle.response_complete

    def _probe(self, seconds: float) -> None:
        if not self.cycle.response_started:
            ignored = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(ignored))
        elif self.scope.get(IS_EVENT_STREAM) and self.conn.our_state is h11.SEND_BODY:
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")))
        self._prober = self.loop.call_later(seconds, self._probe, 10 * seconds)

    def _watch(self) -> None:
        """Check what the server waits for now; restart the time limit if that has changed."""
        if self.transport.is_closing() or self.flow.write_paused:
            self._wait_for(READER)
        else:
            is_kept = self.timeout_keep_alive_task is not None  # uvicorn's own limit, between two requests
            self._wait_for(None if is_kept else {h11.IDLE: HEADERS, h11.SEND_BODY: BODY}.get(self.conn.their_state))

    def _wait_for(self, what: str | None) -> None:
        waits_for = None if what is None else (what, ENDING_SECONDS if self._is_ending else SECONDS[what])
        if waits_for == self._waits_for:
            return
        self._waits_for = waits_for
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if waits_for is None else self.loop.call_later(waits_for[1], self._give_up, *waits_for)

    def _give_up(self, what: str, seconds: int) -> None:
        if what == BODY and not self.cycle.response_started:
            error = RequestError(408, f"the request's body did not come within {seconds} seconds.")
            content = json.dumps(error.body_for(self.scope["path"])).encode()
            head = f"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
            self.transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            self.transport.close()
            self._watch()
        else:
            self.transport.abort()
