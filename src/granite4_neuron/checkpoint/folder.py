"""Checkpoints in folders, in Hugging Face's layout. Importing this module does not import torch."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.checkpoint.checkpoint import (
    Checkpoint,
    StoredWeight,
    converted_remark,
    joined_remarks,
    left_out_remark,
    require_folder,
    unused_remark,
)
from granite4_neuron.checkpoint.folder_contents import (
    CONFIG,
    GENERATION_CONFIG,
    MODELOPT,
    NAMED_TEMPLATES,
    TOKENIZER,
    TOKENIZER_FILES,
    what_else_is_in,
)
from granite4_neuron.checkpoint.stored_tensors import INDEX, WEIGHTS, StoredTensors
from granite4_neuron.config import ModelConfig, config_from_dict
from granite4_neuron.config.json_files import read_object
from granite4_neuron.config.model_config import NO_MTP
from granite4_neuron.config.quantization import modelopt_in, quantization_in
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.model.causal_lm import HybridForCausalLM


def bundled_checkpoint() -> Path:
    """Return the folder of the small trained checkpoint that comes with the package; its model card is README.md."""
    return Path(str(resources.files("granite4_neuron") / "checkpoint" / "tiny"))


class FolderCheckpoint(Checkpoint):
    """A checkpoint folder: config.json, and model.safetensors or shards with model.safetensors.index.json.

    Raises:
        UserError: there is no config.json, or it is not one of a Granite model or of weights that this package reads.
    """

    def __init__(self, folder: Path):
        self.path = folder
        file = folder / CONFIG
        if not file.exists():
            raise UserError(f"{file} does not exist; a checkpoint folder holds a {CONFIG}.{what_else_is_in(folder)}")
        values = read_object(file)
        self.config = config_from_dict(values, source=str(file))
        self._stored = quantization_in(values)
        if self._stored is None and (folder / MODELOPT).exists():
            self._stored = modelopt_in(read_object(folder / MODELOPT))
        self.quantization = self._stored if self._stored is not None and self._stored.is_kept else None

    @property
    def folder(self) -> Path | None:
        return None if self.has_weights and self.tensors.encoded_in() else self.path

    @cached_property
    def tensors(self) -> StoredTensors:
        return StoredTensors(self.path, self.config, self._stored)

    @property
    def has_weights(self) -> bool:
        return any((self.path / name).exists() for name in (WEIGHTS, INDEX))

    @property
    def dtype(self) -> str:
        """The embedding's dtype."""
        return self.tensors.dtype()

    @property
    def stored_in(self) -> list[str]:
        stored, encoded_in = self._stored, self.tensors.encoded_in() if self.has_weights else []
        return [*encoded_in, stored.name] if stored is not None and (stored.is_kept or not encoded_in) else encoded_in

    def with_mtp(self) -> FolderCheckpoint:
        file = self.path / CONFIG
        try:
            config = self.config.with_mtp(read_object(file))
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        if not self.tensors.left_out:  # a copy of a checkpoint may lack what its config has
            raise UserError(f"{self.path}: {NO_MTP}")
        other = copy.copy(self)
        other.__dict__.pop("tensors")
        other.config = config
        return other

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / TOKENIZER).is_file()

    def quantized_weights(self, model: HybridForCausalLM, keep: Collection[str]) -> dict[str, StoredWeight]:
        # Not at the top: config, names and sizes need no torch.
        from granite4_neuron.checkpoint.quantized import quantized_weights, weights_in_fp8
        from granite4_neuron.ops.fp8 import FORMAT as FP8

        found = quantized_weights(self.tensors, model, self.quantization)
        layouts = {name: each.layout(model.get_parameter(name).shape) for name, each in found.items()}
        self.tensors.check(self.config, layouts)
        kept = {
            name: StoredWeight(each.format, partial(each.read, name, stored=self.tensors))
            for name, each in found.items()
        }
        return kept | (weights_in_fp8(self.tensors, model) if FP8.name in keep else {})

    def remark_on(self, quantized: dict[str, StoredWeight], held_in: str) -> str | None:
        return joined_remarks(
            left_out_remark(self.tensors.left_out),
            converted_remark(self.path, self.tensors.encoded_in(besides=quantized), held_in),
            unused_remark(self.tensors.unused),
        )

    def check_plain(self, config: ModelConfig) -> None:
        """Check, without reading them, that the tensors are a model's with this config, and not quantized.

        Raises:
            UserError: they are not; the message lists the faults.
        """
        if self.quantization is not None:
            raise UserError(
                f"the weights in {self.path} are in {self.quantization.name}, which is for the backend cpu."
            )
        require_folder(self)
        self.tensors.check(config)

    def generation_config(self) -> dict[str, Any]:
        file = self.path / GENERATION_CONFIG
        return read_object(file) if file.exists() else {}

    def copy_texts_to(self, folder: Path) -> None:
        named_templates = (str(file.relative_to(self.path)) for file in self.path.glob(NAMED_TEMPLATES))
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG, *named_templates):
            if (self.path / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(self.path / name, folder / name)

    def _read_tokenizer(self) -> PreTrainedTokenizerFast:
        # Not at the top: it imports transformers.
        from granite4_neuron.checkpoint.tokenizer import read_tokenizer

        return read_tokenizer(self.path)
