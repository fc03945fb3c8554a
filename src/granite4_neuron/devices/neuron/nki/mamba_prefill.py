"""A Mamba-2 mixer's whole sequences in one kernel: convolution, scan and gate."""

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch.nn import functional as F

from granite4_neuron.devices.neuron.nki.common import (
    PSUM_BANK,
    common_divisor,
    load,
    on_all_partitions,
    ones,
    program_share,
)
from granite4_neuron.devices.neuron.nki.conv1d_prefill import (
    add_to_window,
    channels_on_partitions,
    conv1d_prefill_torch,
    convolve_block,
    next_window,
    tap_diagonals,
    tiled,
    window_slots,
)
from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import (
    CHUNK_SIZE,
    chunk_masks,
    scan_chunk,
    ssd_chunk_scan_torch,
)


def mamba_prefill_torch(
    states: torch.Tensor,
    conv_states: torch.Tensor,
    xBC: torch.Tensor,
    dt: torch.Tensor,
    taps: torch.Tensor,
    A_D: torch.Tensor,
    z: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Define `mamba_prefill` in torch: same arguments, same results."""
    _, d_state, heads, head_dim = states.shape
    convolved, new_conv_states = conv1d_prefill_torch(xBC, conv_states, taps[:, :-1], taps[:, -1], lengths)
    inner = heads * head_dim
    of_groups = (convolved.shape[2] - inner) // 2
    x, B, C = (convolved[..., start:end] for start, end in ((0, inner), (inner, inner + of_groups), (-of_groups, None)))
    x, B, C = x.unflatten(2, (heads, head_dim)), B.unflatten(2, (-1, d_state)), C.unflatten(2, (-1, d_state))
    y, new_states = ssd_chunk_scan_torch(x, dt, A_D[0], B, C, A_D[1], states.float())
    gated = y.flatten(2).float() * F.silu(z.float())
    return gated.to(xBC.dtype), new_states.to(states.dtype), new_conv_states


@nki.jit
def mamba_prefill(
    states: nl.ndarray,
    conv_states: nl.ndarray,
    xBC: nl.ndarray,
    dt: nl.ndarray,
    taps: nl.ndarray,
    A_D: nl.ndarray,
    z: nl.ndarray,
    lengths: nl.ndarray,
) -> tuple[nl.ndarray, nl.ndarray, nl.ndarray]:
    """
    Compute `conv1d_prefill`, `ssd_chunk_scan` and the gate, chunk by chunk: what is convolved stays in SBUF.

    Dimensions:
        batch: sequences, one after the other
        length: tokens, any number
        num_heads: heads on this logical core; each program (LNC) takes an equal share of them
        head_dim: 32, 64 or 128
        n_groups: groups of consecutive heads with the same B and C; a program has whole groups or an equal part of one
        d_state: 64 or 128
        channels: num_heads * head_dim of x, then n_groups * d_state of B, and of C
        d_conv: taps, 2 to 4

    Args:
        states (nl.ndarray): [batch, d_state, num_heads, head_dim], float32 or bfloat16.
        conv_states (nl.ndarray): [batch, channels, d_conv - 1], dtype of xBC: the inputs before xBC, oldest first.
        xBC (nl.ndarray): [batch, length, channels], float32 or bfloat16, before the convolution; all of them finite.
        dt (nl.ndarray): [batch, length, num_heads], float32, after softplus and limits; 0 for padding.
        taps (nl.ndarray): [channels, d_conv + 1], dtype of xBC: the convolution's weights, then its bias.
        A_D (nl.ndarray): [2, num_heads], float32: A, negative, and D.
        z (nl.ndarray): [batch, length, num_heads * head_dim], dtype of xBC: the gate.
        lengths (nl.ndarray): [batch], int32: how many of a sequence's tokens are real; the rest is padding.

    Returns:
        y (nl.ndarray): like z, the gated outputs; unspecified where a token is padding.
        new_states (nl.ndarray): like states.
        new_conv_states (nl.ndarray): like conv_states.

    Notes:
        - Limits: `limits.check_scan`, `check_convolution` and `check_mamba_decode`.
        - Both programs read and convolve B and C of a group whose heads they share; one writes their window.
        - States in bfloat16 are rounded once, when an engine writes them, as `mamba_decode` does it.
        - Source: Dao and Gu 2024, sections 6 and 8.

    Pseudocode:
        for sequence, for chunk:
            x, B, C = silu(convolution(previous d_conv - 1 inputs, xBC))
            y, state = scan(x, dt, A, B, C, D, state)
            y = y * silu(z)
    """
    batch, d_state, num_heads, head_dim = states.shape
    length, channels = xBC.shape[1], xBC.shape[2]
    reach = conv_states.shape[2]
    first_head, heads = program_share(num_heads)
    own_heads = nl.ds(first_head, heads)
    inner = num_heads * head_dim
    n_groups = (channels - inner) // (2 * d_state)
    heads_per_group = num_heads // n_groups
    first_group, groups = first_head // heads_per_group, heads // common_divisor(heads, heads_per_group)
    # This program's channels, side by side in a tile: of x, B and C, (first channel, how many).
    own_x, own_B = heads * head_dim, groups * d_state
    first_B = inner + first_group * d_state
    places = ((first_head * head_dim, own_x), (first_B, own_B), (first_B + n_groups * d_state, own_B))
    own = own_x + 2 * own_B
    place = (first_head - first_group * heads_per_group, heads_per_group)  # among this program's groups
    width = common_divisor(own_x, d_state)  # channels of a tile

    y = nl.ndarray((batch, length, inner), dtype=xBC.dtype, buffer=nl.shared_hbm)
    new_states = nl.ndarray((batch, d_state, num_heads, head_dim), dtype=states.dtype, buffer=nl.shared_hbm)
    new_conv_states = nl.ndarray((batch, channels, reach), dtype=conv_states.dtype, buffer=nl.shared_hbm)

    taps_sb = _load_tiles(taps, places, width, xBC.dtype)
    diagonals_sb = tap_diagonals(taps_sb[:, :, 0 : reach + 1])
    bias_sb = _as_row(taps_sb[:, :, reach + 1 : reach + 2])
    one_row = ones(1, CHUNK_SIZE, xBC.dtype)
    masks = chunk_masks()
    A_D_sb = (
        on_all_partitions(load(A_D[0:1, own_heads], nl.float32)),
        on_all_partitions(load(A_D[1:2, own_heads], nl.float32)),
    )
    lengths_sb = on_all_partitions(load(lengths.reshape((1, batch)), nl.float32))
    slot_of_sb = window_slots(reach)

    for b in range(batch):
        length_sb = lengths_sb[:, b : b + 1]
        state_sb = load(states[b, 0:d_state, own_heads, 0:head_dim], nl.float32)
        old_window_sb = _load_tiles(conv_states[b], places, width, xBC.dtype)
        window_psum = nl.ndarray((width, own // width, reach), dtype=nl.float32, buffer=nl.psum)
        previous_sb = old_window_sb
        for start in range(0, length, CHUNK_SIZE):
            tokens = nl.ds(start, min(CHUNK_SIZE, length - start))
            # Step 1: the convolution, as `conv1d_prefill` has it.
            xBC_sb = _load_rows(xBC[b, tokens, 0:channels], places, xBC.dtype)
            rows = xBC_sb.shape[0]
            inputs_sb = channels_on_partitions(xBC_sb, previous_sb, width)
            previous_sb = inputs_sb[:, :, rows : rows + reach]
            convolved_sb = nl.ndarray((rows, own), dtype=xBC.dtype, buffer=nl.sbuf)
            convolve_block(convolved_sb, inputs_sb, diagonals_sb, bias_sb, one_row)
            add_to_window(window_psum, xBC_sb, slot_of_sb, length_sb, start)

            # Step 2: the scan of the chunk.
            y_sb = nl.ndarray((rows, heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)
            inputs = (
                convolved_sb[:, 0:own_x].reshape_dim(1, (heads, head_dim)),
                load(dt[b, tokens, own_heads], nl.float32),
                convolved_sb[:, own_x : own_x + own_B].reshape_dim(1, (groups, d_state)),
                convolved_sb[:, own_x + own_B : own].reshape_dim(1, (groups, d_state)),
            )
            scan_chunk(y_sb, state_sb, inputs, A_D_sb, masks, place)

            # Step 3: the gate.
            own_y = nl.ds(first_head * head_dim, own_x)
            gate_sb = nl.ndarray((rows, own_x), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=gate_sb, op=nl.silu, data=load(z[b, tokens, own_y], xBC.dtype))
            gated_sb = nl.ndarray((rows, own_x), dtype=xBC.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=gated_sb,
                data1=y_sb.reshape((rows, own_x)),
                data2=gate_sb,
                op=nl.multiply,
                engine=nisa.gpsimd_engine,
            )
            nisa.dma_copy(dst=y[b, tokens, own_y], src=gated_sb)

        stored_sb = state_sb
        if states.dtype != nl.float32:
            stored_sb = nl.ndarray(state_sb.shape, dtype=states.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=stored_sb, src=state_sb)
        nisa.dma_copy(dst=new_states[b, 0:d_state, own_heads, 0:head_dim], src=stored_sb)
        window_sb = next_window(window_psum, old_window_sb, length_sb[0:width, :])
        # Of programs with parts of one group, the first writes the window of B and C.
        written = 3 if first_head % heads_per_group == 0 else 1
        at = 0
        for i in range(written):
            first, count = places[i]
            tiles = count // width
            target = new_conv_states.ap(
                pattern=[[reach, width], [width * reach, tiles], [1, reach]], offset=(b * channels + first) * reach
            )
            nisa.dma_copy(dst=target, src=window_sb[:, at : at + tiles, :])
            at += tiles
    return y, new_states, new_conv_states


def _load_rows(values: nl.ndarray, places: tuple[tuple[int, int], ...], dtype: str) -> nl.ndarray:
    """Load this program's channels of HBM [rows, channels] side by side: [rows, own], cast to `dtype`."""
    own = places[0][1] + places[1][1] + places[2][1]
    rows_sb = nl.ndarray((values.shape[0], own), dtype=dtype, buffer=nl.sbuf)
    at = 0
    for i in range(3):
        first, count = places[i]
        nisa.dma_copy(dst=rows_sb[:, at : at + count], src=values[:, first : first + count])
        at += count
    return rows_sb


def _load_tiles(values: nl.ndarray, places: tuple[tuple[int, int], ...], width: int, dtype: str) -> nl.ndarray:
    """Load this program's channels of HBM [channels, n] as [width, tiles, n], cast to `dtype`."""
    own = places[0][1] + places[1][1] + places[2][1]
    tiles_sb = nl.ndarray((width, own // width, values.shape[1]), dtype=dtype, buffer=nl.sbuf)
    at = 0
    for i in range(3):
        first, count = places[i]
        tiles = count // width
        nisa.dma_copy(dst=tiles_sb[:, at : at + tiles, :], src=tiled(values, nl.ds(first // width, tiles), width))
        at += tiles
    return tiles_sb


def _as_row(tiles_sb: nl.ndarray) -> nl.ndarray:
    """Copy [width, tiles, 1] to [1, tiles * width]."""
    width, tiles, _ = tiles_sb.shape
    row_sb = nl.ndarray((1, tiles * width), dtype=tiles_sb.dtype, buffer=nl.sbuf)
    tiles_per_bank = PSUM_BANK // width
    for first in range(0, tiles, tiles_per_bank):
        count = min(tiles_per_bank, tiles - first)
        row_psum = nl.ndarray((1, count * width), dtype=tiles_sb.dtype, buffer=nl.psum)
        for i in range(count):
            nisa.nc_transpose(dst=row_psum[:, i * width : (i + 1) * width], data=tiles_sb[:, first + i, :])
        nisa.tensor_copy(dst=row_sb[:, first * width : (first + count) * width], src=row_psum)
    return row_sb
