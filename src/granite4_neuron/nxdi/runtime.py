"""Runs steps of the model through NxD Inference, as `runtime.interface.Runtime` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from transformers import GenerationConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.runtime.interface import Ability, Row, Verification, require
from granite4_neuron.snapshot import Snapshot


class NeuronRuntime:
    """A loaded model of NxD Inference. Its state is the model's own: slot s is the model's sequence s - 1.

    Args:
        model: loaded, with is_continuous_batching and without on_device_sampling_config.
        generation_config: the checkpoint's defaults for generation.

    Raises:
        UserError: the model was configured otherwise.
    """

    rows_per_step = 1
    tokens_per_verification = 0
    state_dtype = torch.float32
    refusals = ()
    cannot: Mapping[Ability, str] = {
        "all_logits": "NxD Inference's graphs give the logits after a prompt's last token, and none before it.",
        "source": "NxD Inference's graphs read and write a sequence's state in one place.",
        "verify": "NxD Inference's graphs add tokens to a sequence at once; it cannot verify and take back.",
        "copy": "NxD Inference keeps the state on the device and has no graph that copies a sequence's.",
        "snapshot": "NxD Inference keeps the state on the device and gives no access to it.",
    }

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
    def dtype(self) -> torch.dtype:
        return self.model.neuron_config.torch_dtype

    @property
    def is_quantized(self) -> bool:
        return False  # its int8 is not among what compile_model asks for

    @property
    def fingerprint(self) -> NoReturn:
        """Only snapshots need one, and there are none."""
        self._refuse("snapshot")

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
        """As `Runtime.step`, for whole prompts and for single tokens; the model cuts a prompt itself.

        Raises:
            UserError: with `all_logits` or a source.
            ValueError: several tokens come after others of their sequence.
        """
        if all_logits:
            require(self, "all_logits")
        if any(row.source is not None for row in rows):
            require(self, "source")
        if any(row.start and len(row.tokens) > 1 for row in rows):
            raise ValueError("NxD Inference runs whole prompts or single tokens.")
        if all(row.start for row in rows):
            return self._logits(rows)
        return torch.cat([self._logits([row]) for row in rows])

    def verify(self, state: None, rows: Sequence[Row]) -> NoReturn:
        self._refuse("verify")

    def commit(self, state: None, verification: Verification, accepted: Sequence[int]) -> NoReturn:
        self._refuse("verify")

    def copy(self, state: None, source: int, destination: int, length: int) -> NoReturn:
        self._refuse("copy")

    def snapshot(self, state: None, slot: int, length: int, start: int = 0) -> NoReturn:
        self._refuse("snapshot")

    def restore(self, state: None, snapshots: Sequence[Snapshot], slot: int) -> NoReturn:
        self._refuse("snapshot")

    def _refuse(self, ability: Ability) -> NoReturn:
        raise UserError(self.cannot[ability])

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
