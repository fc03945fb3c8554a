"""The weights and constants of a decoder layer, as read by all of its fast forms and by vLLM's layers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from granite4_neuron.ops.stochastic_rounding import Rounding
from granite4_neuron.ops.weight import Weight


class MixerWeights(NamedTuple):
    """The part of a Mamba-2 layer between in_proj and the gated norm.

    conv_weight: [conv_dim, 1, d_conv].
    conv_bias: [conv_dim] or None.
    dt_bias, A_log, D: [num_heads], in any dtype.
    n_groups: groups of heads that share B and C.
    time_step_limit: lowest and highest dt.
    rounding: for an ssm_state that is not float32.
    """

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    D: torch.Tensor
    n_groups: int
    time_step_limit: tuple[float, float]
    rounding: Rounding = Rounding()


class MambaWeights(NamedTuple):
    """The half of a decoder layer with Mamba-2."""

    norm: torch.Tensor
    in_proj: Weight
    in_bias: torch.Tensor | None
    mixer: MixerWeights
    gated_norm: torch.Tensor
    out_proj: Weight
    out_bias: torch.Tensor | None
    eps: float
    residual_multiplier: float


class AttentionWeights(NamedTuple):
    """The half of a decoder layer with attention. scale: multiplies the scores."""

    norm: torch.Tensor
    q_proj: Weight
    q_bias: torch.Tensor | None
    k_proj: Weight
    k_bias: torch.Tensor | None
    v_proj: Weight
    v_bias: torch.Tensor | None
    o_proj: Weight
    o_bias: torch.Tensor | None
    head_dim: int
    scale: float
    eps: float
    residual_multiplier: float


class FeedForwardWeights(NamedTuple):
    """The half of a decoder layer with the MLP and the experts.

    input, output: of the MLP.
    router, expert_input, expert_output: None without experts.
    top_k: experts per token.
    correction_bias: for `ops.topk_sigmoid`, like the fields after it; it and the router are then in float32. None for
        `ops.topk_softmax`.
    latent_input, latent_output: the projections before and after the experts; None if these take hidden states.
    """

    norm: torch.Tensor
    input: Weight
    output: Weight
    router: Weight | None
    expert_input: Weight | None
    expert_output: Weight | None
    top_k: int
    eps: float
    residual_multiplier: float
    correction_bias: torch.Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    scaling_factor: float = 1.0
    latent_input: Weight | None = None
    latent_output: Weight | None = None
