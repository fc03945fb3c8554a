"""vLLM's Nemotron 3 with this package's Mamba-2 mixers."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

from granite4_neuron.vllm.cpu.mixer import Granite4MambaMixer2


class Nemotron3ForCausalLM(NemotronHForCausalLM):
    """vLLM's model. All layers but the mixers are vLLM's."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
        return vllm_config.model_config.dtype, torch.float32

    def process_weights_after_loading(self) -> None:
        """Let the mixers read their weights again; vLLM calls this when all weights are loaded."""
        for module in self.modules():
            if isinstance(module, Granite4MambaMixer2):
                module.forget_weights()
