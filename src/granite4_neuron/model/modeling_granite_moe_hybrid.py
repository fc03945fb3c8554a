"""IBM Granite 4.0 hybrid: one decoder step, from tokens and state to logits and state.

The module tree has the parameter names of the published checkpoints, so that a checkpoint's names are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.model import token_layer
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.attention import Attention, RotaryTables
from granite4_neuron.model.binding import Module, fix_weights, second_tree, use
from granite4_neuron.model.fused import FusedLayers
from granite4_neuron.model.linear import Linear, Matrix
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.moe import SharedMLP, SparseMoe
from granite4_neuron.model.norm import RMSNorm
from granite4_neuron.model.parallel import Parallel, VocabParallelEmbedding
from granite4_neuron.model.step import DenseStep, NullSlotStep, Step
from granite4_neuron.ops import Operators, Weight, is_quantized, rotary_tables
from granite4_neuron.ops.operators import Pack
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState, KeyValueState, MambaState


class GraniteMoeHybridForCausalLM(Module):
    """A Granite 4 hybrid with its language model head. It computes in plain torch; `bind` gives it other operators.

    Args:
        config: the model's dimensions and constants.
        parallel: this rank's place, for a model whose heads, widths and vocabulary are split over ranks.
    """

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
        """The dtype of activations, of the KV cache, and of all weights that are not quantized."""
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
        """Return the modules with the matrices of products, by name. A head that is the embedding is there as that."""
        tied = self.lm_head.weight is self.model.embed_tokens.weight
        left_out = self.lm_head if tied else self.model.embed_tokens
        modules = self.named_modules()
        return {name: module for name, module in modules if isinstance(module, Matrix) and module is not left_out}

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """Return all weights by the checkpoint's names, also those that are no parameters."""
        yield from self.named_parameters()
        for name, module in self.matrices().items():
            if not isinstance(module.weight, nn.Parameter):
                yield f"{name}.weight", module.weight

    def bind(
        self, operators: Operators, device: torch.device | None = None, adapters: Sequence[Adapter] = ()
    ) -> GraniteMoeHybridForCausalLM:
        """Return a model with this one's present weights, which computes with `operators`; this one is not changed.

        Its weights are fixed. It shares tensors with this model, but for two cases. With a device other than theirs
        they are copied there. Operators with a layout of their own have copies of all weights, unless the matrices are
        in that layout already.

        Adapters, numbered from 1 on, are for rows of steps that name them; only fused layers take them.
        """
        bound = second_tree(self)
        use(bound, operators)
        if operators.pack is not None:
            bound._pack(operators.pack)
        if device is not None:
            bound._copy_to(device)
        bound.model.fuse_layers(adapters)
        if bound.decodes_at_once:
            embedding = bound.model.embed_tokens.weight
            bound.model.fused_layers.set_ends(embedding, bound.model.norm.weight, bound.lm_head.weight)
        fix_weights(bound)
        return bound

    def _copy_to(self, device: torch.device) -> None:
        # Not by `to`: between a CPU and a GPU it moves the values of parameters, which this model shares.
        for module in self.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.to(device), requires_grad=False)
        self.tie_weights()

    def _pack(self, pack: Pack) -> None:
        """Lay out all matrices as products read them, and copy the other weights."""
        matrices = self.matrices().values()
        is_packed = not any(isinstance(module.weight, nn.Parameter) for module in matrices)
        for module in matrices:
            module.set_compact_weight(pack(module.weight, self.dtype))
        for module in () if is_packed else self.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.detach().clone(), requires_grad=False)
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
        adapters: torch.Tensor | None = None,
        all_logits: bool = False,
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
            adapters: [batch], int64, the number of each row's adapter, 0 for none; None for a step without.
            all_logits: logits of every token rather than of each row's last real one.

        Returns:
            [batch, vocab_size], or [batch, tokens, vocab_size] with `all_logits`; float32.
        """
        step = step_of(positions, lengths, slots, state, kv_length=kv_length, adapters=adapters)
        hidden_states, _ = self.model(input_ids, step, state)
        return self.head(hidden_states if all_logits else last_tokens(hidden_states, step))

    @property
    def decodes_at_once(self) -> bool:
        """Whether there is `decode`: with fused layers, without rotary positions, on one rank, and with an embedding
        that is a tensor or the head's matrix.
        """
        embedding = self.model.embed_tokens.weight
        has_rows = isinstance(embedding, torch.Tensor) or embedding is self.lm_head.weight
        is_whole = not self.config.uses_rope and self.parallel.degree == 1
        return self.model.fused_layers is not None and is_whole and has_rows

    def decode(
        self, tokens: Sequence[int], starts: Sequence[int], slots: Sequence[int], state: HybridState
    ) -> torch.Tensor:
        """Compute `forward` for one token of each row, as one call of fused kernels; see `decodes_at_once`.

        Args:
            tokens, starts, slots: of each row, the token, its position and its slot.
        """
        return self.model.fused_layers.decode(tokens, starts, slots, state)

    def verify(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor | None,
        state: HybridState,
        *,
        kv_length: int | None = None,
        adapters: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run `forward` for tokens that may be taken back: keys and values are written, recurrent state is not.

        Returns:
            Logits of every token, [batch, tokens, vocab_size] in float32; and the inputs of each Mamba layer's
            recurrence, [batch, tokens, conv_dim + num_heads], for `advance`.
        """
        step = step_of(positions, lengths, slots, state, kv_length=kv_length, adapters=adapters, verifies=True)
        hidden_states, inputs = self.model(input_ids, step, state)
        return self.head(hidden_states), inputs

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute logits: [..., hidden_size] to [..., vocab_size], float32."""
        part = self.operators.logits(hidden_states, self.lm_head.weight, self.config.logits_scaling)
        return self.parallel.all_gather(part)

    def advance(
        self,
        kept_inputs: Sequence[torch.Tensor],
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor | None,
        state: HybridState,
    ) -> None:
        """Advance recurrent state by the first tokens of a step that verified: the Mamba layers' recurrences only.

        Args:
            kept_inputs: of that step, from `verify`.
            positions, slots: its own.
            lengths: [batch], int64, 0 to those of that step: how many tokens of each row.
            state: as for `forward`.
        """
        step = step_of(positions, lengths, slots, state, kv_length=0)
        if self.model.fuses(step):
            self.model.fused_layers.advance(kept_inputs, step, state)
            return
        mamba = [pair for pair in zip(self.model.layers, state.layers, strict=True) if pair[0].is_mamba]
        for (layer, layer_state), inputs in zip(mamba, kept_inputs, strict=True):
            layer.mamba.advance(inputs, step, layer_state)


def last_tokens(hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
    """Select each row's last real token: [batch, tokens, hidden_size] to [batch, hidden_size]."""
    if hidden_states.shape[1] == 1:
        return hidden_states[:, 0]
    # By a mask and not by an index, which suits a compiler for static shapes.
    return hidden_states.masked_fill(~step.is_last[..., None], 0.0).sum(1)


def step_of(
    positions: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor | None,
    state: HybridState,
    *,
    kv_length: int | None = None,
    adapters: torch.Tensor | None = None,
    verifies: bool = False,
) -> Step:
    """Return the step of the kind that the state needs; arguments as in `GraniteMoeHybridForCausalLM.forward`."""
    in_order = slots is None
    if in_order:
        slots = torch.arange(1, state.num_sequences + 1, dtype=positions.dtype, device=positions.device)
    cache_slots = slots.where(lengths > 0, NULL_SLOT)
    where = (positions, lengths, cache_slots, state.max_length if kv_length is None else kv_length)
    if state.has_null_slot:
        return NullSlotStep(*where, verifies=verifies, adapters=adapters)
    return DenseStep(*where, None if in_order else slots - 1, verifies=verifies, in_order=in_order)


class _Decoder(Module):
    """Embedding, layers, final norm.

    The layers are computed one after another by their parts, or as one call where the operators have one that takes it.
    """

    def __init__(self, config: GraniteMoeHybridConfig, parallel: Parallel):
        super().__init__()
        self.config = config
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.embed_tokens = VocabParallelEmbedding(vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(_decoder_layer(config, layer, parallel) for layer in range(len(config.layer_types)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fused_layers: FusedLayers | None = None

    def fuse_layers(self, adapters: Sequence[Adapter]) -> None:
        """Use the one call for all layers if the operators have it, and none if not."""
        operators = self.operators
        self.fused_layers = operators.fused_layers and FusedLayers(operators, self.layers, self.config, adapters)

    def fuses(self, step: Step) -> bool:
        """Return whether the call for all layers takes the step."""
        return self.fused_layers is not None and step.has_null_slot

    def forward(
        self, input_ids: torch.Tensor, step: Step, state: HybridState
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final hidden states, [batch, tokens, hidden_size]; for a verification, Mamba layers' inputs too."""
        hidden_states, rotary = self.embed(input_ids, step), self.rotary(step)
        if self.fuses(step):
            hidden_states, kept_inputs = self.fused_layers(hidden_states, step, state, rotary)
            return self.norm(hidden_states), kept_inputs
        kept_inputs = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            hidden_states, inputs = layer(hidden_states, step, layer_state, rotary)
            if step.verifies and layer.is_mamba:
                kept_inputs.append(inputs)
        return self.norm(hidden_states), kept_inputs

    def embed(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        """Return what enters the first layer, [batch, tokens, hidden_size] in float32."""
        # The residual stream stays in float32 whatever the dtype of the weights: in bfloat16 it is the largest error.
        hidden_states = self.embed_tokens(input_ids) * self.config.embedding_multiplier
        # Padding enters as zeros, and so it is finite in every layer, like the state that its row reads.
        return hidden_states.masked_fill(~step.is_real[..., None], 0.0)

    def rotary(self, step: Step) -> RotaryTables | None:
        """Return rotary tables for the step's positions; None for a model without rotary positions."""
        if not self.config.uses_rope:
            return None
        return rotary_tables(step.positions, self.config.head_dim, self.config.rope_theta)


class DecoderLayer(Module):
    """Mamba or attention, then experts and MLP, each half behind a norm and added with the residual multiplier.

    This is the definition. It is written twice more: as fused kernels, ops/cpu/kernels/layers.h, and for decode of few
    sequences on a GPU, model/token_layer.py.
    """

    def __init__(
        self, config: GraniteMoeHybridConfig, mixer: nn.Module, shared_mlp: nn.Module, experts: nn.Module | None
    ):
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_mamba = isinstance(mixer, Mamba2)
        if self.is_mamba:
            self.mamba = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = experts
        self.shared_mlp = shared_mlp

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: Step,
        state: MambaState | KeyValueState,
        rotary: RotaryTables | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the new hidden_states, [batch, tokens, hidden_size]; and of a Mamba layer the inputs of `advance`."""
        if token_layer.takes(self, hidden_states, step):
            return token_layer.forward(self, hidden_states, step, state, rotary), None
        residual_add, inputs = self.operators.residual_add, None
        x = self.input_layernorm(hidden_states)
        if self.is_mamba:
            mixed, inputs = self.mamba(x, step, state)
        else:
            mixed = self.attend(x, step, state, rotary)
        hidden_states = residual_add(hidden_states, mixed, self.residual_multiplier)
        x = self.post_attention_layernorm(hidden_states)
        for output in self.feed_forward(x, step):
            hidden_states = residual_add(hidden_states, output, self.residual_multiplier)
        return hidden_states, inputs

    def attend(self, x: torch.Tensor, step: Step, state: KeyValueState, rotary: RotaryTables | None) -> torch.Tensor:
        """Apply the layer's `Attention`."""
        return self.self_attn(x, step, state, rotary)

    def feed_forward(self, x: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
        """Return the terms that are added one after the other, each [batch, tokens, hidden_size]."""
        yield self.shared_mlp(x)
        if self.block_sparse_moe is not None:
            yield self.block_sparse_moe(x)


def _decoder_layer(config: GraniteMoeHybridConfig, layer: int, parallel: Parallel) -> DecoderLayer:
    is_mamba = config.layer_types[layer] == MAMBA
    mixer = Mamba2(config, parallel, layer) if is_mamba else Attention(config, parallel)
    experts = SparseMoe(config, parallel) if config.num_local_experts else None
    return DecoderLayer(config, mixer, SharedMLP(config, parallel), experts)
