"""What the backend torch has to know of a kind of PyTorch device. Importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TorchDevice:
    """A kind of PyTorch device.

    name: torch's, without a number.
    compiler, graphs, kv_write: defaults of the options with these names.
    communication: the backend of torch.distributed that joins several.
    long_prompts: lengths of prompts' pieces that have graphs by default, besides those of all devices.
    formats: of quantized weights that its kernels read.
    keeps_snapshots: whether snapshots stay in its memory; otherwise they are in the host's.
    has_row_counts: whether decode, verification and commit have graphs for fewer rows than a state has slots.
    prompts_per_graph: the most prompts of a graph.
    why_missing: returns a sentence that says why this machine has none, or None if it may have one.
    """

    name: str
    compiler: str = "inductor"
    graphs: str = "layer"
    kv_write: str = "index"
    communication: str = "gloo"
    long_prompts: tuple[int, ...] = ()
    formats: tuple[str, ...] = ()
    keeps_snapshots: bool = False
    has_row_counts: bool = False
    prompts_per_graph: int = 1
    why_missing: Callable[[], str | None] = lambda: None
