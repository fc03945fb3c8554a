"""A Mamba-2 layer between its projections: a causal convolution, then the recurrence.

`model.mamba2.Mamba2` calls the two functions of a `MambaOperators`, by the number of tokens in the step:

| step | set | convolution | recurrence |
|---|---|---|---|
| prefill, several tokens | `CHUNKED` | `causal_conv1d` | `chunked_scan`: `mamba_chunk_scan_combined`, chunk by chunk |
| decode, one token | `SINGLE_TOKEN` | `causal_conv1d` | `single_token_scan`: `selective_state_step`, in place |

These are the definitions. A backend's sets (`Operators.mamba_prefill`, `Operators.mamba_decode`) have other functions
with the same arguments and results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.ops.mamba_chunk_scan import mamba_chunk_scan_combined
from granite4_neuron.ops.selective_state_step import selective_state_step

Results = tuple[torch.Tensor, torch.Tensor]


class MixerConstants(NamedTuple):
    """Constants of a layer's mixer, apart from its projections and its norm.

    weight: [channels, d_conv], of the convolution. bias: [channels], or None. A, D: [num_heads], float32.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor


@dataclass(frozen=True)
class FusedMixer:
    """Convolution, recurrence and gate of each sequence's tokens as one kernel.

    mix: takes xBC [batch, tokens, channels], before the convolution; dt [batch, tokens, num_heads], float32, after
        softplus; `MixerConstants`; and conv_state and ssm_state in the dtypes that they are kept in, the latter in the
        NKI kernels' layout. Then the gate z [batch, tokens, num_heads * head_dim], to get outputs y * silu(z), shaped
        like z; and accepted [batch], how many of a row's tokens advance the states, to get the new ssm_state and
        conv_state, in this order. Either may be None; then its results are left out. That of a prompt needs both.
    max_tokens: the most tokens per sequence.
    """

    mix: Callable[..., tuple[torch.Tensor, ...]]
    max_tokens: int


@dataclass(frozen=True)
class MambaOperators:
    """The convolution and the scan of one kind of step.

    scan: as `chunked_scan`.
    convolve: as `causal_conv1d`; y may be in x's dtype.
    has_kernel_layout: whether `scan` takes and returns ssm_state as the NKI kernels have it, [batch, d_state,
        num_heads, head_dim], and not as [batch, num_heads, head_dim, d_state].
    fused_mixer: used in place of both for steps of no more tokens than it takes; None if there is none. Prefill's is
        used with that of decode only. See `devices.neuron.forms`.
    """

    scan: Callable[..., Results]
    convolve: Callable[..., Results] = causal_conv1d
    has_kernel_layout: bool = False
    fused_mixer: FusedMixer | None = None


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
    """Compute the recurrence over a step's tokens, from `ssm_state` on, in time linear in the number of tokens.

    Args:
        x, dt, A, B, C, D: as `mamba_chunk_scan_combined` takes them.
        ssm_state: [batch, num_heads, head_dim, d_state], float32; may be overwritten.
        chunk_size: tokens to scan at once. It changes the speed only; an implementation may use its own.

    Returns:
        (y, new ssm_state): y is like x, the state like the old one.
    """
    y, ssm_state = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, initial_states=ssm_state, return_final_states=True
    )
    return y, ssm_state


def quadratic_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    chunk_size: int,
) -> Results:
    """Compute `chunked_scan` with one decay matrix over all tokens."""
    return chunked_scan(x, dt, A, B, C, D, ssm_state, chunk_size=x.shape[1])


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
    """Compute `chunked_scan` of one token, which is the recurrence itself."""
    y = selective_state_step(ssm_state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)
    return y[:, None], ssm_state


CHUNKED = MambaOperators(chunked_scan)
QUADRATIC = MambaOperators(quadratic_scan)
SINGLE_TOKEN = MambaOperators(single_token_scan)


def with_layout(operators: MambaOperators, has_kernel_layout: bool) -> MambaOperators:
    """Return `operators` for states of this layout. If theirs is another, transpose states before and after the scan.

    It serves an NKI kernel beside functions in torch, because both kinds of steps share one state layout.
    """
    if operators.has_kernel_layout == has_kernel_layout:
        return operators

    @functools.wraps(operators.scan)
    def scan(x, dt, A, B, C, D, ssm_state, chunk_size):
        own = _transposed(ssm_state, to_kernel=not has_kernel_layout)
        y, own = operators.scan(x, dt, A, B, C, D, own, chunk_size)
        return y, _transposed(own, to_kernel=has_kernel_layout)

    return replace(operators, scan=scan, has_kernel_layout=has_kernel_layout)


def _transposed(ssm_state: torch.Tensor, to_kernel: bool) -> torch.Tensor:
    return ssm_state.permute((0, 3, 1, 2) if to_kernel else (0, 2, 3, 1)).contiguous()
