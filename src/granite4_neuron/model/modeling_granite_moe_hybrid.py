"""IBM Granite 4.0 hybrid: one decoder step, from tokens and state to logits and state.

The module tree has the parameter names of the published checkpoints, so that a checkpoint's names are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.model.attention import Attention, RotaryTables
from granite4_neuron.model.binding import bind, weights
from granite4_neuron.model.linear import Linear, Matrix
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.moe import SharedMLP, SparseMoe, feed_forward
from granite4_neuron.model.norm import RMSNorm
from granite4_neuron.model.parallel import Parallel, VocabParallelEmbedding
from granite4_neuron.model.state import NULL_SLOT, HybridState, KeyValueState, MambaState
from granite4_neuron.model.step import DenseStep, NullSlotStep, Step
from granite4_neuron.ops import TORCH, LaunchParameters, Operators, Weight, is_quantized, rotary_tables
from granite4_neuron.ops.launch_parameters import HEURISTIC
from granite4_neuron.ops.operators import AttentionWeights, DecoderLayerWeights, FeedForwardWeights, MambaWeights, Pack


class GraniteMoeHybridForCausalLM(nn.Module):
    """A Granite 4 hybrid with its language model head. It computes in plain torch; `bind` gives it other operators.

    Args:
        config: the model's dimensions and constants.
        parallel: this rank's place, for a model whose heads, widths and vocabulary are split over ranks.
    """

    operators: Operators = TORCH

    def __init__(self, config: GraniteMoeHybridConfig, parallel: Parallel = Parallel()):  # noqa: B008
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.model = _Decoder(config, parallel)
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.lm_head = Linear(config.hidden_size, vocab_size, bias=False)
        self.tie_weights()

    @property
    def kernel_layout(self) -> bool:
        """Whether the SSM states are to be allocated as the NKI kernels have them."""
        return self.operators.mamba_decode.has_kernel_layout

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, of the KV cache, and of all weights that are not quantized."""
        return self.model.norm.weight.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is, see `ops.quantization`."""
        return any(is_quantized(module.weight) for module in self.matrices().values())

    def tie_weights(self) -> None:
        """Make the head the embedding's transpose, for a config that says so; a quantized head has its own values where
        the embedding is not quantized.
        """
        weight = self.model.embed_tokens.weight
        head_is_its_own = is_quantized(self.lm_head.weight) and isinstance(weight, nn.Parameter)
        if not self.config.tie_word_embeddings or head_is_its_own:
            return
        if isinstance(weight, nn.Parameter):
            self.lm_head.weight = weight
        else:
            self.lm_head.set_compact_weight(weight)

    def matrices(self) -> dict[str, Matrix]:
        """The modules whose weights operators multiply by, by name. A head that is the embedding is there as that."""
        tied = self.lm_head.weight is self.model.embed_tokens.weight
        left_out = self.lm_head if tied else self.model.embed_tokens
        modules = self.named_modules()
        return {name: module for name, module in modules if isinstance(module, Matrix) and module is not left_out}

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """All weights by the checkpoint's names, also those that are no parameters."""
        yield from self.named_parameters()
        for name, module in self.matrices().items():
            if not isinstance(module.weight, nn.Parameter):
                yield f"{name}.weight", module.weight

    def bind(self, operators: Operators, device: torch.device | None = None) -> GraniteMoeHybridForCausalLM:
        """A model over the same weights that computes with `operators`; this one is not changed.

        Both have the same weights, whichever of them is given new ones. With a device other than theirs the weights are
        copied there, and are the bound model's own. Operators with a layout of their own have copies of the matrices in
        it, unless these are in it already.
        """
        bound = bind(self, operators)
        if operators.pack is not None:
            bound._pack(operators.pack)
        bound.model.fuse_layers()
        if device is not None:
            for module in bound.modules():
                module._parameters = dict(module._parameters)
            bound.to(device).tie_weights()
        return bound

    def _pack(self, pack: Pack) -> None:
        """Have all matrices as products read them. Where they are parameters, another model may have them too."""
        for module in self.matrices().values():
            packed = pack(module.weight, self.dtype)
            module._parameters = dict(module._parameters)
            module.set_compact_weight(packed)
        self.lm_head._parameters = dict(self.lm_head._parameters)
        self.tie_weights()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor | None,
        state: HybridState,
        *,
        kv_length: int | None = None,
        all_logits: bool = False,
        launch_parameters: LaunchParameters = HEURISTIC,
        kept_inputs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Add tokens to sequences, each of which lives in a slot of `state`, and predict what follows.

        Prefill, a further chunk of prefill, a verify step and decode are all this function: cutting a sequence anywhere
        gives the same logits. Neither a padded token nor a row of length 0 changes anything.

        Args:
            input_ids: [batch, tokens], int64; any valid id in padding.
            positions: [batch, tokens], int64, each token's place in its sequence, consecutive within a row. A row whose
                first position is 0 starts from zeros, whatever its slot held.
            lengths: [batch], int64, 0 to tokens: how many of a row's tokens are real; the rest is padding on the right.
            slots: [batch], int64; no two rows with real tokens share one, and none of them is the null slot. Where
                `state.has_null_slot` is false this goes for rows of length 0 as well. None for a row per sequence of
                the state, in the order of their slots; such a step of one token comes with a contract, see
                `model.step.DenseStep`.
            state: updated in place.
            kv_length: how many cache entries attention visits, above every real position; None for all of them.
            all_logits: logits of every token rather than of each row's last real one.
            launch_parameters: how a CPU's kernels cut up the step; graphs that are traced leave it as it is.
            kept_inputs: None, or a list, empty, of a step that verifies: it leaves recurrent state as it is and puts
                there what `advance` takes. Keys and values are written.

        Returns:
            [batch, vocab_size], or [batch, tokens, vocab_size] with `all_logits`; float32.
        """
        if kv_length is None:
            kv_length = state.max_length
        step = step_of(positions, lengths, slots, kv_length, state, launch_parameters, kept_inputs=kept_inputs)
        hidden_states = self.model(input_ids, step, state)
        if not all_logits:
            # Selected by a mask and not by an index: what a compiler for static shapes handles well.
            hidden_states = hidden_states.masked_fill(~step.is_last[..., None], 0.0).sum(1)
        return self.parallel.all_gather(self.head(hidden_states))

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logits: [..., hidden_size] to [..., vocab_size of the rank], float32."""
        head = self.lm_head
        return self.operators.logits(hidden_states, head.weight, self.config.logits_scaling)

    def advance(
        self,
        kept_inputs: Sequence[torch.Tensor],
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor | None,
        state: HybridState,
        launch_parameters: LaunchParameters = HEURISTIC,
    ) -> None:
        """Advance recurrent state by the first tokens of a step that verified: the Mamba layers' recurrences only.

        Args:
            kept_inputs: of that step, from `forward`.
            positions, slots: its own.
            lengths: [batch], int64, 0 to those of that step: how many tokens of each row.
            state, launch_parameters: as for `forward`.
        """
        step = step_of(positions, lengths, slots, 0, state, launch_parameters)
        if self.model.fuses(step):
            self.model.fused_layers.advance(kept_inputs, list(state.tensors()), step.rows, launch_parameters)
            return
        mamba = [pair for pair in zip(self.model.layers, state.layers, strict=True) if pair[0].is_mamba]
        for (layer, layer_state), inputs in zip(mamba, kept_inputs, strict=True):
            layer.mamba.advance(inputs, step, layer_state)


def step_of(
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    kv_length: int,
    state: HybridState,
    launch_parameters: LaunchParameters = HEURISTIC,
    *,
    kept_inputs: list[torch.Tensor] | None = None,
) -> Step:
    """The step of the kind that goes with the state; arguments as `GraniteMoeHybridForCausalLM.forward` has them."""
    in_order = slots is None
    if in_order:
        slots = torch.arange(1, state.num_sequences + 1, device=positions.device)
    cache_slots = slots.where(lengths > 0, NULL_SLOT)
    where = (positions, lengths, cache_slots, kv_length)
    if state.has_null_slot:
        return NullSlotStep(*where, launch_parameters=launch_parameters, kept_inputs=kept_inputs)
    return DenseStep(*where, None if in_order else slots - 1, kept_inputs=kept_inputs)


class _Decoder(nn.Module):
    """Embedding, layers, final norm.

    The layers are computed one after another by their parts, or as one call where the operators have one that takes it.
    """

    operators: Operators = TORCH

    def __init__(self, config: GraniteMoeHybridConfig, parallel: Parallel):
        super().__init__()
        self.config = config
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.embed_tokens = VocabParallelEmbedding(vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(_DecoderLayer(config, layer, parallel) for layer in range(len(config.layer_types)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fused_layers: Callable[..., list[torch.Tensor]] | None = None

    def fuse_layers(self) -> None:
        """Take the one call for all layers, if the operators have it."""
        make = self.operators.decoder_layers
        self.fused_layers = make and make([layer.weights() for layer in self.layers], self.config)

    def fuses(self, step: Step) -> bool:
        """Whether that call takes the step."""
        return self.fused_layers is not None and step.has_null_slot

    def forward(self, input_ids: torch.Tensor, step: Step, state: HybridState) -> torch.Tensor:
        # The residual stream stays in float32 whatever the dtype of the weights: in bfloat16 it is the largest error.
        hidden_states = self.embed_tokens(input_ids) * self.config.embedding_multiplier
        # Padding enters as zeros, and so it is finite in every layer, like the state that its row reads.
        hidden_states = hidden_states.masked_fill(~step.is_real[..., None], 0.0)
        rotary = self.rotary(step)
        if self.fuses(step):
            rows = (*step.rows, step.slots, *(rotary or ()))
            of_step = step.launch_parameters, step.kept_inputs is not None
            hidden_states, *inputs = self.fused_layers(hidden_states, list(state.tensors()), rows, *of_step)
            for each in inputs:
                step.keep(each)
        else:
            for layer, layer_state in zip(self.layers, state.layers, strict=True):
                hidden_states = layer(hidden_states, step, layer_state, rotary)
        return self.norm(hidden_states)

    def rotary(self, step: Step) -> RotaryTables | None:
        """For the step's positions; None for a model without rotary positions."""
        if not self.config.uses_rope:
            return None
        return rotary_tables(step.positions, self.config.head_dim, self.config.rope_theta)


class _DecoderLayer(nn.Module):
    """Mamba or attention, then experts and MLP, each half behind a norm and added with the residual multiplier."""

    operators: Operators = TORCH

    def __init__(self, config: GraniteMoeHybridConfig, layer: int, parallel: Parallel):
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_mamba = config.layer_types[layer] == MAMBA
        if self.is_mamba:
            self.mamba = Mamba2(config, parallel, layer)
        else:
            self.self_attn = Attention(config, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = SparseMoe(config, parallel) if config.num_local_experts else None
        self.shared_mlp = SharedMLP(config, parallel)

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: Step,
        state: MambaState | KeyValueState,
        rotary: RotaryTables | None,
    ) -> torch.Tensor:
        x = self.input_layernorm(hidden_states)
        mixed = self.mamba(x, step, state) if self.is_mamba else self.self_attn(x, step, state, rotary)
        hidden_states = self.operators.residual_add(hidden_states, mixed, self.residual_multiplier)
        return feed_forward(
            hidden_states,
            self.post_attention_layernorm,
            self.shared_mlp,
            self.block_sparse_moe,
            self.residual_multiplier,
        )

    def weights(self) -> DecoderLayerWeights:
        """Of all parts."""
        mlp, experts = self.shared_mlp, self.block_sparse_moe
        matrices = [mlp.input_linear.weight, mlp.output_linear.weight]
        if experts is not None:
            matrices += [each.weight for each in (experts.router.layer, experts.input_linear, experts.output_linear)]
        mixer = self._mamba_weights() if self.is_mamba else self._attention_weights()
        return DecoderLayerWeights(mixer, FeedForwardWeights(weights(self.post_attention_layernorm), matrices))

    def _mamba_weights(self) -> MambaWeights:
        mamba = self.mamba
        parts = (self.input_layernorm, mamba.in_proj, mamba.conv1d, mamba, mamba.norm, mamba.out_proj)
        return MambaWeights([mamba.in_proj.weight, mamba.out_proj.weight], *map(weights, parts))

    def _attention_weights(self) -> AttentionWeights:
        attention = self.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        matrices, biases = [each.weight for each in projections], [weights(each) for each in projections]
        return AttentionWeights(matrices, weights(self.input_layernorm), biases)
