"""A decoder layer of a token of each sequence, by operators that join products with what is around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.step import DenseStep, Step
from granite4_neuron.state.hybrid_state import KeyValueState, MambaState

if TYPE_CHECKING:
    from granite4_neuron.model.modeling_granite_moe_hybrid import DecoderLayer


def takes(layer: DecoderLayer, hidden_states: torch.Tensor, step: Step) -> bool:
    """Return whether there are such operators, and the layer and the step are what they are for: a whole layer without
    biases of projections and with one norm of all channels, and decode of not too many sequences.
    """
    operators = layer.operators.token_layer
    if operators is None or len(hidden_states) > operators.MOST_SEQUENCES:
        return False
    mixer = layer.mamba if layer.is_mamba else layer.self_attn
    output = mixer.out_proj if layer.is_mamba else mixer.o_proj
    is_whole = output.parallel.degree == 1 and output.bias is None
    has_one_norm = not layer.is_mamba or mixer.n_groups == 1
    return is_whole and has_one_norm and isinstance(step, DenseStep) and step.is_decode and not step.verifies


def forward(
    layer: DecoderLayer,
    hidden_states: torch.Tensor,
    step: DenseStep,
    state: MambaState | KeyValueState,
    rotary: RotaryTables | None,
) -> torch.Tensor:
    """Compute `DecoderLayer.forward` for hidden_states [batch, 1, hidden_size]."""
    x = hidden_states[:, 0]
    x = _mamba(layer, x, step, state) if layer.is_mamba else _attention(layer, x, step, state, rotary)
    return _feed_forward(layer, x, step.lengths).view(hidden_states.shape)


def _mamba(layer: DecoderLayer, x: torch.Tensor, step: DenseStep, state: MambaState) -> torch.Tensor:
    operators, mamba, norm = layer.operators.token_layer, layer.mamba, layer.input_layernorm
    convolution = mamba.conv1d.weight.squeeze(1), mamba.conv1d.bias, state.conv_state, step.lengths
    constants = dict(num_heads=mamba.num_heads, eps=norm.eps)
    inputs = operators.mixer_inputs(x, norm.weight, mamba.in_proj.weight, *convolution, **constants)
    of_heads = mamba.dt_bias, mamba.A_log, mamba.D
    gated = operators.advance_mixer(inputs, *of_heads, state.ssm_state, step.lengths, *mamba.time_step_limit)
    gated_norm = mamba.norm
    return operators.add_product(
        x, gated, gated_norm.weight, mamba.out_proj.weight, layer.residual_multiplier, gated_norm.eps
    )


def _attention(
    layer: DecoderLayer, x: torch.Tensor, step: DenseStep, state: KeyValueState, rotary: RotaryTables | None
) -> torch.Tensor:
    operators, attention, norm = layer.operators.token_layer, layer.self_attn, layer.input_layernorm
    weights = [projection.weight for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    projected = operators.project_heads(x, norm.weight, *weights, norm.eps).split(list(map(len, weights)), 1)
    output = attention.attend([part[:, None] for part in projected], step, state, rotary)
    return operators.add_product(x, output[:, 0], None, attention.o_proj.weight, layer.residual_multiplier, norm.eps)


def _feed_forward(layer: DecoderLayer, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    operators, mlp, experts = layer.operators.token_layer, layer.shared_mlp, layer.block_sparse_moe
    norm, eps = layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps
    alpha = layer.residual_multiplier
    first, second = mlp.input_linear.weight, mlp.output_linear.weight
    if experts is None:
        return operators.add_product(x, operators.activate(x, norm, first, eps), None, second, alpha, eps)
    w1, w2 = experts.input_linear.weight, experts.output_linear.weight
    normed, logits = operators.route(x, norm, experts.router.layer.weight, eps)
    activated, chosen = operators.activate_experts(normed, first, w1, logits, lengths, experts.top_k)
    return operators.add_feed_forward(x, activated, second, chosen, w2, logits, lengths, alpha)
