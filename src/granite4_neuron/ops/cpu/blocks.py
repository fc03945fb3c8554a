"""Half a decoder layer as one call of a fused kernel, for models whose other halves are not ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.ops.cpu.build import kernel
from granite4_neuron.ops.cpu.weights import PackedWeight
from granite4_neuron.ops.operators import FeedForwardWeights


class PagedMambaBlock:
    """The half that has a Mamba-2 layer, over states in pages: hidden_states + residual_multiplier *
    out_proj(rms_norm_gated(y, z)), where y = paged_mamba_mixer(x, B, C, dt) and (z, x, B, C, dt) =
    in_proj(rms_norm(hidden_states)).

    Args:
        matrices: in_proj and out_proj.
        weights: the other tensors, in the order of `MambaWeights.now`.
        sizes: as `paged_mamba_mixer` has them.
        constants: lowest and highest step size, eps of both norms, and the residual multiplier.
    """

    def __init__(
        self,
        matrices: Sequence[PackedWeight],
        weights: Sequence[torch.Tensor | None],
        sizes: tuple[int, int, int],
        constants: tuple[float, float, float, float],
    ):
        self._matrices, self._weights = [matrix.packed for matrix in matrices], list(weights)
        self._sizes, self._constants = sizes, constants
        self._run = kernel("paged_mamba_block")

    def __call__(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        rows: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """As hidden_states, [tokens, hidden_size] in float32. States and rows are those of `paged_mamba_mixer`."""
        states = [conv_state, ssm_state]
        return self._run(hidden_states, self._matrices, self._weights, states, rows, self._sizes, self._constants)


class FeedForwardBlock:
    """The half that has the MLPs. The definition is `model.moe.feed_forward`.

    Args:
        weights: of the layer.
        top_k: experts per token; 0 without experts.
        eps: of the norm.
        residual_multiplier: of what is added.
    """

    def __init__(self, weights: FeedForwardWeights, top_k: int, eps: float, residual_multiplier: float):
        self._norm = weights.norm
        self._matrices = [weight.packed for weight in weights.matrices]
        self._settings = (top_k, eps, residual_multiplier)
        self._run = kernel("feed_forward_block")

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As hidden_states, [batch, tokens, hidden_size] in float32."""
        return self._run(hidden_states, self._matrices, self._norm["weight"], *self._settings)
