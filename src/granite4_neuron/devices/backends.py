"""The backends by name, and the options that each takes. Importing this module imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from granite4_neuron.devices.cpu import backend as cpu
from granite4_neuron.devices.neuron import backend as nxdi
from granite4_neuron.devices.torch import backend as torch_device
from granite4_neuron.devices.xla import backend as xla
from granite4_neuron.errors import UserError, check_choice
from granite4_neuron.runtime.declaration import Backend, Option

if TYPE_CHECKING:
    from granite4_neuron.config.quantization import StoredQuantization

BACKENDS: dict[str, Backend] = {
    each.name: each for each in (cpu.BACKEND, torch_device.BACKEND, xla.BACKEND, nxdi.BACKEND)
}


def all_options() -> dict[str, Option]:
    """Return the options of all backends, by name."""
    return {option.name: option for backend in BACKENDS.values() for option in backend.options}


def check_values(name: str, given: Mapping[str, Any]) -> None:
    """Check the values of options: this backend's own, and others by the declarations of their backends.

    Args:
        given: values by the names of `all_options`.

    Raises:
        UserError: there is no such backend, or an option has no such value.
    """
    options = all_options() | {option.name: option for option in _declared(name).options}
    for option_name, value in given.items():
        options[option_name].check(value)


def check_backend(name: str, given: Mapping[str, Any]) -> None:
    """Check that a backend takes these options.

    Args:
        given: values by the names of `all_options`; options that are not there have their defaults.

    Raises:
        UserError: there is no such backend, it does not take an option, or it needs another one.
    """
    backend, options = _declared(name), all_options()
    for needed, sentence in backend.needs.items():
        if given.get(needed) is None:
            raise UserError(sentence)
    own = {option.name for option in backend.options}
    for option_name, value in given.items():
        if option_name not in own and value != options[option_name].default:
            _refuse(options[option_name], value, backend)


def check_here(name: str, given: Mapping[str, Any], stored: StoredQuantization | None = None) -> None:
    """Check as `check_backend` does, and that this machine has what the backend needs.

    Args:
        stored: how the model's weights are quantized.
    """
    check_backend(name, given)
    if stored is not None:
        check_backend(name, {**given, "quantize": given["quantize"] or stored.name})
    BACKENDS[name].require(given)


def _declared(name: str) -> Backend:
    check_choice("backend", name, list(BACKENDS))
    return BACKENDS[name]


def _refuse(option: Option, value: Any, backend: Backend) -> None:
    """Refuse an option that the backend does not have, unless its value is what the backend does anyway."""
    if option.name in backend.refuses:
        raise UserError(backend.refuses[option.name])
    if option.everywhere is not None and option.spelled(value) == option.everywhere:
        return
    owners = " and ".join(each.name for each in BACKENDS.values() if option in each.options)
    sentence = option.refusal or f"{option.name} is an option of the backend {owners}; the backend here is {{backend}}."
    raise UserError(sentence.format(value=value, backend=backend.name))
