"""`ssd` of AWS's nki-library (SDK 2.30 and later) with the arguments and results of `ssd_chunk_scan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from test.support.nki_library import member

CHUNK_SIZE = 128


def has_ssd(folder: Path) -> bool:
    """Return whether a checkout of nki-library is new enough to have the kernel."""
    return (folder / "src/nkilib_src/nkilib/experimental/scan/ssd.py").is_file()


def ssd_kernel() -> Callable:
    """Return the library's kernel without optional arguments. Call within `nki_library.provided_library`."""
    import nki

    ssd = member("experimental.scan.ssd:ssd")

    @nki.jit
    def nkilib_ssd(x, dt, A, B, C, D, initial_state, causal_mask):
        return ssd(x, dt, A, B, C, CHUNK_SIZE, D, initial_state, causal_mask)

    return nkilib_ssd


def ssd_arguments(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return arguments of `ssd_kernel` from those of `ssd_chunk_scan`, of one group: heads come before tokens."""
    x, dt, A, B, C, D, initial_states = inputs.values()
    mask = torch.ones(CHUNK_SIZE, CHUNK_SIZE).tril()
    states = initial_states.transpose(1, 2)
    return [x.transpose(1, 2), dt.transpose(1, 2), A, B.squeeze(2), C.squeeze(2), D, states, mask]


def ssd_results(y: torch.Tensor, final_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `ssd_kernel` as `ssd_chunk_scan` arranges its own."""
    return y.transpose(1, 2), final_states.transpose(1, 2)
