"""Estimates whether the activations of a prompt's graph fit into SBUF, and the bytes that move if they do not.

A compiler streams weights through SBUF, and keeps activations there if it can. The estimate assumes a schedule that
reads every weight once: a product with a weight takes all tokens of the graph at a time. While it runs, three tensors
are live, whole and in the model's dtype: the residual stream, the product's operand and its result. The live set of a
graph is the largest such sum. Everything else is tiled and does not count: weights; products of activations with each
other, such as attention's scores and the chunks of a scan, which go head by head; element-wise work. Experts are
computed one after another, beside the sum over them. Each physical core of a logical one holds half of the live set.

A product whose live set does not fit has its operand in HBM. The operand is written once, and read again for each block
of columns whose sums PSUM holds.

The graphs of one model were published (`published_latency.PLUGIN`): Qwen3.5-27B on four ranks spills with 2,048 tokens,
but not with 1,024 and 512. The estimate agrees: 74, 37 and 18.5 MiB, of 48. It would not if each physical core held the
whole residual stream. The estimated bytes read again with 2,048 tokens are 0.82 of the 108.7 GB in a profile. A live
set near the capacity may fit or not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.devices.neuron.sdk import LOGICAL_CORE_SIZE, TRAINIUM2, Chip

# PSUM has 128 partitions of 8 banks of 2 KiB, which hold sums in float32. The results of a product are columns of the
# weight on the partitions, and tokens along the banks.
_PARTITIONS, _SUMS = 128, 8 * 2048 // 4


@dataclass(frozen=True)
class Product:
    """A product of hidden states with a weight, in entries of one token on one rank.

    operand: the size of the operand. result: the part of the result that is kept. columns: the weight's. layers: the
    number of layers with this product.
    """

    name: str
    operand: int
    result: int
    columns: int
    layers: int


@dataclass(frozen=True)
class LiveSet:
    """The estimate for one graph, in bytes of one rank.

    live: the live set of the product `largest`. read, written: bytes in HBM because of products that do not fit.
    capacity: of SBUF.
    """

    live: int
    largest: str
    read: int
    written: int
    capacity: int

    @property
    def fits(self) -> bool:
        return self.live <= self.capacity

    @property
    def moved(self) -> int:
        return self.read + self.written

    def spill(self) -> str | None:
        """Return a sentence about the product that does not fit; None if all fit."""
        if self.fits:
            return None
        live, capacity = (f"{count / 2**20:.1f}" for count in (self.live, self.capacity))
        return (
            f"it spills by estimate: {live} MiB are live during {self.largest} product, and SBUF has {capacity}; that "
            f"moves {self.moved / 1e9:.2g} GB in HBM."
        )


def sbuf_bytes(chip: Chip) -> int:
    """Return the SBUF of a logical core."""
    return LOGICAL_CORE_SIZE * chip.sbuf_bytes


def live_set(config: ModelConfig, tp_degree: int, dtype: torch.dtype, tokens: int, chip: Chip = TRAINIUM2) -> LiveSet:
    """Estimate the live set of a prompt's graph on one rank; raise UserError if tp_degree does not divide the model."""
    return live_set_of(list(products(config, tp_degree)), config.hidden_size, dtype.itemsize, tokens, chip)


def live_set_of(
    of_model: Sequence[Product], hidden_size: int, itemsize: int, tokens: int, chip: Chip = TRAINIUM2
) -> LiveSet:
    """Estimate the live set of a graph of `tokens` tokens, from a model's products."""
    columns_at_a_time = _PARTITIONS * max(1, _SUMS // tokens)
    entry = tokens * itemsize
    live = {product: (hidden_size + product.operand + product.result) * entry for product in of_model}
    spilled = [product for product in of_model if live[product] > sbuf_bytes(chip)]
    largest = max(live, key=live.__getitem__)
    return LiveSet(
        live[largest],
        largest.name,
        read=sum(
            product.layers * math.ceil(product.columns / columns_at_a_time) * product.operand * entry
            for product in spilled
        ),
        written=sum(product.layers * product.operand * entry for product in spilled),
        capacity=sbuf_bytes(chip),
    )


def products(config: ModelConfig, tp_degree: int) -> Iterator[Product]:
    """Return the products of a model's layers with weights, without the router's."""
    rank, hidden = config.rank_dimensions(tp_degree), config.hidden_size
    gates = 2 if config.has_gated_mlp else 1

    def product(name: str, operand: int, result: int, layers: int) -> Product:
        return Product(name, operand, result, result, layers)

    mamba = config.layers_with(MAMBA)
    if mamba:
        inner = rank.mamba_intermediate_size
        yield product("Mamba's first", hidden, inner + rank.mamba_conv_dim + rank.mamba_heads, mamba)
        yield product("Mamba's last", inner, hidden, mamba)
    attention = config.layers_with(ATTENTION)
    if attention:
        query = rank.attention_heads * config.head_dim
        yield product("attention's first", hidden, query + 2 * rank.key_value_heads * config.head_dim, attention)
        yield product("attention's last", query, hidden, attention)
    all_parts = [config.parts(kind) for kind in config.layer_types]
    for width, layers in Counter(parts.mlp_width // tp_degree for parts in all_parts if parts.mlp_width).items():
        yield product("MLP's first", hidden, gates * width, layers)
        yield product("MLP's last", width, hidden, layers)
    with_experts = sum(parts.has_experts for parts in all_parts)
    if with_experts:
        width = gates * rank.intermediate_size
        columns = config.num_experts_per_tok * width
        inner = config.expert_hidden_size
        yield Product("experts' first", inner, width + inner, columns, with_experts)
        if config.expert_latent_size:
            yield product("latent space's first", hidden, inner, with_experts)
            yield product("latent space's last", inner, hidden, with_experts)
