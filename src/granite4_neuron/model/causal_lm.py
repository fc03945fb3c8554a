"""A hybrid language model as runtimes call it: hidden states of a step, head, and the advance of a verified step.

A family of models is a subclass, which has the computation from tokens to logits. The module tree has the parameter
names of Granite's published checkpoints; `checkpoint.names` maps the names of other families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.bindable_model import BindableModel, Decoder
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.linear import Linear
from granite4_neuron.model.mtp import MultiTokenPrediction
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.stack import LayersAsOne
from granite4_neuron.model.step import PackedStep, Step
from granite4_neuron.state.hybrid_state import HybridState


class HybridForCausalLM(BindableModel, ABC):
    """A hybrid with its language model head. It computes in plain torch; `bind` gives it other operators.

    This class has what runtimes call. The computation itself is in the family's file.

    Args:
        config: the model's dimensions and constants.
        parallel: this rank's place, for a model whose heads, widths and vocabulary are split over ranks.
    """

    def __init__(self, config: ModelConfig, parallel: Parallel = Parallel()):  # noqa: B008
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.model = self.make_decoder(config, parallel, self._make_layers(config, parallel))
        vocab_size = config.rank_dimensions(parallel.degree).vocab_size
        self.lm_head = Linear(config.hidden_size, vocab_size, bias=False)
        self.mtp = None
        if (of_mtp := config.mtp_config) is not None:
            self.mtp = MultiTokenPrediction(of_mtp, self._make_layers(of_mtp, parallel))
        self.tie_weights()

    @staticmethod
    @abstractmethod
    def make_decoder(config: ModelConfig, parallel: Parallel, layers: Iterable[DecoderLayer]) -> Decoder:
        """Make the model without its head, from its layers."""

    @staticmethod
    @abstractmethod
    def make_layer(config: ModelConfig, number: int, parallel: Parallel) -> DecoderLayer:
        """Make a layer of the model by its number."""

    def _make_layers(self, config: ModelConfig, parallel: Parallel) -> list[DecoderLayer]:
        return [self.make_layer(config, number, parallel) for number in range(len(config.layer_types))]

    def forward(
        self, input_ids: torch.Tensor, step: Step, state: HybridState, all_logits: bool = False
    ) -> torch.Tensor:
        """Add tokens to sequences, each of which lives in a slot of `state`, and predict what follows: `head` of
        `hidden_states`.

        Prefill, a further chunk of prefill, a verify step and decode are all this function: cutting a sequence anywhere
        gives the same logits. Neither a padded token nor a row of length 0 changes anything.

        Args:
            input_ids: [batch, tokens], int64; any valid id in padding. For a `PackedStep` [1, tokens], row after row.
            step: where the tokens belong; from `model.step.step_of`, or a `PackedStep` if the layers are fused.
            state: updated in place.
            all_logits: logits of every token rather than of each row's last real one.

        Returns:
            [rows, vocab_size], or [batch, tokens, vocab_size] with `all_logits`; float32.
        """
        stack = self.model.stack
        if isinstance(step, PackedStep) and isinstance(stack, LayersAsOne) and stack.takes(step) and not all_logits:
            return stack.forward_packed(input_ids, step, state)
        hidden_states, _ = self.hidden_states(input_ids, step, state)
        return self.head(hidden_states if all_logits else step.last_tokens(hidden_states))

    def hidden_states(
        self, input_ids: torch.Tensor, step: Step, state: HybridState
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute `forward` up to the head.

        Returns:
            [batch, tokens, hidden_size] in the model's dtype, after the last norm; and if the step verifies, the inputs
            of each Mamba layer's recurrence, [batch, tokens, conv_dim + num_heads], for `advance`.
        """
        return self.model(input_ids, step, state)

    @abstractmethod
    def head(self, hidden_states: torch.Tensor, of_decode: bool = False) -> torch.Tensor:
        """Compute logits: [..., hidden_size] to [..., vocab_size], float32.

        Args:
            of_decode: whether hidden_states are of one token of each sequence, for which a device may have another
                operator.
        """

    def advance(self, kept_inputs: Sequence[torch.Tensor], step: Step, state: HybridState) -> None:
        """Advance recurrent state by the first tokens of a step that verified; only the Mamba layers' recurrences run.

        Args:
            kept_inputs: from `hidden_states` of that step.
            step: that step's positions and slots; its lengths say how many of each row's tokens to take, 0 to the row's
                length in that step.
            state: as for `forward`.
        """
        self.model.stack.advance(kept_inputs, step, state)
