"""Times a fingerprint of all weights, beside loading them: the least of several times each.

python -m benchmarks.engine.fingerprint h-350m --numbers bfloat16 int8 int4
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import reports_errors
from benchmarks.random_checkpoint import write_random
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands.output import write
from granite4_neuron.config.choices import CPU_KERNELS, QUANTIZATIONS
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.runtime.bound_model import digest_of_weights


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each kind of numbers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the family member; its weights are random")
    parser.add_argument("--numbers", nargs="+", choices=("bfloat16", *QUANTIZATIONS), default=["bfloat16"])
    parser.add_argument("--kernels", choices=CPU_KERNELS, default=CPU_KERNELS[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    operators = cpu.choose_operators(options.kernels)
    with tempfile.TemporaryDirectory() as folder:
        original = write_random(options.name, Path(folder) / "bfloat16")
        for numbers in options.numbers:
            stored = original
            if numbers != "bfloat16":
                stored = Path(folder) / numbers
                save_model(load_model(original, quantize=numbers), stored)
            loading, model = _best(lambda stored=stored: load_model(stored, operators=operators), options.repeats)
            model = model.bind(operators)
            reading, _ = _best(lambda model=model: digest_of_weights(model), options.repeats)
            write(
                f"{numbers}, {torch.get_num_threads()} threads: loading {loading:.3f} s, fingerprint {reading:.3f} s, "
                f"{reading / loading:.1%}"
            )
    return 0


def _best(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the least seconds of several calls, and the last result."""
    least = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        least = min(least, time.perf_counter() - started)
    return least, result


if __name__ == "__main__":
    sys.exit(main())
