"""Options of the backend torch, and what they mean. Importing this module imports no framework."""

from granite4_neuron.config.choices import KV_WRITES, QUANTIZATIONS
from granite4_neuron.devices.cpu.torch_device import CPU
from granite4_neuron.devices.cuda.torch_device import CUDA
from granite4_neuron.devices.neuron.torchneuron.device import NEURON
from granite4_neuron.devices.options import COMPILED, QUANTIZE, STATE_DTYPE
from granite4_neuron.devices.torch_device import TorchDevice
from granite4_neuron.errors import UserError, check_choice
from granite4_neuron.runtime.declaration import Option

DEVICES = {each.name: each for each in (CPU, CUDA, NEURON)}
GRAPHS = ("layer", "model")
_MOST_DIGITS = 9  # of a number of layers
_BELONGS = "device, graphs and tp_degree belong to the backend torch; the backend here is {backend}."

OPTIONS = (
    *COMPILED,
    STATE_DTYPE,
    QUANTIZE,
    Option(
        "device",
        f"for --backend torch: the PyTorch device, one of {', '.join(DEVICES)}, or one of several such as cuda:1 "
        "(default: %(default)s)",
        _BELONGS,
        default=CPU.name,
        metavar="NAME",
        changes_numbers=False,  # the runtime tells which device this is: cuda:1 may be as cuda:0
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
        changes_numbers=False,  # it divides the weights
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
        "one index of rows (rows), or by writing the whole cache (select); default: select on neuron, index elsewhere",
        choices=KV_WRITES,
        changes_numbers=False,
    ),
    Option(
        "prefill_by_view",
        "for --backend torch, not on a GPU: give the graphs of prompts a view of their slot's state rather than the "
        "slot's number (default: they get one)",
        is_flag=True,
        changes_numbers=False,
    ),
    Option(
        "batch_invariant",
        "for --backend torch on a GPU: give a sequence the same tokens alone, beside others and with drafts; decode of "
        "a single sequence and of more than 32 takes longer (default: these have kernels of their own, which may give "
        "other tokens)",
        is_flag=True,
    ),
)


def kind_of_device(name: str) -> str:
    """Return "cuda" for "cuda:1"."""
    return name.split(":")[0]


def find_kind(device: str) -> TorchDevice:
    """Return the kind of a device; raise UserError if there is no such kind."""
    kind = kind_of_device(device)
    check_choice("device", kind, DEVICES)
    return DEVICES[kind]


def check_format(name: str, device: str) -> None:
    """Check that a device runs weights in a quantisation, or of another tool; raise UserError if not."""
    kind = find_kind(device)
    if name not in kind.formats and (name in QUANTIZATIONS or not kind.formats):
        assert QUANTIZE.refusal is not None
        raise UserError(QUANTIZE.refusal.format(value=name, backend=f"torch on {kind.name}"))


def kv_write_of(form: str | None, device: str) -> str:
    """Return a form of `choices.KV_WRITES`, or the device's default for None.

    Raises:
        UserError: there is no such form.
    """
    if form is None:
        return find_kind(device).kv_write
    check_choice("kv_write", form, KV_WRITES)
    return form


def graphs_of(graphs: str | int | None, device: str) -> str:
    """Return a choice of graphs as the command line has it, or the device's default for None.

    Raises:
        UserError: there is no such choice.
    """
    if graphs is None:
        return find_kind(device).graphs
    choice = str(graphs)
    is_number = choice.isascii() and choice.isdecimal() and 0 < len(choice.lstrip("0")) <= _MOST_DIGITS
    if choice not in GRAPHS and not is_number:
        raise UserError(f"graphs is {graphs!r}; it must be one of {', '.join(GRAPHS)}, or a number of layers.")
    return choice
