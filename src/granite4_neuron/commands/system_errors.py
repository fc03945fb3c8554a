"""Turns errors of the operating system into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from granite4_neuron.errors import UserError
from granite4_neuron.system import available_memory
from granite4_neuron.system.sandbox.limited_process import NoProcess, starting


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise a `UserError` for an error of the system within the block, also if memory runs out, but not for a closed
    pipe.
    """
    try:
        with starting():
            yield
    except BrokenPipeError:
        raise
    except NoProcess as error:
        raise UserError(str(error)) from None
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if available_memory.is_exhausted(error):
            raise UserError("there is not enough memory.") from None
        if not isinstance(error, OSError):
            raise
        raise UserError(f"{error.filename or 'the system'}: {error.strerror or error}.") from None
