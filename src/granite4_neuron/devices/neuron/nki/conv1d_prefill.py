"""The causal depthwise convolution over whole sequences, and the next window."""

import nki
import nki.isa as nisa
import nki.language as nl
import torch

from granite4_neuron.devices.neuron.nki.common import (
    MAX_PARTITIONS,
    PSUM_BANK,
    identity,
    largest_divisor,
    load,
    on_all_partitions,
    ones,
    program_share,
)
from granite4_neuron.ops.causal_conv1d import causal_conv1d

TOKENS = MAX_PARTITIONS  # per block


def conv1d_prefill_torch(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `conv1d_prefill` in torch: same arguments, same results."""
    y, new_states = causal_conv1d(x, conv_states, weight, bias, lengths)
    return y.to(x.dtype), new_states


@nki.jit
def conv1d_prefill(
    x: nl.ndarray,
    conv_states: nl.ndarray,
    weight: nl.ndarray,
    bias: nl.ndarray,
    lengths: nl.ndarray,
) -> tuple[nl.ndarray, nl.ndarray]:
    """
    Compute SiLU of the causal depthwise convolution of `conv_states` then `x`, plus bias; and the next window.

    Blocks of 128 tokens are transposed to channels on partitions, where shifting by a token is shifting an address.
    A product with a diagonal matrix then multiplies every channel by its tap, and transposes back.

    Dimensions:
        batch: sequences, one after the other
        length: tokens, any number
        channels: on this logical core; each program (LNC) takes an equal share of them
        d_conv: taps, 2 to 4

    Args:
        x (nl.ndarray): [batch, length, channels], float32 or bfloat16; padding must be finite.
        conv_states (nl.ndarray): [batch, channels, d_conv - 1], dtype of x: the inputs before x, oldest first.
        weight (nl.ndarray): [channels, d_conv], dtype of x; the last tap multiplies the current token.
        bias (nl.ndarray): [channels], dtype of x.
        lengths (nl.ndarray): [batch], int32: how many of a sequence's tokens are real; the rest is padding.

    Returns:
        y (nl.ndarray): like x, unspecified where x is padding.
        new_states (nl.ndarray): like conv_states: the last d_conv - 1 inputs up to the last real token.

    Notes:
        - channels must be a multiple of the number of programs; a multiple of 128 per program fills all lanes.
        - Limits: `limits.check_convolution`.
        - Taps add up in float32.
        - Source: Dao and Gu 2024, section 8.

    Pseudocode:
        for sequence, for block of tokens:
            inputs[channel, token] = previous d_conv - 1 tokens, then transpose(x)
            y = silu(bias + sum over k of inputs[:, k : k + tokens].T @ diagonal(weight[:, k]))
            window[channel, j] += x.T @ (token == length + j - (d_conv - 1))
        window += inputs of the previous window that are still within reach
    """
    batch, length, channels = x.shape
    d_conv = weight.shape[1]
    reach = d_conv - 1
    first_channel, own = program_share(channels)
    own_channels = nl.ds(first_channel, own)
    width = largest_divisor(own, MAX_PARTITIONS)  # channels of a tile
    tiles = own // width
    own_tiles = nl.ds(first_channel // width, tiles)

    y = nl.ndarray((batch, length, channels), dtype=x.dtype, buffer=nl.shared_hbm)
    new_states = nl.ndarray((batch, channels, reach), dtype=conv_states.dtype, buffer=nl.shared_hbm)

    diagonals_sb = tap_diagonals(load(tiled(weight, own_tiles, width), x.dtype))
    bias_sb = load(bias.reshape((1, channels))[0:1, own_channels], x.dtype)
    one_row = ones(1, TOKENS, x.dtype)
    lengths_sb = on_all_partitions(load(lengths.reshape((1, batch)), nl.float32))
    slot_of_sb = window_slots(reach)

    for b in range(batch):
        length_sb = lengths_sb[:, b : b + 1]
        old_window_sb = load(tiled(conv_states[b], own_tiles, width), x.dtype)
        window_psum = nl.ndarray((width, tiles, reach), dtype=nl.float32, buffer=nl.psum)
        previous_sb = old_window_sb
        for start in range(0, length, TOKENS):
            tokens = nl.ds(start, min(TOKENS, length - start))
            x_sb = load(x[b, tokens, own_channels], x.dtype)
            rows = x_sb.shape[0]
            # Step 1: channels on partitions, after the last inputs of the previous block.
            inputs_sb = channels_on_partitions(x_sb, previous_sb, width)
            previous_sb = inputs_sb[:, :, rows : rows + reach]

            # Step 2: the taps as products with diagonal matrices, which put tokens back on partitions.
            y_sb = nl.ndarray((rows, own), dtype=x.dtype, buffer=nl.sbuf)
            convolve_block(y_sb, inputs_sb, diagonals_sb, bias_sb, one_row)
            nisa.dma_copy(dst=y[b, tokens, own_channels], src=y_sb)

            # Step 3: the window up to the last real token, selected by a product wherever that token is.
            add_to_window(window_psum, x_sb, slot_of_sb, length_sb, start)
        window_sb = next_window(window_psum, old_window_sb, length_sb[0:width, :])
        own_states = new_states.ap(
            pattern=[[reach, width], [width * reach, tiles], [1, reach]], offset=(b * channels + first_channel) * reach
        )
        nisa.dma_copy(dst=own_states, src=window_sb)
    return y, new_states


def tiled(values: nl.ndarray, own_tiles: slice, width: int) -> nl.ndarray:
    """View [channels, n] in HBM, this program's share, as [width, tiles, n]."""
    channels, columns = values.shape
    return values.reshape((channels // width, width, columns))[own_tiles, :, :].permute((1, 0, 2))


def tap_diagonals(weight_sb: nl.ndarray) -> nl.ndarray:
    """Return taps [width, tiles, d_conv] as diagonal matrices [width, tiles, d_conv, width]."""
    width, tiles, d_conv = weight_sb.shape
    diagonals_sb = nl.ndarray((width, tiles, d_conv, width), dtype=weight_sb.dtype, buffer=nl.sbuf)
    ones_sb = identity(width).expand_dim(1).broadcast(1, d_conv).expand_dim(1).broadcast(1, tiles)
    taps_sb = weight_sb.expand_dim(3).broadcast(3, width)
    nisa.tensor_tensor(dst=diagonals_sb, data1=ones_sb, data2=taps_sb, op=nl.multiply, engine=nisa.gpsimd_engine)
    return diagonals_sb


def channels_on_partitions(x_sb: nl.ndarray, previous_sb: nl.ndarray, width: int) -> nl.ndarray:
    """Append a block x [rows, own] to its previous inputs [width, tiles, reach]: [width, tiles, reach + rows]."""
    rows, own = x_sb.shape
    reach, tiles = previous_sb.shape[2], own // width
    tiles_per_bank = PSUM_BANK // TOKENS
    inputs_sb = nl.ndarray((width, tiles, reach + rows), dtype=x_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=inputs_sb[:, :, 0:reach], src=previous_sb)
    for first in range(0, tiles, tiles_per_bank):
        count = min(tiles_per_bank, tiles - first)
        transposed_psum = nl.ndarray((width, count, rows), dtype=x_sb.dtype, buffer=nl.psum)
        for i in range(count):
            columns = nl.ds((first + i) * width, width)
            nisa.nc_transpose(dst=transposed_psum[:, i, :], data=x_sb[:, columns])
        nisa.tensor_copy(dst=inputs_sb[:, first : first + count, reach : reach + rows], src=transposed_psum)
    return inputs_sb


def convolve_block(
    y_sb: nl.ndarray, inputs_sb: nl.ndarray, diagonals_sb: nl.ndarray, bias_sb: nl.ndarray, one_row: nl.ndarray
) -> None:
    """Compute y [rows, own] = silu(bias + the taps' sum), from inputs [width, tiles, reach + rows]."""
    rows = y_sb.shape[0]
    width, tiles, d_conv, _ = diagonals_sb.shape
    tiles_per_bank = PSUM_BANK // width
    for first in range(0, tiles, tiles_per_bank):
        count = min(tiles_per_bank, tiles - first)
        columns = nl.ds(first * width, count * width)
        sum_psum = nl.ndarray((rows, count * width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=sum_psum,
            stationary=one_row[0:1, 0:rows],
            moving=bias_sb[0:1, columns],
            is_stationary_onezero=True,
            accumulate=False,
        )
        for i in range(count):
            for tap in range(d_conv):
                nisa.nc_matmul(
                    dst=sum_psum[:, i * width : (i + 1) * width],
                    stationary=inputs_sb[:, first + i, tap : tap + rows],
                    moving=diagonals_sb[:, first + i, tap, :],
                    accumulate=True,
                )
        nisa.activation(dst=y_sb[:, columns], op=nl.silu, data=sum_psum)


def window_slots(reach: int) -> nl.ndarray:
    """Return [128, reach] in float32: the length for which token p of the first block is the window's element j."""
    slot_of_sb = nl.ndarray((TOKENS, reach), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=slot_of_sb, pattern=[[-1, reach]], offset=reach, channel_multiplier=1)
    return slot_of_sb


def add_to_window(
    window_psum: nl.ndarray, x_sb: nl.ndarray, slot_of_sb: nl.ndarray, length_sb: nl.ndarray, start: int
) -> None:
    """Add a block's inputs that are in the window, which begins before the sequence's first block.

    Args:
        window_psum: [width, tiles, reach].
        x_sb: [rows, tiles * width].
        slot_of_sb: from `window_slots`.
        length_sb: [128, 1], the sequence's real tokens on every partition.
        start: the block's first token.
    """
    rows = x_sb.shape[0]
    width, tiles, reach = window_psum.shape
    is_slot_sb = nl.ndarray((rows, reach), dtype=x_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=is_slot_sb,
        data=slot_of_sb[0:rows, :],
        op0=nl.add,
        operand0=float(start),
        op1=nl.equal,
        operand1=length_sb[0:rows, :],
    )
    for tile in range(tiles):
        nisa.nc_matmul(
            dst=window_psum[:, tile, :],
            stationary=x_sb[:, tile * width : (tile + 1) * width],
            moving=is_slot_sb,
            is_moving_onezero=True,
            accumulate=start > 0,
        )


def next_window(window_psum: nl.ndarray, old_window_sb: nl.ndarray, length_sb: nl.ndarray) -> nl.ndarray:
    """Return the new window: inputs from x, plus inputs of the old one where fewer than d_conv - 1 tokens are real.

    Args:
        window_psum, old_window_sb: [width, tiles, reach].
        length_sb: [width, 1], float32.
    """
    width, _, reach = old_window_sb.shape
    window_sb = nl.ndarray(old_window_sb.shape, dtype=old_window_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=window_sb, src=window_psum)
    is_length_sb = nl.ndarray((width, reach), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=is_length_sb, pattern=[[1, reach]])
    nisa.tensor_scalar(dst=is_length_sb, data=is_length_sb, op0=nl.equal, operand0=length_sb)
    for length in range(reach):
        kept_sb = window_sb[:, :, 0 : reach - length]
        nisa.scalar_tensor_tensor(
            dst=kept_sb,
            data=old_window_sb[:, :, length:reach],
            op0=nl.multiply,
            operand0=is_length_sb[:, length : length + 1],
            op1=nl.add,
            operand1=kept_sb,
        )
    return window_sb
