"""Registers: numbers that a kernel reads from memory while it runs; and what programs would say to each other."""

from __future__ import annotations

from nki.language import Register
from nki.tensors import NkiTensor
from nki.values import NkiError


def register_alloc(value: int | NkiTensor | None = None) -> Register:
    """A register with a number, or with the one that a tensor holds."""
    return Register(0 if value is None else int(value.array.item()) if isinstance(value, NkiTensor) else int(value))


def register_load(dst: Register, src: NkiTensor) -> None:
    dst.value = int(src.array.item())


def core_barrier(*tensors: object, **options: object) -> None:
    """Programs run one after the other, so that the later ones see all of the earlier ones and not the other way."""


def sendrecv(*tensors: object, **options: object) -> None:
    raise NkiError("sendrecv is not emulated: programs run one after the other")
