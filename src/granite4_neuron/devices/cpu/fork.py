"""Lets a process fork after it has computed, as gunicorn --preload and multiprocessing do.

The child has none of OpenMP's threads. OpenMP does not know this, so the child would wait for them forever.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

_LOGGER = logging.getLogger(__name__)


@functools.cache
def survive_forks() -> None:
    """Make every forked child compute in one thread, and log that."""
    os.register_at_fork(after_in_child=_compute_in_one_thread)


def _compute_in_one_thread() -> None:
    torch.set_num_threads(1)
    _LOGGER.warning(
        "granite4-neuron: this process was forked from one that had loaded a model, and computes in one thread; to use "
        "more, start processes with the method spawn, or load the model in each of them."
    )
