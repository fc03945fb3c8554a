"""How a rank's process takes its Neuron core through TorchNeuron.

A process takes one logical core when it makes its process group. TorchNeuron reads the variables that torchrun sets,
and Neuron's runtime reads NEURON_RT_VISIBLE_CORES; the process's own core is then the device "neuron". Nothing, not
even a tensor, may have started the runtime before. This has not run on a device. Sources: "How to
use torch.distributed on Neuron" in the documentation of SDK 2.33, which has torchrun, the process group "neuron" and
the device "neuron" without a number; for the rest the source of the process group in TorchNeuron's beta.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch

from granite4_neuron.errors import UserError

_VISIBLE = "NEURON_RT_VISIBLE_CORES"
_CORES = re.compile(r"(?P<first>\d+)(-(?P<last>\d+))?")


def visible_cores() -> list[int] | None:
    """Return the numbers of the logical cores that this process may use; None for all of the machine's.

    Raises:
        UserError: the variable that says so is not a list of numbers and ranges.
    """
    text = os.environ.get(_VISIBLE)
    if not text:
        return None
    cores: list[int] = []
    for part in text.split(","):
        match = _CORES.fullmatch(part)
        if match is None:
            raise UserError(f"{_VISIBLE} is {text!r}; it must be numbers and ranges of cores, such as 0-3.")
        cores += range(int(match["first"]), int(match["last"] or match["first"]) + 1)
    return cores


def check_cores(tp_degree: int) -> None:
    """Check that this process may take a core as rank 0, and that there is a core for each rank, as far as this is
    known before the runtime starts.

    Raises:
        UserError: it may not, or there are too few cores.
    """
    if torch.get_device_module("neuron").is_initialized():
        raise UserError("this process has used a Neuron core already; split a model before it uses any.")
    cores = visible_cores()
    if cores is not None and len(cores) < tp_degree:
        raise UserError(f"tp_degree is {tp_degree} and {_VISIBLE} has {len(cores)} cores.")


def take_core(rank: int, tp_degree: int, cores: Sequence[int] | None) -> None:
    """Choose this process's core. Call it before the process makes its process group.

    Args:
        cores: one for each rank, from `visible_cores`; None for the cores from 0 on.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(tp_degree),
        "LOCAL_WORLD_SIZE": str(tp_degree),
        "MASTER_ADDR": "127.0.0.1",
        _VISIBLE: str(rank if cores is None else cores[rank]),
    }
