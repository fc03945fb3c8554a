"""The commands in README and docs are parsed, not run: their options exist and accept the values."""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template

import pytest

pytest.importorskip("httpx", reason="httpx is not installed; benchmarks/serving needs it")

from benchmarks.first_run.command import parser as first_run_parser
from benchmarks.latency import options as latency_options
from benchmarks.probe.command import parser as probe_parser
from benchmarks.serving import command as serving
from benchmarks.serving import processor_time
from granite4_neuron import UserError
from granite4_neuron.commands import cli

ROOT = Path(__file__).parents[2]
PARSERS = {
    "granite4-neuron": cli.parser,
    "benchmark_latency.py": lambda: latency_options.parser(""),
    "benchmarks.serving": serving._parser,
    "benchmarks.serving.processor_time": processor_time._parser,
    "benchmarks.probe": probe_parser,
    "benchmarks.first_run": first_run_parser,
}


def lines_of_code(text: str) -> Iterator[str]:
    """Yield the lines of fenced and indented blocks. A line with its continuation counts as one."""
    is_fenced = False
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield line


def expanded(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with the values of variables that were assigned before in double quotes."""
    values: dict[str, str] = {}
    for line in lines:
        yield Template(line).safe_substitute(values)
        for name, value in re.findall(r'\b([A-Z_]+)="(.*?)"', line):
            values[name] = Template(value).safe_substitute(values)


def commands_of(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the program's name and arguments for each command in a line of shell whose program is in PARSERS."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    reader.whitespace_split = True
    command: list[str] = []
    for token in (*reader, ";"):
        name = token.rpartition("/")[2]
        if command and set(token) <= set("|&;()<>"):
            yield tuple(command)
            command = []
        elif command:
            command.append(token)
        elif name in PARSERS:
            command.append(name)


def documented_commands() -> list[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for line in expanded(lines_of_code(file.read_text(encoding="utf-8"))):
            if any(name in line for name in PARSERS):
                found.update(commands_of(line))
    # A name alone is the name of a folder.
    return sorted(command for command in found if len(command) > 1)


def parse(command: tuple[str, ...]) -> None:
    try:
        PARSERS[command[0]]().parse_args(command[1:])
    except SystemExit as exit:
        assert exit.code == 0, command


@pytest.mark.parametrize("command", documented_commands(), ids=" ".join)
def test_options_exist(command):
    parse(command)


def test_the_search_finds_commands():
    line = "A=1 .venv/bin/granite4-neuron info --model h-1b && echo x | granite4-neuron chat  # granite4-neuron"
    assert list(commands_of(line)) == [("granite4-neuron", "info", "--model", "h-1b"), ("granite4-neuron", "chat")]
    assert list(lines_of_code("`granite4-neuron`\n```sh\na \\\n  b\n```\nc\n    d")) == ["a  b", "    d"]
    lines = ['A="--x 1" B="$A --y"', 'B="$B 2"', "granite4-neuron $B $C"]
    assert list(expanded(lines))[-1] == "granite4-neuron --x 1 --y 2 $C"
    assert len(documented_commands()) > 40
    with pytest.raises(UserError):
        parse(("granite4-neuron", "info", "--no-such-option"))
