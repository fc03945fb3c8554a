"""A model as a set of weights: their names, and how they are packed, moved and tied when it is bound to operators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.config.choices import MERGE_INSTEAD
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.binding import Module, fix_weights, set_operators, shallow_copy
from granite4_neuron.model.linear import Linear, Matrix
from granite4_neuron.model.moe import StackedWeights
from granite4_neuron.model.mtp import MultiTokenPrediction
from granite4_neuron.model.parallel import Parallel, VocabParallelEmbedding
from granite4_neuron.model.stack import LayersAsOne, LayerStack
from granite4_neuron.model.step import Step
from granite4_neuron.ops import CompactWeight, Operators, QuantizedWeight, Weight, is_quantized
from granite4_neuron.ops.operators import Pack
from granite4_neuron.state.hybrid_state import HybridState

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class Decoder(LayerStack):
    """A model without its head: embedding, layers, final norm."""

    embed_tokens: VocabParallelEmbedding

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, step: Step, state: HybridState
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final hidden states, [batch, tokens, hidden_size]; if the step verifies, also Mamba layers' inputs."""

    @abstractmethod
    def embed(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the first layer's input, [batch, tokens, hidden_size] in float32."""

    @abstractmethod
    def rotary(self, step: Step) -> RotaryTables | None:
        """Return rotary tables for the step's positions; None for a model without rotary positions."""


class BindableModel(Module):
    """A model as a set of weights.

    fallbacks: a sentence for each faster way of computing that it was not given when it was bound.
    mtp: its layers for multi-token prediction, if the config has them. They change no logits.
    """

    config: ModelConfig
    parallel: Parallel
    model: Decoder
    lm_head: Linear
    mtp: MultiTokenPrediction | None
    fallbacks: tuple[str, ...] = ()

    @property
    def is_fused(self) -> bool:
        """Whether all layers are one call of fused kernels."""
        return isinstance(self.model.stack, LayersAsOne)

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
        embedding is not quantized, and so has one whose inputs come first.
        """
        weight = self.model.embed_tokens.weight
        is_quantized_alone = is_quantized(self.lm_head.weight) and isinstance(weight, nn.Parameter)
        head_is_its_own = is_quantized_alone or self.operators.input_first
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
        layout already; on a device, operators that exchange the axes of matrices copy these.

        Adapters must have numbers; they apply to the rows of steps that name them.

        Raises:
            UserError: there are adapters, and the layers are not fused.
        """
        bound = shallow_copy(self)
        set_operators(bound, operators)
        if operators.pack is not None:
            bound._pack(operators.pack)
        if operators.input_first or operators.input_first_experts:
            bound._put_inputs_first(operators)
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
        copied.model._bound_stack = copied.mtp = None
        copied.config = copied.config.without_mtp()
        return copied

    def _choose_forms(self, adapters: Sequence[Adapter]) -> None:
        """Choose how layers and decode are computed, and record why a faster form of them is not used."""
        reasons = self.model.choose_forms(self.parallel, adapters)
        if self.mtp is not None:
            self.mtp.choose_forms(self.parallel, ())
        stack = self.model.stack
        if isinstance(stack, LayersAsOne):
            embedding, head = self.model.embed_tokens.weight, self.lm_head.weight
            refusal = stack.why_not_one_call(embedding, head)
            if refusal is None:
                stack.set_embedding_and_head(embedding, self.model.norm.weight, head)
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
        for matrix in self.matrices().values():
            if isinstance(matrix.weight, QuantizedWeight):
                matrix.set_compact_weight(matrix.weight.to(device))
        self.tie_weights()

    def _put_inputs_first(self, operators: Operators) -> None:
        """Exchange the axes of the matrices of products, or only of experts: a view, which a copy to a device makes
        contiguous there. So a tied head has values of its own.
        """
        for module in self.modules():
            of_products = operators.input_first and module is not self.model.embed_tokens
            if isinstance(module, Matrix if of_products else StackedWeights):
                weight = module.get_parameter("weight")
                module._parameters["weight"] = nn.Parameter(weight.transpose(-2, -1), requires_grad=False)

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


def _packed(matrix: Matrix, pack: Pack, dtype: torch.dtype) -> CompactWeight:
    """Return a matrix laid out for products with activations of `dtype`, or float32 if the matrix stays in float32."""
    if "weight" not in matrix.keeps_float32:
        return pack(matrix.weight, dtype)
    weight = matrix.weight
    return pack(weight.float() if isinstance(weight, torch.Tensor) else weight, torch.float32)
