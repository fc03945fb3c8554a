"""GGUF files as checkpoints. Importing this module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from granite4_neuron.checkpoint.checkpoint import Checkpoint, StoredWeight, joined_remarks, left_out_remark
from granite4_neuron.checkpoint.folder_contents import GENERATION_CONFIG
from granite4_neuron.checkpoint.gguf.config import read_config, stored_dtype
from granite4_neuron.checkpoint.gguf.file import open_gguf
from granite4_neuron.checkpoint.gguf.sampling import read_sampling
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.checkpoint.gguf.tensors import GGUFTensors
    from granite4_neuron.model.causal_lm import HybridForCausalLM


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, which has config, weights and tokenizer.

    Raises:
        UserError: the file is damaged, or this package does not run its model.
    """

    folder = None
    quantization = None

    def __init__(self, path: Path):
        self.path = path
        self._file = open_gguf(path)
        self.config = read_config(self._file)

    @cached_property
    def tensors(self) -> GGUFTensors:
        # Not at the top: it imports torch.
        from granite4_neuron.checkpoint.gguf.tensors import GGUFTensors

        return GGUFTensors(self._file, self.config)

    @property
    def has_weights(self) -> bool:
        return True

    @property
    def dtype(self) -> str:
        """It is bfloat16 if weights are quantized."""
        return stored_dtype(self._file)

    @property
    def stored_in(self) -> list[str]:
        """GGUF's names of the types."""
        return sorted({one.type for one in self._file.tensors.values()})

    def with_mtp(self) -> NoReturn:
        raise UserError(
            f"{self.path} is a GGUF file, and layers for multi-token prediction are read from checkpoint folders only."
        )

    @property
    def has_tokenizer(self) -> bool:
        from granite4_neuron.checkpoint.gguf.tokenizer import has_tokenizer

        return has_tokenizer(self._file)

    def quantized_weights(self, model: HybridForCausalLM, keep: Collection[str]) -> dict[str, StoredWeight]:
        from granite4_neuron.checkpoint.gguf.kept import kept_weights

        found = kept_weights(self.tensors, model) if keep else {}
        return {
            name: StoredWeight(each.format, partial(each.read, name, stored=self.tensors))
            for name, each in found.items()
        }

    def remark_on(self, quantized: dict[str, StoredWeight], held_in: str) -> str | None:
        from granite4_neuron.checkpoint.gguf.kept import remark_on

        return joined_remarks(left_out_remark(self.tensors.left_out), remark_on(self.tensors, quantized, held_in))

    def generation_config(self) -> dict[str, Any]:
        """Return GGUF's recommended sampling, under its own names where generation_config.json has none."""
        return read_sampling(self._file)

    def copy_texts_to(self, folder: Path) -> None:
        if self.has_tokenizer:
            self._read_tokenizer().save_pretrained(folder)
        sampling = {name: value for name, value in self.generation_config().items() if "." not in name}
        if sampling:
            (folder / GENERATION_CONFIG).write_text(json.dumps(sampling, indent=2) + "\n")

    def _read_tokenizer(self) -> PreTrainedTokenizerFast:
        from granite4_neuron.checkpoint.gguf.tokenizer import read_tokenizer

        return read_tokenizer(self._file)
