"""How work is cut up for this machine's processor, from tables of what measured best; results do not depend on it.

A table is a JSON file for layers of one size on one processor, and its name says which:

    head_dim=64,d_state=128,cache_dtype=float32,device=AMD_EPYC_9R14.json

It has an entry for each batch * num_heads (the number of states that a step advances) that was measured:

    {"48": {"chunk_size": 64, "heads_per_task": 4, "torch_chunk_size": 64}, "192": {...}}

`find_launch_table` says which table is used. Graphs that are traced for XLA and NKI kernels never look at one: they are
the same on every machine.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import reprlib
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from granite4_neuron.choices import FOLDER_VARIABLE
from granite4_neuron.config.json_files import without_duplicates
from granite4_neuron.errors import UserError
from granite4_neuron.regular_files import read_bytes

# What each parameter may be.
CHOICES = {
    "chunk_size": (32, 64, 128),
    "heads_per_task": (1, 2, 4, 8, 16, 32),
    "torch_chunk_size": (32, 64, 128, 256),
}
_ANY_CPU = "cpu"


@dataclass(frozen=True)
class LaunchParameters:
    """How the Mamba-2 kernels cut up a step.

    chunk_size: tokens that the fused kernels take through a part of a state at a time.
    heads_per_task: states, of all rows together, that a thread of the fused kernels takes at a time in decode.
    torch_chunk_size: tokens that plain torch scans at once, see `mamba_chunk_scan_combined`.

    Raises:
        ValueError: one of them is not in `CHOICES`.
    """

    chunk_size: int
    heads_per_task: int
    torch_chunk_size: int

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if type(value) is not int or value not in choices:
                raise ValueError(f"{name} is {reprlib.repr(value)}; it must be one of {', '.join(map(str, choices))}")


# For sizes that nobody has measured.
HEURISTIC = LaunchParameters(chunk_size=64, heads_per_task=4, torch_chunk_size=64)


@dataclass(frozen=True)
class LaunchTable:
    """Launch parameters by batch * num_heads, for layers of one size; never empty."""

    entries: Mapping[int, LaunchParameters]
    _closest: dict[int, LaunchParameters] = field(default_factory=dict, init=False, repr=False, compare=False)

    def at(self, batch_heads: int) -> LaunchParameters:
        """The entry closest to `batch_heads`; of two equally close ones the smaller."""
        if batch_heads not in self._closest:
            closest = min(self.entries, key=lambda measured: (abs(measured - batch_heads), measured))
            self._closest[batch_heads] = self.entries[closest]
        return self._closest[batch_heads]


def find_launch_table(head_dim: int, d_state: int, cache_dtype: torch.dtype, folder: Path | None = None) -> LaunchTable:
    """The table for layers of this size on this machine's processor.

    It is the one in the folder for this processor, or else the one there for any (device=cpu); one that is broken is
    refused, not passed over. Where there is none, `HEURISTIC` is for every batch.

    Args:
        head_dim, d_state: of a Mamba-2 layer.
        cache_dtype: of its ssm_state.
        folder: the user's, see `tuned_config_folder`; None for none.

    Raises:
        UserError: the file is not a table; the message has its name.
    """
    for device in (device_name(), _ANY_CPU) if folder is not None else ():
        table = read_table(folder / table_name(head_dim, d_state, cache_dtype, device))
        if table is not None:
            return table
    return LaunchTable({1: HEURISTIC})


def tuned_config_folder(argument: str | Path | None = None) -> Path | None:
    """The user's folder of tables: the argument, or else what GRANITE4_TUNED_CONFIG_FOLDER says now, or else None.

    Raises:
        UserError: it is not a folder.
    """
    folder = argument if argument is not None else os.environ.get(FOLDER_VARIABLE) or None
    if folder is None:
        return None
    if not os.path.isdir(folder):
        origin = "tuned_configs" if argument is not None else FOLDER_VARIABLE
        example = table_name(64, 128, torch.float32, _ANY_CPU)
        raise UserError(
            f"{origin} is {str(folder)!r}, which is not a folder; it must be one with files like {example}."
        )
    return Path(folder)


def table_name(head_dim: int, d_state: int, cache_dtype: torch.dtype, device: str) -> str:
    """The file name of a table."""
    dtype = str(cache_dtype).removeprefix("torch.")
    return f"head_dim={head_dim},d_state={d_state},cache_dtype={dtype},device={device}.json"


@functools.cache
def device_name() -> str:
    """`processor_name` as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", processor_name()).strip("_")


def processor_name() -> str:
    """This machine's processor, as the system names its model."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_table(file: Path) -> LaunchTable | None:
    """A table from its file; None if there is no such file.

    Raises:
        UserError: the file cannot be read, or anything in it is not as it must be.
    """
    try:
        stored = json.loads(read_bytes(file).decode("utf-8"), object_pairs_hook=without_duplicates)
        return LaunchTable(_entries(stored))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a table of launch parameters ({error}).") from None


def write_table(file: Path, table: LaunchTable) -> None:
    """Make `file` hold `table`, at once: a reader sees the old file or the new one. Its folder is made if need be.

    Raises:
        UserError: it cannot be written; what was there before is still there.
    """
    text = json.dumps({str(size): asdict(table.entries[size]) for size in sorted(table.entries)}, indent=2) + "\n"
    try:
        file.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_text(text, encoding="utf-8")
            written.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}).") from None


def _entries(stored: object) -> dict[int, LaunchParameters]:
    if not isinstance(stored, dict) or not stored:
        raise ValueError("it must be an object with an entry for each batch * num_heads, and one entry at least")
    entries = {}
    for size, values in stored.items():
        if not re.fullmatch("[1-9][0-9]{0,17}", size):
            raise ValueError(f"{reprlib.repr(size)} is no batch * num_heads; it must be a positive integer")
        if not isinstance(values, dict) or values.keys() != CHOICES.keys():
            raise ValueError(f"entry {size} must be an object of exactly {', '.join(CHOICES)}")
        try:
            entries[int(size)] = LaunchParameters(**values)
        except ValueError as error:
            raise ValueError(f"entry {size}: {error}") from None
    return entries
