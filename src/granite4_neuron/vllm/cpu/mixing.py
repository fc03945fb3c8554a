"""The part of a Mamba-2 layer between its projections, over states in the pages of vLLM's cache: with fused kernels, or
in plain torch without a compiler.

Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from granite4_neuron import ops
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.layers import MambaMixer
from granite4_neuron.ops.launch_parameters import HEURISTIC
from granite4_neuron.ops.layer_weights import MixerWeights
from granite4_neuron.vllm.operators import causal_conv1d_update, selective_state_update


@dataclass(frozen=True)
class Mixer:
    """A layer's weights between its projections, for one rank, and the fused mixer of them.

    record: the weights; `conv_weight` is [conv_dim, 1, d_conv].
    """

    record: MixerWeights

    @cached_property
    def fused(self) -> MambaMixer:
        """The fused mixer of these weights, see `cpu.layers.mamba_mixer`."""
        return cpu.layers.mamba_mixer(self.record)

    @cached_property
    def conv_weight(self) -> torch.Tensor:
        """[conv_dim, d_conv]."""
        return self.record.conv_weight.squeeze(1)


@dataclass(frozen=True)
class Pages:
    """A layer's states. conv: [pages, conv_dim, columns] in the model's dtype, any strides; ssm: [pages, num_heads,
    head_dim, d_state] in float32, a page contiguous. Pages 0 and -1 belong to no sequence.
    """

    conv: torch.Tensor
    ssm: torch.Tensor


@dataclass(frozen=True)
class DecodeRows:
    """A few tokens each of several sequences, as the fused mixer takes them; accepted may be None."""

    starts: torch.Tensor
    pages: torch.Tensor
    accepted: torch.Tensor | None


# (mixer, xBC_dt, pages, rows) to y: xBC_dt is [tokens, conv_dim + num_heads], from in_proj; y is [tokens, num_heads *
# head_dim] in float32. States are advanced in place.
Decode = Callable[[Mixer, torch.Tensor, Pages, DecodeRows], torch.Tensor]
# (mixer, xBC_dt, pages, page that is read or None for an empty state, page that is written) to y, for the tokens of
# one sequence.
Prefill = Callable[[Mixer, torch.Tensor, Pages, int | None, int], torch.Tensor]


def fused_decode(mixer: Mixer, xBC_dt: torch.Tensor, pages: Pages, rows: DecodeRows) -> torch.Tensor:
    """Run `Decode` as one call of a kernel."""
    return mixer.fused.step_paged(
        projected=xBC_dt,
        conv_state=pages.conv,
        ssm_state=pages.ssm,
        starts=rows.starts,
        pages=rows.pages,
        accepted=rows.accepted,
    )


def fused_prefill(mixer: Mixer, xBC_dt: torch.Tensor, pages: Pages, read: int | None, write: int) -> torch.Tensor:
    """Run `Prefill` as one call of a kernel, on a copy of the state; beside a prompt the copy costs little."""
    conv, ssm = _dense(mixer, pages, read)
    slot = start = torch.zeros(1, dtype=torch.int64)
    y = mixer.fused.step(
        projected=xBC_dt,
        conv_state=conv,
        ssm_state=ssm,
        offsets=start,
        lengths=torch.tensor([len(xBC_dt)]),
        read_slots=slot,
        write_slots=slot,
        starts=start,
    )
    _store(pages, write, conv, ssm)
    return y


def torch_decode(mixer: Mixer, xBC_dt: torch.Tensor, pages: Pages, rows: DecodeRows) -> torch.Tensor:
    """Run `Decode` with the operators that have vLLM's signatures."""
    xBC, dt = _split(mixer, xBC_dt)
    table = rows.pages if rows.accepted is not None else rows.pages[:, :1]
    mixed = causal_conv1d_update(
        xBC, pages.conv, mixer.conv_weight, mixer.record.conv_bias, "silu", table, rows.accepted, rows.starts,
        out=torch.empty_like(xBC),
    )  # fmt: skip
    x, B, C = _heads(mixer, mixed, pages)
    num_heads, head_dim, d_state = pages.ssm.shape[1:]
    y = torch.empty(len(x), num_heads, head_dim)
    A = -mixer.record.A_log.float().exp()
    selective_state_update(
        pages.ssm, x.float(), dt[..., None].expand(-1, -1, head_dim), B=B, C=C,
        A=A[:, None, None].expand(-1, head_dim, d_state), D=mixer.record.D[:, None].expand(-1, head_dim),
        state_batch_indices=table, out=y, num_accepted_tokens=rows.accepted, cu_seqlens=rows.starts,
    )  # fmt: skip
    return y.flatten(1)


def torch_prefill(mixer: Mixer, xBC_dt: torch.Tensor, pages: Pages, read: int | None, write: int) -> torch.Tensor:
    """Run `Prefill` with the plain definitions."""
    conv, ssm = _dense(mixer, pages, read)
    xBC, dt = _split(mixer, xBC_dt)
    lengths = torch.tensor([len(xBC_dt)])
    mixed, conv = ops.causal_conv1d(xBC[None], conv, mixer.conv_weight, mixer.record.conv_bias, lengths)
    x, B, C = (part[None] for part in _heads(mixer, mixed[0], pages))
    A, chunk_size = -mixer.record.A_log.float().exp(), HEURISTIC.torch_chunk_size
    y, ssm = ops.mamba_chunk_scan_combined(
        x, dt[None], A, B, C, chunk_size, mixer.record.D, initial_states=ssm, return_final_states=True
    )
    _store(pages, write, conv, ssm)
    return y[0].flatten(1)


def _dense(mixer: Mixer, pages: Pages, read: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence's states [1, conv_dim, d_conv - 1] and [1, num_heads, head_dim, d_state], to advance."""
    history = mixer.conv_weight.shape[1] - 1
    conv, ssm = pages.conv[:1, :, :history], pages.ssm[:1]
    if read is None:
        return torch.zeros_like(conv, memory_format=torch.contiguous_format), torch.zeros_like(ssm)
    here = slice(read, read + 1)
    return (
        pages.conv[here, :, :history].clone(memory_format=torch.contiguous_format),
        pages.ssm[here].clone(memory_format=torch.contiguous_format),
    )


def _store(pages: Pages, write: int, conv: torch.Tensor, ssm: torch.Tensor) -> None:
    pages.conv[write, :, : conv.shape[2]] = conv[0]
    pages.ssm[write] = ssm[0]


def _split(mixer: Mixer, xBC_dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the projection into inputs of the convolution, and step sizes in float32."""
    conv_dim = len(mixer.conv_weight)
    dt = F.softplus(xBC_dt[:, conv_dim:].float() + mixer.record.dt_bias.float()).clamp(*mixer.record.time_step_limit)
    return xBC_dt[:, :conv_dim], dt


def _heads(mixer: Mixer, mixed: torch.Tensor, pages: Pages) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, [tokens, num_heads, head_dim], and B and C, [tokens, n_groups, d_state]."""
    num_heads, head_dim, d_state = pages.ssm.shape[1:]
    group_width = mixer.record.n_groups * d_state
    x, B, C = mixed.split([num_heads * head_dim, group_width, group_width], dim=1)
    groups = (mixer.record.n_groups, d_state)
    return x.unflatten(1, (num_heads, head_dim)), B.unflatten(1, groups), C.unflatten(1, groups)
