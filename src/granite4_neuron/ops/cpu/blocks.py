"""Half a decoder layer as one call of a fused kernel: the time that Python takes between short kernels is saved.

A block is bound to a layer's weights by where they are, not by their values: it reads them anew in each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.ops.cpu.functions import is_few, kernel
from granite4_neuron.ops.launch_parameters import LaunchParameters
from granite4_neuron.ops.operators import FeedForwardWeights, MambaWeights


class MambaBlock:
    """The half that has a Mamba-2 layer: hidden_states + residual_multiplier * out_proj(rms_norm_gated(y, z)), where
    y = mamba_mixer(x, B, C, dt) and (z, x, B, C, dt) = in_proj(rms_norm(hidden_states)).

    The definition is `layers.mamba2.Mamba2`, between norm and residual.

    Args:
        weights: of the layer.
        n_groups: of B and C.
        time_step_limit: lowest and highest step size.
        eps: of both norms.
        residual_multiplier: of what is added.
    """

    def __init__(
        self,
        weights: MambaWeights,
        n_groups: int,
        time_step_limit: tuple[float, float],
        eps: float,
        residual_multiplier: float,
    ):
        in_proj, out_proj = (_linear(projection) for projection in (weights.in_proj, weights.out_proj))
        conv1d = [(weights.conv1d, "weight"), (weights.conv1d, "bias")]
        mixer = [(weights.mixer, name) for name in ("dt_bias", "A_log", "D")]
        norm, gated_norm = (weights.norm, "weight"), (weights.gated_norm, "weight")
        self._weights = (norm, *in_proj, *conv1d, *mixer, gated_norm, *out_proj)
        self._n_groups = n_groups
        self._constants = (*time_step_limit, eps, residual_multiplier)
        self._run = kernel("mamba_block")

    def __call__(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        rows: Sequence[torch.Tensor],
        launch_parameters: LaunchParameters,
    ) -> torch.Tensor:
        """As hidden_states, [batch, tokens, hidden_size] in float32. States and rows are those of `mamba_mixer`."""
        weights = [parameters[name] for parameters, name in self._weights]
        sizes = (self._n_groups, launch_parameters.chunk_size, launch_parameters.heads_per_task)
        return self._run(hidden_states, weights, conv_state, ssm_state, rows, sizes, self._constants)


class FeedForwardBlock:
    """The half that has the MLPs. The definition is `layers.moe.feed_forward`.

    Args:
        weights: of the layer.
        top_k: experts per token; 0 without experts.
        eps: of the norm.
        residual_multiplier: of what is added.
    """

    def __init__(self, weights: FeedForwardWeights, top_k: int, eps: float, residual_multiplier: float):
        self._weights = [(weights.norm, "weight"), *_linear(weights.mlp_input, weights.mlp_output, bias=False)]
        if top_k:
            experts = _linear(weights.experts_input, weights.experts_output, bias=False)
            self._weights += [(weights.router, "weight"), *experts]
        self._settings = (top_k, eps, residual_multiplier)
        self._run = kernel("feed_forward_block")

    def takes(self, hidden_states: torch.Tensor) -> bool:
        """Whether it computes so many tokens [batch, tokens, hidden_size]: with experts a few."""
        return self._settings[0] == 0 or is_few(hidden_states)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As hidden_states, [batch, tokens, hidden_size] in float32."""
        weights = [parameters[name] for parameters, name in self._weights]
        return self._run(hidden_states, weights, *self._settings)


def _linear(*projections, bias: bool = True):
    names = ("weight", "bias", "weight_scale") if bias else ("weight", "weight_scale")
    return [(projection, name) for projection in projections for name in names]
