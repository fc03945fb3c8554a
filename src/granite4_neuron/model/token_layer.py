"""A decoder layer with kernels for one token of each of few sequences; they join products with what is around them."""

from __future__ import annotations

import torch

from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.step import Step
from granite4_neuron.state.hybrid_state import KeyValueState, MambaState


class TokenLayer(DecoderLayer):
    """A layer by `Operators.token_layer` in steps that decode, of no more sequences than these are for."""

    @staticmethod
    def why_not(layer: DecoderLayer) -> str | None:
        """Return why the kernels do not support a layer, as a clause; None if they do."""
        mixer = layer.mamba if layer.is_mamba else layer.self_attn
        output = mixer.out_proj if layer.is_mamba else mixer.o_proj
        if (degree := output.parallel.degree) > 1:
            return f"they are for a whole model, and this is a part of {degree}"
        if output.bias is not None:
            return "they take no biases of projections"
        if layer.is_mamba and mixer.n_groups > 1:
            return f"they normalise all channels together, and here are {mixer.n_groups} groups"
        return None

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: Step,
        state: MambaState | KeyValueState,
        rotary: RotaryTables | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute `DecoderLayer.forward`; of decode there are no inputs of `advance`."""
        operators = self.operators.token_layer
        if step.verifies or not step.is_decode or len(hidden_states) > operators.MOST_SEQUENCES:
            return super().forward(hidden_states, step, state, rotary)
        x = hidden_states[:, 0]
        x = self._mamba(x, step, state) if self.is_mamba else self._attention(x, step, state, rotary)
        return self._feed_forward(x, step.lengths).view(hidden_states.shape), None

    def _mamba(self, x: torch.Tensor, step: Step, state: MambaState) -> torch.Tensor:
        operators, mamba, norm = self.operators.token_layer, self.mamba, self.input_layernorm
        convolution = mamba.conv1d.weight.squeeze(1), mamba.conv1d.bias, state.conv_state, step.lengths
        constants = dict(num_heads=mamba.num_heads, eps=norm.eps)
        inputs = operators.mixer_inputs(x, norm.weight, mamba.in_proj.weight, *convolution, **constants)
        of_heads = mamba.dt_bias, mamba.A_log, mamba.D
        gated = operators.advance_mixer(inputs, *of_heads, state.ssm_state, step.lengths, *mamba.time_step_limit)
        return operators.add_product(
            x, gated, mamba.norm.weight, mamba.out_proj.weight, self.residual_multiplier, mamba.norm.eps
        )

    def _attention(
        self, x: torch.Tensor, step: Step, state: KeyValueState, rotary: RotaryTables | None
    ) -> torch.Tensor:
        operators, attention, norm = self.operators.token_layer, self.self_attn, self.input_layernorm
        weights = [projection.weight for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
        projected = operators.project_heads(x, norm.weight, *weights, norm.eps).split(list(map(len, weights)), 1)
        output = attention.attend([part[:, None] for part in projected], step, state, rotary)
        return operators.add_product(x, output[:, 0], None, attention.o_proj.weight, self.residual_multiplier, norm.eps)

    def _feed_forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        operators, mlp, experts = self.operators.token_layer, self.shared_mlp, self.block_sparse_moe
        norm, eps = self.post_attention_layernorm.weight, self.post_attention_layernorm.eps
        alpha = self.residual_multiplier
        first, second = mlp.input_linear.weight, mlp.output_linear.weight
        if experts is None:
            return operators.add_product(x, operators.activate(x, norm, first, eps), None, second, alpha, eps)
        w1, w2 = experts.input_linear.weight, experts.output_linear.weight
        normed, logits = operators.route(x, norm, experts.router.layer.weight, eps)
        activated, chosen = operators.activate_experts(normed, first, w1, logits, lengths, experts.top_k)
        return operators.add_feed_forward(x, activated, second, chosen, w2, logits, lengths, alpha)
