"""The package's version."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str | None:
    """Return the version that is installed; None for a checkout that is not."""
    try:
        return metadata.version("granite4-neuron")
    except metadata.PackageNotFoundError:
        return None
