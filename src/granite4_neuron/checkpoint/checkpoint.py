"""A checkpoint, whatever its format. Importing this module does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
    folder: the folder, for libraries that read one; None for a GGUF file.
    quantization: how the weights are quantized; None if they are not. The weights in a GGUF file count as not
        quantized: they are read dequantized, in any dtype.
    """

    path: Path
    folder: Path | None
    config: ModelConfig
    quantization: StoredQuantization | None

    @property
    @abstractmethod
    def tensors(self) -> StoredTensors | GGUFTensors:
        """The weights by published name.

        Raises:
            UserError: they are incomplete or damaged.
        """

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
    def quantized_weights(self, model: HybridForCausalLM, keep: bool) -> dict[str, StoredWeight]:
        """Return, by name, the weights that are read quantized as stored.

        Args:
            model: without weights.
            keep: whether quantized weights of a GGUF file stay quantized if int4 or int8 has the same numbers.

        Raises:
            UserError: the names, shapes or dtypes of the tensors are not the model's.
        """

    @abstractmethod
    def remark_on(self, quantized: dict[str, StoredWeight], dtype: torch.dtype) -> str | None:
        """Return a sentence on weights that are quantized here but not in memory, and on weights that the model does
        not have; None if there are neither.

        Args:
            quantized: as `quantized_weights` returns them.
            dtype: the other weights' dtype in memory.
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


def left_out_remark(left_out: Mapping[str, int]) -> str | None:
    """Return a sentence on the tensors that are not loaded; None if there are none.

    Args:
        left_out: the number of tensors that the model does not have, by their purpose.
    """
    if not left_out:
        return None
    what = " and ".join(f"{number:,} tensors for {purpose}" for purpose, number in left_out.items())
    return f"{what} are left out; only --speculate mtp uses them."


def require_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder of a checkpoint.

    Raises:
        UserError: it is a GGUF file.
    """
    if checkpoint.folder is None:
        raise UserError(
            f"{checkpoint.path} is a GGUF file, which compiled graphs of NxD Inference are not made from; "
            "granite4-neuron convert writes a checkpoint folder of it."
        )
    return checkpoint.folder
