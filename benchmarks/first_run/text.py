"""Runs a command that writes a text, keeps the text in a file, and compares it with one that an earlier step kept.

python -m benchmarks.first_run.text FILE [--same-as FILE] -- PROGRAM generate ...
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SHOWN = 40  # characters of each text from the place where they part


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_run.text", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--same-as", type=Path, metavar="FILE")
    parser.add_argument("command", nargs="+")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Return the command's exit code, or 1 if its text is not the other one."""
    options = parser().parse_args(arguments)
    done = subprocess.run(options.command, stdout=subprocess.PIPE, encoding="utf-8")
    print(done.stdout)
    if done.returncode:
        return done.returncode
    options.file.write_text(done.stdout, encoding="utf-8")
    if options.same_as is None:
        return 0
    expected = options.same_as.read_text(encoding="utf-8")
    if done.stdout == expected:
        print(f"The text is that of {options.same_as.name}.")
        return 0
    print(parting(done.stdout, expected, options.same_as.name))
    return 1


def parting(text: str, expected: str, name: str) -> str:
    """Say where a text leaves the expected one, which has this name."""
    pairs = enumerate(zip(text, expected, strict=False))
    place = next((i for i, (one, other) in pairs if one != other), min(len(text), len(expected)))
    one, other = (each[place : place + _SHOWN] for each in (text, expected))
    return f"After {place} of {len(expected)} characters the text is {one!r}, and that of {name} {other!r}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
