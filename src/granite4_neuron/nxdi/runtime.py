"""Runs steps of the model through NxD Inference, with the interface of `runtime.cpu.CPURuntime`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.runtime.cpu import Row


class NeuronRuntime:
    """A loaded model of NxD Inference. Its state is the model's own: slot s is the model's sequence s - 1.

    Args:
        model: loaded, with is_continuous_batching and without on_device_sampling_config.
        generation_config: the checkpoint's defaults for generation.

    Raises:
        UserError: the model was configured otherwise.
    """

    prompts_per_step = 1

    def __init__(self, model: NeuronGraniteMoeHybridForCausalLM, generation_config: GenerationConfig):
        neuron_config = model.neuron_config
        if not neuron_config.is_continuous_batching or neuron_config.on_device_sampling_config is not None:
            raise UserError("the model must be compiled with is_continuous_batching, and without on-device sampling.")
        self.model = model
        self.generation_config = generation_config

    @property
    def config(self) -> GraniteMoeHybridConfig:
        return self.model.config.granite

    @property
    def tokens_per_step(self) -> int:
        """All of a prompt: the model itself cuts it into what its graphs take."""
        return self.model.neuron_config.max_length

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """Check that the compiled model has the slots; it made them when it was loaded.

        Raises:
            UserError: it was compiled for fewer or shorter sequences.
        """
        slots, length = self.model.neuron_config.kv_cache_batch_size, self.tokens_per_step
        if num_sequences > slots or max_length > length:
            raise UserError(
                f"the model is compiled for {slots} sequences of {length} tokens, "
                f"and {num_sequences} of {max_length} are asked for; ask for less, or compile it for more."
            )

    @torch.inference_mode()
    def step(self, state: None, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """As `CPURuntime.step`, for whole prompts and for single tokens.

        Raises:
            NotImplementedError: with `all_logits`, or for several tokens that come after others of their sequence:
                the graphs give the logits of each row's last token, and cut prompts where they please.
        """
        if all_logits or any(row.start and len(row.tokens) > 1 for row in rows):
            raise NotImplementedError("NxD Inference runs whole prompts or single tokens, for their last logits.")
        if all(row.start for row in rows):
            return self._logits(rows)
        return torch.cat([self._logits([row]) for row in rows])

    def _logits(self, rows: Sequence[Row]) -> torch.Tensor:
        starts = torch.tensor([row.start for row in rows])
        tokens = torch.tensor([list(row.tokens) for row in rows])
        known = starts if starts.all() else starts + tokens.shape[1]  # the mask of a single token leaves it out
        output = self.model(
            input_ids=tokens,
            attention_mask=(torch.arange(int(known.max())) < known[:, None]).long(),
            position_ids=starts[:, None] + torch.arange(tokens.shape[1]),
            seq_ids=torch.tensor([row.slot - 1 for row in rows]),
        )
        return output.logits[:, -1].float()
