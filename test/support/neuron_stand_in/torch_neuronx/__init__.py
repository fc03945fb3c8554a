"""A stand-in for TorchNeuron. With its folder on the path, PyTorch loads it by itself, as it does TorchNeuron.

The device `neuron` is the CPU, and the process group `neuron` is gloo. The stand-in is as strict as TorchNeuron about
the start of the runtime: a process group must be made before it and sees one core, and no two processes share a core.
A process that takes a core makes a file with the core's number in the folder NEURON_STAND_IN_LOG.
"""

import os
import types
from pathlib import Path

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_CORES = 4
_empty = torch.empty


class _Runtime:
    """The runtime of this process. cores: its cores, once it has started."""

    cores: list[int] | None = None

    def start(self) -> None:
        if self.cores is not None:
            return
        first, _, last = os.environ.get("NEURON_RT_VISIBLE_CORES", f"0-{_CORES - 1}").partition("-")
        self.cores = list(range(int(first), int(last or first) + 1))
        if self.cores[-1] >= _CORES:
            raise RuntimeError(f"nrt_init failed: there is no core {self.cores[-1]}")
        for core in self.cores:
            try:
                # The record outlives the process, although the core is then free again.
                (Path(os.environ["NEURON_STAND_IN_LOG"]) / f"core{core}").touch(exist_ok=False)
            except FileExistsError:
                raise RuntimeError(f"nrt_init failed: core {core} is in use") from None


_runtime = _Runtime()


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def has_primary_context(self, device: int) -> bool:
        return False

    def is_built(self) -> bool:
        return True


def start() -> None:
    """Register the device's module, its compiler and its process group."""
    from torch._dynamo import register_backend
    from torch._dynamo.backends.debugging import eager

    module = types.ModuleType("torch.neuron")
    module.is_initialized = lambda: _runtime.cores is not None
    module.synchronize = _runtime.start
    module.current_device = lambda: 0
    module.is_available = lambda: False  # else PyTorch asks for its streams
    module.device_count = lambda: _CORES
    _setup_privateuseone_for_python_backend("neuron", module, _Hook())
    torch.empty = _made_on_cpu
    register_backend(eager, name="neuron")
    torch.distributed.Backend.register_backend("neuron", _process_group, devices=["cpu"])


def _made_on_cpu(*sizes, device=None, **options):
    if device is not None and torch.device(device).type == "neuron":
        _runtime.start()
        device = "cpu"
    return _empty(*sizes, device=device, **options)


def _process_group(store, rank, size, timeout):
    assert _runtime.cores is None, "the runtime has started before the process group"
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank), str(size))
    _runtime.start()
    assert len(_runtime.cores) == 1, "a process of a group has one core"
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
