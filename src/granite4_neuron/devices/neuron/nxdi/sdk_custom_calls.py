"""Operators that only the Neuron SDK has or compiles, as custom calls in a graph that is traced without the SDK.

A graph with custom calls cannot run. It shows the names of the operators that a device needs, and the graph around
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch_xla


@contextmanager
def as_custom_calls() -> Iterator[None]:
    """Trace these operators of NxD and NxD Inference as custom calls within the context."""
    with ExitStack() as patches:
        for module, name, stand_in in _STAND_INS:
            __import__(module)
            patches.enter_context(mock.patch.object(sys.modules[module], name, stand_in))
        yield


def custom_call(
    name: str, inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Return the results of a custom call that is known by its name only."""
    return torch_xla._XLAC._xla_custom_call(list(inputs), name, list(shapes), list(dtypes), False, "", 2, {})


class _Kernel:
    """An NKI kernel, called directly or with a grid in brackets."""

    def __init__(self, call: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]):
        self._call = call

    def __getitem__(self, grid: int) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        return self._call

    def __call__(self, *arguments, **options):
        return self._call(*arguments, **options)


class _Operator:
    """A class with a static `apply`, as torch_neuronx has for operators that its compiler knows."""

    def __init__(self, apply: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]):
        self.apply = apply


def _attention_cte(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_, **options) -> torch.Tensor:
    """Map query [heads, tokens, head_dim] to [heads, head_dim, tokens]; `options` hold a prior if there is one."""
    heads, tokens, head_dim = query.shape
    tensors = [option for option in options.values() if isinstance(option, torch.Tensor)]
    return custom_call("attention_cte", [query, key, value, *tensors], [(heads, head_dim, tokens)], [query.dtype])[0]


def _topk(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def topk(
        tensor: torch.Tensor, k: int, dim: int | None = None, sorted_flag: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*tensor.shape[:-1], k)
        values, indices = custom_call(name, [tensor], [shape, shape], [tensor.dtype, torch.int32])
        return values, indices

    return topk


def _argmax(tensor: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    return custom_call("argmax", [tensor], [(*tensor.shape[:-1], 1) if keepdim else tensor.shape[:-1]], [torch.int32])[
        0
    ]


def _cascaded_max(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (tensor.shape[0], 1)
    values, indices = custom_call("cascaded_max", [tensor], [shape, shape], [tensor.dtype, torch.int32])
    return values, indices


def _cumsum(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    return custom_call("cumsum", [tensor], [tensor.shape], [tensor.dtype])[0]


def _fill_prefix(cache: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """Write the prefix. Like the SDK, torch_xla makes a DynamicUpdateSlice of this."""
    return torch.slice_scatter(cache, prefix, dim=2, end=prefix.shape[2])


def _experts(name: str) -> Callable[..., torch.Tensor]:
    """Return a stand-in for kernels that take keywords. Some return partial results for tokens with several experts."""

    def experts(hidden_states: torch.Tensor, **options) -> torch.Tensor:
        tensors = [option for option in options.values() if isinstance(option, torch.Tensor)]
        shape = list(hidden_states.shape)
        if name == "bwmm_shard_on_block":
            shape.insert(1, 2)
        return custom_call(name, [hidden_states, *tensors], [shape], [hidden_states.dtype])[0]

    return experts


def _launch(kernel: Any, *arguments: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Call a kernel of this package: its results are those of its definition in torch."""
    function = getattr(kernel, "function", kernel)
    given = [value for value in arguments if value is not None]
    if function.__name__ == "experts_prefill":  # its definition reads values, which the meta device does not have
        x, *_, choices = given
        shapes, dtypes = [(choices.numel(), x.shape[1])], [x.dtype]
    else:
        definition = getattr(sys.modules[function.__module__], f"{function.__name__}_torch")
        results = definition(
            *(None if value is None else torch.empty_like(value, device="meta") for value in arguments)
        )
        shapes, dtypes = [result.shape for result in results], [result.dtype for result in results]
    return tuple(custom_call(function.__name__, given, shapes, dtypes))


_NXD, _NXDI = "neuronx_distributed", "neuronx_distributed_inference"
_STAND_INS = (
    ("granite4_neuron.devices.neuron.nki.launch", "launch", _launch),
    ("granite4_neuron.devices.neuron.nxdi.feed_forward", "launch", _launch),
    (f"{_NXDI}.modules.attention.attention_base", "_flash_fwd_call_nki", _Kernel(_attention_cte)),
    (f"{_NXDI}.modules.attention.attention_base", "_has_native_gqa_tp_support", True),
    (f"{_NXDI}.modules.kvcache.kv_cache_manager", "fill_prefix", _fill_prefix),
    (f"{_NXDI}.modules.generation.sampling", "nki_cumsum", _cumsum),
    (f"{_NXDI}.modules.generation.sampling", "rand_like", torch.rand_like),
    (
        f"{_NXD}.modules.moe.blockwise",
        "_blockwise_mm_baseline_shard_intermediate_hybrid",
        _Kernel(_experts("blockwise_mm_baseline_shard_intermediate_hybrid")),
    ),
    (f"{_NXD}.modules.moe.blockwise", "_bwmm_shard_on_block_nki_call", _Kernel(_experts("bwmm_shard_on_block"))),
    (f"{_NXD}.operators.topk", "TopK", _Operator(_topk("TopK"))),
    (f"{_NXD}.operators.topk", "nki_topk", _Kernel(_topk("topk"))),
    (f"{_NXD}.operators.argmax", "Argmax", _Operator(_argmax)),
    (f"{_NXD}.operators.argmax", "nki_max", _Kernel(_cascaded_max)),
)
