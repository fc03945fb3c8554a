"""A Mamba layer's convolution and scan for prompts, which read and write the state where it is.

The operators that a model's definition calls take and return rows' states, which compilers copy from and to their
slots. With these a layer has seven launches fewer.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.devices.cuda.causal_conv1d import convolve_tokens, dtype_of_output, launch_convolution
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.ssd_chunk_scan import Rows, ScanInputs, TimeSteps, launch_scan, scan_chunks
from granite4_neuron.devices.cuda.token_mixer import rows_of_slots, write_rows_of_slots


@operator(mutates=("conv_state",))
def convolve_prompt(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `convolve_tokens`, and update conv_state in place.

    Args:
        conv_state: [sequences, channels, d_conv - 1].
        starts: [batch], the positions of first tokens: a row with tokens that begins at 0 has no window.
        slots: [batch], each row's entry of conv_state is slot - 1; None if row i has entry i.
    """
    rows = rows_of_slots(conv_state, slots)
    y, windows = convolve_tokens(x, _begun(rows, starts, lengths), weight, bias, lengths)
    _write(conv_state, slots, windows)
    return y


@convolve_prompt.register_fake
def _(x, weight, bias, conv_state, starts, lengths, slots):
    return x.new_empty(x.shape, dtype=dtype_of_output(x))


def _launch_convolve_prompt(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    return launch_convolution(x, conv_state, weight, bias, lengths, conv_state, starts, slots)


register_launch(convolve_prompt, _launch_convolve_prompt)


@operator(mutates=("ssm_state",))
def scan_prompt(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    lowest_dt: float,
    highest_dt: float,
) -> torch.Tensor:
    """Compute `scan_chunks`, with the time steps of `Mamba2.recurrence_inputs`, and update ssm_state in place.

    Args:
        xBC: from `convolve_prompt`.
        dt: [batch, tokens, num_heads], before the bias.
        dt_bias, A_log, D: [num_heads].
        ssm_state: [sequences, num_heads, head_dim, d_state] in float32.
        starts, slots: as for `convolve_prompt`.

    Returns:
        [batch, tokens, num_heads * head_dim] in xBC's dtype.
    """
    is_real = torch.arange(dt.shape[1], device=dt.device) < lengths[:, None]
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(lowest_dt, highest_dt)
    steps = steps.masked_fill(~is_real[..., None], 0.0)
    rows = rows_of_slots(ssm_state, slots)
    x, B, C = _parts(xBC, ssm_state)
    y, states = scan_chunks(x, steps, -torch.exp(A_log.float()), B, C, D, _begun(rows, starts, lengths))
    _write(ssm_state, slots, states)
    return y.flatten(2)


@scan_prompt.register_fake
def _(xBC, dt, dt_bias, A_log, D, ssm_state, *others):
    return xBC.new_empty(*xBC.shape[:2], ssm_state.shape[1] * ssm_state.shape[2])


def _launch_scan_prompt(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    lowest_dt: float,
    highest_dt: float,
) -> torch.Tensor:
    x, B, C = _parts(xBC, ssm_state)
    inputs = ScanInputs(x, TimeSteps(dt, A_log, dt_bias, lowest_dt, highest_dt), B, C, D)
    return launch_scan(inputs, ssm_state, ssm_state, Rows(starts, lengths, slots)).flatten(2)


register_launch(scan_prompt, _launch_scan_prompt)


def _parts(xBC: torch.Tensor, ssm_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, [batch, tokens, num_heads, head_dim], and B and C, [batch, tokens, n_groups, d_state]."""
    _, num_heads, head_dim, d_state = ssm_state.shape
    inner = num_heads * head_dim
    B, C = (values.unflatten(-1, (-1, d_state)) for values in xBC[..., inner:].chunk(2, -1))
    return xBC[..., :inner].unflatten(-1, (num_heads, head_dim)), B, C


def _begun(rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return rows of a state, with zeros for those that begin."""
    is_fresh = (starts == 0) & (lengths > 0)
    return rows.masked_fill(is_fresh.view(-1, *[1] * (rows.dim() - 1)), 0.0)


def _write(state: torch.Tensor, slots: torch.Tensor | None, rows: torch.Tensor) -> None:
    if slots is None:
        state.copy_(rows)
    else:
        write_rows_of_slots(state, slots, rows.to(state.dtype))
