"""Work that only saves time, such as a prefix cache's or a drafter's, may fail: texts continue without it."""

from __future__ import annotations

import logging

from granite4_neuron.errors import sentence_of

_LOGGER = logging.getLogger(__name__)


class BestEffort:
    """A context for work that only saves time. If it fails, the engine continues without it; the first failure is
    logged.

    Args:
        what: its name in the log, such as "The drafter".
    """

    def __init__(self, what: str):
        self._what = what
        self._has_failed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):  # nothing failed, or it is an interrupt
            return False
        if not self._has_failed:
            self._has_failed = True
            reason = sentence_of(error)
            _LOGGER.warning("%s failed, and texts go on without it: %s", self._what, reason, exc_info=error)
        return True
