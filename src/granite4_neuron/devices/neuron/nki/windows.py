"""The convolution of a few tokens, and its windows.

In HBM the channels of a row are consecutive, and DMA is fast if it moves many of them at once. So they are loaded and
stored in lanes of up to 128 channels on one partition. The convolution has channels on partitions, to use all 128 of
them; TensorE transposes in between.

One tile has two kinds of lanes as columns: first the lanes of x, whole heads of one group, then the lanes of B and C,
one for each group. `x_place` is (first channel, lanes, channels of a lane), `BC_place` is (first channel, groups in
HBM, first own group, own groups, d_state).
"""

import nki.isa as nisa
import nki.language as nl

from granite4_neuron.devices.neuron.nki.common import MAX_PARTITIONS, PSUM_BANK, flat


def x_lanes(values: nl.ndarray, x_place: tuple[int, int, int]) -> nl.ndarray:
    """View HBM [rows, channels, n] as this program's [lanes, rows, channels of a lane, n]."""
    first, lanes, width = x_place
    rows, _, columns = values.shape
    own = values[0:rows, first : first + lanes * width, 0:columns]
    return own.reshape_dim(1, (lanes, width)).permute((1, 0, 2, 3))


def BC_lanes(values: nl.ndarray, BC_place: tuple[int, int, int, int, int]) -> nl.ndarray:
    """View HBM [rows, channels, n] as B and C of this program's groups: [2, groups, rows, d_state, n]."""
    first, all_groups, first_group, groups, d_state = BC_place
    rows, channels, columns = values.shape
    both = values[0:rows, first:channels, 0:columns].reshape_dim(1, (2, all_groups, d_state))
    own = both[0:rows, 0:2, first_group : first_group + groups, 0:d_state, 0:columns]
    return own.permute((1, 2, 0, 3, 4))


def load_windows(
    conv_states: nl.ndarray,
    xBC: nl.ndarray,
    x_place: tuple[int, int, int],
    BC_place: tuple[int, int, int, int, int],
) -> nl.ndarray:
    """Load the convolution's inputs, channels on partitions: [128, d_conv - 1 + tokens, columns, rows], float32."""
    rows, tokens, _ = xBC.shape
    reach = conv_states.shape[2]
    windows_sb = _columns_tile(reach + tokens, rows, x_place, BC_place)
    new = xBC.permute((0, 2, 1))
    old_times, new_times = windows_sb[:, 0:reach, :, :], windows_sb[:, reach : reach + tokens, :, :]
    _fill_columns(old_times, x_lanes(conv_states, x_place), BC_lanes(conv_states, BC_place), False)
    _fill_columns(new_times, x_lanes(new, x_place), BC_lanes(new, BC_place), True)
    return windows_sb


def load_taps(taps: nl.ndarray, x_place: tuple[int, int, int], BC_place: tuple[int, int, int, int, int]) -> nl.ndarray:
    """Load the convolution's weights and bias in `load_windows`' layout: [128, d_conv + 1, columns, 1], float32."""
    taps_sb = _columns_tile(taps.shape[1], 1, x_place, BC_place)
    row = taps.expand_dim(0)
    _fill_columns(taps_sb, x_lanes(row, x_place), BC_lanes(row, BC_place), False)
    return taps_sb


def convolve_windows(windows_sb: nl.ndarray, taps_sb: nl.ndarray) -> nl.ndarray:
    """Compute silu of the convolution plus bias: [128, tokens, columns, rows], float32."""
    partitions, times, columns, rows = windows_sb.shape
    d_conv = taps_sb.shape[1] - 1
    tokens = times - d_conv + 1
    sum_sb = nl.ndarray((partitions, tokens, columns, rows), dtype=nl.float32, buffer=nl.sbuf)
    product_sb = nl.ndarray(sum_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    for tap in range(d_conv):
        factors = taps_sb[:, tap : tap + 1, :, :].broadcast(1, tokens).broadcast(3, rows)
        target_sb = sum_sb if tap == 0 else product_sb
        nisa.tensor_tensor(dst=target_sb, data1=windows_sb[:, tap : tap + tokens, :, :], data2=factors, op=nl.multiply)
        if tap > 0:
            nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=product_sb, op=nl.add)
    bias = taps_sb[:, d_conv : d_conv + 1, :, :].broadcast(1, tokens).broadcast(3, rows)
    nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=bias, op=nl.add)
    nisa.activation(dst=sum_sb, op=nl.silu, data=sum_sb)
    return sum_sb


def store_windows(
    new_conv_states: nl.ndarray,
    start: int,
    windows_sb: nl.ndarray,
    accepted_sb: nl.ndarray,
    x_place: tuple[int, int, int],
    BC_place: tuple[int, int, int, int, int],
    has_first_heads: bool,
) -> None:
    """Write the convolution's window before the first token that is not accepted.

    Args:
        new_conv_states: HBM [batch, channels, d_conv - 1].
        start: the first of the rows.
        accepted_sb: [128, rows], a row's number of accepted tokens on every partition.
        has_first_heads: whether this program has its groups' first heads; then it writes B and C.
    """
    partitions, times, columns, rows = windows_sb.shape
    _, channels, reach = new_conv_states.shape
    kept_sb = nl.ndarray((partitions, reach, columns, rows), dtype=new_conv_states.dtype, buffer=nl.sbuf)
    chosen_sb = nl.ndarray(kept_sb.shape, dtype=new_conv_states.dtype, buffer=nl.sbuf)
    for count in range(times - reach + 1):
        is_count_sb = nl.ndarray((partitions, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=is_count_sb, data=accepted_sb, op0=nl.equal, operand0=float(count))
        is_chosen = is_count_sb.expand_dim(1).expand_dim(1).broadcast(1, reach).broadcast(2, columns)
        target_sb = kept_sb if count == 0 else chosen_sb
        window = windows_sb[:, count : count + reach, :, :]
        nisa.tensor_tensor(dst=target_sb, data1=window, data2=is_chosen, op=nl.multiply, engine=nisa.gpsimd_engine)
        if count > 0:
            nisa.tensor_tensor(dst=kept_sb, data1=kept_sb, data2=chosen_sb, op=nl.add, engine=nisa.gpsimd_engine)
    # Outputs are written through access patterns: NKI 0.3 wrote a copy to a reshaped output elsewhere.
    row, own_rows = channels * reach, [channels * reach, rows]
    first, lanes, width = x_place
    x_target = new_conv_states.ap(
        pattern=[[width * reach, lanes], own_rows, [reach, width], [1, reach]], offset=start * row + first * reach
    )
    _store_columns(x_target, kept_sb[0:width, :, 0:lanes, :])
    if has_first_heads:
        first, all_groups, first_group, groups, d_state = BC_place
        of_groups = [[all_groups * d_state * reach, 2], [d_state * reach, groups]]
        BC_target = new_conv_states.ap(
            pattern=[*of_groups, own_rows, [reach, d_state], [1, reach]],
            offset=start * row + (first + first_group * d_state) * reach,
        )
        _store_columns(BC_target, kept_sb[0:d_state, :, lanes:columns, :])


def transposed(dst_psum: nl.ndarray, columns: nl.ndarray) -> None:
    """Transpose [channels, n, lanes, rows] to lanes and rows on partitions, [lanes * rows, n, channels], in PSUM."""
    for i in range(columns.shape[1]):
        nisa.nc_transpose(dst=dst_psum[:, i, :], data=flat(columns[:, i, :, :]))


def _columns_tile(
    times: int, rows: int, x_place: tuple[int, int, int], BC_place: tuple[int, int, int, int, int]
) -> nl.ndarray:
    """Return [128, times, columns, rows], which is zeros where not every column has 128 channels."""
    _, lanes, width = x_place
    _, _, _, groups, d_state = BC_place
    shape = (MAX_PARTITIONS, times, lanes + 2 * groups, rows)
    tile_sb = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if width < MAX_PARTITIONS or d_state < MAX_PARTITIONS:
        nisa.memset(dst=tile_sb, value=0.0)
    return tile_sb


def _fill_columns(tile_sb: nl.ndarray, x: nl.ndarray, BC: nl.ndarray, is_by_token: bool) -> None:
    """Load `x_lanes` and `BC_lanes` of [rows, channels, n] into [128, n, columns, rows].

    Args:
        is_by_token: whether HBM has the channels of each of the n side by side, not the n of each channel.
    """
    _, times, columns, rows = tile_sb.shape
    lanes, _, width, _ = x.shape
    groups, d_state = BC.shape[1], BC.shape[3]
    if is_by_token:
        x_sb = nl.ndarray((lanes * rows, times, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_sb, src=x.permute((0, 1, 3, 2)))
        BC_sb = nl.ndarray((2 * groups * rows, times, d_state), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=BC_sb, src=BC.permute((0, 1, 2, 4, 3)))
        _put_on_partitions(tile_sb[0:width, :, 0:lanes, :], x_sb.permute((0, 2, 1)))
        _put_on_partitions(tile_sb[0:d_state, :, lanes:columns, :], BC_sb.permute((0, 2, 1)))
    else:
        x_sb = nl.ndarray((lanes * rows, width, times), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=x_sb, src=x)
        BC_sb = nl.ndarray((2 * groups * rows, d_state, times), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=BC_sb, src=BC)
        _put_on_partitions(tile_sb[0:width, :, 0:lanes, :], x_sb)
        _put_on_partitions(tile_sb[0:d_state, :, lanes:columns, :], BC_sb)


def _put_on_partitions(columns_sb: nl.ndarray, lanes_sb: nl.ndarray) -> None:
    """Transpose lanes [lanes * rows, channels, n] to columns [channels, n, lanes, rows], cast to its dtype."""
    channels, times, lanes, rows = columns_sb.shape
    size = lanes * rows
    per_bank = PSUM_BANK // size
    for start in range(0, times, per_bank):
        count = min(per_bank, times - start)
        bank_psum = nl.ndarray((channels, count, size), dtype=lanes_sb.dtype, buffer=nl.psum)
        for i in range(count):
            nisa.nc_transpose(dst=bank_psum[:, i, :], data=lanes_sb[:, :, start + i])
        nisa.tensor_copy(
            dst=columns_sb[:, start : start + count, :, :],
            src=bank_psum.reshape_dim(2, (lanes, rows)),
            engine=nisa.scalar_engine,
        )


def _store_columns(target: nl.ndarray, kept: nl.ndarray) -> None:
    """Write [channels, n, lanes, rows] to a view of HBM that has lanes, rows, channels and n, in this order."""
    channels, times, lanes, rows = kept.shape
    lanes_psum = nl.ndarray((lanes * rows, times, channels), dtype=kept.dtype, buffer=nl.psum)
    transposed(lanes_psum, kept)
    lanes_sb = nl.ndarray((lanes * rows, channels, times), dtype=kept.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=lanes_sb.permute((0, 2, 1)), src=lanes_psum, engine=nisa.scalar_engine)
    nisa.dma_copy(dst=target, src=lanes_sb)
