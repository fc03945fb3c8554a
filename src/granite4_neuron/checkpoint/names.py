"""Names of stored tensors: published ones, and other spellings of them."""

from __future__ import annotations

from typing import NamedTuple

# The tensors that a checkpoint may have instead of a published one. Several of them hold its rows together.
OTHER_NAMES = {
    # GraniteForCausalLM.
    "shared_mlp.input_linear.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "shared_mlp.output_linear.weight": ("mlp.down_proj.weight",),
    # transformers 5.x in memory; the files that it writes have the published names.
    "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts.gate_up_proj",),
    "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts.down_proj",),
    "block_sparse_moe.router.layer.weight": ("block_sparse_moe.router.weight",),
}


class Part(NamedTuple):
    """A stored tensor's place in the published tensor `name`: its rows are part `number`, from 0, `of` so many."""

    name: str
    number: int = 0
    of: int = 1


def part_of(stored_name: str) -> Part:
    """Return the place of a stored tensor, also of a part of a quantized weight such as "...weight_scale"."""
    for published, others in OTHER_NAMES.items():
        for number, other in enumerate(others):
            before, found, ending = stored_name.partition(f".{other}")
            if found and (not ending or ending.startswith("_")):
                return Part(f"{before}.{published}{ending}", number, len(others))
    return Part(stored_name)
