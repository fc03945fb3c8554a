"""The dimensions of published checkpoints, which come with the package: a config.json for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from granite4_neuron.errors import UserError

_FOLDER = Path(__file__).parent / "family"
_BEGINNINGS = ("granite-4.0-", "nemotron-3-")  # prefixes of names, which may be left out
_HUB_IDS = {
    "nemotron-3-nano-4b": "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
    "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-3-super-120b-a12b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nemotron-3-ultra-550b-a55b": "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
}


def published_names() -> list[str]:
    """Return the names of all published checkpoints, such as ``granite-4.0-h-350m``."""
    return sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir())


def published_name(name: str) -> str | None:
    """Return the whole name for ``granite-4.0-h-350m`` or ``h-350m``; None if there is no such checkpoint."""
    names = published_names()
    return next((whole for start in ("", *_BEGINNINGS) if (whole := f"{start}{name}") in names), None)


def short_name(whole_name: str) -> str:
    """Return `h-350m` for `granite-4.0-h-350m`; `published_name` takes it too."""
    return next((whole_name.removeprefix(start) for start in _BEGINNINGS if whole_name.startswith(start)), whole_name)


def published_values(name: str) -> dict[str, Any]:
    """Return the content of a published checkpoint's ``config.json``; see `published_config`."""
    whole = published_name(name)
    if whole is None:
        raise UserError(f"there is no family member {name!r}; choose one of: {', '.join(published_names())}.")
    return json.loads((_FOLDER / f"{whole}.json").read_text(encoding="utf-8"))


def hub_id(whole_name: str) -> str:
    """Return the Hugging Face id of a checkpoint."""
    return _HUB_IDS.get(whole_name, f"ibm-granite/{whole_name}")
