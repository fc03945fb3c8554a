"""Sizes of pieces of work for this machine's processor; results do not depend on them.

The tune command measures the fastest values for layers of one size and writes them into a JSON file. The file's name
says which layers and which processor:

    head_dim=64,d_state=128,cache_dtype=float32,device=AMD_EPYC_9R14.json

NKI kernels, and graphs traced for XLA, do not depend on such a file: they are the same on every machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from granite4_neuron.config.choices import FOLDER_VARIABLE
from granite4_neuron.config.json_files import read_object
from granite4_neuron.errors import UserError

# The values that each parameter may have.
CHOICES = {
    "chunk_size": (32, 64, 128),
    "heads_per_task": (1, 2, 4, 8, 16, 32),
    "torch_chunk_size": (32, 64, 128, 256),
}


@dataclass(frozen=True)
class LaunchParameters:
    """The sizes of the pieces into which the Mamba-2 kernels cut a step.

    chunk_size: tokens per block: the fused kernels apply a block of tokens to one part of a state, then to the next
        part.
    heads_per_task: head states, counted over all rows, per task of a thread of the fused kernels in decode.
    torch_chunk_size: tokens that plain torch scans at once, see `mamba_chunk_scan_combined`.
    """

    chunk_size: int
    heads_per_task: int
    torch_chunk_size: int


# For layers and processors that have not been measured.
HEURISTIC = LaunchParameters(chunk_size=64, heads_per_task=4, torch_chunk_size=64)


def find_launch_parameters(
    head_dim: int, d_state: int, cache_dtype: torch.dtype, folder: Path | None
) -> LaunchParameters:
    """Return the parameters that were tuned for these layers on this processor; `HEURISTIC` if the folder has none.

    Args:
        head_dim, d_state: of a Mamba-2 layer.
        cache_dtype: of its ssm_state.
        folder: see `tuned_config_folder`; None for none.

    Raises:
        UserError: the file is broken.
    """
    file = folder and folder / file_name(head_dim, d_state, cache_dtype)
    if file is None or not os.path.exists(file):
        return HEURISTIC
    values = read_object(file)
    if values.keys() != CHOICES.keys() or not all(_is_choice(name, value) for name, value in values.items()):
        right = "; ".join(f"{name}: {', '.join(map(str, choices))}" for name, choices in CHOICES.items())
        raise UserError(f"{file} does not hold launch parameters; it must have one of each of these: {right}.")
    return LaunchParameters(**values)


def write_launch_parameters(file: Path, parameters: LaunchParameters) -> None:
    """Write the parameters to `file` atomically: a reader sees the old file or the new one.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        written = Path(folder) / file.name
        written.write_text(json.dumps(asdict(parameters)) + "\n", encoding="utf-8")
        written.replace(file)


def tuned_config_folder(argument: str | Path | None = None) -> Path | None:
    """Return the user's folder: the argument, else the present value of GRANITE4_TUNED_CONFIG_FOLDER, else None.

    Raises:
        UserError: it is not a folder.
    """
    folder = argument if argument is not None else os.environ.get(FOLDER_VARIABLE) or None
    if folder is not None and not os.path.isdir(folder):
        origin = "tuned_configs" if argument is not None else FOLDER_VARIABLE
        raise UserError(f"{origin} is {str(folder)!r}, which is not a folder; the tune command makes one.")
    return None if folder is None else Path(folder)


def file_name(head_dim: int, d_state: int, cache_dtype: torch.dtype) -> str:
    """Return the name of the file for these layers on this processor."""
    dtype = str(cache_dtype).removeprefix("torch.")
    device = re.sub(r"[^A-Za-z0-9.-]+", "_", processor_name()).strip("_")
    return f"head_dim={head_dim},d_state={d_state},cache_dtype={dtype},device={device}.json"


def processor_name() -> str:
    """Return the model name of this machine's processor, as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _is_choice(name: str, value: object) -> bool:
    return type(value) is int and value in CHOICES[name]
