"""The convolution of a few tokens with channels on partitions, and the windows it works on."""

import nki.isa as nisa
import nki.language as nl

from granite4_neuron.ops.nki.common import MAX_PARTITIONS, largest_divisor, load


def lanes_of(channels: int) -> tuple[int, int]:
    """Return on how many partitions x is, and how many of its channels follow each other on one."""
    lanes = largest_divisor(channels, MAX_PARTITIONS)
    return lanes, channels // lanes


def _by_column(values: nl.ndarray, own: tuple[int, int], inner: int, d_state: int) -> tuple[nl.ndarray, nl.ndarray]:
    """View HBM [rows, channels, n]: x of this program as [lanes, per_lane, rows, n], B and C as [d_state, n_groups of B
    then of C, rows, n].
    """
    first, channels = own
    rows, all_channels, columns = values.shape
    lanes, per_lane = lanes_of(channels)
    x = values[0:rows, first : first + channels, 0:columns].reshape_dim(1, (lanes, per_lane))
    rest = values[0:rows, inner:all_channels, 0:columns].reshape_dim(1, ((all_channels - inner) // d_state, d_state))
    return x.permute((1, 2, 0, 3)), rest.permute((2, 1, 0, 3))


def _loaded_columns(sources: tuple[nl.ndarray, nl.ndarray], tile_sb: nl.ndarray, first: int) -> None:
    """Load the views of `_by_column` side by side, into elements from `first` on of the last dimension."""
    lanes, per_lane, _, columns = sources[0].shape
    last = first + columns
    nisa.dma_copy(dst=tile_sb[0:lanes, 0:per_lane, :, first:last], src=sources[0])
    nisa.dma_copy(dst=tile_sb[0 : sources[1].shape[0], per_lane : tile_sb.shape[1], :, first:last], src=sources[1])


def load_windows(
    conv_states: nl.ndarray, xBC: nl.ndarray, own: tuple[int, int], inner: int, d_state: int
) -> nl.ndarray:
    """Load the convolution's inputs, channels on partitions: [128, columns, rows, d_conv - 1 + tokens], float32."""
    rows, tokens, _ = xBC.shape
    reach = conv_states.shape[2]
    old = _by_column(conv_states, own, inner, d_state)
    new = _by_column(xBC.permute((0, 2, 1)), own, inner, d_state)
    columns = old[0].shape[1] + old[1].shape[1]
    windows_sb = nl.ndarray((MAX_PARTITIONS, columns, rows, reach + tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=windows_sb, value=0.0)  # not every column has 128 partitions
    _loaded_columns(old, windows_sb, 0)
    _loaded_columns(new, windows_sb, reach)
    return windows_sb


def load_taps(taps: nl.ndarray, own: tuple[int, int], inner: int, d_state: int) -> nl.ndarray:
    """Load the convolution's weights and bias in `load_windows`' layout: [128, columns, 1, d_conv + 1], float32."""
    sources = _by_column(taps.expand_dim(0), own, inner, d_state)
    columns = sources[0].shape[1] + sources[1].shape[1]
    taps_sb = nl.ndarray((MAX_PARTITIONS, columns, 1, taps.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=taps_sb, value=0.0)
    _loaded_columns(sources, taps_sb, 0)
    return taps_sb


def convolve_windows(windows_sb: nl.ndarray, taps_sb: nl.ndarray) -> nl.ndarray:
    """Compute silu of the convolution plus bias: [128, columns, rows, tokens], float32."""
    partitions, columns, rows, width = windows_sb.shape
    d_conv = taps_sb.shape[3] - 1
    tokens = width - d_conv + 1
    sum_sb = nl.ndarray((partitions, columns, rows, tokens), dtype=nl.float32, buffer=nl.sbuf)
    product_sb = nl.ndarray(sum_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    for tap in range(d_conv):
        factors = taps_sb[:, :, :, tap : tap + 1].broadcast(2, rows).broadcast(3, tokens)
        target_sb = sum_sb if tap == 0 else product_sb
        nisa.tensor_tensor(dst=target_sb, data1=windows_sb[:, :, :, tap : tap + tokens], data2=factors, op=nl.multiply)
        if tap > 0:
            nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=product_sb, op=nl.add)
    bias = taps_sb[:, :, :, d_conv : d_conv + 1].broadcast(2, rows).broadcast(3, tokens)
    nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=bias, op=nl.add)
    nisa.activation(dst=sum_sb, op=nl.silu, data=sum_sb)
    return sum_sb


def store_windows(
    new_conv_states: nl.ndarray,
    windows_sb: nl.ndarray,
    accepted_row: nl.ndarray,
    own: tuple[int, int],
    inner: int,
    d_state: int,
) -> None:
    """Write what the convolution sees before the first token that is not accepted; of B and C, the first program.

    Args:
        accepted_row: [1, rows] in HBM.
    """
    partitions, columns, rows, width = windows_sb.shape
    reach = new_conv_states.shape[2]
    accepted_sb = load(accepted_row.broadcast(0, partitions), nl.float32)
    kept_sb = nl.ndarray((partitions, columns, rows, reach), dtype=nl.float32, buffer=nl.sbuf)
    chosen_sb = nl.ndarray(kept_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    for count in range(width - reach + 1):
        is_count_sb = nl.ndarray((partitions, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=is_count_sb, data=accepted_sb, op0=nl.equal, operand0=float(count))
        is_chosen = is_count_sb.expand_dim(1).broadcast(1, columns).expand_dim(3).broadcast(3, reach)
        target_sb = kept_sb if count == 0 else chosen_sb
        nisa.tensor_tensor(
            dst=target_sb, data1=windows_sb[:, :, :, count : count + reach], data2=is_chosen, op=nl.multiply
        )
        if count > 0:
            nisa.tensor_tensor(dst=kept_sb, data1=kept_sb, data2=chosen_sb, op=nl.add)
    x, rest = _by_column(new_conv_states, own, inner, d_state)
    nisa.dma_copy(dst=x, src=kept_sb[0 : x.shape[0], 0 : x.shape[1], :, :])
    if own[0] == 0:
        nisa.dma_copy(dst=rest, src=kept_sb[0:d_state, x.shape[1] : columns, :, :])
