"""The HTTP server: socket, signals and shutdown."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from transformers import PreTrainedTokenizerFast

from granite4_neuron.serving.apis.chat.answers import TokenTexts
from granite4_neuron.serving.channel import Channel
from granite4_neuron.serving.engine_client import EngineClient
from granite4_neuron.serving.engine_loop import ServedModel
from granite4_neuron.serving.http.app import make_app
from granite4_neuron.serving.http.connection import Connection
from granite4_neuron.serving.http.service import ServerOptions, Service
from granite4_neuron.serving.metrics import Metrics
from granite4_neuron.serving.sequences import RequestBuilder
from granite4_neuron.serving.work_queue import WorkQueues
from granite4_neuron.system.signals import SIGNALS_TO_END, handling

LAST_WORDS_SECONDS = 1
POLL_SECONDS = 0.1  # as uvicorn


class Server(uvicorn.Server):
    """Serves one model until SIGTERM, SIGHUP or SIGINT. Then it refuses new requests for texts and finishes those it
    has.

    Args:
        served, tokenizer: the model.
        channel: to the engine's loop.
        signals: gives the numbers of signals, each as a byte; None for none but those of this process.
    """

    def __init__(
        self,
        served: ServedModel,
        tokenizer: PreTrainedTokenizerFast,
        channel: Channel,
        options: ServerOptions,
        signals: socket.socket | None = None,
    ):
        limits = options.limits
        queues = WorkQueues(limits.num_sequences)
        metrics = Metrics(served.facts, served.num_sequences, limits.max_length, queues, options.model)
        engine = EngineClient(channel, limits.num_sequences, served.adapters, metrics, self._engine_ended)
        maker = RequestBuilder(served, tokenizer, limits, (options.model, *options.aliases))
        texts = TokenTexts(tokenizer, limits.max_length)
        self.service = Service(options, engine, queues, maker, texts, metrics)
        self._signals = signals
        self._has_failed = False
        super().__init__(
            uvicorn.Config(
                make_app(self.service),
                loop="asyncio",  # its own event loop calls `Listener.accept`
                http=Connection,
                lifespan="on",
                ws="none",
                log_level="error",  # it warns about each mistake of a client
                use_colors=False,
                access_log=False,
                server_header=False,
                timeout_keep_alive=options.keep_alive,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block. Unlike uvicorn's, it does not raise them again within the event loop at the
        end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handling(SIGNALS_TO_END, self.handle_exit):
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.engine.start()
        if self._signals is not None:
            asyncio.get_running_loop().add_reader(self._signals, self._take_signals, self._signals)
        await super().startup(sockets)
        if self.started:
            self.service.engine.started(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = time.monotonic() + self.service.options.shutdown_timeout
        for connection in list(self.server_state.connections):
            connection.shutdown()
        # A load balancer learns from /health that this server takes no requests, so the listener stays open.
        while self.server_state.tasks and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        finishing = asyncio.create_task(super().shutdown(sockets))
        while not (finishing.done() or self.force_exit or time.monotonic() > end):
            await asyncio.wait([finishing], timeout=POLL_SECONDS)
        self.force_exit |= not finishing.done()
        if self.force_exit:  # uvicorn would leave running tasks to the end of the event loop, which complains
            await self._cut_off()
        await finishing
        if self.force_exit:
            await self.lifespan.shutdown()

    async def _cut_off(self) -> None:
        """End the engine, tell each request, and close all connections."""
        self.service.engine.close()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.is_ending = True
        super().handle_exit(sig, frame)

    def _take_signals(self, signals: socket.socket) -> None:
        numbers = signals.recv(64)
        if not numbers:  # the engine's process has ended
            asyncio.get_running_loop().remove_reader(signals)
        for number in numbers:
            self.handle_exit(number, None)

    def _engine_ended(self) -> None:
        """End the server. It has failed unless it was ending anyway."""
        self._has_failed = not self.should_exit
        self.service.is_ending = self.should_exit = True
