"""A hybrid language model: one decoder step, from tokens and state to logits and state.

A family of models is a subclass, which makes the layers. The module tree has the parameter names of Granite's published
checkpoints; `checkpoint.names` maps the names of other families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.config.choices import MERGE_INSTEAD
from granite4_neuron.devices.cpu.forms import FusedLayers, why_not_one_call
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.binding import Module, fix_weights, set_operators, shallow_copy
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.linear import Linear, Matrix
from granite4_neuron.model.moe import StackedWeights
from granite4_neuron.model.mtp import MultiTokenPrediction
from granite4_neuron.model.norm import norm_of
from granite4_neuron.model.parallel import Parallel, VocabParallelEmbedding
from granite4_neuron.model.stack import LayerStack
from granite4_neuron.model.step import DenseStep, NullSlotStep, PackedStep, Step
from granite4_neuron.ops import CompactWeight, Operators, Weight, is_quantized, rotary_tables
from granite4_neuron.ops.operators import Pack
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class HybridForCausalLM(Module, ABC):
    """A hybrid with its language model head. It computes in plain torch; `bind` gives it other operators.

    fallbacks: a sentence for each faster way of computing that it was not given when it was bound.
    mtp: its layers for multi-token prediction, if the config has them. They change no logits.

    Args:
        config: the model's dimensions and constants.
        parallel: this rank's place, for a model whose heads, widths and vocabulary are split over ranks.
    """

    fallbacks: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, parallel: Parallel = Parallel()):  # noqa: B008
        super().__init__()
        self._packed_call: Callable[..., torch.Tensor] | None = None
        self.config = config
        self.parallel = parallel
        self.model = _Decoder(config, parallel, self._make_layers(config, parallel))
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.lm_head = Linear(config.hidden_size, vocab_size, bias=False)
        self.mtp: MultiTokenPrediction | None = None
        if (of_mtp := config.mtp_config) is not None:
            self.mtp = MultiTokenPrediction(of_mtp, self._make_layers(of_mtp, parallel))
        self.tie_weights()

    @staticmethod
    @abstractmethod
    def make_layer(config: ModelConfig, number: int, parallel: Parallel) -> DecoderLayer:
        """Make a layer of the model by its number."""

    def _make_layers(self, config: ModelConfig, parallel: Parallel) -> list[DecoderLayer]:
        return [self.make_layer(config, number, parallel) for number in range(len(config.layer_types))]

    @property
    def is_fused(self) -> bool:
        """Whether all layers are one call of fused kernels."""
        return isinstance(self.model.stack, FusedLayers)

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
        """Whether any weight is quantized, see `ops.quantization`."""
        return any(is_quantized(module.weight) for module in self.matrices().values())

    def tie_weights(self) -> None:
        """Share the embedding's matrix with the head, if the config says so. A quantized head has its own values if the
        embedding is not quantized.
        """
        weight = self.model.embed_tokens.weight
        head_is_its_own = is_quantized(self.lm_head.weight) and isinstance(weight, nn.Parameter)
        if not self.config.tie_word_embeddings or head_is_its_own:
            return
        if isinstance(weight, torch.Tensor):
            self.lm_head.weight = weight
        else:
            self.lm_head.set_compact_weight(weight)

    def matrices(self) -> dict[str, Matrix]:
        """Return the modules with the matrices of products, by name. A tied head is listed as the embedding."""
        tied = self.lm_head.weight is self.model.embed_tokens.weight
        left_out = self.lm_head if tied else self.model.embed_tokens
        modules = self.named_modules()
        return {name: module for name, module in modules if isinstance(module, Matrix) and module is not left_out}

    def named_weights(self) -> Iterator[tuple[str, Weight]]:
        """Return all weights by the checkpoint's names, also those that are not parameters."""
        yield from self.named_parameters()
        for name, module in self.matrices().items():
            if not isinstance(module.weight, nn.Parameter):
                yield f"{name}.weight", module.weight

    def float32_weights(self) -> set[str]:
        """Return the names of weights that stay in float32, whatever the model's dtype."""
        modules = ((name, module) for name, module in self.named_modules() if isinstance(module, Module))
        return {f"{name}.{weight}" for name, module in modules for weight in module.keeps_float32}

    def bind(self, operators: Operators, device: torch.device | None = None, adapters: Sequence[Adapter] = ()) -> Self:
        """Return a model with this one's present weights, which computes with `operators`; this one is not changed.

        Its weights are fixed. It shares tensors with this model, with three exceptions: weights are copied to a device
        if they are elsewhere; operators with a layout of their own copy all weights, unless the matrices are in that
        layout already; on a device, operators that exchange the axes of experts' weights copy these.

        Adapters must have numbers; they apply to the rows of steps that name them.

        Raises:
            UserError: there are adapters, and the layers are not fused.
        """
        bound = shallow_copy(self)
        set_operators(bound, operators)
        if operators.pack is not None:
            bound._pack(operators.pack)
        if operators.input_first_experts:
            bound._put_inputs_first()
        if device is not None:
            bound._copy_to(device)
        bound._choose_forms(adapters)
        fix_weights(bound)
        return bound

    def weights_of_states(self) -> Self:
        """Return a model over the weights on which its states depend: without chosen forms, without adapters (see
        `bind`) and without layers for multi-token prediction.
        """
        copied = shallow_copy(self)
        copied._packed_call = copied.model._bound_stack = copied.mtp = None
        copied.config = copied.config.without_mtp()
        return copied

    def _choose_forms(self, adapters: Sequence[Adapter]) -> None:
        """Choose how layers and decode are computed, and record why a faster form of them is not used."""
        reasons = self.model.choose_forms(self.parallel, adapters)
        if self.mtp is not None:
            self.mtp.choose_forms(self.parallel, ())
        self._packed_call = None
        stack = self.model.stack
        if isinstance(stack, FusedLayers):
            embedding, head = self.model.embed_tokens.weight, self.lm_head.weight
            refusal = why_not_one_call(self.config, embedding, head)
            if refusal is None:
                stack.set_embedding_and_head(embedding, self.model.norm.weight, head)
                self._packed_call = stack.forward_packed
            else:
                reasons.append(f"a step is not one call from tokens to logits: {refusal}.")
        elif adapters:
            raise UserError(f"adapters run with the fused kernels and their chunked scan only; {MERGE_INSTEAD}.")
        self.fallbacks = (*self.operators.fallbacks, *reasons)

    def _copy_to(self, device: torch.device) -> None:
        # Not by `to`: between a CPU and a GPU it moves the values of parameters, which this model shares.
        for module in self.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.contiguous().to(device), requires_grad=False)
            module._buffers = {
                name: value if value is None else value.to(device) for name, value in module._buffers.items()
            }
        self.tie_weights()

    def _put_inputs_first(self) -> None:
        """Exchange the axes of each expert's matrices: a view, which a copy to a device makes contiguous there."""
        for module in self.modules():
            if isinstance(module, StackedWeights):
                weight = module.get_parameter("weight")
                module._parameters["weight"] = nn.Parameter(weight.transpose(1, 2), requires_grad=False)

    def _pack(self, pack: Pack) -> None:
        """Lay out all matrices for products, and copy the other weights."""
        matrices = self.matrices().values()
        is_packed = not any(isinstance(matrix.weight, nn.Parameter) for matrix in matrices)
        for matrix in matrices:
            matrix.set_compact_weight(_packed(matrix, pack, self.dtype))
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
            slots: [batch], int64; no two rows with real tokens share one, and none of them is the null slot. If
                `state.has_null_slot` is false this also holds for rows of length 0. None if there is one row per
                sequence of the state, in the order of the slots; a step of one token then has a contract, see
                `model.step.DenseStep`.
            state: updated in place.
            kv_length: how many cache entries attention visits, above every real position; None for all of them.
            adapters: [batch], int64, the number of each row's adapter, 0 for none; None for a step without adapters.
            all_logits: logits of every token rather than of each row's last real one.

        Returns:
            [batch, vocab_size], or [batch, tokens, vocab_size] with `all_logits`; float32.
        """
        step = step_of(positions, lengths, slots, state, kv_length=kv_length, adapters=adapters)
        hidden_states, _ = self.model(input_ids, step, state)
        return self.head(hidden_states if all_logits else step.last_tokens(hidden_states))

    def forward_packed(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        state: HybridState,
        *,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `forward` for rows of different lengths without padding. The layers must be fused (`is_fused`).

        Args:
            input_ids, positions: [tokens], int64, row after row.
            lengths, slots: [rows], int64; no length is 0.
            adapters: [rows], int64, or None.

        Returns:
            Logits after each row's last token, [rows, vocab_size] in float32.
        """
        if self._packed_call is not None and adapters is None:
            starts = positions[lengths.cumsum(0) - lengths]
            lists = (numbers.tolist() for numbers in (input_ids, lengths, starts, slots))
            return self._packed_call(*lists, state)
        hidden_states = self.packed_hidden_states(input_ids, positions, lengths, slots, state, adapters=adapters)
        return self.head(hidden_states[lengths.cumsum(0) - 1])

    def packed_hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        state: HybridState,
        *,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `forward_packed` up to the head: [tokens, hidden_size] in the model's dtype, after the last norm."""
        step = PackedStep(positions[None], lengths, slots, state.max_length, adapters=adapters)
        hidden_states, _ = self.model(input_ids[None], step, state)
        return hidden_states[0]

    def decode(
        self, tokens: Sequence[int], starts: Sequence[int], slots: Sequence[int], state: HybridState
    ) -> torch.Tensor:
        """Compute `forward` for one token of each row; fused layers have a separate call for it.

        Args:
            tokens, starts, slots: each row's token, its position and its slot.
        """
        if self._packed_call is not None:
            return self._packed_call(tokens, [1] * len(tokens), starts, slots, state)
        ids, positions = (torch.tensor(values)[:, None] for values in (tokens, starts))
        lengths = torch.ones(len(tokens), dtype=torch.int64)
        return self(ids, positions, lengths, torch.tensor(slots), state, kv_length=max(starts) + 1)

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
        hidden_states, inputs = self.hidden_states(
            input_ids, positions, lengths, slots, state, kv_length=kv_length, adapters=adapters, verifies=True
        )
        return self.head(hidden_states), inputs

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor | None,
        state: HybridState,
        *,
        kv_length: int | None = None,
        adapters: torch.Tensor | None = None,
        verifies: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute `forward`, or with `verifies` `verify`, up to the head.

        Returns:
            [batch, tokens, hidden_size] in the model's dtype, after the last norm; and with `verifies` the inputs for
            `advance`.
        """
        step = step_of(positions, lengths, slots, state, kv_length=kv_length, adapters=adapters, verifies=verifies)
        return self.model(input_ids, step, state)

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
        """Advance recurrent state by the first tokens of a step that verified; only the Mamba layers' recurrences run.

        Args:
            kept_inputs: from `verify` of that step.
            positions, slots: that step's.
            lengths: [batch], int64: how many of each row's tokens to take, 0 to the row's length in that step.
            state: as for `forward`.
        """
        step = step_of(positions, lengths, slots, state, kv_length=0)
        self.model.stack.advance(kept_inputs, step, state)


def _packed(matrix: Matrix, pack: Pack, dtype: torch.dtype) -> CompactWeight:
    """Return a matrix laid out for products with activations of `dtype`, or float32 if the matrix stays in float32."""
    if "weight" not in matrix.keeps_float32:
        return pack(matrix.weight, dtype)
    weight = matrix.weight
    return pack(weight.float() if isinstance(weight, torch.Tensor) else weight, torch.float32)


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
    """Return the kind of step that the state needs; arguments as in `HybridForCausalLM.forward`."""
    if slots is None:
        row_slots = torch.arange(1, state.num_sequences + 1, dtype=positions.dtype, device=positions.device)
    else:
        row_slots = slots
    cache_slots = row_slots.where(lengths > 0, NULL_SLOT)
    where = (positions, lengths, cache_slots, state.max_length if kv_length is None else kv_length)
    if state.has_null_slot:
        return NullSlotStep(*where, verifies=verifies, adapters=adapters)
    sequences = None if slots is None else slots - 1
    return DenseStep(*where, sequences, verifies=verifies, in_order=slots is None)


class _Decoder(LayerStack):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, parallel: Parallel, layers: Iterable[DecoderLayer]):
        super().__init__()
        self.config = config
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.embed_tokens = VocabParallelEmbedding(vocab_size, config.hidden_size, parallel)
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))  # torch's list has any modules
        self.norm = norm_of(config)

    def forward(
        self, input_ids: torch.Tensor, step: Step, state: HybridState
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final hidden states, [batch, tokens, hidden_size]; if the step verifies, also Mamba layers' inputs."""
        hidden_states, kept_inputs = self.stack(self.embed(input_ids, step), step, state, self.rotary(step))
        return self.norm(hidden_states), kept_inputs

    def embed(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the first layer's input, [batch, tokens, hidden_size] in float32."""
        # The residual stream is float32 whatever the weights' dtype: in bfloat16 it would be the largest source of
        # error.
        hidden_states = self.embed_tokens(input_ids) * self.config.embedding_multiplier
        # Padding enters as zeros, so it stays finite in every layer, like the state that its row reads.
        return hidden_states.masked_fill(~step.is_real[..., None], 0.0)

    def rotary(self, step: Step) -> RotaryTables | None:
        """Return rotary tables for the step's positions; None for a model without rotary positions."""
        if not self.config.uses_rope:
            return None
        return rotary_tables(step.positions, self.config.head_dim, self.config.rope_theta)
