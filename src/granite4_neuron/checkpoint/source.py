"""What a checkpoint says of itself, be it a folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from granite4_neuron.checkpoint.folder import CONFIG
from granite4_neuron.checkpoint.gguf import config as gguf_config
from granite4_neuron.checkpoint.gguf.file import is_gguf, open_gguf
from granite4_neuron.checkpoint.stored_tensors import StoredTensors
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.config.quantization import StoredQuantization, stored_quantization


def read_config(checkpoint: Path) -> GraniteMoeHybridConfig:
    """Read the config of a checkpoint.

    Raises:
        UserError: it is not one of a Granite model.
    """
    if is_gguf(checkpoint):
        return gguf_config.read_config(open_gguf(checkpoint))
    return GraniteMoeHybridConfig.from_file(checkpoint / CONFIG)


def quantization_of(checkpoint: Path) -> StoredQuantization | None:
    """Read how the weights in a folder are quantized; None if they are not. The weights in a GGUF file count as not
    quantized: each is read with the numbers that it stands for, in any dtype.

    Raises:
        UserError: they are in a way that this package does not read.
    """
    return None if is_gguf(checkpoint) else stored_quantization(checkpoint / CONFIG)


def dtype_of(checkpoint: Path) -> str:
    """Return the dtype, one of `config.DTYPES`, in which a checkpoint's weights are if no other is asked for.

    Raises:
        UserError: the checkpoint is damaged.
    """
    return gguf_config.stored_dtype(open_gguf(checkpoint)) if is_gguf(checkpoint) else StoredTensors(checkpoint).dtype()


def types_of(checkpoint: Path) -> list[str]:
    """Return the types of GGUF of a file's tensors; none for a folder."""
    return sorted({one.type for one in open_gguf(checkpoint).tensors.values()}) if is_gguf(checkpoint) else []
