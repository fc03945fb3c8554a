"""How large the parts of a model are, from its config alone: weights, state, cache. Needs no torch."""

from __future__ import annotations

from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig

Shape = tuple[int, ...]

FLOAT32_BYTES = 4  # of an SSM state's number by default, whatever the model's dtype


def parameter_shapes(config: GraniteMoeHybridConfig) -> dict[str, Shape]:
    """The shape of each tensor of the whole model, by its published name; a head that is the embedding is not there."""
    embedding = (config.vocab_size, config.hidden_size)
    shapes = {"model.embed_tokens.weight": embedding}
    for index, kind in enumerate(config.layer_types):
        layer = _mixer_shapes(config, kind == MAMBA) | _feed_forward_shapes(config)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = embedding
    return shapes


def mamba_state_shapes(
    config: GraniteMoeHybridConfig, tp_degree: int = 1, kernel_layout: bool = False
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of one rank's conv_state and ssm_state of one sequence in one Mamba layer."""
    dimensions = config.rank_dimensions(tp_degree)
    conv_shape = (dimensions.mamba_conv_dim, config.mamba_d_conv - 1)
    heads, head_dim, d_state = dimensions.mamba_heads, config.mamba_d_head, config.mamba_d_state
    return conv_shape, (d_state, heads, head_dim) if kernel_layout else (heads, head_dim, d_state)


def sequence_bytes(
    config: GraniteMoeHybridConfig, itemsize: int, tp_degree: int = 1, state_itemsize: int = FLOAT32_BYTES
) -> int:
    """Bytes of state that a rank holds of one sequence whatever its length: all its Mamba layers.

    Args:
        itemsize: bytes of a number in the model's dtype.
        state_itemsize: of one in an SSM state's.
    """
    if MAMBA not in config.layer_types:
        return 0
    (conv_dim, window), (heads, head_dim, d_state) = mamba_state_shapes(config, tp_degree)
    per_layer = conv_dim * window * itemsize + heads * head_dim * d_state * state_itemsize
    return config.layer_types.count(MAMBA) * per_layer


def token_bytes(config: GraniteMoeHybridConfig, itemsize: int, tp_degree: int = 1) -> int:
    """Bytes of keys and values that each token of a sequence adds on a rank: all attention layers.

    Args:
        itemsize: bytes of a number in the model's dtype.
    """
    attention_layers = len(config.layer_types) - config.layer_types.count(MAMBA)
    kv_heads = config.rank_dimensions(tp_degree).key_value_heads
    return attention_layers * 2 * kv_heads * config.head_dim * itemsize


def _mixer_shapes(config: GraniteMoeHybridConfig, is_mamba: bool) -> dict[str, Shape]:
    hidden = config.hidden_size
    if not is_mamba:
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        shapes: dict[str, Shape] = {}
        for name, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
            shapes[f"self_attn.{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                shapes[f"self_attn.{name}_proj.bias"] = (rows,)
        return shapes
    inner, heads = config.mamba_intermediate_size, config.mamba_n_heads
    conv = config.rank_dimensions().mamba_conv_dim
    projected = inner + conv + heads
    shapes = {
        "mamba.in_proj.weight": (projected, hidden),
        "mamba.conv1d.weight": (conv, 1, config.mamba_d_conv),
        "mamba.dt_bias": (heads,),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (hidden, inner),
    }
    if config.mamba_conv_bias:
        shapes["mamba.conv1d.bias"] = (conv,)
    if config.mamba_proj_bias:
        shapes |= {"mamba.in_proj.bias": (projected,), "mamba.out_proj.bias": (hidden,)}
    return shapes


def _feed_forward_shapes(config: GraniteMoeHybridConfig) -> dict[str, Shape]:
    hidden, shared = config.hidden_size, config.shared_intermediate_size
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "shared_mlp.input_linear.weight": (2 * shared, hidden),
        "shared_mlp.output_linear.weight": (hidden, shared),
    }
    if config.num_local_experts:
        experts, width = config.num_local_experts, config.intermediate_size
        shapes |= {
            "block_sparse_moe.router.layer.weight": (experts, hidden),
            "block_sparse_moe.input_linear.weight": (experts, 2 * width, hidden),
            "block_sparse_moe.output_linear.weight": (experts, hidden, width),
        }
    return shapes
