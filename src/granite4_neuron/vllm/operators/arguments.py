"""Index tables, ragged batches, and checks of the operators' arguments.

Every error is a ValueError whose message begins with the argument's name.
"""

from __future__ import annotations

import torch

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0  # in vLLM's block tables


def check_shape(name: str, tensor: torch.Tensor | None, *shape: int) -> None:
    """Check a tensor's shape; -1 stands for any size, and an optional argument that is None passes."""
    if tensor is None:
        return
    same = tensor.dim() == len(shape) and all(
        want in (-1, size) for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not same:
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)} where [{wanted}] is needed")


def check_floating(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} where a floating-point dtype is needed")


def check_silu(activation: bool | str | None) -> bool:
    """Return whether to apply SiLU."""
    if activation not in (None, True, False, "silu", "swish"):
        raise ValueError(f"activation is {activation!r} where None, True, False, 'silu' or 'swish' is needed")
    return bool(activation)


def check_flags(name: str, flags: torch.Tensor | None, count: int) -> None:
    check_shape(name, flags, count)
    if flags is not None and flags.dtype != torch.bool:
        raise ValueError(f"{name} is {flags.dtype} where torch.bool is needed")


def check_integers(name: str, values: torch.Tensor, lowest: int, end: int) -> torch.Tensor:
    """Return `values` in int64; each must be in [lowest, end)."""
    if values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(f"{name} is {values.dtype} where an integer dtype is needed")
    if values.numel() and not lowest <= int(values.min()) <= int(values.max()) < end:
        raise ValueError(
            f"{name} holds {int(values.min())} to {int(values.max())} where {lowest} to {end - 1} is allowed"
        )
    return values.long()


def check_slots(name: str, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return `slots` in int64; each must be -1 (padding) or a slot that exists."""
    return check_integers(name, slots, PAD_SLOT_ID, num_slots)


def check_distinct(name: str, slots: torch.Tensor) -> None:
    """Check that no slot is written twice: the result would depend on the order."""
    if slots.unique().numel() != slots.numel():
        raise ValueError(f"{name} names a slot twice as a destination: {sorted(slots.tolist())}")


def is_padding(slots: torch.Tensor, *padding_ids: int | None) -> torch.Tensor:
    """Return a mask of the padding in an index table: -1, or one of `padding_ids`."""
    padding = slots == PAD_SLOT_ID
    for padding_id in padding_ids:
        if padding_id is not None:
            padding = padding | (slots == padding_id)
    return padding


def ragged(name: str, offsets: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (starts, lengths) in int64, each [sequences], of sequences that lie one after another.

    Args:
        offsets: [sequences + 1], where each sequence starts; the last one's end is at most `total`.
    """
    check_shape(name, offsets, -1)
    offsets = check_integers(name, offsets, 0, total + 1)
    lengths = offsets.diff()
    if len(offsets) == 0 or offsets[0] != 0 or (lengths < 0).any():
        raise ValueError(f"{name} is {offsets.tolist()} where offsets that begin with 0 and never fall are needed")
    return offsets[:-1], lengths


def tokens_of(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the indices of all tokens of some sequences of a ragged batch, sequence by sequence."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))
