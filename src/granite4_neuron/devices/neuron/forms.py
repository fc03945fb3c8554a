"""A Mamba-2 layer with one kernel for convolution, recurrence and gate; see `ops.FusedMixer`."""

from __future__ import annotations

import torch

from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.step import Step
from granite4_neuron.ops import FusedMixer, MixerConstants
from granite4_neuron.state.hybrid_state import MambaState


class FusedMixerMamba2(Mamba2):
    """`Mamba2` with the operators' fused mixers.

    Decode's takes steps of at most its `max_tokens` tokens; prefill's, if there is one, others that do not verify.
    """

    def forward(self, hidden_states: torch.Tensor, step: Step, state: MambaState) -> tuple[torch.Tensor, torch.Tensor]:
        mixer = self._mixer_of(hidden_states.shape[1])
        if mixer is None and not step.verifies:
            mixer = self.operators.mamba_prefill.fused_mixer
        if mixer is None:
            return super().forward(hidden_states, step, state)
        z, xBC_dt = self.project(hidden_states)
        return self.out_proj(self._mix_fused(mixer, xBC_dt, z, step, state), None, self.norm), xBC_dt

    def advance(self, inputs: torch.Tensor, step: Step, state: MambaState) -> None:
        mixer = self._mixer_of(inputs.shape[1])
        if mixer is None:
            super().advance(inputs, step, state)
        else:
            self._mix_fused(mixer, inputs, None, step, state)

    def _mixer_of(self, tokens: int) -> FusedMixer | None:
        """Return decode's mixer, or None if it does not take so many tokens."""
        mixer = self.operators.mamba_decode.fused_mixer
        assert mixer is not None  # `devices.selection`
        return mixer if tokens <= mixer.max_tokens else None

    def _mix_fused(
        self, mixer: FusedMixer, xBC_dt: torch.Tensor, z: torch.Tensor | None, step: Step, state: MambaState
    ) -> torch.Tensor | None:
        """Apply convolution, scan and gate: [batch, tokens, d_inner]; None without z. Verification keeps the state."""
        xBC, dt = self.recurrence_inputs(xBC_dt, step)
        constants = MixerConstants(self.conv1d.weight.squeeze(1), self.conv1d.bias, self.A(), self.D.float())
        before = step.read(state.conv_state), step.read(state.ssm_state)
        accepted = None if step.verifies else step.lengths
        results = mixer.mix(xBC, dt, constants, *before, z, accepted)
        if accepted is not None:
            step.write(state.ssm_state, results[-2])
            step.write(state.conv_state, results[-1])
        return None if z is None else results[0]
