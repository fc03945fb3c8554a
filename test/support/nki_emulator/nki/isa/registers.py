"""Registers, which hold numbers that a kernel reads from memory while it runs, and barriers between programs."""

from __future__ import annotations

from nki.language import Register
from nki.running import last_launch
from nki.tensors import NkiTensor
from nki.values import NkiError


def register_alloc(value: int | NkiTensor | None = None) -> Register:
    """Return a register with a number, or with the number that a tensor holds."""
    return Register(0 if value is None else int(value.array.item()) if isinstance(value, NkiTensor) else int(value))


def register_load(dst: Register, src: NkiTensor) -> None:
    dst.value = int(src.array.item())


def core_barrier(*tensors: object, **options: object) -> None:
    """Count the barrier. Programs run one after the other: later ones see all of earlier ones, but not the reverse."""
    last_launch().barriers += 1


def sendrecv(*tensors: object, **options: object) -> None:
    raise NkiError("sendrecv is not emulated: programs run one after the other")
