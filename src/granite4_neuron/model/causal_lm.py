"""The steps of a hybrid language model that runtimes ask for: prompts, decode, verification and commit.

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
from granite4_neuron.model.step import DenseStep, NullSlotStep, PackedStep, Step
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState


class HybridForCausalLM(BindableModel, ABC):
    """A hybrid with its language model head. It computes in plain torch; `bind` gives it other operators.

    This class has the steps that runtimes ask for. The computation itself is in the family's file.

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

    @abstractmethod
    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute logits: [..., hidden_size] to [..., vocab_size], float32."""

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
