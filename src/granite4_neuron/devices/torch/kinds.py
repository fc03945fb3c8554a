"""Names: of the kinds of PyTorch devices, and of what a graph computes. Importing this module imports no framework."""

from granite4_neuron.errors import UserError

DEVICES = ("cpu", "cuda", "neuron")
GRAPHS = ("layer", "model")
_DEFAULT_GRAPHS = {"neuron": "model"}  # by kind of device, where it is not GRAPHS[0]
_MOST_DIGITS = 9  # of a number of layers


def kind_of_device(name: str) -> str:
    """Return "cuda" for "cuda:1"."""
    return name.split(":")[0]


def graphs_of(graphs: str | int | None, device: str) -> str:
    """Return a choice of graphs as the command line has it, or the device's default for None.

    Raises:
        UserError: there is no such choice.
    """
    if graphs is None:
        return _DEFAULT_GRAPHS.get(kind_of_device(device), GRAPHS[0])
    choice = str(graphs)
    is_number = choice.isascii() and choice.isdecimal() and 0 < len(choice.lstrip("0")) <= _MOST_DIGITS
    if choice not in GRAPHS and not is_number:
        raise UserError(f"graphs is {graphs!r}; it must be one of {', '.join(GRAPHS)}, or a number of layers.")
    return choice
