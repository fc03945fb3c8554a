"""NumPy in place of the NKI compiler: runs the package's kernels where the Neuron SDK is not installed."""

from __future__ import annotations

import sys
from pathlib import Path


def provide_nki() -> None:
    """Make `import nki` work: the SDK's where it is installed, this folder's emulator elsewhere.

    PyPI's placeholder of that name raises ImportError, and counts as not installed.
    """
    try:
        import nki  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parent))
