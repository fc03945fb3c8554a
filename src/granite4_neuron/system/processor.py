"""This machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path


def instruction_sets() -> str:
    """Return the processor's instruction sets as the system lists them, or its name if the system does not."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return line
    return platform.processor()
