"""The quantisations: one module for each, whose FORMAT is a `Format` with the module's name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.ops.weight import Format

FORMATS: Mapping[str, Format] = {name: import_module(f"{__name__}.{name}").FORMAT for name in QUANTIZATIONS}
