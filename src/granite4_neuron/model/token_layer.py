"""A decoder layer with kernels for one token of each of few sequences, which fuse products with their neighbours."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch

from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.norm import why_not_fusible
from granite4_neuron.model.step import Step
from granite4_neuron.state.hybrid_state import KeyValueState, LayerState, MambaState


class TokenLayer(DecoderLayer):
    """A layer that uses `Operators.token_layer` in decode, up to the number of sequences that these are for."""

    @staticmethod
    def why_not(layer: DecoderLayer) -> str | None:
        """Return why the kernels do not support a layer, as a clause; None if they do."""
        if not (layer.has_mixer and layer.has_feed_forward):
            return "they are for layers with a mixer and an MLP"
        output = layer.mamba.out_proj if layer.is_mamba else layer.self_attn.o_proj
        if (degree := output.parallel.degree) > 1:
            return f"they are for a whole model, and this is a part of {degree}"
        if output.bias is not None:
            return "they take no biases of projections"
        if layer.is_mamba and (groups := layer.mamba.n_groups) > 1:
            return f"they normalise all channels together, and here are {groups} groups"
        return why_not_fusible(layer.input_layernorm)

    @property
    def _kernels(self) -> ModuleType | SimpleNamespace:
        kernels = self.operators.token_layer
        assert kernels is not None  # `forms_of`
        return kernels

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: Step,
        state: LayerState,
        rotary: RotaryTables | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute `DecoderLayer.forward`; of decode there are no inputs of `advance`."""
        if step.verifies or not step.is_decode or len(hidden_states) > self._kernels.MOST_SEQUENCES:
            return super().forward(hidden_states, step, state, rotary)
        x = hidden_states[:, 0]
        if isinstance(state, MambaState):
            x = self._mamba(x, step, state)
        elif isinstance(state, KeyValueState):
            x = self._attention(x, step, state, rotary)
        return self._feed_forward(x, step.lengths).view(hidden_states.shape), None

    def _mamba(self, x: torch.Tensor, step: Step, state: MambaState) -> torch.Tensor:
        operators, weights = self._kernels, self.mamba_weights()
        mixer = weights.mixer
        convolution = mixer.conv_weight.squeeze(1), mixer.conv_bias, state.conv_state, step.lengths
        constants = dict(num_heads=len(mixer.dt_bias), eps=weights.eps)
        inputs = operators.mixer_inputs(x, weights.norm, weights.in_proj, *convolution, **constants)
        of_heads = mixer.dt_bias, mixer.A_log, mixer.D
        gated = operators.advance_mixer(inputs, *of_heads, state.ssm_state, step.lengths, *mixer.time_step_limit)
        product = weights.gated_norm, weights.out_proj, weights.residual_multiplier, weights.eps
        return operators.add_product(x, gated, *product)

    def _attention(
        self, x: torch.Tensor, step: Step, state: KeyValueState, rotary: RotaryTables | None
    ) -> torch.Tensor:
        operators, weights = self._kernels, self.attention_weights()
        matrices = weights.q_proj, weights.k_proj, weights.v_proj
        widths = [matrix.shape[0] for matrix in matrices]
        projected = operators.project_heads(x, weights.norm, *matrices, weights.eps).split(widths, 1)
        output = self.self_attn.attend([part[:, None] for part in projected], step, state, rotary)
        product = None, weights.o_proj, weights.residual_multiplier, weights.eps
        return operators.add_product(x, output[:, 0], *product)

    def _feed_forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        operators, weights = self._kernels, self.feed_forward_weights()
        norm, eps, alpha = weights.norm, weights.eps, weights.residual_multiplier
        if weights.router is None:
            activated = operators.activate(x, norm, weights.input, eps)
            return operators.add_product(x, activated, None, weights.output, alpha, eps)
        normed, logits = operators.route(x, norm, weights.router, eps)
        activated, chosen = operators.activate_experts(
            normed, weights.input, weights.expert_input, logits, lengths, weights.top_k
        )
        return operators.add_feed_forward(
            x, activated, weights.output, chosen, weights.expert_output, logits, lengths, alpha
        )
