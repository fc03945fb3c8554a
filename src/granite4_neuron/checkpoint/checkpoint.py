"""A checkpoint, whatever its format. Importing this module does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.config import ModelConfig
from granite4_neuron.config.quantization import StoredQuantization
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.checkpoint.gguf.tensors import GGUFTensors
    from granite4_neuron.checkpoint.stored_tensors import StoredTensors
    from granite4_neuron.model.causal_lm import HybridForCausalLM
    from granite4_neuron.ops import Format, QuantizedWeight


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is stored quantized and read without conversion.

    format: its format in memory.
    read: returns the weight, given its shape in the model.
    """

    format: Format
    read: Callable[[torch.Size], QuantizedWeight]


class Checkpoint(ABC):
    """An open checkpoint: its config has been read, everything else is read on demand.

    path: the folder or the GGUF file.
    quantization: how the weights are quantized; None if they are not. The weights in a GGUF file and encoded ones count
        as not quantized: they can be read as floats, in any dtype.
    """

    path: Path
    config: ModelConfig
    quantization: StoredQuantization | None

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The folder, for libraries that read one; None for a GGUF file, and for weights that they do not read.

        Raises:
            UserError: the weights are incomplete or damaged.
        """

    @property
    @abstractmethod
    def tensors(self) -> StoredTensors | GGUFTensors:
        """The weights by published name; raise UserError if they are incomplete or damaged."""

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """Whether there are weights: a config alone is enough for planning."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The weights' default dtype, one of `config.dtypes.DTYPES`.

        Raises:
            UserError: the weights are incomplete or damaged.
        """

    @property
    @abstractmethod
    def stored_in(self) -> list[str]:
        """The names of the formats that weights are stored in; none if all are stored in `dtype`."""

    @abstractmethod
    def with_mtp(self) -> Checkpoint:
        """Return the same checkpoint with the model's layers for multi-token prediction.

        Raises:
            UserError: it has none, or others than this package runs.
        """

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer of any kind."""

    @abstractmethod
    def quantized_weights(self, model: HybridForCausalLM, keep: Collection[str]) -> dict[str, StoredWeight]:
        """Return, by name, the weights that are read quantized as stored.

        Args:
            model: without weights.
            keep: formats in which quantized weights of other tools stay if these have the same numbers: int4 and
                int8 for GGUF files, fp8 for encoded weights.

        Raises:
            UserError: the names, shapes or dtypes of the tensors are not the model's.
        """

    @abstractmethod
    def remark_on(self, quantized: dict[str, StoredWeight], held_in: str) -> str | None:
        """Return a sentence on weights that are in another format here than in memory, and on tensors that are not
        used; None if there are neither.

        Args:
            quantized: as `quantized_weights` returns them.
            held_in: the other weights' format or dtype in memory.
        """

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Return the fields of generation_config.json, or what a GGUF file has in its place, unchecked; none if there
        are none.
        """

    @abstractmethod
    def copy_texts_to(self, folder: Path) -> None:
        """Write the tokenizer and the generation config to a folder, if there are any."""

    def load_tokenizer(self) -> PreTrainedTokenizerFast:
        """Load the tokenizer.

        Raises:
            UserError: there is none, it cannot be read, it may make a text grow too much (see `tokenizer_growth`), or
                it has more entries than the model's vocabulary.
        """
        tokenizer = self._read_tokenizer()
        if len(tokenizer) > self.config.vocab_size:
            raise UserError(
                f"the tokenizer in {self.path} has {len(tokenizer)} entries and the model only "
                f"{self.config.vocab_size}; they are not from the same checkpoint."
            )
        # Its warning about a long text, "will result in indexing errors", is wrong here: the engine refuses the text.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        return tokenizer

    @abstractmethod
    def _read_tokenizer(self) -> PreTrainedTokenizerFast: ...


def converted_remark(path: Path, stored_in: Sequence[str], held_in: str) -> str | None:
    """Return a sentence on the weights that are in other formats in memory; None if there are none.

    Args:
        stored_in: their formats in the checkpoint.
        held_in: their format or dtype in memory.
    """
    if not stored_in:
        return None
    how = f"{path} has weights in {', '.join(stored_in)}, which are kept in {held_in} here"
    if held_in == "float32":
        return f"{how}, with the same values."
    return f"{how} and rounded where it does not hold their values; float32 does."


def left_out_remark(left_out: Mapping[str, int]) -> str | None:
    """Return a sentence on the tensors that are not loaded; None if there are none.

    Args:
        left_out: the number of tensors that the model does not have, by their purpose.
    """
    if not left_out:
        return None
    what = " and ".join(f"{number:,} tensors for {purpose}" for purpose, number in left_out.items())
    return f"{what} are left out; only --speculate mtp uses them."


def unused_remark(unused: Mapping[str, int]) -> str | None:
    """Return a sentence on scales that no weight has; None if there are none.

    Args:
        unused: their number, by their purpose.
    """
    if not unused:
        return None
    what = " and ".join(f"{number:,} scale{'s' * (number != 1)} of {purpose}" for purpose, number in unused.items())
    return f"{what} {'is' if sum(unused.values()) == 1 else 'are'} not used: nothing but weights is quantized here."


def joined_remarks(*remarks: str | None) -> str | None:
    return " ".join(remark for remark in remarks if remark is not None) or None


def require_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint; raise UserError if other libraries do not read it."""
    if checkpoint.folder is None:
        raise UserError(
            f"{checkpoint.path} has weights in {', '.join(checkpoint.stored_in)}, which are not read here; "
            "granite4-neuron convert writes a checkpoint folder of it."
        )
    return checkpoint.folder
