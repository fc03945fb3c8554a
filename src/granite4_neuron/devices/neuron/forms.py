"""A Mamba-2 layer with one kernel for a few tokens: convolution, recurrence and gate; see `ops.FusedMixer`."""

from __future__ import annotations

import torch

from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.step import Step
from granite4_neuron.ops import FusedMixer, MixerConstants
from granite4_neuron.state.hybrid_state import MambaState


class FusedMixerMamba2(Mamba2):
    """`Mamba2` with the operators' fused mixer, for steps of at most `max_tokens` tokens."""

    @property
    def _fused_mixer(self) -> FusedMixer:
        fused_mixer = self.operators.mamba_decode.fused_mixer
        assert fused_mixer is not None  # `devices.selection`
        return fused_mixer

    def forward(self, hidden_states: torch.Tensor, step: Step, state: MambaState) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden_states.shape[1] > self._fused_mixer.max_tokens:
            return super().forward(hidden_states, step, state)
        z, xBC_dt = self.project(hidden_states)
        return self.out_proj(self._mix_fused(xBC_dt, z, step, state), None, self.norm), xBC_dt

    def advance(self, inputs: torch.Tensor, step: Step, state: MambaState) -> None:
        if inputs.shape[1] > self._fused_mixer.max_tokens:
            super().advance(inputs, step, state)
        else:
            self._mix_fused(inputs, None, step, state)

    def _mix_fused(
        self, xBC_dt: torch.Tensor, z: torch.Tensor | None, step: Step, state: MambaState
    ) -> torch.Tensor | None:
        """Apply convolution, scan and gate: [batch, tokens, d_inner]; None without z. Verification keeps the state."""
        xBC, dt = self.recurrence_inputs(xBC_dt, step)
        constants = MixerConstants(self.conv1d.weight.squeeze(1), self.conv1d.bias, self.A(), self.D.float())
        before = step.read(state.conv_state), step.read(state.ssm_state)
        accepted = None if step.verifies else step.lengths
        results = self._fused_mixer.mix(xBC, dt, constants, *before, z, accepted)
        if accepted is not None:
            step.write(state.ssm_state, results[-2])
            step.write(state.conv_state, results[-1])
        return None if z is None else results[0]
