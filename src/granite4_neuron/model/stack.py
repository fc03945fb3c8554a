"""Layers one above the other, and the ways of computing them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.binding import Module
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.forms import forms_of
from granite4_neuron.model.norm import RMSNorm
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import PackedStep, Step
from granite4_neuron.ops import Operators, Weight
from granite4_neuron.state.hybrid_state import HybridState, LayerState, MambaState


class LayerStack(Module):
    """Layers and the norm after them.

    config: of these layers.
    stack: how the layers are computed.
    """

    config: ModelConfig
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    _bound_stack: LayerLoop | LayersAsOne | None = None

    @property
    def stack(self) -> LayerLoop | LayersAsOne:
        return LayerLoop(self.layers) if self._bound_stack is None else self._bound_stack

    def choose_forms(self, parallel: Parallel, adapters: Sequence[Adapter]) -> list[str]:
        """Choose how the layers are computed; return a sentence for each faster form that is not used."""
        self._bound_stack, reasons = self.form_of(self.layers, parallel, adapters)
        return reasons

    def form_of(
        self, layers: Sequence[DecoderLayer], parallel: Parallel, adapters: Sequence[Adapter]
    ) -> tuple[LayerLoop | LayersAsOne, list[str]]:
        """Return how consecutive layers of these are computed, and a sentence for each faster form that is not used."""
        reasons: list[str] = []
        if self.operators.fused_layers is not None:
            form: type[LayersAsOne] | None = self.operators.stack_form
            assert form is not None  # operators with fused layers have it
            refusal = form.why_not(parallel, self.norm, layers)
            if refusal is None:
                return form(self.operators, layers, self.config, adapters), reasons
            reasons.append(f"the fused decoder layers are not used: {refusal}.")
        forms, more_reasons = forms_of(layers)
        return LayerLoop(forms), reasons + more_reasons


class LayersAsOne(ABC):
    """All decoder layers of a model as one call, with the weights that they have at construction.

    Args:
        operators: with fused layers.
        layers: with packed matrices.
        config: the whole model's.
        adapters: with numbers.
    """

    @abstractmethod
    def __init__(
        self,
        operators: Operators,
        layers: Sequence[DecoderLayer],
        config: ModelConfig,
        adapters: Sequence[Adapter] = (),
    ): ...

    @staticmethod
    @abstractmethod
    def why_not(parallel: Parallel, norm: nn.Module, layers: Sequence[DecoderLayer]) -> str | None:
        """Return why it does not support a model, as a clause; None if it does. norm: the model's final norm; all norms
        are of its kind.
        """

    @abstractmethod
    def __call__(
        self, hidden_states: torch.Tensor, step: Step, state: HybridState, rotary: RotaryTables | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute `LayerLoop.__call__`."""

    @abstractmethod
    def advance(self, kept_inputs: Sequence[torch.Tensor], step: Step, state: HybridState) -> None:
        """Compute `LayerLoop.advance`."""

    @abstractmethod
    def why_not_one_call(self, embedding: Weight, head: Weight) -> str | None:
        """Return why there is no `forward_packed` for the model, as a clause; None if there is."""

    @abstractmethod
    def set_embedding_and_head(self, embedding: Weight, norm: torch.Tensor, head: Weight) -> None:
        """Give it the model's embedding, final norm and head, for `forward_packed`; see `why_not_one_call`."""

    @abstractmethod
    def takes(self, step: PackedStep) -> bool:
        """Return whether there is `forward_packed` for the model and the step."""

    @abstractmethod
    def forward_packed(self, input_ids: torch.Tensor, step: PackedStep, state: HybridState) -> torch.Tensor:
        """Compute `HybridForCausalLM.forward`."""


class LayerLoop:
    """The layers of a model, one after another.

    Args:
        layers: each in its chosen form.
    """

    def __init__(self, layers: Iterable[DecoderLayer]):
        self.layers = tuple(layers)

    def __call__(
        self, hidden_states: torch.Tensor, step: Step, state: HybridState, rotary: RotaryTables | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Advance hidden_states, [batch, tokens, hidden_size] in float32, through all layers, and the state in place.

        Returns:
            The new hidden_states; and if the step verifies, the inputs of each Mamba layer's recurrence.
        """
        return through_layers(
            lambda layer, x, layer_state: layer(x, step, layer_state, rotary),
            self.layers,
            state.layers,
            hidden_states,
            keep_inputs=step.verifies,
        )

    def advance(self, kept_inputs: Sequence[torch.Tensor], step: Step, state: HybridState) -> None:
        """Advance the Mamba layers' states by inputs that a call kept, see `Mamba2.advance`."""
        pairs = zip(self.layers, state.layers, strict=True)
        mamba = [(layer, layer_state) for layer, layer_state in pairs if isinstance(layer_state, MambaState)]
        for (layer, layer_state), inputs in zip(mamba, kept_inputs, strict=True):
            layer.advance(inputs, step, layer_state)


def through_layers(
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    layers: Sequence[DecoderLayer],
    states: Sequence[LayerState | Sequence[torch.Tensor]],
    hidden_states: torch.Tensor,
    keep_inputs: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute layers one after another: `compute(layer, hidden_states, state)` is what `DecoderLayer.forward` returns.

    keep_inputs: also return the inputs of each Mamba layer's recurrence; otherwise each layer's inputs are freed.
    """
    kept_inputs = []
    for layer, state in zip(layers, states, strict=True):
        hidden_states, inputs = compute(layer, hidden_states, state)
        if keep_inputs and inputs is not None:
            kept_inputs.append(inputs)
    return hidden_states, kept_inputs
