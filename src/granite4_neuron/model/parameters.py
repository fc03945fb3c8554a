"""The model's parameters: published names, shapes, and how ranks split them. Needs no torch.

The modules in this folder have the same parameters under the same names; a test compares them with this table.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from granite4_neuron.config import MAMBA, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_ROUTER = "block_sparse_moe.router.layer.weight"

Axes = tuple[int | tuple[int, ...], ...]

_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True)
class Parameter:
    """A tensor of the whole model, or one rank's part of it.

    axes: the size of each axis; for the axis that ranks split, the sizes of the blocks that lie along it one after
        another. Every rank takes a part of each of these.
    is_matrix: whether it is [rows, columns], or such a matrix for each expert, as operators multiply by it.
    may_be_quantized: whether `--quantize` quantizes it. Rounding a router would change which experts a token gets.
    """

    axes: Axes
    is_matrix: bool = False
    may_be_quantized: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis if isinstance(axis, int) else sum(axis) for axis in self.axes)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def split_axis(self) -> int | None:
        """The axis that ranks split; None if each of them has the whole tensor."""
        return next((number for number, axis in enumerate(self.axes) if isinstance(axis, tuple)), None)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of the blocks along that axis; none if each rank has the whole tensor."""
        return next((axis for axis in self.axes if isinstance(axis, tuple)), ())

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a matrix for each expert."""
        return self.is_matrix and len(self.axes) == 3


def parameters(config: ModelConfig, tp_degree: int = 1) -> dict[str, Parameter]:
    """Return all parameters of a model, as one of `tp_degree` ranks has them; no head that is the embedding.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    table = _table(config, tp_degree)
    found = {EMBEDDING: table[EMBEDDING]}
    for number, kind in enumerate(config.layer_types):
        parts = {"input_layernorm", "post_attention_layernorm", "shared_mlp", "mamba" if kind == MAMBA else "self_attn"}
        if config.num_local_experts:
            parts.add("block_sparse_moe")
        layer_table = {name: one for name, one in table.items() if name.partition(".")[0] in parts}
        found |= {f"model.layers.{number}.{name}": one for name, one in layer_table.items()}
    found[NORM] = table[NORM]
    if not config.tie_word_embeddings:
        found[HEAD] = table[HEAD]
    return found


def parameter(name: str, config: ModelConfig, tp_degree: int = 1) -> Parameter:
    """Return the parameter of this name, with or without the layer's part "model.layers.3."; else as `parameters`."""
    return _table(config, tp_degree)[_LAYER.sub("", name)]


def matmul_weights(config: ModelConfig, tp_degree: int = 1) -> dict[str, Parameter]:
    """Return the matrices that multiply hidden states: not the embedding, and always the head."""
    table = parameters(replace(config, tie_word_embeddings=False), tp_degree)
    return {name: one for name, one in table.items() if one.is_matrix and name != EMBEDDING}


def _table(config: ModelConfig, tp_degree: int) -> dict[str, Parameter]:
    """Return the parameters of every kind of layer by their names within a layer, and those outside of layers."""
    rank, hidden = config.rank_dimensions(tp_degree), config.hidden_size
    inner, heads = rank.mamba_intermediate_size, rank.mamba_heads
    states = rank.mamba_groups * config.mamba_d_state
    convolved = (inner, states, states)  # x, B, C
    query, key = rank.attention_heads * config.head_dim, rank.key_value_heads * config.head_dim
    experts, width, shared = config.num_local_experts, rank.intermediate_size, rank.shared_intermediate_size
    matrices: dict[str, Axes] = {
        EMBEDDING: ((rank.vocab_size,), hidden),
        HEAD: ((rank.vocab_size,), hidden),
        "mamba.in_proj.weight": ((inner, *convolved, heads), hidden),  # z, x, B, C, dt
        "mamba.out_proj.weight": (hidden, (inner,)),
        "self_attn.q_proj.weight": ((query,), hidden),
        "self_attn.k_proj.weight": ((key,), hidden),
        "self_attn.v_proj.weight": ((key,), hidden),
        "self_attn.o_proj.weight": (hidden, (query,)),
        "shared_mlp.input_linear.weight": ((shared, shared), hidden),  # gate, up
        "shared_mlp.output_linear.weight": (hidden, (shared,)),
        _ROUTER: (experts, hidden),
        "block_sparse_moe.input_linear.weight": (experts, (width, width), hidden),  # gate, up
        "block_sparse_moe.output_linear.weight": (experts, hidden, (width,)),
    }
    others: dict[str, Axes] = {
        NORM: (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mamba.conv1d.weight": (convolved, 1, config.mamba_d_conv),
        "mamba.dt_bias": ((heads,),),
        "mamba.A_log": ((heads,),),
        "mamba.D": ((heads,),),
        "mamba.norm.weight": ((inner,),),
    }
    for module in _biased_modules(config):
        others[f"{module}.bias"] = (matrices | others)[f"{module}.weight"][:1]
    table = {name: Parameter(axes, True, name not in (EMBEDDING, _ROUTER)) for name, axes in matrices.items()}
    return table | {name: Parameter(axes) for name, axes in others.items()}


def _biased_modules(config: ModelConfig) -> list[str]:
    modules = []
    if config.mamba_conv_bias:
        modules.append("mamba.conv1d")
    if config.mamba_proj_bias:
        modules += ["mamba.in_proj", "mamba.out_proj"]
    if config.attention_bias:
        modules += [f"self_attn.{name}_proj" for name in "qkvo"]
    return modules
