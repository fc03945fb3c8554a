"""vLLM's Mamba-2 layer with this package's convolution and recurrence. Loading, sharding and cache stay vLLM's."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend

from granite4_neuron.config import FAMILIES
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.ops.layer_weights import MixerWeights
from granite4_neuron.vllm.cpu.metadata import Scan, StepBackend, Verify
from granite4_neuron.vllm.cpu.mixing import (
    DecodeRows,
    Mixer,
    Pages,
    fused_decode,
    fused_prefill,
    torch_decode,
    torch_prefill,
)


class Granite4MambaMixer2(MambaMixer2):
    """The mixer of Granite 4 and Nemotron 3. For other models it behaves as MambaMixer2.

    Raises:
        ValueError: ReplaySSM or vLLM's method draft_model is requested.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        config, speculative = vllm_config.model_config.hf_text_config, vllm_config.speculative_config
        self.is_ours = config.model_type in FAMILIES
        if not self.is_ours:
            return
        if speculative is not None and speculative.uses_draft_model():
            raise ValueError(
                "vLLM's method draft_model cannot draft for or with a hybrid model; use custom_class with "
                "granite4_neuron.vllm.cpu.draft_model.DraftModelProposer."
            )
        if self.use_replayssm:
            raise ValueError("granite4-neuron has no ReplaySSM; leave out --use-replayssm.")
        self.time_step_limit = FAMILIES[config.model_type].time_step_limit_in(config.to_dict())
        self._paged_cache: tuple[torch.Tensor, ...] | None = None
        fused = cpu.has_fused_kernels()
        self.decode, self.prefill = (fused_decode, fused_prefill) if fused else (torch_decode, torch_prefill)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        if not self.is_ours:
            return super().get_state_dtype()
        return self.model_config.dtype, torch.float32

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """Run convolution and recurrence of a step's tokens as vLLM does, from z, x, B, C and dt to `output`."""
        if not self.is_ours:
            return super().conv_ssm_forward(projected_states, output)
        output.copy_(self.mix(projected_states[:, self.tped_intermediate_size :]))

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StepBackend if self.is_ours else super().get_attn_backend()

    def mix(self, xBC_dt: torch.Tensor) -> torch.Tensor:
        """Mix [tokens, conv_dim + num_heads] to [tokens, num_heads * head_dim] in float32; zeros for padding."""
        parts = self._parts()
        if len(parts) == 1 and parts[0].tokens == slice(0, len(xBC_dt)):
            return self._mix_part(parts[0], xBC_dt)
        mixed = xBC_dt.new_zeros(len(xBC_dt), self.tped_intermediate_size, dtype=torch.float32)
        for part in parts:
            mixed[part.tokens] = self._mix_part(part, xBC_dt[part.tokens])
        return mixed

    def decode_rows(self, tokens: int) -> tuple[Pages, DecodeRows] | None:
        """Return states and rows of a step that only decodes, a few tokens of each sequence; None for other steps."""
        parts = self._parts()
        if len(parts) != 1 or not isinstance(parts[0], Verify) or parts[0].tokens != slice(0, tokens):
            return None
        return self._pages(), parts[0].rows

    def _parts(self) -> list[Scan | Verify]:
        """Return the parts of the step; none while vLLM is measuring the memory of a step."""
        layer_metadata = get_forward_context().attn_metadata
        return [] if layer_metadata is None else layer_metadata[self.prefix].parts

    def _mix_part(self, part: Scan | Verify, xBC_dt: torch.Tensor) -> torch.Tensor:
        if isinstance(part, Verify):
            return self.decode(self.own_mixer, xBC_dt, self._pages(), part.rows)
        return self.prefill(self.own_mixer, xBC_dt, self._pages(), part.read, part.write)

    def _pages(self) -> Pages:
        """Return the pages of the cache that vLLM has bound last."""
        if self._paged_cache is not self.kv_cache:
            conv, ssm = self.kv_cache[:2]
            self._views = Pages(conv if is_conv_state_dim_first() else conv.transpose(1, 2), ssm)
            self._paged_cache = self.kv_cache
        return self._views

    def forget_weights(self) -> None:
        """Drop the cached weights, after vLLM has loaded new ones."""
        self.__dict__.pop("own_mixer", None)

    @cached_property
    def own_mixer(self) -> Mixer:
        return Mixer(
            MixerWeights(
                conv_weight=self.conv_weights.unsqueeze(1),
                conv_bias=self.conv1d.bias,
                dt_bias=self.dt_bias,
                A_log=self.A.abs().log(),  # A is negative, except with vLLM's random weights for benchmarks
                D=self.D,
                n_groups=self.n_groups // self.tp_size,
                time_step_limit=self.time_step_limit,
            )
        )
