"""The `runtime.interface.Runtime` of NxD Inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from transformers import GenerationConfig

from granite4_neuron.config import ModelConfig
from granite4_neuron.config.choices import NO_ADAPTERS, NO_HIDDEN_STATES
from granite4_neuron.devices.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.runtime.interface import (
    Ability,
    Refusals,
    Row,
    Verification,
    accepted_rows,
    check_verification,
    require,
)
from granite4_neuron.runtime.prompt_cuts import Anywhere


class NeuronRuntime(Refusals):
    """A loaded model of NxD Inference. The model keeps its own state: slot s is its sequence s - 1.

    Args:
        model: loaded, with is_continuous_batching and without on_device_sampling_config.
        generation_config: the checkpoint's defaults for generation.

    Raises:
        UserError: the model was configured differently.
    """

    rows_per_step = 1
    packs_rows = False
    begins_snapshots = False
    sampling = None
    prompt_cuts = Anywhere(is_exact=False)
    adapters: Mapping[str, Adapter] = {}

    def __init__(self, model: NeuronGraniteMoeHybridForCausalLM, generation_config: GenerationConfig):
        neuron_config = model.neuron_config
        if not neuron_config.is_continuous_batching or neuron_config.on_device_sampling_config is not None:
            raise UserError("the model must be compiled with is_continuous_batching, and without on-device sampling.")
        self.model = model
        self.generation_config = generation_config
        cannot: dict[Ability, str] = {
            "all_logits": "NxD Inference's graphs return logits after a prompt's last token only.",
            "snapshot": "NxD Inference keeps the state on the device: a sequence can be copied to another slot there, "
            "but not to the host.",
            "decode": "NxD Inference's graphs bring the logits of all steps to the host.",
            "adapters": NO_ADAPTERS,
            "hidden_states": NO_HIDDEN_STATES,
        }
        if not neuron_config.speculation_length:
            cannot["verify"] = "the model was compiled without graphs that verify; compile it with --verify."
        if model.copy_model is None:
            cannot["copy"] = "the model was compiled for one sequence; there is no other slot to copy it to."
        self.cannot: Mapping[Ability, str] = cannot

    @property
    def config(self) -> ModelConfig:
        return self.model.config.granite

    @property
    def max_length(self) -> int:
        return self.model.neuron_config.max_length

    @property
    def own_slots(self) -> int:
        return self.model.neuron_config.kv_cache_batch_size

    @property
    def dtype(self) -> torch.dtype:
        return self.model.neuron_config.torch_dtype

    @property
    def state_dtype(self) -> torch.dtype:
        return getattr(torch, self.model.config.state_dtype)

    @property
    def is_quantized(self) -> bool:
        return False  # `compile_model` does not use NxD Inference's int8

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return self.model.config.operators.fallbacks

    @property
    def fingerprint(self) -> NoReturn:
        """Refused: only snapshots need a fingerprint."""
        raise UserError(self.cannot["snapshot"])

    @property
    def tokens_per_step(self) -> int:
        """A whole prompt, because the model itself cuts it for its graphs."""
        return self.max_length

    @property
    def tokens_per_long_step(self) -> int:
        return self.tokens_per_step

    @property
    def tokens_per_verification(self) -> int:
        return self.model.neuron_config.speculation_length

    def sequences_that_fit(self, max_length: int) -> int:
        """The state was made when the model was loaded."""
        return self.own_slots

    def allocate(self, num_sequences: int, max_length: int) -> None:
        """Check that the compiled model has the slots, which it made when it was loaded.

        Raises:
            UserError: it was compiled for fewer or shorter sequences.
        """
        if num_sequences > self.own_slots or max_length > self.max_length:
            raise UserError(
                f"the model is compiled for {self.own_slots} sequences of {self.max_length} tokens, "
                f"and {num_sequences} of {max_length} are asked for; reduce them, or compile it with larger limits."
            )

    def warm_up(self, state: None, verified_tokens: int = 0) -> None:
        """Every graph was loaded with the model."""

    @torch.inference_mode()
    def step(self, state: None, rows: Sequence[Row], all_logits: bool = False) -> torch.Tensor:
        """Decode single tokens together; the model cuts prompts itself.

        Raises:
            UserError: with `all_logits`.
        """
        if all_logits:
            require(self, "all_logits")
        single = [row for row in rows if row.start and len(row.tokens) == 1 and not row.is_prompt]
        decoded = dict(zip((row.slot for row in single), self._logits(single), strict=True)) if single else {}
        return torch.stack([decoded[row.slot] if row.slot in decoded else self._prompt(row) for row in rows])

    @torch.inference_mode()
    def verify(self, state: None, rows: Sequence[Row]) -> Verification:
        """One graph is for all slots; its kept inputs stay on the device.

        The graph takes only sequences that have begun. The first token of a new sequence runs as a prompt, which is
        safe because a row at position 0 starts from zeros whatever its slot holds.
        """
        require(self, "verify")
        check_verification(self, rows)
        first = {row.slot: self._logits([Row(row.slot, 0, row.tokens[:1])]) for row in rows if not row.start}
        tokens = torch.zeros(self.own_slots, self.tokens_per_verification, dtype=torch.int64)
        is_there = torch.zeros(self.own_slots, dtype=torch.bool)
        for slot, (_, row_tokens) in _begun(rows).items():
            tokens[slot - 1, : len(row_tokens)] = torch.tensor(row_tokens)
            is_there[slot - 1] = len(row_tokens) > 0
        by_slot, kept_inputs = self.model.verify(tokens, self._starts(rows), is_there)
        for slot, logits in first.items():
            by_slot[slot - 1] = torch.cat([logits, by_slot[slot - 1, :-1]])
        longest = max(len(row.tokens) for row in rows)
        logits = torch.stack([by_slot[row.slot - 1, :longest] for row in rows]).float()
        return Verification(rows, logits, kept_inputs)

    @torch.inference_mode()
    def commit(self, state: None, verification: Verification, accepted: Sequence[int]) -> None:
        """It runs on the device."""
        require(self, "verify")
        counts = torch.zeros(self.own_slots, dtype=torch.int64)
        for slot, (_, row_tokens) in _begun(accepted_rows(verification.rows, accepted)).items():
            counts[slot - 1] = len(row_tokens)
        self.model.commit(verification.kept_inputs, self._starts(verification.rows), counts)

    @torch.inference_mode()
    def copy(self, state: None, source: int, destination: int, length: int) -> None:
        """Copy the whole slot, on the device."""
        require(self, "copy")
        self.model.copy(source - 1, destination - 1)

    def _starts(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return [slots], the position where each row's verification starts; 0 for other slots."""
        starts = torch.zeros(self.own_slots, dtype=torch.int64)
        for slot, (start, _) in _begun(rows).items():
            starts[slot - 1] = start
        return starts

    def _prompt(self, row: Row) -> torch.Tensor:
        """Return logits [vocab_size] after a prompt or further tokens of one."""
        if not row.start:
            return self._logits([row])[0]
        if self.model.prefill_continuation_model is not None:
            return self.model.extend(torch.tensor(row.tokens), row.start, row.slot - 1)[0].float()
        for place, token in enumerate(row.tokens):
            logits = self._logits([Row(row.slot, row.start + place, [token])])
        return logits[0]

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


def _begun(rows: Sequence[Row]) -> dict[int, tuple[int, Sequence[int]]]:
    """Return start and tokens of each row by slot, without the first token of a new sequence."""
    return {row.slot: (row.start, row.tokens) if row.start else (1, row.tokens[1:]) for row in rows}
