"""The traced model with verification, kept inputs and their replay for speculation; and with captured tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry

from granite4_neuron.devices.neuron.nxdi.modeling import NeuronDecoderLayer, NeuronGraniteMoeHybridModel
from granite4_neuron.devices.neuron.nxdi.state import NeuronStep, int32_arange


class JournalStep(NeuronStep):
    """A step that keeps each Mamba layer's inputs in `journal`, for `SpeculativeModel.advance`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.journal: list[torch.Tensor] = []

    def keep(self, inputs: torch.Tensor) -> None:
        self.journal.append(inputs)


class SpeculativeModel(NeuronGraniteMoeHybridModel):
    """`NeuronGraniteMoeHybridModel` with one more kind of step, and with a replay of recurrent state:

    * verification, tokens == neuron_config.speculation_length < n: drafts of sequences that have begun. Recurrent state
      does not change, and `kept_inputs` has the inputs for `advance`. The mask has ones for the tokens before the step.

    keeps_inputs: whether token generation also fills `kept_inputs`.
    """

    keeps_inputs = False
    kept_inputs: Sequence[torch.Tensor] = ()

    def make_step(self, position_ids: torch.Tensor, seq_ids: torch.Tensor) -> NeuronStep:
        verifies, self.kept_inputs = self._is_for_speculation(position_ids), ()
        if not (verifies or self.keeps_inputs):
            return super().make_step(position_ids, seq_ids)
        arguments = self.step_arguments(position_ids, seq_ids)
        step = JournalStep(*arguments, verifies=verifies, has_begun=verifies)
        self.kept_inputs = step.journal
        return step

    def for_head(self, hidden_states: torch.Tensor, step: NeuronStep) -> torch.Tensor:
        """Select the hidden states for the head; in a verification all of them, [batch, tokens, hidden_size]."""
        return hidden_states if step.verifies else super().for_head(hidden_states, step)

    def advance(
        self, kept_inputs: Sequence[torch.Tensor], position_ids: torch.Tensor, accepted: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the recurrent state after the first tokens of a verification, by a masked replay.

        Args:
            kept_inputs: of each Mamba layer, [slots, tokens, conv_dim + num_heads].
            position_ids: [slots, 1], of that step's first tokens.
            accepted: [slots], 0 to tokens; tokens after these have dt = 0 and do not change the state. The window
                of the convolution ends at the last accepted token.

        Returns:
            conv_state and ssm_state of each Mamba layer.
        """
        if not kept_inputs:
            return []
        positions = position_ids.int() + int32_arange(kept_inputs[0].shape[1], position_ids)
        slots = int32_arange(len(accepted), position_ids)
        step = NeuronStep(positions, accepted.int(), slots, self.n_positions, None, has_begun=True)
        new = []
        for (idx, layer), inputs in zip(self.mamba_layers(), kept_inputs, strict=True):
            state = self.kv_mgr.mamba_state(idx)
            layer.advance(inputs, step, state)
            new += [state.conv_state, state.ssm_state]
        return new

    def mamba_layers(self) -> Iterator[tuple[int, NeuronDecoderLayer]]:
        """Return each Mamba layer with its index among all layers."""
        return ((idx, layer) for idx, layer in enumerate(self.layers) if layer.is_mamba)

    def _is_for_speculation(self, input_ids: torch.Tensor) -> bool:
        return 1 < input_ids.shape[-1] == self.speculation_length < self.n_positions

    def _sample_on_device(
        self,
        logits: torch.Tensor,
        sampling_params: torch.Tensor,
        is_for_speculation: bool,
        is_for_context_encoding: bool,
    ) -> torch.Tensor:
        """Return tokens [batch, 1]; for a verification the greedy tokens after each token, [batch, tokens]."""
        if not is_for_speculation:
            return super()._sample_on_device(logits, sampling_params, is_for_speculation, is_for_context_encoding)
        tokens = self.sampler(logits.flatten(0, 1), sampling_params, rank_id=self.rank_util.get_rank())
        return tokens.view(logits.shape[:2]).to(torch.int32)

    def _get_captured_tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors that tensor_capture_config names."""
        captured = super()._get_captured_tensors(device)
        # The call above cleared the names in the registry, but the next step or graph needs them again.
        wanted = self.neuron_config.tensor_capture_config
        TensorRegistry.get_instance().configure(
            True, wanted.modules_to_capture, wanted.max_intermediate_tensors, wanted.capture_inputs
        )
        return captured
