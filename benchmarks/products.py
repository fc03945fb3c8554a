"""Products of activations and weights: this package's, in a fixed order of sums, beside torch's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.ops import cpu

_BYTES = 2**27  # of weights, more than caches hold
_SECONDS = 0.3


@dataclass(frozen=True)
class Product:
    """Of a matrix [outputs, inputs] and some rows; seconds of one."""

    name: str
    outputs: int
    inputs: int
    rows: int
    ours: float
    torchs: float


@torch.inference_mode()
def measure_products(config: GraniteMoeHybridConfig, dtype: torch.dtype) -> Iterator[Product]:
    """Time the products of a Mamba layer and of the shared MLP, for one row, 8, 32 and 512."""
    hidden, inner = config.hidden_size, config.shared_intermediate_size
    shapes = {
        "Mamba in": (config.mamba_intermediate_size + config.mamba_conv_dim + config.mamba_n_heads, hidden),
        "Mamba out": (hidden, config.mamba_intermediate_size),
        "MLP in": (2 * inner, hidden),
        "MLP out": (hidden, inner),
    }
    operators = cpu.operators()
    for name, shape in shapes.items():
        copies = max(1, _BYTES // (shape[0] * shape[1] * dtype.itemsize))
        weights = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(copies)]
        packed = [operators.pack(weight, dtype) for weight in weights]
        for rows in (1, 8, 32, 512):
            x = torch.randn(rows, shape[1]).to(dtype)
            ours = _seconds(lambda number: operators.linear(x, packed[number % copies]))
            torchs = _seconds(lambda number: torch.nn.functional.linear(x, weights[number % copies]))
            yield Product(name, *shape, rows, ours, torchs)


def _seconds(product: Callable[[int], object]) -> float:
    """Return the least time of a product in a number of them."""
    times, number = [], 0
    end = time.perf_counter() + _SECONDS
    while number < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        product(number)
        times.append(time.perf_counter() - started)
        number += 1
    return min(times[1:])
