"""Sizes of a model's state and cache, from its config alone. Needs no torch."""

from __future__ import annotations

from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig

FLOAT32_BYTES = 4  # a number of an SSM state by default, whatever the model's dtype


def mamba_state_shapes(
    config: ModelConfig, tp_degree: int = 1, kernel_layout: bool = False
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shapes of conv_state and ssm_state of one sequence in one Mamba layer on one rank."""
    dimensions = config.rank_dimensions(tp_degree)
    conv_shape = (dimensions.mamba_conv_dim, config.mamba_d_conv - 1)
    heads, head_dim, d_state = dimensions.mamba_heads, config.mamba_d_head, config.mamba_d_state
    return conv_shape, (d_state, heads, head_dim) if kernel_layout else (heads, head_dim, d_state)


def sequence_bytes(config: ModelConfig, itemsize: int, tp_degree: int = 1, state_itemsize: int = FLOAT32_BYTES) -> int:
    """Return the bytes of a sequence's recurrent state on a rank, in all Mamba layers; they do not depend on its
    length.

    Args:
        itemsize: bytes of a number in the model's dtype.
        state_itemsize: bytes of a number in the SSM states' dtype.
    """
    if not config.layers_with(MAMBA):
        return 0
    (conv_dim, window), (heads, head_dim, d_state) = mamba_state_shapes(config, tp_degree)
    per_layer = conv_dim * window * itemsize + heads * head_dim * d_state * state_itemsize
    return config.layers_with(MAMBA) * per_layer


def token_bytes(config: ModelConfig, itemsize: int, tp_degree: int = 1) -> int:
    """Return the bytes of keys and values that each token adds on a rank, in all attention layers.

    Args:
        itemsize: bytes of a number in the model's dtype.
    """
    kv_heads = config.rank_dimensions(tp_degree).key_value_heads
    return config.layers_with(ATTENTION) * 2 * kv_heads * config.head_dim * itemsize
