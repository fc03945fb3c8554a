"""The sampling that a GGUF file recommends, which llama.cpp takes as its defaults."""

from __future__ import annotations

from typing import Any

from granite4_neuron.checkpoint.gguf.file import GGUFFile
from granite4_neuron.checkpoint.gguf.metadata import Metadata

# Names in generation_config.json by GGUF's.
_NUMBERS = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
# Others, and the value with which each has no effect here. What is not listed has none without one of these.
_OTHERS: dict[str, Any] = {"sequence": "", "xtc_probability": 0, "mirostat": 0, "penalty_last_n": -1}


def read_sampling(file: GGUFFile) -> dict[str, Any]:
    """Return the recommended sampling as fields of generation_config.json, and what is not among these under GGUF's own
    names.

    Raises:
        UserError: a value is of the wrong type.
    """
    about = Metadata(file, "general.sampling")
    there = [name for name in (*_NUMBERS, "top_k", *_OTHERS) if file.get(about.key(name)) is not None]
    values: dict[str, Any] = {_NUMBERS[name]: about.number(name) for name in there if name in _NUMBERS}
    if "top_k" in there:
        values["top_k"] = max(0, int(about.number("top_k")))  # below 1 means all tokens
    if values.keys() - {"repetition_penalty"}:
        values["do_sample"] = True  # llama.cpp always samples; a temperature of 0 is greedy
    others = {about.key(name): file.get(about.key(name)) for name in there if name in _OTHERS}
    return values | {key: value for key, value in others.items() if value != _OTHERS[key.rpartition(".")[2]]}
