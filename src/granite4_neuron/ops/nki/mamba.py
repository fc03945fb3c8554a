"""The NKI kernels as a Mamba-2 layer calls them: with the arguments and results of the plain definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from granite4_neuron.neuron_sdk import LOGICAL_CORE_SIZE
from granite4_neuron.ops.mamba_kernels import FewTokens, MambaKernels, MixerConstants, Results
from granite4_neuron.ops.nki.common import PSUM_BANK
from granite4_neuron.ops.nki.conv1d_prefill import conv1d_prefill
from granite4_neuron.ops.nki.conv1d_update import conv1d_update
from granite4_neuron.ops.nki.launch import launch
from granite4_neuron.ops.nki.limits import check_convolution, check_mamba_decode, check_scan, check_ssm_decode
from granite4_neuron.ops.nki.mamba_decode import MAX_TOKENS, mamba_decode
from granite4_neuron.ops.nki.ssd_chunk_scan import ssd_chunk_scan
from granite4_neuron.ops.nki.ssm_decode import ssm_decode
from granite4_neuron.ops.nki.tensor_tensor_scan import tensor_tensor_scan
from granite4_neuron.ops.stochastic_rounding import Rounding


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


def mix(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    constants: MixerConstants,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    z: torch.Tensor | None,
    accepted: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """As `FewTokens.mix`."""
    weight, bias = constants.weight, constants.bias
    taps = torch.cat([weight, torch.zeros_like(weight[:, :1]) if bias is None else bias[:, None]], dim=1)
    A_D = torch.stack([constants.A, constants.D])
    counts = None if accepted is None else accepted.to(torch.int32)
    return launch(mamba_decode, ssm_state, conv_state, xBC, dt, taps, A_D, z, counts)


def decode_kernels(num_heads: int, head_dim: int, n_groups: int, d_state: int) -> MambaKernels:
    """What advances a layer of these dimensions: one kernel for steps of a few tokens.

    Raises:
        UserError: that kernel does not take them. `DECODE` may.
    """
    check_mamba_decode(1, num_heads, head_dim, n_groups, d_state, LOGICAL_CORE_SIZE)
    most = min(MAX_TOKENS, PSUM_BANK // (num_heads // LOGICAL_CORE_SIZE))
    return replace(DECODE, few_tokens=FewTokens(mix, most))


def round_in_hardware(
    values: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """`ops.stochastic_round`, with the engines' own random numbers, if the runtime is told so; else to nearest."""
    return values.to(dtype)


def _scan(kernel: Any) -> MambaKernels:
    def scan(x, dt, A, B, C, D, ssm_state, chunk_size):
        check_scan(*x.shape[2:], *B.shape[2:], LOGICAL_CORE_SIZE)
        return launch(kernel, x, dt, A, B, C, D.float(), ssm_state)

    return MambaKernels(scan, convolve, has_kernel_layout=True)


SCAN = _scan(tensor_tensor_scan)
SSD = _scan(ssd_chunk_scan)
DECODE = MambaKernels(single_token_scan, convolve_single_token, has_kernel_layout=True)
