"""Multi-token prediction: layers that predict the token after the next one.

Row i reads the embedding of token i + 1 and the model's final hidden state after token i, and predicts token i + 2:

    x = eh_proj([enorm(embedding of token i + 1), hnorm(hidden state i)])
    h = norm(layers(x))
    logits = head(h)

The embedding and the head are the model's, and the hidden state is the head's input, after the last norm. All norms are
RMS norms with the model's epsilon. The layers see the rows of earlier tokens only, and keep a cache of their own. To
predict a token further on, h takes the hidden state's place and the predicted token that of token i + 1.

Sources: Megatron-LM's MultiTokenPredictionLayer, with the norms of its hybrid_layer_specs (TENorm) and the
normalization "RMSNorm" that Megatron-Bridge's NemotronHBridge sets. The names in published files are that bridge's.
vLLM, SGLang and TensorRT-LLM compute the same. llama.cpp has a LayerNorm in place of the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.linear import Linear
from granite4_neuron.model.norm import norm_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.stack import LayerLoop, LayersAsOne, LayerStack
from granite4_neuron.model.step import NullSlotStep, Step
from granite4_neuron.state.hybrid_state import HybridState


class MultiTokenPrediction(LayerStack):
    """The layers of a model for multi-token prediction, without embedding and head.

    Args:
        config: of these layers, see `ModelConfig.mtp_config`.
        layers: attention, MLPs or experts.
    """

    def __init__(self, config: ModelConfig, layers: Iterable[DecoderLayer]):
        super().__init__()
        self.config = config
        self.enorm, self.hnorm = norm_of(config), norm_of(config)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))  # torch's list has any modules
        self.norm = norm_of(config)
        # Of the layers after the last attention, only the results for a row's last token are needed.
        attention = [number for number, layer in enumerate(self.layers) if layer.has_mixer]
        self._first_after = attention[-1] + 1 if attention else 0
        self._stack_after: LayerLoop | LayersAsOne | None = None

    def choose_forms(self, parallel: Parallel, adapters: Sequence[Adapter]) -> list[str]:
        """Choose how the layers are computed; return a sentence for each faster form that is not used."""
        self._bound_stack, reasons = self.form_of(self.layers[: self._first_after], parallel, adapters)
        self._stack_after, _ = self.form_of(self.layers[self._first_after :], parallel, adapters)
        return reasons

    def forward(
        self, embedded: torch.Tensor, hidden_states: torch.Tensor, step: Step, state: HybridState
    ) -> torch.Tensor:
        """Add rows to sequences of `state`, which is of these layers only. The forms of the layers must be chosen.

        Args:
            embedded: [batch, tokens, hidden_size], of each row's next token.
            hidden_states: of the same shape: the model's after each row's token, or an earlier result of this function.

        Returns:
            [rows, hidden_size] in the model's dtype, the head's input after the last token of each of the step's rows.
        """
        assert self._stack_after is not None  # `choose_forms`
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden_states)], dim=-1))
        x, _ = self.stack(x.float(), step, replace(state, layers=state.layers[: self._first_after]), None)
        last = NullSlotStep(step.last_positions[:, None], torch.ones_like(step.lengths), step.slots, step.kv_length)
        state_after = replace(state, layers=state.layers[self._first_after :])
        x, _ = self._stack_after(step.last_tokens(x)[:, None], last, state_after, None)
        return self.norm(x[:, 0])
