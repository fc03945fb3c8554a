"""Quantized weights of a GGUF file that one of this package's formats represents exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from granite4_neuron.checkpoint.checkpoint import converted_remark
from granite4_neuron.checkpoint.gguf.tensors import FLOAT_TYPES, GGUFTensors
from granite4_neuron.checkpoint.weight_plan import formats_for, partner
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.ops import Format, QuantizedWeight
from granite4_neuron.ops.formats.int4 import FORMAT as INT4
from granite4_neuron.ops.formats.int8 import FORMAT as INT8

_SCALE_BYTES = 2  # in float16; a block begins with it
_SEEN_FIRST = 4  # rows to check first; they are enough to rule out most weights


@dataclass(frozen=True)
class Blocks:
    """A type of GGUF whose blocks are a scale and numbers that one of this package's formats represents exactly.

    block_bytes: the size of a block of 32 columns.
    may_keep: whether the format can represent these scales [..., rows, blocks], in float32.
    """

    format: Format
    block_bytes: int
    may_keep: Callable[[torch.Tensor], bool]

    def scales(self, raw: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, bytes of a row] to [..., rows, blocks] in float32."""
        return self._blocks(raw)[..., :_SCALE_BYTES].contiguous().view(torch.float16)[..., 0].float()

    def read(self, name: str, shape: torch.Size, stored: GGUFTensors) -> QuantizedWeight:
        """Read the weight of this name without rounding."""
        raw = stored.raw(name)
        scales, numbers = self.scales(raw), self._blocks(raw)[..., _SCALE_BYTES:]
        if self.format is INT8:
            return QuantizedWeight(INT8, numbers.flatten(-2).view(torch.int8), scales[..., 0].contiguous(), shape)
        # A GGUF byte has a column of the block's first half and one of its second half; ours has two neighbouring
        # columns.
        halves = torch.stack([numbers & 15, numbers >> 4], dim=-2).unflatten(-1, (-1, 2))
        values = (halves[..., 0] | halves[..., 1] << 4).flatten(-3)
        return QuantizedWeight(INT4, values, scales.bfloat16(), shape)

    def _blocks(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.unflatten(-1, (-1, self.block_bytes))


def _are_bfloat16(scales: torch.Tensor) -> bool:
    return torch.equal(scales, scales.bfloat16().float())


def _are_one_per_row(scales: torch.Tensor) -> bool:
    return torch.equal(scales, scales[..., :1].expand_as(scales))


_BLOCKS = {"Q4_0": Blocks(INT4, 18, _are_bfloat16), "Q8_0": Blocks(INT8, 34, _are_one_per_row)}


def kept_weights(stored: GGUFTensors, model: HybridForCausalLM) -> dict[str, Blocks]:
    """Find the weights that int4 or int8 represents exactly, by name.

    Args:
        model: without weights.
    """
    found = {}
    for name in formats_for(model, INT4.name):
        types = stored.types([name])
        blocks = _BLOCKS.get(next(iter(types))) if len(types) == 1 else None
        if blocks is not None and _may_keep(stored, name, blocks):
            found[name] = blocks
    return {name: blocks for name, blocks in found.items() if found.get(partner(name)) is blocks}


def _may_keep(stored: GGUFTensors, name: str, blocks: Blocks) -> bool:
    if not blocks.may_keep(blocks.scales(stored.first_rows(name, _SEEN_FIRST))):
        return False
    return blocks.may_keep(blocks.scales(stored.raw(name)))


def remark_on(stored: GGUFTensors, kept: Collection[str], held_in: str) -> str | None:
    """Return a sentence on the weights that are quantized in the file but not kept so; None if there are none.

    Args:
        kept: the names of the weights that are quantized in memory as in the file.
        held_in: the other weights' format or dtype in memory.
    """
    types = stored.types(name for name in stored.names() if name not in kept) - {*FLOAT_TYPES}
    return converted_remark(stored.path, sorted(types), held_in)
