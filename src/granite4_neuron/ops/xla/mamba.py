"""The Mamba-2 recurrence in compiled graphs."""

from __future__ import annotations

import torch

from granite4_neuron.ops import mamba_kernels
from granite4_neuron.ops.mamba_kernels import MambaKernels, Results

# Tokens that are scanned at once: the number of partitions that Trainium's engines work on.
CHUNK_SIZE = 128


def chunked_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    chunk_size: int,
) -> Results:
    """`mamba_kernels.chunked_scan`, whose chunks have the same size on every machine."""
    return mamba_kernels.chunked_scan(x, dt, A, B, C, D, ssm_state, CHUNK_SIZE)


CHUNKED = MambaKernels(chunked_scan)
