"""NumPy in place of the NKI compiler, so that the package's kernels run where the Neuron SDK is not installed."""

from __future__ import annotations

import sys
from pathlib import Path


def provide_nki() -> None:
    """Make `import nki` work with the SDK's package if it is installed, or else with this folder's emulator.

    PyPI's placeholder of that name raises ImportError, and counts as not installed.
    """
    try:
        import nki  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parent))
