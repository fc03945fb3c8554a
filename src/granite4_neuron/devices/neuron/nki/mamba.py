"""The NKI kernels with the arguments and results of the plain definitions, as a Mamba-2 layer calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from granite4_neuron.devices.neuron.nki.common import PSUM_BANK
from granite4_neuron.devices.neuron.nki.conv1d_prefill import conv1d_prefill, conv1d_prefill_torch
from granite4_neuron.devices.neuron.nki.launch import Launcher, launcher
from granite4_neuron.devices.neuron.nki.limits import check_convolution, check_mamba_decode, check_scan
from granite4_neuron.devices.neuron.nki.mamba_decode import MAX_TOKENS, mamba_decode, mamba_decode_torch
from granite4_neuron.devices.neuron.nki.mamba_prefill import mamba_prefill, mamba_prefill_torch
from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_torch
from granite4_neuron.devices.neuron.nki.tensor_tensor_scan import tensor_tensor_scan, tensor_tensor_scan_torch
from granite4_neuron.devices.neuron.sdk import LOGICAL_CORE_SIZE
from granite4_neuron.ops.mamba_operators import FusedMixer, MambaOperators, MixerConstants, Results
from granite4_neuron.ops.stochastic_rounding import Rounding

_convolve = launcher(conv1d_prefill, conv1d_prefill_torch)


def convolve(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
) -> Results:
    """Compute `ops.causal_conv1d`; y is in x's dtype."""
    channels, d_conv = weight.shape
    check_convolution(channels, d_conv, x.shape[0], LOGICAL_CORE_SIZE)
    y, new_conv_state = _convolve(x, conv_state, weight, _bias(weight, bias), lengths.to(torch.int32))
    return y, new_conv_state


def _bias(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(weight[:, 0]) if bias is None else bias


def _mixing(kernel: Launcher, name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def mix(
        xBC: torch.Tensor,
        dt: torch.Tensor,
        constants: MixerConstants,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        z: torch.Tensor | None,
        accepted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weight = constants.weight
        taps = torch.cat([weight, _bias(weight, constants.bias)[:, None]], dim=1)
        A_D = torch.stack([constants.A, constants.D])
        counts = None if accepted is None else accepted.to(torch.int32)
        return kernel(ssm_state, conv_state, xBC, dt, taps, A_D, z, counts)

    mix.__qualname__ = name
    return mix


# Prompts have outputs and new states; `FusedMixer.mix` may leave out one of them for a few tokens only.
PROMPT_MIXER = FusedMixer(_mixing(launcher(mamba_prefill, mamba_prefill_torch), "mamba_prefill"), sys.maxsize)
_MIXER = _mixing(launcher(mamba_decode, mamba_decode_torch), "mamba_decode")


def fused_mixer(num_heads: int, head_dim: int, n_groups: int, d_state: int) -> FusedMixer:
    """Return the kernel that advances a layer of these dimensions by one or a few tokens.

    Raises:
        UserError: the kernel does not take these dimensions.
    """
    check_mamba_decode(1, num_heads, head_dim, n_groups, d_state, LOGICAL_CORE_SIZE)
    return FusedMixer(_MIXER, min(MAX_TOKENS, PSUM_BANK // (num_heads // LOGICAL_CORE_SIZE)))


def round_in_hardware(
    values: torch.Tensor, dtype: torch.dtype, positions: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """Round as `ops.stochastic_round`, with the engines' random numbers, if the runtime is set so; else to nearest."""
    return values.to(dtype)


def _scan(kernel: Launcher, name: str) -> MambaOperators:
    def scan(x, dt, A, B, C, D, ssm_state, chunk_size):
        num_heads, head_dim = x.shape[2:]
        n_groups, d_state = B.shape[2:]
        check_scan(num_heads, head_dim, n_groups, d_state, LOGICAL_CORE_SIZE)
        return kernel(x, dt, A, B, C, D.float(), ssm_state)

    scan.__qualname__ = name
    return MambaOperators(scan, convolve, has_kernel_layout=True)


SCAN = _scan(launcher(tensor_tensor_scan, tensor_tensor_scan_torch), "tensor_tensor_scan")
SSD = _scan(launcher(ssd_chunk_scan, ssd_chunk_scan_torch), "ssd_chunk_scan")
