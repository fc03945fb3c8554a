"""The process that talks to clients: HTTP, JSON, tokenizing, templates, grammars. The engine's process starts it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Engine, PrefixCache, SlotPrefixCache
from granite4_neuron.generation.structured_outputs import Matchers
from granite4_neuron.serving.channel import Channel
from granite4_neuron.serving.engine_loop import EngineLoop, ServedModel
from granite4_neuron.serving.http.listener import Listener
from granite4_neuron.serving.http.server import Server
from granite4_neuron.serving.http.service import ServerOptions
from granite4_neuron.system.sandbox.limited_process import NoProcess
from granite4_neuron.system.signals import SIGNALS_TO_END, handling
from granite4_neuron.system.stack import in_large_stack


class FrontEnd:
    """Starts the process, forked from this one. It ends when this one does.

    Start it before a model is loaded: it has no weights and no device, and shares the memory of all modules.

    Args:
        listener: a bound socket, which this process closes.
    """

    def __init__(self, listener: Listener):
        self._channel, theirs = Channel.pair()
        self._signals, their_signals = socket.socketpair()
        self._received: set[int] = set()  # signals
        gc.freeze()  # a collection in one of the processes would copy what they share; see also `serve`
        start = multiprocessing.get_context("fork").Process
        ours = self._channel, self._signals
        self._process = start(target=_serve, args=(listener, theirs, their_signals, ours), name="front end")
        self._process.start()
        for of_child in (listener, theirs, their_signals):
            of_child.close()

    def serve(
        self,
        engine: Engine,
        cache: PrefixCache | SlotPrefixCache | None,
        tokenizer: PreTrainedTokenizerFast,
        on_start: Callable[[int], None],
        options: ServerOptions,
    ) -> bool:
        """Serve until a signal, or until a process fails; return false if one has failed.

        Args:
            engine, cache: the engine, which has the tokenizer, and its prefix cache.
            on_start: called with the port once clients can connect.

        Raises:
            KeyboardInterrupt: the signal was SIGINT.
        """
        self._channel.send((ServedModel.of(engine, cache), tokenizer, options), waits=True)
        matchers = None
        with suppress(ValueError):  # the front end finds the same, and compiles no grammar
            matchers = Matchers(tokenizer, engine.runtime.config.vocab_size)
        loop = EngineLoop(engine, cache, matchers, self._channel, on_start)
        # A full collection would delay all requests by a third of a second; objects that exist by now stay.
        gc.freeze()
        with handling(SIGNALS_TO_END, self._hand_on):
            # The stack is for grammars.
            was_closed = in_large_stack(loop.run)
            self._process.join()
        if signal.SIGINT in self._received:
            raise KeyboardInterrupt
        return was_closed

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._signals.close()
        self._process.join()

    def _hand_on(self, number: int, _: object) -> None:
        """Hand a signal to the other process."""
        self._received.add(number)
        with suppress(OSError):  # it has ended
            self._signals.send(bytes([number]))


def _serve(listener: Listener, channel: Channel, signals: socket.socket, others: tuple[Channel, socket.socket]) -> None:
    """Serve in this process, once the other one is ready; end it with a sentence if it has too few threads."""
    os.setsid()  # Ctrl-C in the terminal reaches the other process, which hands it on
    for each in others:
        each.close()
    with suppress(EOFError):  # it has ended before
        [(served, tokenizer, options)] = channel.receive()
        try:
            server = Server(served, tokenizer, channel, options, signals)
        except NoProcess as error:
            sys.exit(f"granite4-neuron: {error}")
        gc.freeze()
        server.run([listener])
