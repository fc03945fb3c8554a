"""The id of each request to the server, and a line for each in the log. The log has no texts."""

from __future__ import annotations

import logging
import time
import uuid

from granite4_neuron.serving.apis.chat.answers import Answer
from granite4_neuron.serving.apis.strict import Ignored
from granite4_neuron.serving.engine_client import Generation

HEADER = b"x-request-id"
IGNORED_HEADER = b"x-ignored-fields"
_LONGEST_ID = 128
_LOGGER = logging.getLogger(__name__)


class RequestLog:
    """The line in the log for one request.

    generated: the running sequences and the answer made of them, once the engine has the request.
    arrived: when its body was there, in seconds.
    ignored: what of it changes nothing.
    """

    generated: tuple[Generation, Answer] | None = None
    arrived = 0.0

    def __init__(self, path: str, asked_id: bytes):
        self.id = _id(asked_id)
        self.ignored = Ignored()
        self._path = path
        self._started = time.perf_counter()

    def write(self, status: int | None) -> None:
        """Write the line, at level info.

        Args:
            status: of the response; None if there was none.
        """
        if not _LOGGER.isEnabledFor(logging.INFO):
            return
        facts = [self._path, str(status or "gone")]
        if self.generated is not None:
            facts += _tokens(*self.generated)
        if self.ignored.names:
            facts.append(f"ignored={','.join(sorted(self.ignored.names))}")
        _LOGGER.info("%s %s, %.3f s", self.id, " ".join(facts), time.perf_counter() - self._started)


def _tokens(generation: Generation, answer: Answer) -> list[str]:
    usage, reasons = answer.usage(), answer.finish_reasons()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    facts = [
        f"prompt_tokens={usage['prompt_tokens']}",
        f"cached_tokens={cached}",
        f"completion_tokens={usage['completion_tokens']}",
        f"finish_reason={','.join(sorted({reason or 'cancelled' for reason in reasons}))}",
    ]
    if generation.first_time is not None:
        facts.append(f"first_token={generation.first_time - generation.started:.3f}s")
    return facts


def _id(asked: bytes) -> str:
    """Return the id that the client gave, if it can be shown and has no space, behind which facts begin in the log;
    otherwise a new one.
    """
    text = asked.decode("latin-1")
    is_right = 0 < len(text) <= _LONGEST_ID and text.isascii() and text.isprintable() and " " not in text
    return text if is_right else uuid.uuid4().hex
