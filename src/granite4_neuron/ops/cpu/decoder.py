"""All decoder layers as one call of a fused kernel: the time that Python takes between short kernels is saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.ops.cpu.build import kernel
from granite4_neuron.ops.cpu.functions import mamba_mixer
from granite4_neuron.ops.launch_parameters import LaunchParameters
from granite4_neuron.ops.operators import DecoderLayerWeights, MambaWeights
from granite4_neuron.ops.stochastic_rounding import Rounding


class DecoderLayers:
    """The decoder layers of a model, one after another. The definition is `modeling_granite_moe_hybrid`'s.

    It is bound to the layers' packed matrices, and to where their other weights are: these it reads anew in each call.

    Args:
        layers: the weights of each.
        config: of the whole model.
    """

    def __init__(self, layers: Sequence[DecoderLayerWeights], config: GraniteMoeHybridConfig):
        self._layers = layers
        self._matrices = [matrix.packed for layer in layers for matrix in layer.matrices()]
        seed, _, rounds = Rounding()
        self._sizes = (config.num_experts_per_tok if config.num_local_experts else 0, seed, rounds)
        self._n_groups, self._time_step_limit = config.mamba_n_groups, config.time_step_limit
        norms_and_sums = config.rms_norm_eps, config.residual_multiplier, config.attention_multiplier
        self._constants = (*config.time_step_limit, *norms_and_sums)
        self._run = kernel("decoder_layers")

    def __call__(
        self,
        hidden_states: torch.Tensor,
        states: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        launch_parameters: LaunchParameters,
        keep_inputs: bool,
    ) -> list[torch.Tensor]:
        """What becomes of hidden_states; with `keep_inputs`, behind it what `advance` takes.

        Args:
            hidden_states: [batch, tokens, hidden_size], float32.
            states: `HybridState.tensors`, advanced in place.
            rows: those of `mamba_mixer`; each row's slot in the caches of keys and values, [batch]; and `rotary_tables`
                of the tokens' positions where the model has rotary ones.
        """
        weights = [weight for layer in self._layers for weight in layer.now()]
        sizes = (*self._mixer_sizes(launch_parameters), *self._sizes)
        return self._run(hidden_states, self._matrices, weights, states, rows, sizes, self._constants, keep_inputs)

    def advance(
        self,
        kept_inputs: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        launch_parameters: LaunchParameters,
    ) -> None:
        """Advance the Mamba layers' states by inputs that a call kept, see `model.mamba2.Mamba2.advance`."""
        sizes, inputs = self._mixer_sizes(launch_parameters), iter(kept_inputs)
        for number, layer in enumerate(self._layers):
            if isinstance(layer.mixer, MambaWeights):
                state, weights = states[2 * number : 2 * number + 2], layer.mixer.mixer_now()
                of_layer = Rounding(stream=number)
                mamba_mixer(next(inputs), weights, *state, rows[:4], sizes, self._time_step_limit, of_layer)

    def _mixer_sizes(self, launch_parameters: LaunchParameters) -> tuple[int, int, int]:
        return self._n_groups, launch_parameters.chunk_size, launch_parameters.heads_per_task
