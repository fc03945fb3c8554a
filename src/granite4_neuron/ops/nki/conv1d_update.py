"""The causal depthwise convolution for one token of a batch of sequences, and the shifted windows."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch.nn import functional as F

from granite4_neuron.ops.nki.common import MAX_PARTITIONS, largest_divisor, load, program_share


def conv1d_update_torch(
    x: torch.Tensor, conv_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `conv1d_update`: same arguments, same results."""
    window = torch.cat([conv_states, x[:, :, None]], dim=-1)
    y = F.silu((window.float() * weight.float()).sum(-1) + bias.float())
    return y.to(x.dtype), window[:, :, 1:]


@nki.jit
def conv1d_update(
    x: nl.ndarray, conv_states: nl.ndarray, weight: nl.ndarray, bias: nl.ndarray
) -> tuple[nl.ndarray, nl.ndarray]:
    """
    SiLU of the convolution at the current token, plus bias; and the window that the next token needs.

    Dimensions:
        batch: sequences
        channels: on this logical core; each program (LNC) takes an equal share of them
        d_conv: taps, 2 to 4

    Args:
        x (nl.ndarray): [batch, channels], float32 or bfloat16.
        conv_states (nl.ndarray): [batch, channels, d_conv - 1], dtype of x: the inputs before x, oldest first.
        weight (nl.ndarray): [channels, d_conv], dtype of x; the last tap multiplies the current token.
        bias (nl.ndarray): [channels], dtype of x.

    Returns:
        y (nl.ndarray): like x.
        new_states (nl.ndarray): like conv_states, without the oldest input and with x.

    Notes:
        - channels must be a multiple of the number of programs; a multiple of 128 per program fills all lanes.
        - Limits: `limits.check_convolution`.
        - Arithmetic is float32.
        - The caller may give new_states the memory of conv_states: all windows are read before one is written.
        - Source: state-spaces/mamba causal_conv1d_update.

    Pseudocode:
        window = concatenate(conv_states, x)
        y = silu(sum over taps of window * weight + bias)
        new_states = window[1:]
    """
    batch, channels = x.shape
    d_conv = weight.shape[1]
    reach = d_conv - 1
    first_channel, own = program_share(channels)
    lanes = largest_divisor(own, MAX_PARTITIONS)
    per_lane = own // lanes  # consecutive channels share a partition, so that a transfer has contiguous pieces
    first_lane = first_channel // per_lane
    own_lanes = nl.ds(first_lane, lanes)

    y = nl.ndarray((batch, channels), dtype=x.dtype, buffer=nl.shared_hbm)
    new_states = nl.ndarray((batch, channels, reach), dtype=conv_states.dtype, buffer=nl.shared_hbm)

    # Step 1: windows with x behind them, and all but their oldest inputs back.
    window_sb = nl.ndarray((lanes, batch, per_lane, d_conv), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=window_sb[:, :, :, 0:reach], src=_by_lane(conv_states, own_lanes, per_lane))
    x_columns = x.reshape((batch, channels, 1))
    nisa.dma_copy(dst=window_sb[:, :, :, reach:d_conv], src=_by_lane(x_columns, own_lanes, per_lane))
    nisa.dma_copy(dst=_by_lane(new_states, own_lanes, per_lane), src=window_sb[:, :, :, 1:d_conv])

    # Step 2: the taps' sum, bias and SiLU.
    weight_sb = load(_by_lane(weight.reshape((1, channels, d_conv)), own_lanes, per_lane), nl.float32)
    bias_sb = load(_by_lane(bias.reshape((1, channels, 1)), own_lanes, per_lane), nl.float32)
    products_sb = nl.ndarray((lanes, batch, per_lane, d_conv), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=products_sb, data1=window_sb, data2=weight_sb.broadcast(1, batch), op=nl.multiply)
    sums_sb = nl.ndarray((lanes, batch, per_lane, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums_sb, op=nl.add, data=products_sb, axis=3)
    nisa.tensor_tensor(dst=sums_sb, data1=sums_sb, data2=bias_sb.broadcast(1, batch), op=nl.add)
    y_sb = nl.ndarray((lanes, batch, per_lane, 1), dtype=x.dtype, buffer=nl.sbuf)
    nisa.activation(dst=y_sb, op=nl.silu, data=sums_sb)
    nisa.dma_copy(dst=_by_lane(y.reshape((batch, channels, 1)), own_lanes, per_lane), src=y_sb)
    return y, new_states


def _by_lane(values: nl.ndarray, own_lanes: slice, per_lane: int) -> nl.ndarray:
    """[batch, channels, n] in HBM, this program's share, as [lanes, batch, per_lane, n]."""
    batch, channels, columns = values.shape
    lanes = values.reshape((batch, channels // per_lane, per_lane, columns))
    return lanes[:, own_lanes, :, :].permute((1, 0, 2, 3))
