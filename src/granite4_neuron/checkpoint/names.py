"""Names of stored tensors: the model's own, which are Granite's published ones, and other spellings of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from granite4_neuron.config import EXPERT_NUMBER, ModelConfig
from granite4_neuron.model.parameters import parameters

if TYPE_CHECKING:
    import torch

_QUANTIZED = re.compile(r"(.+\.weight)(_\w+)")  # a part of a quantized weight, such as "...weight_scale"
# The tensors that a checkpoint may have in place of a published one. If there are several, their rows together are its
# rows.
OTHER_NAMES = {
    # GraniteForCausalLM.
    "shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "shared_mlp.output_linear.weight": ("mlp.down_proj.weight",),
    # transformers 5.x in memory; the files that it writes have the published names.
    "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts.gate_up_proj",),
    "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts.down_proj",),
    "block_sparse_moe.router.layer.weight": ("block_sparse_moe.router.weight",),
}
# The same for MLX.
_MLX_NAMES = {
    "block_sparse_moe.input_linear.weight": (
        "block_sparse_moe.switch_mlp.gate_proj.weight",
        "block_sparse_moe.switch_mlp.up_proj.weight",
    ),
    "block_sparse_moe.output_linear.weight": ("block_sparse_moe.switch_mlp.down_proj.weight",),
}
# MLX's names of all experts' matrices, by the names of one expert's.
_MLX_STACKED = {
    f"experts.{EXPERT_NUMBER}.{one}": f"switch_mlp.{all}" for one, all in (("up_proj", "fc1"), ("down_proj", "fc2"))
}


class Part(NamedTuple):
    """A stored tensor's place in the model's tensor `name`: its rows are part `number`, counted from 0, `of` this many.

    is_expert: whether it is instead the whole matrix of expert `number`.
    """

    name: str
    number: int = 0
    of: int = 1
    is_expert: bool = False


def part_of(stored_name: str) -> Part:
    """Return the place of a stored tensor, or of a part of a quantized weight such as "...weight_scale"."""
    for published, others in (*OTHER_NAMES.items(), *_MLX_NAMES.items()):
        for number, other in enumerate(others):
            before, found, ending = stored_name.partition(f".{other}")
            if found and (not ending or ending.startswith("_")):
                return Part(f"{before}.{published}{ending}", number, len(others))
    return Part(stored_name)


class StoredNames:
    """The names of a model's tensors in checkpoints.

    Args:
        config: the model's, which decides the names.
    """

    def __init__(self, config: ModelConfig):
        self._config = config
        self._parts: dict[str, Part] = {}
        for name, one in parameters(config).items():
            stored_name = config.stored_name(name)
            if EXPERT_NUMBER in stored_name:
                experts = one.shape[0]
                places = (Part(name, number, experts, is_expert=True) for number in range(experts))
                self._parts |= {stored_name.replace(EXPERT_NUMBER, str(part.number)): part for part in places}
                for of_one, of_all in _MLX_STACKED.items():
                    self._parts[stored_name.replace(of_one, of_all)] = Part(name)
                in_memory = stored_name.replace(f".{EXPERT_NUMBER}.", ".").removesuffix(".weight")
                self._parts[in_memory] = Part(name)  # transformers 5.x
            elif stored_name != name:
                self._parts[stored_name] = Part(name)

    def part_of(self, stored_name: str) -> Part:
        """Return the place of a stored tensor, or of a part of a quantized weight."""
        if not self._parts:
            return part_of(stored_name)
        base, ending = _split(self._config.published_name(stored_name))
        part = self._parts.get(base, Part(base))
        return part._replace(name=f"{part.name}{ending}")

    def purpose_of_left_out(self, stored_name: str) -> str | None:
        """Return the purpose of a tensor that the model does not have; None for all others."""
        left_out = self._config.left_out_tensors
        return next((purpose for start, purpose in left_out.items() if stored_name.startswith(start)), None)

    def published(self, name: str) -> str:
        """Return the published name of a tensor of the model, or of a part of a quantized weight."""
        base, ending = _split(name)
        return f"{self._config.stored_name(base)}{ending}"

    def stored(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors in a checkpoint for a tensor of the model, or for a part of a quantized weight."""
        base, ending = _split(name)
        stored_name = self._config.stored_name(base)
        if EXPERT_NUMBER not in stored_name:
            yield f"{stored_name}{ending}", tensor
            return
        for number, of_expert in enumerate(tensor):
            yield f"{stored_name.replace(EXPERT_NUMBER, str(number))}{ending}", of_expert


def _split(name: str) -> tuple[str, str]:
    """Split a stored name into the weight's name and the ending of its part."""
    match = _QUANTIZED.fullmatch(name)
    return (name, "") if match is None else (match[1], match[2])
