"""What becomes of each stored tensor in memory: which format it has, and where and how it is laid out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from granite4_neuron.checkpoint.stored_tensors import EMBEDDING, HEAD
from granite4_neuron.model.linear import Matrix
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import FORMATS, Format, Weight
from granite4_neuron.ops.int4 import INT4
from granite4_neuron.ops.int8 import INT8
from granite4_neuron.ops.operators import Operators
from granite4_neuron.ops.weight_memory import WeightMemory


def formats_for(model: GraniteMoeHybridForCausalLM, quantize: str | None) -> dict[str, Format]:
    """The format of each weight that `checkpoint.load_model` quantizes, by name.

    Args:
        model: without weights.
        quantize: one of `FORMATS`; None for no weight at all.
    """
    if quantize is None:
        return {}
    named = [(f"{name}.weight", module) for name, module in model.named_modules() if isinstance(module, Matrix)]
    formats = {name: FORMATS[quantize] for name, module in named if module.may_be_quantized}
    # Four bits are too few for it: one of its rows is all by which a token enters or leaves the model.
    if model.config.tie_word_embeddings and quantize != INT8.name:
        formats.pop(HEAD)
        return formats | {EMBEDDING: INT8}
    return formats | {HEAD: INT8}


def model_format(formats: Collection[Format]) -> Format:
    """The one by which a model is called whose weights have these: that with the fewest bits."""
    return INT4 if INT4 in formats else INT8


class WeightPlan:
    """What becomes of each stored tensor in memory.

    Args:
        model: without weights.
        dtype: of weights that are not quantized.
        formats: of those that are, by name. A head with one has values of its own, also where the config says that it
            is the embedding.
        operators: quantize and lay out matrices.
    """

    def __init__(
        self,
        model: GraniteMoeHybridForCausalLM,
        dtype: torch.dtype,
        formats: Mapping[str, Format],
        operators: Operators,
    ):
        self._dtype, self._formats, self._operators = dtype, formats, operators
        is_tied = model.config.tie_word_embeddings and HEAD not in formats
        matrices = {f"{name}.weight" for name in model.matrices()}
        self._packed = matrices if is_tied else (matrices - {EMBEDDING}) | {HEAD}
        self.shapes = {name: one.shape for name, one in model.named_parameters(remove_duplicate=is_tied)}

    @property
    def num_bytes(self) -> int:
        return sum(map(self.num_bytes_of, self.shapes))

    def tensors(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of all that the model is going to be kept as."""
        return [tensor for name in self.shapes for tensor in self._tensors_of(name).values()]

    def largest_first(self) -> list[str]:
        """All names, in the order in which reading takes the least memory beside what is there already."""
        return sorted(self.shapes, key=lambda name: self.shapes[name].numel(), reverse=True)

    def num_bytes_of(self, name: str) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors_of(name).values())

    def place(self, name: str, weight: Weight, memory: WeightMemory) -> Weight:
        """What is stored as the model has it, in `memory`."""
        places = {ending: memory.empty(*about) for ending, about in self._tensors_of(name).items()}
        if isinstance(weight, torch.Tensor):
            format = self._formats.get(name)
            weight = weight.to(self._dtype) if format is None else self._operators.quantize(weight, format)
        if self._is_packed(name):
            return self._operators.pack(weight, self._dtype, places[""])
        return places[""].copy_(weight) if isinstance(weight, torch.Tensor) else weight.moved_to(places)

    def _is_packed(self, name: str) -> bool:
        return self._operators.pack is not None and name in self._packed

    def _tensors_of(self, name: str) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        shape, format = self.shapes[name], self._formats.get(name)
        if self._is_packed(name):
            return {"": (torch.Size([self._operators.pack.num_bytes(shape, self._dtype, format)]), torch.uint8)}
        return {"": (shape, self._dtype)} if format is None else format.layout(shape)
