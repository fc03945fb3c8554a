"""The loop that runs the engine, in a process of its own. Requests come through a channel; tokens go back by steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import GenerationConfig

from granite4_neuron.config import ModelConfig
from granite4_neuron.engine import Engine, Output, PrefixCache, Request, SlotPrefixCache
from granite4_neuron.engine.live_sequences import MOST_FAILED_STEPS
from granite4_neuron.engine.prefix.cache import PrefixCacheStats
from granite4_neuron.engine.request import GenerationStats
from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import CompiledGrammar, Matchers
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.serving.channel import Channel

CLOSE = None  # the last message to the engine
_GONE = object()

_LOGGER = logging.getLogger(__name__)


class EngineFacts(NamedTuple):
    """What metrics say of an engine and its prefix cache, in numbers, because each step sends it.

    num_running, num_waiting: texts that run and that wait.
    numbers: of `GenerationStats`.
    cache_numbers: of `PrefixCacheStats`; None without a prefix cache.
    folder_bytes: of the prefix cache; None without a folder.
    """

    num_running: int
    num_waiting: int
    numbers: Sequence[float]
    cache_numbers: Sequence[int] | None
    folder_bytes: int | None

    @classmethod
    def of(cls, engine: Engine, cache: PrefixCache | SlotPrefixCache | None) -> EngineFacts:
        """Return those of now."""
        folder_bytes = cache.folder_bytes if isinstance(cache, PrefixCache) else None
        cache_numbers = None if cache is None else tuple(vars(cache.stats).values())
        numbers = tuple(vars(engine.stats).values())
        return cls(engine.num_running, engine.num_waiting, numbers, cache_numbers, folder_bytes)

    @property
    def stats(self) -> GenerationStats:
        return GenerationStats(*self.numbers)  # type: ignore[arg-type]  # its fields are of both kinds

    @property
    def cache_stats(self) -> PrefixCacheStats | None:
        return None if self.cache_numbers is None else PrefixCacheStats(*self.cache_numbers)


@dataclass(frozen=True)
class ServedModel:
    """What the front end knows of the engine.

    adapters: their names.
    num_sequences: that may run at a time.
    facts: of the start.
    """

    config: ModelConfig
    generation_config: GenerationConfig
    adapters: Sequence[str]
    num_sequences: int
    facts: EngineFacts

    @classmethod
    def of(cls, engine: Engine, cache: PrefixCache | SlotPrefixCache | None) -> ServedModel:
        """Return what holds at the start."""
        runtime, facts = engine.runtime, EngineFacts.of(engine, cache)
        return cls(runtime.config, runtime.generation_config, tuple(runtime.adapters), engine.num_sequences, facts)


class EngineLoop:
    """Runs an engine for an `EngineClient` at the other end of a channel.

    Args:
        engine, cache: the engine and its prefix cache.
        matchers: of its tokenizer's tokens; None if that does not work with grammars.
        on_start: called with the port once clients can connect.
    """

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache | SlotPrefixCache | None,
        matchers: Matchers | None,
        channel: Channel,
        on_start: Callable[[int], None],
    ):
        self._engine = engine
        self._cache = cache
        self._matchers = matchers
        self._channel = channel
        self._commands: dict[str, Callable[..., None]] = {
            "add": self._add,
            "constrained": self._constrained,
            "cancel": self._cancel,
            "fail": self._fail,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "started": on_start,
        }
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._texts: dict[int, tuple[int, str | None]] = {}  # numbers of texts and their adapters, by the engine's ids
        self._ids: dict[int, int] = {}  # the engine's ids, by the numbers of texts
        self._compiling: dict[int, str | None] = {}  # adapters of requests whose grammar waits, by first numbers
        self._compiler = ThreadPoolExecutor(1, "matchers")
        self._unloading: set[str] = set()
        self._told: EngineFacts | None = None
        self._is_closed = False

    def run(self) -> bool:
        """Run until the client closes the channel; return false if it is gone, or if steps keep failing."""
        reader = threading.Thread(target=self._read, name="reader")
        reader.start()
        try:
            failed = 0
            # A supervisor of the process is expected to start the server again.
            while max(failed, self._engine.failed_steps) < MOST_FAILED_STEPS and self._take_in():
                failed = 0 if self._step() else failed + 1
            return self._is_closed
        finally:
            self._compiler.shutdown(wait=False, cancel_futures=True)
            self._channel.end()
            reader.join()

    def _read(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self._inbox.put(message)
        except EOFError:
            pass
        finally:
            self._inbox.put(_GONE)

    def _step(self) -> bool:
        """Run a step and give out what it returns; false if there was too little memory even to begin it."""
        stats = self._engine.stats
        before = stats.prompt_tokens + stats.generated_tokens
        try:
            outputs = self._engine.step()
        except MemoryError:  # outside of the work for sequences, so the next step can go on
            return False
        self._tell(list(map(self._row, outputs)), stats.prompt_tokens + stats.generated_tokens - before)
        return True

    def _row(self, output: Output) -> tuple:
        """Return an output's fields, without the last ones if they have their defaults."""
        number, _ = self._texts[output.id]
        reason, logprob, prompt = output.finish_reason, output.logprob, output.prompt
        if reason is None and logprob is None and prompt is None:
            return number, output.token, output.text
        if reason is not None:
            del self._texts[output.id], self._ids[number]
        rest = output.error, output.is_requests_fault, logprob, prompt, output.stop_string
        return number, output.token, output.text, reason, *rest

    def _tell(self, rows: Sequence[tuple], step_tokens: int | None) -> None:
        self._told = EngineFacts.of(self._engine, self._cache)
        self._channel.send(("outputs", rows, step_tokens, *self._told))

    def _take_in(self) -> bool:
        """Run the commands that have come in, waiting for one if there is no work; false if the loop is to end."""
        while True:
            self._unload_unused()
            if self._engine.has_work:
                if self._inbox.empty():
                    return True
            else:
                if self._told != EngineFacts.of(self._engine, self._cache):
                    self._tell([], None)
                self._channel.flush(waits=True)
            command = self._inbox.get()
            if command is _GONE:
                _LOGGER.error("The process that talks to clients has ended.")
                return False
            if command is CLOSE:
                self._is_closed = True
                return False
            name, *arguments = command
            self._commands[name](*arguments)

    def _add(self, first: int, requests: Sequence[Request], grammar: CompiledGrammar | None) -> None:
        """Add the texts of a request, numbered from `first` on."""
        if grammar is not None:
            self._compiling[first] = requests[0].adapter
            self._compiler.submit(self._compile, first, requests, grammar)
            return
        try:
            for number, request in enumerate(requests, first):
                id = self._engine.add(request)
                self._ids[number], self._texts[id] = id, (number, request.adapter)
        except Exception as error:  # such as too little memory; other requests must not notice
            self._cancel(first, len(requests))
            self._fail(first, error)

    def _compile(self, first: int, requests: Sequence[Request], grammar: CompiledGrammar) -> None:
        """Make the constraint of a grammar, beside the engine's steps."""
        try:
            assert self._matchers is not None  # otherwise no grammar compiles
            constraint = self._matchers.constraint(grammar)
        except Exception as error:
            self._inbox.put(("fail", first, error))
        else:
            self._inbox.put(("constrained", first, [replace(each, constraint=constraint) for each in requests]))

    def _constrained(self, first: int, requests: Sequence[Request]) -> None:
        if first in self._compiling:
            del self._compiling[first]
            self._add(first, requests, None)

    def _fail(self, first: int, error: Exception) -> None:
        if not isinstance(error, UserError):
            _LOGGER.error("A request failed.", exc_info=error)
        self._channel.send(("failed", first, error if isinstance(error, UserError) else None))

    def _cancel(self, first: int, count: int) -> None:
        self._compiling.pop(first, None)
        for number in range(first, first + count):
            id = self._ids.pop(number, None)
            if id is not None:
                self._engine.cancel(id)
                del self._texts[id]

    def _load_adapter(self, name: str, adapter: Adapter) -> None:
        error = None
        try:
            self._engine.runtime.load_adapter(name, adapter)
        except (UserError, MemoryError) as failure:
            error = failure
        self._tell_of_adapter(name, error)

    def _unload_adapter(self, name: str) -> None:
        self._unloading.add(name)

    def _unload_unused(self) -> None:
        """Remove adapters that are to go, once no text uses them."""
        for name in list(self._unloading):
            if name not in (*self._compiling.values(), *(adapter for _, adapter in self._texts.values())):
                self._engine.runtime.unload_adapter(name)
                self._unloading.remove(name)
                self._tell_of_adapter(name, None)

    def _tell_of_adapter(self, name: str, error: Exception | None) -> None:
        self._channel.send(("adapter", name, error, list(self._engine.runtime.adapters)))
