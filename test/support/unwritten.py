"""Memory of new tensors that nothing has written yet."""

from contextlib import contextmanager

import torch


@contextmanager
def unwritten_memory_is_nan():
    """Let torch fill the memory of empty tensors with NaN, as it does with deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
