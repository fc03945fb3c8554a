"""Tells a model's states from all others, by two digests: of its weights, and of all else that decides the last bit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from granite4_neuron.ops import Weight

_PIECE = 2**24  # bytes per task of a thread
_DIGITS = 32  # hex digits of each of the two digests


class Fingerprint:
    """Tells states from those of other weights, and from those that were computed by other kernels or options.

    Its text has 64 hex digits and is the same in every process with the same weights and numerics. Making it reads
    all weights, so it is made only for a comparison with another one: states that stay in memory need none.

    Args:
        weights: makes the digest of the weights, 32 hex digits, when it is first needed.
        numerics: `facts_digest` of everything else that decides the last bit of a state.
    """

    def __init__(self, weights: Callable[[], str], numerics: str):
        self._make: Callable[[], str] | None = weights
        self._weights = ""
        self._numerics = numerics
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Return the fingerprint with this text. Any text is accepted; one of another form equals no model's
        fingerprint.
        """
        return cls(lambda: text[:_DIGITS], text[_DIGITS:])

    def __str__(self) -> str:
        with self._lock:
            if self._make is not None:
                self._weights, self._make = self._make(), None  # which holds all weights
        return self._weights + self._numerics

    def difference(self, other: Fingerprint) -> str | None:
        """Return what differs: "numerics" (kernels, versions or options, which may lay out the same weights in another
        way), or only "weights"; None if nothing does.
        """
        if self._numerics != other._numerics:
            return "numerics"
        return None if self is other or str(self) == str(other) else "weights"


def facts_digest(*facts: object) -> str:
    """Return a digest of facts as `repr` shows them, 32 hex digits."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:_DIGITS]


def weights_digest(weights: Iterable[tuple[str, Weight]], *facts: object) -> str:
    """Return a digest, 32 hex digits, of facts and of weights with their names, dtypes, shapes and formats.

    It hashes the weights as they lie in memory with XXH3 (128 bits), in as many threads as torch has.
    """
    about = [repr(facts)]
    pieces: list[torch.Tensor] = []
    for name, weight in sorted(weights, key=lambda named: named[0]):
        format, tensors = _parts(weight)
        for part, tensor in tensors.items():
            about.append(f"{name} {format} {part} {tensor.dtype} {list(tensor.shape)}")
            pieces += _pieces(tensor.detach())
    digests, threads = [b""] * len(pieces), torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        # A few calls per thread: one call per small tensor would take longer than reading the tensors.
        shares = pool.map(lambda first: [_digest(piece) for piece in pieces[first::threads]], range(threads))
        for first, share in enumerate(shares):
            digests[first::threads] = share
    return xxhash.xxh3_128_hexdigest("\n".join(about).encode() + b"".join(digests))


def _parts(weight: Weight) -> tuple[str | None, Mapping[str, torch.Tensor]]:
    """Return the name of a weight's format, if it is quantized, and the tensors that hold it."""
    if isinstance(weight, torch.Tensor):
        return None, {"": weight}
    return None if weight.format is None else weight.format.name, weight.tensors()


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a tensor along its first axis, so that only a piece at a time is copied if it is not contiguous."""
    if tensor.dim() == 0:
        return (tensor[None],)
    return tensor.split(max(1, _PIECE * len(tensor) // max(1, tensor.nbytes)))


def _digest(piece: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(piece.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
