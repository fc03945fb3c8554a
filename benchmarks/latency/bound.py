"""The bound of this machine: the weights' arithmetic at the rate of a large matrix product, and reading weights and
state at the memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.model.parameters import HEAD, Parameter, matmul_weights
from granite4_neuron.ops import FORMATS
from granite4_neuron.state.sizes import FLOAT32_BYTES, sequence_bytes, token_bytes
from granite4_neuron.system.large_memory import LargeMemory

_PRODUCT_SIZES = ((512, 4096, 4096), (2048, 2048, 2048))
_TRIAL_SIZE = 512  # the size of a product that shows which dtype is faster
_READ_BYTES = 2**29
_TRIES = 5


@dataclass(frozen=True)
class Rates:
    """flops: FLOP/s of a large matrix product in the model's dtype, or in float32 if that is faster.
    bytes: bytes/s read from memory.
    """

    flops: float
    bytes: float

    @classmethod
    def median(cls, measured: Iterable[Rates]) -> Rates:
        measured = list(measured)
        return cls(statistics.median(r.flops for r in measured), statistics.median(r.bytes for r in measured))


class Machine:
    """Measures the rates with weights laid out in memory as a model's."""

    def __init__(self, dtype: torch.dtype):
        faster = _faster_dtype(dtype, torch.float32)
        self._products = [(_weights(faster, m, k), _weights(faster, n, k)) for m, k, n in _PRODUCT_SIZES]
        self._matrix = _weights(dtype, _READ_BYTES // dtype.itemsize // 1024, 1024)
        self._vector = self._matrix[:1].clone()
        operators = cpu.choose_operators()
        self._linear = operators.linear
        self._read = self._matrix if operators.pack is None else operators.pack(self._matrix, dtype)

    @torch.inference_mode()
    def rates(self) -> Rates:
        """Measure the rates, each the best of a few ways."""
        flops = max(_flops(x, w) / _seconds(lambda x=x, w=w: F.linear(x, w)) for x, w in self._products)
        numbers = self._matrix.view(torch.float32)
        ways = (lambda: numbers.sum(), lambda: self._linear(self._vector, self._read))
        return Rates(flops, self._matrix.nbytes / min(_seconds(way) for way in ways))


def prefill_flops(config: ModelConfig, prompt_length: int) -> float:
    """Return the operations of products with weights for one prompt: all its tokens, the head for the last one only."""
    matrices = matmul_weights(config)
    head = matrices.pop(HEAD)
    per_token = 0.0
    for matrix in matrices.values():
        share = config.num_experts_per_tok / config.num_local_experts if matrix.is_of_experts else 1.0
        per_token += matrix.numel * share
    return 2 * (per_token * prompt_length + head.numel)


def decode_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    batch_size: int,
    context: int,
    quantize: str | None = None,
    state_itemsize: int = FLOAT32_BYTES,
) -> float:
    """Return the bytes of weights and state that a step reads for `batch_size` sequences of `context` tokens.

    Only chosen experts count: as many different ones as if each token chose among all with equal probability.
    """
    chosen = 1.0
    if config.num_local_experts:
        chosen = 1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** batch_size
    weights = 0.0
    for name, matrix in matmul_weights(config).items():
        weights += _stored_bytes(name, matrix, dtype, quantize) * (chosen if matrix.is_of_experts else 1.0)
    state = sequence_bytes(config, dtype.itemsize, state_itemsize=state_itemsize)
    return weights + batch_size * (state + context * token_bytes(config, dtype.itemsize))


def _stored_bytes(name: str, matrix: Parameter, dtype: torch.dtype, quantize: str | None) -> int:
    """Return the bytes of a matrix in memory, with its scales."""
    if quantize is None or not matrix.may_be_quantized:
        return matrix.numel * dtype.itemsize
    format = FORMATS[quantize]
    return (format.head if name == HEAD else format).num_bytes(torch.Size(matrix.shape))


def _weights(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return LargeMemory([(torch.Size(shape), dtype)]).empty(torch.Size(shape), dtype).fill_(0.01)


@torch.inference_mode()
def _faster_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype with the faster products.

    Without instructions for bfloat16, torch's products in it are many times slower than the processor could be.
    """
    trials = {dtype: _weights(dtype, _TRIAL_SIZE, _TRIAL_SIZE) for dtype in dtypes}
    return min(trials, key=lambda dtype: _seconds(lambda: F.linear(trials[dtype], trials[dtype])))


def _flops(x: torch.Tensor, weight: torch.Tensor) -> float:
    return 2 * math.prod(x.shape) * len(weight)


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    """Return the median time of several calls. The compared times are medians too."""
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
