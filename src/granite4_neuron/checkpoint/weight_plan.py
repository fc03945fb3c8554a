"""The plan of a model's weights in memory: the format of each, its size and its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from granite4_neuron.checkpoint.stored_tensors import EMBEDDING, HEAD
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.linear import Matrix
from granite4_neuron.ops import FORMATS, Format, QuantizedWeight, Weight
from granite4_neuron.ops.operators import Operators, Pack
from granite4_neuron.system.large_memory import LargeMemory

EXPERTS = ".block_sparse_moe."  # between the name of a layer and those of its experts' weights
_WIDE_ROW = torch.Size([1, 2**12])
_PARTNERS = {"input_linear.weight": "output_linear.weight", "output_linear.weight": "input_linear.weight"}


def formats_for(model: HybridForCausalLM, quantize: str | None) -> dict[str, Format]:
    """Return the format of each weight that `checkpoint.loading.load_model` quantizes, by name.

    Args:
        model: without weights.
        quantize: one of `FORMATS`; None to quantize nothing.
    """
    if quantize is None:
        return {}
    format = FORMATS[quantize]
    named = [(f"{name}.weight", module) for name, module in model.named_modules() if isinstance(module, Matrix)]
    formats = {name: format for name, module in named if module.may_be_quantized}
    if model.config.tie_word_embeddings and format.quantizes_tied_embedding:
        formats.pop(HEAD)
        return formats | {EMBEDDING: format.head}
    return formats | {HEAD: format.head}


def model_format(formats: Mapping[str, Format]) -> Format:
    """Return the format that a model is named by: its layers' format with the fewest bits.

    Args:
        formats: the quantized weights', by name.
    """
    layer_formats = {format for name, format in formats.items() if name not in (EMBEDDING, HEAD)}
    return min(layer_formats or formats.values(), key=lambda format: (format.num_bytes(_WIDE_ROW), format.name))


def partner(name: str) -> str:
    """Return the name of the other matrix of a layer's experts, since no kernel takes two formats; otherwise the name
    itself.
    """
    layer, experts, which = name.partition(EXPERTS)
    return f"{layer}{experts}{_PARTNERS.get(which, which)}"


class WeightPlan:
    """The plan of a model's weights in memory.

    Args:
        model: without weights.
        dtype: for weights that are not quantized.
        formats: for quantized weights, by name. A head with a format has values of its own, even if the config ties it
            to the embedding.
        operators: quantize and lay out matrices.
    """

    def __init__(
        self,
        model: HybridForCausalLM,
        dtype: torch.dtype,
        formats: Mapping[str, Format],
        operators: Operators,
    ):
        self._dtype, self._formats, self._operators = dtype, formats, operators
        self._float32 = model.float32_weights()
        is_tied = model.config.tie_word_embeddings and HEAD not in formats
        matrices = {f"{name}.weight" for name in model.matrices()}
        self._packed = matrices if is_tied else (matrices - {EMBEDDING}) | {HEAD}
        self.shapes = {name: one.shape for name, one in model.named_parameters(remove_duplicate=is_tied)}

    @property
    def num_bytes(self) -> int:
        return sum(map(self.num_bytes_of, self.shapes))

    def tensors(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of all tensors that the model will have."""
        return [tensor for name in self.shapes for tensor in self._tensors_of(name).values()]

    def largest_first(self) -> list[str]:
        """Return all names in the order that takes the least temporary memory to read."""
        return sorted(self.shapes, key=lambda name: self.shapes[name].numel(), reverse=True)

    def num_bytes_of(self, name: str) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors_of(name).values())

    def form(self) -> list[str]:
        """Return a line for each weight, in the order of `largest_first`, that says how it lies in memory."""
        lines = []
        for name in self.largest_first():
            format = self._formats.get(name)
            where = [f"{ending} {list(shape)} {dtype}" for ending, (shape, dtype) in self._tensors_of(name).items()]
            lines.append(f"{name} {list(self.shapes[name])} {self.dtype_of(name)} {format and format.name} {where}")
        return lines

    def places(self, name: str, memory: LargeMemory) -> dict[str, torch.Tensor]:
        """Take the memory for a weight."""
        return {ending: memory.empty(*about) for ending, about in self._tensors_of(name).items()}

    def lying_in(self, name: str, places: Mapping[str, torch.Tensor]) -> Weight:
        """Return the weight that `place` has laid out in these places."""
        shape, format = self.shapes[name], self._formats.get(name)
        if (pack := self._pack(name)) is not None:
            return pack.packed(shape, format, places[""])
        return places[""] if format is None else QuantizedWeight(format, places[""], places["_scale"], shape)

    def place(self, name: str, weight: torch.Tensor | QuantizedWeight, places: Mapping[str, torch.Tensor]) -> Weight:
        """Lay out a stored weight in the model's form, in these places.

        Raises:
            UserError: its format cannot represent it.
        """
        if isinstance(weight, torch.Tensor):
            weight = self._converted(name, weight)
        if (pack := self._pack(name)) is not None:
            return pack(weight, self.dtype_of(name), places[""])
        return places[""].copy_(weight) if isinstance(weight, torch.Tensor) else weight.moved_to(places)

    def _converted(self, name: str, weight: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        """Return a tensor in the model's dtype, or quantized in its format."""
        format = self._formats.get(name)
        if format is None:
            return weight.to(self.dtype_of(name))
        quantized = self._operators.quantize(weight, format)
        if not format.holds(quantized):
            raise UserError(
                f"{name} has a row whose weights are of too many sizes for {format.name}; load it without "
                "--quantize, which gives the same numbers."
            )
        return quantized

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a weight that is not quantized."""
        return torch.float32 if name in self._float32 else self._dtype

    def _pack(self, name: str) -> Pack | None:
        """Return the function that lays out a weight for products; None for a weight that is not laid out."""
        return self._operators.pack if name in self._packed else None

    def _tensors_of(self, name: str) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        shape, format = self.shapes[name], self._formats.get(name)
        if (pack := self._pack(name)) is not None:
            return {"": (torch.Size([pack.num_bytes(shape, self.dtype_of(name), format)]), torch.uint8)}
        return {"": (shape, self.dtype_of(name))} if format is None else format.layout(shape)
