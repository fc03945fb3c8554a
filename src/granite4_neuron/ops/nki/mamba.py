"""The NKI kernels as a Mamba-2 layer calls them: with the arguments and results of the plain definitions."""

from __future__ import annotations

from typing import Any

import torch

from granite4_neuron.neuron_sdk import LOGICAL_CORE_SIZE
from granite4_neuron.ops.mamba_kernels import MambaKernels, Results
from granite4_neuron.ops.nki.conv1d_prefill import conv1d_prefill
from granite4_neuron.ops.nki.conv1d_update import conv1d_update
from granite4_neuron.ops.nki.launch import launch
from granite4_neuron.ops.nki.limits import check_convolution, check_scan, check_ssm_decode
from granite4_neuron.ops.nki.selective_scan import selective_scan
from granite4_neuron.ops.nki.ssd_chunk_scan import ssd_chunk_scan
from granite4_neuron.ops.nki.ssm_decode import ssm_decode


def convolve(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
) -> Results:
    """`ops.causal_conv1d`; y is in x's dtype."""
    check_convolution(*weight.shape, x.shape[0], LOGICAL_CORE_SIZE)
    bias = torch.zeros_like(weight[:, 0]) if bias is None else bias
    return launch(conv1d_prefill, x, conv_state, weight, bias, lengths.to(torch.int32))


def convolve_single_token(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
) -> Results:
    """`convolve` of one token."""
    check_convolution(*weight.shape, x.shape[0], LOGICAL_CORE_SIZE)
    bias = torch.zeros_like(weight[:, 0]) if bias is None else bias
    y, new_state = launch(conv1d_update, x[:, 0], conv_state, weight, bias)
    return y[:, None], new_state.where((lengths > 0)[:, None, None], conv_state)


def single_token_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    chunk_size: int,
) -> Results:
    """`ops.mamba_kernels.single_token_scan`, of a state in the kernels' layout."""
    check_ssm_decode(*x.shape[2:], *B.shape[2:], LOGICAL_CORE_SIZE)
    y, ssm_state = launch(ssm_decode, ssm_state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D.float())
    return y[:, None], ssm_state


def _scan(kernel: Any) -> MambaKernels:
    def scan(x, dt, A, B, C, D, ssm_state, chunk_size):
        check_scan(*x.shape[2:], *B.shape[2:], LOGICAL_CORE_SIZE)
        return launch(kernel, x, dt, A, B, C, D.float(), ssm_state)

    return MambaKernels(scan, convolve, has_kernel_layout=True)


SCAN = _scan(selective_scan)
SSD = _scan(ssd_chunk_scan)
DECODE = MambaKernels(single_token_scan, convolve_single_token, has_kernel_layout=True)
