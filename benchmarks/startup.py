"""Times of commands from the shell, and what they import: the modules that torch alone brings take seconds.

    python -m benchmarks.startup

Seconds are the median of a few runs; what they are on a busy machine means little.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

COMMANDS = (
    ("--help",),
    ("--version",),
    ("generate", "--help"),
    ("info", "--model", "h-small"),
    ("generate", "An assignment statement", "--max-tokens", "1"),
)
RUNS = 5
_PROGRAM = """
import sys
from granite4_neuron.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
names = [name for name in ("torch", "transformers") if name in sys.modules]
print(len(sys.modules), *names, file=sys.stderr)
"""


def main() -> None:
    table = Table("command", "seconds", "modules", "among them")
    for command in COMMANDS:
        seconds, modules = [], []
        for _ in range(RUNS):
            started = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", _PROGRAM, *command], capture_output=True, text=True)
            seconds.append(time.perf_counter() - started)
            modules = done.stderr.splitlines()[-1].split()
        table.add_row(" ".join(command), f"{statistics.median(seconds):.2f}", modules[0], ", ".join(modules[1:]))
    Console().print(table)


if __name__ == "__main__":
    main()
