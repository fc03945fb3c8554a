"""This package's layers on the ranks of NxD."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import comm, parallel_state
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.parameters import parameter


class NeuronParallel(Parallel):
    """A rank of NxD's tensor parallel group. One graph is traced for all ranks, so `rank` is not known in it."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return reduce_from_tensor_model_parallel_region(partial)

    def all_reduce_together(self, *partials: torch.Tensor) -> Sequence[torch.Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        return comm.all_reduce(xm.REDUCE_SUM, list(partials), groups=group)


def split_over_ranks(module: nn.Module, name: str, config: ModelConfig, degree: int) -> None:
    """Tell NxD which parameters of a layer are one rank's parts.

    NxD shards a checkpoint by the attributes of the parameters, but looks only at modules of its own classes. So each
    module with such a parameter also becomes one of these. It computes the same as before.

    Args:
        module: built with a rank's sizes.
        name: of the module in a checkpoint's decoder layer, such as "mamba".
        degree: number of ranks.
    """
    for child_name, child in module.named_modules(prefix=name):
        tensors = dict(child.named_parameters(recurse=False))
        axes = {leaf: parameter(f"{child_name}.{leaf}", config).split_axis for leaf in tensors}
        for leaf, axis in axes.items():
            if axis is not None:
                set_tensor_model_parallel_attributes(tensors[leaf], True, axis, stride=1, num_partitions=degree)
        if any(axis is not None for axis in axes.values()):
            child.__class__ = _known_to_nxd(type(child))  # type: ignore[arg-type]  # to mypy a class has no __hash__


@functools.cache
def _known_to_nxd(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (cls, BaseParallelLinear), {})
