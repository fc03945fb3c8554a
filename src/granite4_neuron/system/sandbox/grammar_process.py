"""Compiles grammars in processes with limits on time and memory, and computes masks there where one may take long.

A grammar may come from a stranger. llguidance has limits, but a short grammar, such as the multiples of a large number,
still takes minutes, or so much memory that Rust ends the whole process, and a mask of an ambiguous one takes seconds.

A first process reads the vocabulary, and forks another for each grammar, which shares the vocabulary's memory. One that
exceeds a limit ends alone. It also ends when its connection is closed.

This module imports little, and no torch, so its process starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import llguidance

from granite4_neuron.system.sandbox.limited_process import NoProcess, Stop, Stopped, starting

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from granite4_neuron.system.sandbox import grammar_process; grammar_process.main(int(sys.argv[2]))"
)
COMPILE_SECONDS = 4  # of the processor's time
_MEMORY_BYTES = 2**30
# A grammar that overflows this stack ends its process. Afterwards grammars are used in threads with eight times as much
# stack, or in the caller's thread, which has twice as much by default.
_STACK_BYTES = 2**20
_MOST_WAITING = 60  # seconds until an answer, for a process that only waits
_LENGTH = struct.Struct("!I")  # before a message
_PR_SET_CHILD_SUBREAPER = 36
# A state takes 1 to 2 kB; llguidance's default limit is four times as large. A row has items for each member that an
# object may have, and 500 members reach the default limit of 2,000. A verbose error of a large grammar takes a second.
_LIMITS = llguidance.LLParserLimits(max_lexer_states=2**16, max_items_in_row=2**14, verbose_errors=False)


class GrammarFailed(Exception):
    """The grammar cannot be used; the message says why."""


class GrammarTooCostly(GrammarFailed):
    """Its compilation exceeded a limit."""

    def __init__(self) -> None:
        limits = f"{COMPILE_SECONDS} seconds or {_MEMORY_BYTES / 2**30:g} GiB"
        super().__init__(f"it is nested too deep, or takes more than {limits}")


class WorkerEnded(Exception):
    """A process exceeded a limit while it answered."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    definition: of its tokenizer, as a tokenizer.json has it.
    size: how many tokens the model has; at least the tokenizer's.
    end: the end-of-sequence token.
    """

    definition: str
    size: int
    end: int

    def read(self) -> llguidance.LLTokenizer:
        """Read it, which takes a second for 100,000 tokens.

        Raises:
            ValueError: llguidance does not support the tokenizer.
        """
        return llguidance.LLTokenizer(self.definition, n_vocab=self.size, eos_token=self.end)


@dataclass(frozen=True)
class Mask:
    """The tokens that may come next.

    bits: one for each token, the lowest bit of a byte first.
    has_ended: whether the text is complete and has its end token.
    error: why there are none; an empty text if there are.
    seconds: of the processor's time that it took.
    """

    bits: bytes
    has_ended: bool
    error: str
    seconds: float


class Matcher:
    """A grammar at one place of a text.

    has_ended: whether the text is complete and has its end token.
    """

    def __init__(self, matcher: llguidance.LLMatcher, end: int, has_ended: bool = False):
        self._matcher = matcher
        self._end = end
        self.has_ended = has_ended

    @classmethod
    def of(cls, tokenizer: llguidance.LLTokenizer, end: int, grammar: str) -> Matcher:
        """Compile a grammar in llguidance's format, and compute the mask of the first token, to fill caches that its
        copies share.

        Raises:
            GrammarFailed: it does not compile.
        """
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarFailed(_error_of(matcher))
        return cls(matcher, end)

    def fork(self) -> Matcher:
        """Return a copy."""
        return Matcher(self._matcher.deep_copy(), self._end, self.has_ended)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the text."""
        for token in tokens:
            is_complete = self._matcher.is_stopped()  # only an end token may follow
            if not is_complete:
                self._matcher.consume_token(token)
            self.has_ended = token == self._end and self._matcher.is_stopped()

    def mask(self, tokens: Sequence[int]) -> Mask:
        """Advance, and return the mask of the token that follows."""
        started = time.thread_time()
        self.advance(tokens)
        bits = self._matcher.compute_bitmask()
        error = _error_of(self._matcher) if self._matcher.is_error() else ""
        return Mask(bits, self.has_ended, error, time.thread_time() - started)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other."""
        return 0 if self.has_ended else self._matcher.validate_tokens(list(tokens))

    def forced(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens that are the only ones in their masks. llguidance's own list spells all forced
        bytes at once; after its first token, other tokens could spell the rest.
        """
        matcher = self._matcher
        tokens: list[int] = []
        while len(tokens) < most and not self.has_ended:
            following = matcher.compute_ff_tokens()[:1]
            if not following and matcher.is_stopped() and not matcher.is_error():
                return [*tokens, self._end]
            if not following:
                break
            if matcher is self._matcher:
                matcher = matcher.deep_copy()
            matcher.consume_tokens(following)
            tokens += following
            if following == [self._end] and matcher.is_stopped():
                break
        return tokens

    def check_next_step(self) -> None:
        """Try a first token, because some limits hold only from then on.

        Raises:
            GrammarFailed: the matcher exceeds one.
        """
        matcher = self._matcher.deep_copy()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        first = (mask & -mask).bit_length() - 1
        if first >= 0 and not matcher.is_stopped():
            matcher.consume_token(first)
        if matcher.is_error():
            raise GrammarFailed(_error_of(matcher))


def _error_of(matcher: llguidance.LLMatcher) -> str:
    """Return a matcher's error in one line."""
    return matcher.get_error().strip().partition("\n")[0]


class GrammarWorker:
    """A process with a grammar at one place of a text. It ends with this object."""

    def __init__(self, connection: socket.socket, pid: int | None = None):
        connection.settimeout(_MOST_WAITING)
        self._connection = connection
        self._pid = pid

    def __reduce__(self) -> tuple:
        """Let it go to another process that gets the connection."""
        return GrammarWorker, (self._connection, self._pid)

    def fork(self) -> GrammarWorker:
        """Return another process at the same place; raise WorkerEnded if no process could be started."""
        ours, theirs = socket.socketpair()
        forked = GrammarWorker(ours)
        with theirs:
            self._send({}, theirs)
        forked._pid = forked._receive()["pid"]
        return forked

    def compile(self, kind: str, text: str, seconds: float) -> str:
        """Compile a grammar, and return it in llguidance's format.

        Args:
            seconds: the most processor time.

        Raises:
            GrammarFailed: it is not a grammar or allows no text.
            WorkerEnded: it takes more than the limits allow.
        """
        self._send({"kind": kind, "text": text, "seconds": seconds})
        answer = self._receive()
        if "error" in answer:
            raise GrammarFailed(answer["error"])
        return answer["grammar"]

    def mask(self, tokens: Sequence[int], seconds: float) -> Mask:
        """See `Matcher.mask`.

        Args:
            seconds: the most processor time.

        Raises:
            WorkerEnded: it takes more.
        """
        self._send({"tokens": list(tokens), "seconds": seconds})
        answer = self._receive()
        return Mask(**{**answer, "bits": bytes.fromhex(answer["bits"])})

    def kill(self) -> None:
        """End the process while it answers."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any], connection: socket.socket | None = None) -> None:
        try:
            _send(self._connection, message, connection)
        except OSError as error:
            raise WorkerEnded from error

    def _receive(self) -> dict[str, Any]:
        try:
            message, _ = _receive(self._connection)
        except TimeoutError as error:
            self.kill()
            raise WorkerEnded from error
        except (OSError, EOFError) as error:
            raise WorkerEnded from error
        except BaseException:  # Ctrl-C: its late answer would be taken for the next one
            self.kill()
            self._connection.close()
            raise
        return message


class GrammarProcess:
    """Starts processes for grammars. Several threads may share it; one grammar is compiled at a time.

    Its first process stays until it is closed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._first: GrammarWorker | None = None
        self._compiling: GrammarWorker | None = None

    def start(self) -> None:
        """Let the first process read the vocabulary beside what the caller does next; otherwise a grammar waits for it.

        Raises:
            NoProcess: it cannot be started.
        """
        with self._lock, starting():
            self._start()

    def compile(
        self, kind: str, text: str, stop: Stop | None = None, seconds: float = COMPILE_SECONDS
    ) -> tuple[GrammarWorker, str]:
        """Compile a grammar.

        Args:
            kind: as in `llguidance.grammar_from`.
            stop: ends the compilation from another thread.
            seconds: the most processor time.

        Returns:
            A process with the grammar, and the grammar in llguidance's format, which `Matcher.of` compiles within the
            same limits.

        Raises:
            GrammarFailed: it is not a grammar, or allows no text.
            GrammarTooCostly: it is nested too deep, or takes more than `seconds` or 1 GiB.
            NoProcess: none can be started to compile it.
            Stopped: `stop` was set.
        """
        stop = stop or Stop()
        with self._lock:
            if stop.is_set:
                raise Stopped
            try:
                with starting():
                    self._compiling = worker = self._start().fork()
            except WorkerEnded:
                raise NoProcess("") from None
            try:
                with stop.over(worker):
                    return worker, worker.compile(kind, text, seconds)
            except WorkerEnded:
                if stop.is_set:
                    raise Stopped from None
                raise GrammarTooCostly from None
            finally:
                self._compiling = None

    def close(self) -> None:
        """End what compiles and the first process. Processes with a grammar end on their own; a later grammar starts
        another first one.
        """
        # A grammar that came before may still start a process until it is compiled.
        while not self._lock.acquire(timeout=0.05):
            if (compiling := self._compiling) is not None:
                compiling.kill()
        try:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._first = None
        finally:
            self._lock.release()

    def _start(self) -> GrammarWorker:
        """Return the first process; start it if it does not run."""
        if self._first is None or self._process is None or self._process.poll() is not None:
            ours, theirs = socket.socketpair()
            # A socket would hold so much only when the process reads.
            with theirs, _file_in_memory() as vocabulary:
                json.dump(asdict(self._vocabulary), vocabulary)
                vocabulary.seek(0)
                command = [sys.executable, "-I", "-c", _CODE, json.dumps(sys.path), str(theirs.fileno())]
                self._process = subprocess.Popen(
                    command,
                    stdin=vocabulary,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
                )
            self._first = GrammarWorker(ours)
        return self._first


class DeferredWorker:
    """A compiled grammar without a process, for texts that may wait long.

    Args:
        process: compiles it.
        text: in llguidance's format.
    """

    def __init__(self, process: GrammarProcess, text: str):
        self._process = process
        self._text = text

    def fork(self) -> GrammarWorker:
        """Return a process with the grammar at the beginning of a text.

        Raises:
            NoProcess: none can be started.
            WorkerEnded: it takes more than the limits allow.
        """
        try:
            # It has been compiled within the limit, which a second time may just exceed.
            worker, _ = self._process.compile("llguidance", self._text, seconds=2 * COMPILE_SECONDS)
        except GrammarTooCostly:
            raise WorkerEnded from None
        return worker


def _file_in_memory() -> IO[str]:
    """Return a file without a name, in memory if this Python can make one: conda's is built for a system without."""
    return open(os.memfd_create("vocabulary"), "w+") if hasattr(os, "memfd_create") else tempfile.TemporaryFile("w+")


def main(descriptor: int) -> None:
    """Serve a `GrammarProcess` over a connection; standard input has the vocabulary."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    _limit_stack(_STACK_BYTES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # No process that has ended waits for its parent, also if that one has ended before.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    connection = socket.socket(fileno=descriptor)
    with sys.stdin:
        vocabulary = Vocabulary(**json.load(sys.stdin))
    with suppress(EOFError, ConnectionError):  # the other side has ended
        _serve(connection, vocabulary)


def _serve(connection: socket.socket, vocabulary: Vocabulary) -> None:
    """Answer questions. For a message with another connection, fork a process that answers over that one."""
    tokenizer, matcher = vocabulary.read(), None
    while True:
        question, other = _receive(connection)
        if other is not None:
            with other, suppress(OSError):  # there may be too many processes
                if os.fork() == 0:
                    os.dup2(other.detach(), connection.fileno())
                    _send(connection, {"pid": os.getpid()})
            continue
        signal.setitimer(signal.ITIMER_PROF, max(question["seconds"], 0.001))  # its signal ends the process
        if "tokens" in question:
            assert matcher is not None  # it has a grammar
            mask = matcher.mask(question["tokens"])
            answer = {**asdict(mask), "bits": mask.bits.hex()}
        else:
            try:
                grammar = llguidance.grammar_from(question["kind"], question["text"])
                matcher = Matcher.of(tokenizer, vocabulary.end, grammar)
                matcher.check_next_step()
                answer = {"grammar": grammar}
            except (ValueError, GrammarFailed) as error:
                answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(connection, answer)


def _limit_stack(most: int) -> None:
    """Limit how far the main thread's stack may still grow; keep a lower limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    limits = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_STACK, (min(limits), hard))


def _send(connection: socket.socket, message: dict[str, Any], other: socket.socket | None = None) -> None:
    """Send a message, with another connection if there is one."""
    data = json.dumps(message).encode()
    header = _LENGTH.pack(len(data))
    if other is None:
        connection.sendall(header)
    else:
        socket.send_fds(connection, [header], [other.fileno()])
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    """Receive what `_send` sent; raise EOFError if nothing will come."""
    header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    other = socket.socket(fileno=descriptors[0]) if descriptors else None
    header += _exactly(connection, _LENGTH.size - len(header))
    return json.loads(_exactly(connection, *_LENGTH.unpack(header))), other


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
