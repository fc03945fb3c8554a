"""The backend torch: compiled graphs on a PyTorch device, or on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from granite4_neuron.config.choices import KV_WRITES
from granite4_neuron.devices.options import ARITHMETIC, EXPERTS, PREFILL_BUCKETS
from granite4_neuron.devices.torch.kinds import DEVICES, graphs_of
from granite4_neuron.runtime.declaration import Backend, Option

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from granite4_neuron.checkpoint.checkpoint import Checkpoint
    from granite4_neuron.devices.torch.runtime import TorchRuntime

_BELONGS = "device, graphs and tp_degree belong to the backend torch; the backend here is {backend}."

OPTIONS = (
    *ARITHMETIC,
    EXPERTS,
    PREFILL_BUCKETS,
    Option(
        "device",
        f"for --backend torch: the PyTorch device, one of {', '.join(DEVICES)}, or one of several such as cuda:1 "
        "(default: %(default)s)",
        _BELONGS,
        default=DEVICES[0],
        metavar="NAME",
    ),
    Option(
        "graphs",
        "for --backend torch: what a graph of decode computes: layer (one layer), model (all layers, which takes much "
        "longer to compile), or a number of layers (default: model on neuron, layer elsewhere)",
        _BELONGS,
        metavar="WHAT",
    ),
    Option(
        "tp_degree",
        "for --backend torch: split the model over N GPUs or Neuron cores of this machine (default: %(default)s)",
        _BELONGS,
        default=1,
        least=1,
        metavar="N",
    ),
    Option(
        "compiler",
        "for --backend torch: the backend of torch.compile, for example eager (default: inductor, or on neuron that of "
        "TorchNeuron)",
        metavar="NAME",
    ),
    Option(
        "kv_write",
        "for --backend torch: how graphs write keys and values to their cache: by an index for each axis (index), by "
        "one index of rows (rows), or by writing the whole cache (select); default: %(default)s",
        default=KV_WRITES[0],
        choices=KV_WRITES,
    ),
    Option(
        "prefill_by_view",
        "for --backend torch, not on a GPU: give the graphs of prompts a view of their slot's state rather than the "
        "slot's number (default: they get one)",
        is_flag=True,
    ),
    Option(
        "batch_invariant",
        "for --backend torch on a GPU: give a sequence the same tokens alone, beside others and with drafts; decode of "
        "a single sequence takes longer (default: one whose state has no other slots has kernels of its own, which may "
        "give other tokens)",
        is_flag=True,
    ),
)


def load(
    checkpoint: Checkpoint,
    generation_config: GenerationConfig,
    *,
    dtype: torch.dtype | None,
    tp_degree: int,
    progress: Callable[[int, int], None] | None,
    remark: Callable[[str], None],
    **options: Any,
) -> TorchRuntime:
    """Load a checkpoint into a `TorchRuntime`, or a `SplitRuntime`, which take the other options as they are."""
    graphs_of(options["graphs"], options["device"])
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.devices.torch.devices import find_device
    from granite4_neuron.devices.torch.runtime import TorchRuntime
    from granite4_neuron.devices.torch.split import SplitRuntime

    if tp_degree != 1:
        options |= dict(tp_degree=tp_degree, progress=progress, remark=remark)
        return SplitRuntime(checkpoint.path, dtype, generation_config, **options)
    find_device(options["device"])  # before the weights are read
    model = load_model(checkpoint, dtype, progress=progress, remark=remark)
    return TorchRuntime(model, generation_config, **options)


BACKEND = Backend("torch", OPTIONS, load)
