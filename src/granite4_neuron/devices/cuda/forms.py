"""A decoder layer with kernels for a few tokens of few sequences, which fuse products with their neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from granite4_neuron.devices.cuda.mamba import CHUNKED
from granite4_neuron.devices.cuda.norms import add_and_normalize
from granite4_neuron.devices.cuda.prompt_mixer import convolve_prompt, scan_prompt
from granite4_neuron.devices.cuda.token_operators import ManyRowsOperators, TokenOperators
from granite4_neuron.devices.cuda.weights import parts_of
from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.norm import why_not_fusible
from granite4_neuron.model.step import DenseStep, Step
from granite4_neuron.ops import Weight, format_of
from granite4_neuron.ops.layer_weights import MambaWeights, MixerWeights
from granite4_neuron.state.hybrid_state import KeyValueState, LayerState, MambaState


class _Mixed(NamedTuple):
    """What a mixer returns before its last product, [rows, columns]; with the arguments of `add_product`."""

    values: torch.Tensor
    norm: torch.Tensor | None
    weight: Weight
    alpha: float
    eps: float


class TokenLayer(DecoderLayer):
    """A layer that uses `TokenOperators` in decode and verification, up to the number of sequences that they are for.

    For more, decode uses `ManyRowsOperators`, but for experts and where a matrix is quantized. Otherwise only mixers of
    Mamba layers with a rounded state use `TokenOperators`: other operators would copy the state.

    A verified token gets the same bits as in decode of several sequences, up to the same number.
    """

    @staticmethod
    def why_not(layer: DecoderLayer) -> str | None:
        """Return why the kernels do not support a layer, as a clause; None if they do."""
        if (degree := layer.parallel.degree) > 1:
            return f"they are for a whole model, and this is a part of {degree}"
        if layer.has_mixer:
            output = layer.mamba.out_proj if layer.is_mamba else layer.self_attn.o_proj
            if output.bias is not None:
                return "they take no biases of projections"
        if (reason := why_not_fusible(layer.input_layernorm)) is not None:
            return reason
        if any(len(set(map(format_of, together))) > 1 for together in _multiplied_together(layer)):
            return "weights that a kernel multiplies together are in several formats"
        return None

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: Step,
        state: LayerState,
        rotary: RotaryTables | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute `DecoderLayer.forward`; decode returns no inputs of `advance`."""
        operators = self._operators_of(step, state)
        if operators is None:
            return super().forward(hidden_states, step, state, rotary)
        x, mixed, inputs = hidden_states.flatten(0, 1), None, None  # a row for each token
        if isinstance(state, MambaState):
            if step.verifies:
                mixed, inputs = self._verified_mamba(operators, x, step, state)
            else:
                mixed = self._mamba(operators, x, step, state)
        elif isinstance(state, KeyValueState):
            mixed = self._attention(operators, x, step, state, rotary)
        if mixed is not None and isinstance(operators, ManyRowsOperators) and self._has_only_mlp:
            return self._add_with_mlp(operators, x, mixed).view(hidden_states.shape), inputs
        if mixed is not None:
            x = self._add(operators, x, mixed)
        if not self._are_few(step):
            x = x.view(hidden_states.shape)
            return (self.add_feed_forward(x, self.feed_forward_norm(x), step) if self.has_feed_forward else x), inputs
        if self.has_feed_forward:
            lengths = step.is_real.flatten().to(step.lengths.dtype) if step.verifies else step.lengths
            is_gated = self.shared_mlp.is_gated
            x = self._feed_forward(operators, x, lengths) if is_gated else self._ungated_feed_forward(operators, x)
        return x.view(hidden_states.shape), inputs

    def mix(
        self, x: torch.Tensor, step: Step, state: LayerState, rotary: RotaryTables | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute `DecoderLayer.mix`. Prompts of Mamba layers read and write a state in float32 where it is."""
        if not (isinstance(state, MambaState) and self._takes_prompts(step, state)):
            return super().mix(x, step, state, rotary)
        mamba, mixer = self.mamba, self.mamba_weights().mixer
        z, xBC_dt = mamba.project(x)
        xBC, dt = xBC_dt[..., : mamba.conv_dim], xBC_dt[..., mamba.conv_dim :]
        index = step.starts, step.lengths, step.looked_up
        convolution = *_convolution(mixer), state.conv_state, *index
        xBC = convolve_prompt(xBC, *convolution)
        y = scan_prompt(xBC, dt, *_head_params(mixer), state.ssm_state, *index, *mixer.time_step_limit)
        return mamba.out_proj(y, z, mamba.norm), xBC_dt

    def _takes_prompts(self, step: Step, state: MambaState) -> bool:
        """Return whether the operators of `prompt_mixer` support a step."""
        is_prompt = step.positions.shape[1] > 1 and not step.verifies
        has_rows = isinstance(step, DenseStep) and (step.sequences is None or step.looked_up is not None)
        return is_prompt and has_rows and not self._is_rounded(state) and self.operators.mamba_prefill is CHUNKED

    def add_mixed(self, hidden_states: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm, terms = self.feed_forward_norm, (hidden_states.flatten(0, 1), mixed.flatten(0, 1))
        results = add_and_normalize(*terms, self.residual_multiplier, norm.weight, norm.eps)
        total, normed = (each.view(hidden_states.shape) for each in results)
        return total, normed

    def advance(self, inputs: torch.Tensor, step: Step, state: MambaState) -> None:
        if not (self._are_few(step) or self._is_rounded(state)):
            super().advance(inputs, step, state)
            return
        mixer = self.mamba_weights().mixer
        weights = *_convolution(mixer), *_head_params(mixer)
        states = state.conv_state, state.ssm_state
        index, limits = (step.starts, step.lengths), mixer.time_step_limit
        rounded = step.looked_up, self._stream(state)
        self._token_operators.advance_verified(inputs, *weights, *states, *index, *limits, *rounded)

    @property
    def _token_operators(self) -> TokenOperators:
        operators = self.operators.token_operators
        assert isinstance(operators, TokenOperators)  # `forms_of`
        return operators

    def _are_few(self, step: Step) -> bool:
        return len(step.lengths) <= self._token_operators.MOST_SEQUENCES

    def _operators_of(self, step: Step, state: LayerState) -> TokenOperators | None:
        """Return the operators for a kind of step, or None if they do not support it."""
        if not (step.is_decode or step.verifies):
            return None
        if not self._are_few(step):
            return self._operators_of_many(step, state)
        of_one_row = self.operators.one_row_operators
        if of_one_row is None or len(step.lengths) > 1 or step.verifies or step.looked_up is not None:
            return self._token_operators
        assert isinstance(of_one_row, TokenOperators)
        return of_one_row

    def _operators_of_many(self, step: Step, state: LayerState) -> TokenOperators | None:
        """Do the same as `_operators_of` for more sequences than are few."""
        if step.is_decode and all([format_of(matrix) is None for matrix in self._matrices()]):
            of_many = self.operators.many_rows_operators
            assert isinstance(of_many, ManyRowsOperators)
            return of_many
        return self._token_operators if self._is_rounded(state) else None

    def _matrices(self) -> list[Weight]:
        """Return the matrices that token operators multiply, but those of experts."""
        matrices: list[Weight] = []
        if self.is_mamba:
            mamba = self.mamba_weights()
            matrices += [mamba.in_proj, mamba.out_proj]
        elif self.has_mixer:
            attention = self.attention_weights()
            matrices += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        if self._has_only_mlp:
            weights = self.feed_forward_weights()
            matrices += [weights.input, weights.output]
        return matrices

    @property
    def _has_only_mlp(self) -> bool:
        """Whether the layer's second half is a gated MLP without experts."""
        return self.has_feed_forward and self.block_sparse_moe is None and self.shared_mlp.is_gated

    def _mamba(self, operators: TokenOperators, x: torch.Tensor, step: Step, state: MambaState) -> _Mixed:
        weights = self.mamba_weights()
        mixer = weights.mixer
        convolution = *_convolution(mixer), state.conv_state, step.lengths, step.looked_up
        values, scales = parts_of(weights.in_proj)
        arguments = x, weights.norm, values, *convolution, scales
        inputs = operators.mixer_inputs(*arguments, num_heads=len(mixer.dt_bias), eps=weights.eps)
        recurrence = *_head_params(mixer), state.ssm_state, step.lengths, *mixer.time_step_limit, step.looked_up
        gated = operators.advance_mixer(inputs, *recurrence, step.starts, self._stream(state))
        return self._gated(gated, weights)

    def _verified_mamba(
        self, operators: TokenOperators, x: torch.Tensor, step: Step, state: MambaState
    ) -> tuple[_Mixed, torch.Tensor]:
        """Return the results of `_mamba` for one token after another, and the inputs of `advance`; keep the state
        unchanged.
        """
        weights = self.mamba_weights()
        mixer = weights.mixer
        values, scales = parts_of(weights.in_proj)
        projected = operators.project(x, weights.norm, values, weights.eps, scales)
        projected = projected.view(*step.positions.shape, -1)
        convolution = *_convolution(mixer), state.conv_state, step.starts
        inputs = operators.convolve_verified(projected, *convolution, len(mixer.dt_bias), step.looked_up)
        index, limits = (step.starts, step.lengths), mixer.time_step_limit
        recurrence = *_head_params(mixer), state.ssm_state, *index, *limits, step.looked_up
        gated = operators.scan_verified(inputs, *recurrence, self._stream(state))
        return self._gated(gated, weights), projected[..., gated.shape[1] :]

    @staticmethod
    def _is_rounded(state: LayerState) -> bool:
        return isinstance(state, MambaState) and state.ssm_state.dtype != torch.float32

    def _stream(self, state: MambaState) -> torch.Tensor | None:
        """Return the stream of the state's rounding; None if it is not rounded."""
        return self.mamba.stream if self._is_rounded(state) else None

    def _gated(self, gated: torch.Tensor, weights: MambaWeights) -> _Mixed:
        """Return a mixer's gated output; a product normalises it, but only if it is one group."""
        norm: torch.Tensor | None = weights.gated_norm
        if (groups := weights.mixer.n_groups) > 1:
            gated, norm = self.operators.rms_norm(gated, weights.gated_norm, weights.eps, groups), None
        return _Mixed(gated, norm, weights.out_proj, weights.residual_multiplier, weights.eps)

    def _add(self, operators: TokenOperators, x: torch.Tensor, mixed: _Mixed) -> torch.Tensor:
        """Add the product of what a mixer returned."""
        values, scales = parts_of(mixed.weight)
        return operators.add_product(x, mixed.values, mixed.norm, values, mixed.alpha, mixed.eps, scales)

    def _add_with_mlp(self, operators: ManyRowsOperators, x: torch.Tensor, mixed: _Mixed) -> torch.Tensor:
        """Do the same as `_add` and `_feed_forward`, where no matrix is quantized."""
        mlp = self.feed_forward_weights()
        output, first, second = [parts_of(weight)[0] for weight in (mixed.weight, mlp.input, mlp.output)]
        return operators.add_product_and_mlp(
            x, mixed.values, mixed.norm, output, mlp.norm, first, second, mixed.alpha, mixed.eps
        )

    def _attention(
        self,
        operators: TokenOperators,
        x: torch.Tensor,
        step: Step,
        state: KeyValueState,
        rotary: RotaryTables | None,
    ) -> _Mixed:
        weights = self.attention_weights()
        matrices = weights.q_proj, weights.k_proj, weights.v_proj
        widths = [matrix.shape[0] for matrix in matrices]
        (query, query_scales), (key, key_scales), (value, value_scales) = map(parts_of, matrices)
        scales = query_scales, key_scales, value_scales
        projected = operators.project_heads(x, weights.norm, query, key, value, weights.eps, *scales)
        parts = projected.view(*step.positions.shape, -1).split(widths, 2)
        output = self.self_attn.attend(parts, step, state, rotary)
        return _Mixed(output.flatten(0, 1), None, weights.o_proj, weights.residual_multiplier, weights.eps)

    def _feed_forward(self, operators: TokenOperators, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        weights = self.feed_forward_weights()
        norm, eps, alpha = weights.norm, weights.eps, weights.residual_multiplier
        (first, first_scales), (second, second_scales) = parts_of(weights.input), parts_of(weights.output)
        if weights.router is None:
            activated = operators.activate(x, norm, first, eps, first_scales)
            return operators.add_product(x, activated, None, second, alpha, eps, second_scales)
        assert weights.expert_input is not None and weights.expert_output is not None  # as there is a router
        router, _ = parts_of(weights.router)  # which is never quantized
        (w1, w1_scales), (w2, w2_scales) = parts_of(weights.expert_input), parts_of(weights.expert_output)
        normed, logits = operators.route(x, norm, router, eps)
        activated, chosen = operators.activate_experts(
            normed, first, w1, logits, lengths, weights.top_k, first_scales, w1_scales
        )
        return operators.add_feed_forward(
            x, activated, second, chosen, w2, logits, lengths, alpha, second_scales, w2_scales
        )

    def _ungated_feed_forward(self, operators: TokenOperators, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's definition; only the router has a kernel for few tokens."""
        norm, experts = self.feed_forward_norm, self.block_sparse_moe
        if experts is None:
            outputs = [self.shared_mlp(norm(x))]
        else:
            router, _ = parts_of(experts.router.layer.weight)
            normed, logits = operators.route(x, norm.weight, router, norm.eps)
            outputs = [self.shared_mlp(normed), experts.multiply(normed, logits)]
        for output in outputs:
            x = self.operators.residual_add(x, output, self.residual_multiplier)
        return x


def _convolution(mixer: MixerWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    return mixer.conv_weight.squeeze(1), mixer.conv_bias


def _head_params(mixer: MixerWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return mixer.dt_bias, mixer.A_log, mixer.D


def _multiplied_together(layer: DecoderLayer) -> Iterator[Sequence[Weight]]:
    """Return the matrices of a layer that one kernel multiplies."""
    if layer.has_mixer and not layer.is_mamba:
        attention = layer.attention_weights()
        yield attention.q_proj, attention.k_proj, attention.v_proj
    if layer.has_feed_forward and layer.block_sparse_moe is not None:
        weights = layer.feed_forward_weights()
        assert weights.expert_input is not None and weights.expert_output is not None  # as there are experts
        yield weights.input, weights.expert_input
        yield weights.output, weights.expert_output
