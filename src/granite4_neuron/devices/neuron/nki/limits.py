"""Limits of a Mamba layer's kernels, checked before a launch: each refusal is a sentence about the model."""

from granite4_neuron.devices.neuron.nki.common import MAX_PARTITIONS, PSUM_BANK
from granite4_neuron.devices.neuron.nki.mamba_decode import MAX_CHANNELS, MAX_TOKENS
from granite4_neuron.errors import UserError

HEAD_DIMS = (32, 64, 128)
SCAN_D_STATES = (64, 128)
DECODE_D_STATES = (32, 64, 128)  # of `mamba_decode`
MAX_GROUPS = MAX_PARTITIONS // 2  # on one core: B and C of all groups are side by side
SUMS_OF_A_CHUNK = 3  # side by side in a PSUM bank


def check_scan(num_heads: int, head_dim: int, n_groups: int, d_state: int, programs: int) -> None:
    """Check that `ssd_chunk_scan` and `tensor_tensor_scan` take these dimensions.

    Raises:
        UserError: they do not.
    """
    if num_heads % programs or num_heads % n_groups or head_dim not in HEAD_DIMS:
        raise UserError(
            f"The NKI kernels for prefill take a multiple of {programs} heads, in groups of one size, and head_dim "
            f"{_listed(HEAD_DIMS)}; here are {num_heads} heads in {n_groups} groups, and head_dim {head_dim}."
        )
    most_heads = PSUM_BANK // SUMS_OF_A_CHUNK * programs
    if d_state not in SCAN_D_STATES or num_heads > most_heads:
        raise UserError(
            f"The NKI kernels for prefill take d_state {_listed(SCAN_D_STATES)} and up to {most_heads} heads; here are "
            f"d_state {d_state} and {num_heads} heads."
        )


def check_mamba_decode(tokens: int, num_heads: int, head_dim: int, n_groups: int, d_state: int, programs: int) -> None:
    """Check that `mamba_decode` takes these dimensions.

    Raises:
        UserError: it does not.
    """
    heads, heads_per_group = num_heads // programs, num_heads // n_groups
    takes_heads = num_heads % programs == 0 and num_heads % n_groups == 0 and 1 <= heads <= MAX_PARTITIONS
    takes_groups = takes_heads and (heads % heads_per_group == 0 or heads_per_group % heads == 0)
    has_room = takes_heads and heads // heads_per_group <= MAX_GROUPS and heads * tokens <= PSUM_BANK
    takes_sizes = head_dim in HEAD_DIMS and d_state in DECODE_D_STATES and heads * head_dim <= MAX_CHANNELS
    if not (1 <= tokens <= MAX_TOKENS and has_room and takes_groups and takes_sizes):
        raise UserError(
            f"The NKI kernel for a Mamba layer's decode takes 1 to {MAX_TOKENS} tokens; on each of {programs} cores "
            f"whole groups of heads or equal parts of one, up to {MAX_GROUPS} groups, {MAX_PARTITIONS} heads, "
            f"{MAX_CHANNELS} channels, and {PSUM_BANK} for heads times tokens; head_dim {_listed(HEAD_DIMS)}, and "
            f"d_state {_listed(DECODE_D_STATES)}. Here are {num_heads} heads in {n_groups} groups, head_dim "
            f"{head_dim}, d_state {d_state}, and steps of {tokens}."
        )


def check_convolution(channels: int, d_conv: int, batch: int, programs: int) -> None:
    """Check that `conv1d_prefill` takes these dimensions.

    Raises:
        UserError: it does not.
    """
    if channels % programs or not 2 <= d_conv <= 4 or batch > PSUM_BANK:
        raise UserError(
            f"The NKI kernel for the convolution takes a multiple of {programs} channels, 2 to 4 taps and up to "
            f"{PSUM_BANK} sequences; here are {channels} channels, {d_conv} taps and {batch} sequences."
        )


def _listed(numbers: tuple[int, ...]) -> str:
    """Write (32, 64, 128) as "32, 64 or 128"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}"
