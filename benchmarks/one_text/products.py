"""Products of activations and weights: this package's, with a fixed order of sums, beside torch's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.cpu import operators as cpu

_BYTES = 2**27  # bytes of weights, more than the processor's caches hold
_MOST_COPIES = 16
_SECONDS = 0.1


@dataclass(frozen=True)
class Product:
    """A product of a matrix [outputs, inputs] and some rows. seconds: the time of one."""

    name: str
    outputs: int
    inputs: int
    rows: int
    ours: float
    torchs: float


@torch.inference_mode()
def measure_products(config: ModelConfig, dtype: torch.dtype) -> Iterator[Product]:
    """Time the products of a Mamba layer and of the shared MLP, for one row, 8 and 512."""
    hidden, inner = config.hidden_size, config.shared_intermediate_size
    width = config.mamba_intermediate_size
    shapes = {
        "Mamba in": (width + config.rank_dimensions(1).mamba_conv_dim + config.mamba_n_heads, hidden),
        "Mamba out": (hidden, width),
        "MLP in": (2 * inner, hidden),
        "MLP out": (hidden, inner),
    }
    operators = cpu.choose_operators()
    for name, shape in shapes.items():
        copies = min(_MOST_COPIES, 1 + _BYTES // (shape[0] * shape[1] * dtype.itemsize))
        weights = [torch.randn(shape).mul_(0.02).to(dtype) for _ in range(copies)]
        packed = [operators.pack(weight, dtype) for weight in weights]
        for rows in (1, 8, 512):
            x = torch.randn(rows, shape[1]).to(dtype)
            ours = _seconds(partial(operators.linear, x), packed)
            torchs = _seconds(partial(torch.nn.functional.linear, x), weights)
            yield Product(name, *shape, rows, ours, torchs)


def _seconds(product: Callable[[Any], object], weights: Sequence[Any]) -> float:
    """Return the median time of a product with each of the weights in turn."""
    times = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        product(weights[len(times) % len(weights)])
        times.append(time.perf_counter() - started)
    return statistics.median(times)
