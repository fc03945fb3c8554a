"""Half a decoder layer as one call of a fused kernel: the time that Python takes between short kernels is saved.

A block is bound to a layer's packed matrices, and to where its other weights are: these it reads anew in each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.ops.cpu.build import kernel
from granite4_neuron.ops.cpu.functions import mamba_mixer
from granite4_neuron.ops.cpu.weights import PackedWeight
from granite4_neuron.ops.launch_parameters import LaunchParameters
from granite4_neuron.ops.operators import FeedForwardWeights, MambaWeights
from granite4_neuron.ops.stochastic_rounding import Rounding


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
        rounding: of an SSM state that is not float32.
    """

    def __init__(
        self,
        weights: MambaWeights,
        n_groups: int,
        time_step_limit: tuple[float, float],
        eps: float,
        residual_multiplier: float,
        rounding: Rounding,
    ):
        self._weights = weights
        self._matrices = [weights.in_proj.packed, weights.out_proj.packed]
        self._n_groups = n_groups
        self._constants = (*time_step_limit, eps, residual_multiplier)
        self._rounding = rounding
        self._run = kernel("mamba_block")

    def __call__(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        rows: Sequence[torch.Tensor],
        launch_parameters: LaunchParameters,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As hidden_states, [batch, tokens, hidden_size] in float32, and what `advance` takes. States and rows are
        those of `mamba_mixer`.
        """
        weights, states, sizes = self._weights.now(), [conv_state, ssm_state], self._sizes(launch_parameters)
        run, matrices, constants = self._run, self._matrices, self._constants
        return run(hidden_states, matrices, weights, states, rows, sizes, constants, self._rounding)

    def advance(
        self,
        inputs: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        rows: Sequence[torch.Tensor],
        launch_parameters: LaunchParameters,
    ) -> None:
        """`layers.mamba2.Mamba2.advance`."""
        weights, sizes, limits = self._weights.mixer_now(), self._sizes(launch_parameters), self._constants[:2]
        mamba_mixer(inputs, weights, conv_state, ssm_state, rows, sizes, limits, self._rounding)

    def _sizes(self, launch_parameters: LaunchParameters) -> tuple[int, int, int]:
        return self._n_groups, launch_parameters.chunk_size, launch_parameters.heads_per_task


class PagedMambaBlock:
    """`MambaBlock` over states in pages: `paged_mamba_mixer` is the mixer. Arguments are those of `MambaBlock`; weights
    are the matrices and, in their order, the other tensors of `MambaWeights.now`.
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
    """The half that has the MLPs. The definition is `layers.moe.feed_forward`.

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
