"""The model's parameters: published names, shapes, and how ranks split them. Needs no torch.

The modules in this folder have the same parameters under the same names; a test compares them with this table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.state.sizes import FLOAT32_BYTES

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_ROUTER = "block_sparse_moe.router.layer.weight"
_CORRECTION_BIAS = "block_sparse_moe.router.e_score_correction_bias"

Axes = tuple[int | tuple[int, ...], ...]

_LAYER = re.compile(r"(model|mtp)\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """A tensor of the whole model, or one rank's part of it.

    axes: the size of each axis; for the axis that ranks split, the sizes of the consecutive blocks along it. Every rank
        takes a part of each block.
    is_matrix: whether it is [rows, columns], or such a matrix for each expert, as operators multiply by it.
    may_be_quantized: whether `--quantize` quantizes it. Rounding a router would change which experts a token gets.
    keeps_float32: whether it is in float32 whatever the model's dtype.
    """

    axes: Axes
    is_matrix: bool = False
    may_be_quantized: bool = False
    keeps_float32: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis if isinstance(axis, int) else sum(axis) for axis in self.axes)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def nbytes(self, itemsize: int) -> int:
        """Return its size in bytes, where a number of the model's dtype takes `itemsize`."""
        return self.numel * (FLOAT32_BYTES if self.keeps_float32 else itemsize)

    @property
    def split_axis(self) -> int | None:
        """The axis that ranks split; None if each of them has the whole tensor."""
        return next((number for number, axis in enumerate(self.axes) if isinstance(axis, tuple)), None)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of the blocks along `split_axis`; none if each rank has the whole tensor."""
        return next((axis for axis in self.axes if isinstance(axis, tuple)), ())

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a matrix for each expert."""
        return self.is_matrix and len(self.axes) == 3


def parameters(config: ModelConfig, tp_degree: int = 1) -> dict[str, Parameter]:
    """Return all parameters of a model as one of `tp_degree` ranks holds them. A tied head is not among them.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    outside = _outside_of_layers(config, tp_degree)
    of_kinds = {kind: _of_layer(config, kind, tp_degree) for kind in dict.fromkeys(config.layer_types)}
    found = {EMBEDDING: outside[EMBEDDING]}
    for number, kind in enumerate(config.layer_types):
        found |= {f"model.layers.{number}.{name}": one for name, one in of_kinds[kind].items()}
    found[NORM] = outside[NORM]
    if not config.tie_word_embeddings:
        found[HEAD] = outside[HEAD]
    if (of_mtp := config.mtp_config) is not None:
        found |= {name: one for name, one in outside.items() if name.startswith("mtp.")}
        for number, kind in enumerate(of_mtp.layer_types):
            found |= {f"mtp.layers.{number}.{name}": one for name, one in _of_layer(config, kind, tp_degree).items()}
    return found


def weight_bytes(config: ModelConfig, itemsize: int, quantized: Mapping[str, int] | None = None) -> int:
    """Return the bytes of all weights as a checkpoint has them; kernels may add padding in memory.

    Args:
        itemsize: the bytes of a number of the model's dtype.
        quantized: the bytes of each quantized matrix, by its name.
    """
    stored = {name: one.nbytes(itemsize) for name, one in parameters(config).items()}
    return sum((stored | dict(quantized or {})).values())


def parameter(name: str, config: ModelConfig, tp_degree: int = 1) -> Parameter:
    """Return the parameter of this name; raises like `parameters`. For a name without the prefix "model.layers.3.",
    return the parameter of the first layer that has one.
    """
    match = _LAYER.match(name)
    if match is not None:
        of_part = config if match[1] == "model" else config.mtp_config
        assert of_part is not None  # the model has this parameter
        return _of_layer(config, of_part.layer_types[int(match[2])], tp_degree)[name[match.end() :]]
    tables = (_of_layer(config, kind, tp_degree) for kind in dict.fromkeys(config.layer_types))
    return next(table[name] for table in (_outside_of_layers(config, tp_degree), *tables) if name in table)


def matmul_weights(config: ModelConfig, tp_degree: int = 1) -> dict[str, Parameter]:
    """Return the matrices that multiply hidden states: always the head, never the embedding."""
    table = parameters(replace(config, tie_word_embeddings=False), tp_degree)
    return {name: one for name, one in table.items() if one.is_matrix and name != EMBEDDING}


def _outside_of_layers(config: ModelConfig, tp_degree: int) -> dict[str, Parameter]:
    vocabulary, hidden = config.rank_dimensions(tp_degree).vocab_size, config.hidden_size
    return {
        EMBEDDING: Parameter(((vocabulary,), hidden), is_matrix=True),
        NORM: Parameter((hidden,)),
        HEAD: Parameter(((vocabulary,), hidden), is_matrix=True, may_be_quantized=True),
        "mtp.eh_proj.weight": Parameter((hidden, 2 * hidden), is_matrix=True, may_be_quantized=True),
        **{f"mtp.{name}.weight": Parameter((hidden,)) for name in ("enorm", "hnorm", "norm")},
    }


def _of_layer(config: ModelConfig, kind: str, tp_degree: int) -> dict[str, Parameter]:
    """Return the parameters of a layer of a kind by their names within the layer."""
    parts, hidden = config.parts(kind), config.hidden_size
    matrices: dict[str, Axes] = {}
    others: dict[str, Axes] = {"input_layernorm.weight": (hidden,)}
    biased: list[str] = []
    if parts.mixer == MAMBA:
        _add_mamba(config, tp_degree, matrices, others, biased)
    elif parts.mixer is not None:
        _add_attention(config, tp_degree, matrices, biased)
    if parts.mixer is not None and parts.mlp_width:
        others["post_attention_layernorm.weight"] = (hidden,)
    gates = 2 if config.has_gated_mlp else 1
    if parts.has_experts:
        experts, width = config.num_local_experts, config.rank_dimensions(tp_degree).intermediate_size
        inner = config.expert_hidden_size
        matrices[_ROUTER] = (experts, hidden)
        matrices["block_sparse_moe.input_linear.weight"] = (experts, (width,) * gates, inner)  # gate, up
        matrices["block_sparse_moe.output_linear.weight"] = (experts, inner, (width,))
        if config.expert_latent_size:
            matrices["block_sparse_moe.fc1_latent_proj.weight"] = (inner, hidden)
            matrices["block_sparse_moe.fc2_latent_proj.weight"] = (hidden, inner)
        if config.has_correction_bias:
            others[_CORRECTION_BIAS] = (experts,)
    if parts.mlp_width:
        width = parts.mlp_width // tp_degree
        matrices["shared_mlp.input_linear.weight"] = ((width,) * gates, hidden)  # gate, up
        matrices["shared_mlp.output_linear.weight"] = (hidden, (width,))
    for module in biased:
        others[f"{module}.bias"] = (matrices | others)[f"{module}.weight"][:1]
    in_float32 = (_ROUTER, _CORRECTION_BIAS) if config.has_correction_bias else ()
    table = {name: Parameter(axes, True, name != _ROUTER, name in in_float32) for name, axes in matrices.items()}
    return table | {name: Parameter(axes, keeps_float32=name in in_float32) for name, axes in others.items()}


def _add_mamba(
    config: ModelConfig, tp_degree: int, matrices: dict[str, Axes], others: dict[str, Axes], biased: list[str]
) -> None:
    rank, hidden = config.rank_dimensions(tp_degree), config.hidden_size
    inner, heads = rank.mamba_intermediate_size, rank.mamba_heads
    states = rank.mamba_groups * config.mamba_d_state
    convolved = (inner, states, states)  # x, B, C
    matrices["mamba.in_proj.weight"] = ((inner, *convolved, heads), hidden)  # z, x, B, C, dt
    matrices["mamba.out_proj.weight"] = (hidden, (inner,))
    others |= {
        "mamba.conv1d.weight": (convolved, 1, config.mamba_d_conv),
        "mamba.dt_bias": ((heads,),),
        "mamba.A_log": ((heads,),),
        "mamba.D": ((heads,),),
        "mamba.norm.weight": ((inner,),),
    }
    if config.mamba_conv_bias:
        biased.append("mamba.conv1d")
    if config.mamba_proj_bias:
        biased += ["mamba.in_proj", "mamba.out_proj"]


def _add_attention(config: ModelConfig, tp_degree: int, matrices: dict[str, Axes], biased: list[str]) -> None:
    rank, hidden = config.rank_dimensions(tp_degree), config.hidden_size
    query, key = rank.attention_heads * config.head_dim, rank.key_value_heads * config.head_dim
    matrices["self_attn.q_proj.weight"] = ((query,), hidden)
    matrices["self_attn.k_proj.weight"] = ((key,), hidden)
    matrices["self_attn.v_proj.weight"] = ((key,), hidden)
    matrices["self_attn.o_proj.weight"] = (hidden, (query,))
    if config.attention_bias:
        biased += [f"self_attn.{name}_proj" for name in "qkvo"]
