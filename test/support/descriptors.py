"""A limit on open files."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def descriptors(most):
    """Let the process open so many files more than it has, within the block."""
    free = [os.dup(0) for _ in range(most)]  # there may be gaps between those that are open
    for each in free:
        os.close(each)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
