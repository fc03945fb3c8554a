"""Tables in narrow terminals: nothing is lost, and no number or word breaks."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from granite4_neuron.commands.output import fitted

ROOT = Path(__file__).parents[3]
WORDS = st.one_of(
    st.integers(0, 10**9).map("{:,}".format),
    st.floats(0, 1e5, allow_nan=False).map("{:,.1f}".format),
    st.from_regex("[a-z]{1,14}", fullmatch=True),
)
CELLS = st.lists(WORDS, min_size=1, max_size=7).map(" ".join)


def shown(table, width):
    text = io.StringIO()
    console = Console(file=text, width=width)
    console.print(fitted(table, console))
    return text.getvalue()


@pytest.mark.slow_cases
@pytest.mark.parametrize("width", [60, 80])
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(2, 12).flatmap(lambda columns: st.lists(st.tuples(*[CELLS] * columns), min_size=2, max_size=4)))
def test_every_word_is_there_whole(width, rows):
    names, *rows = rows
    table = Table(*names)
    for row in rows:
        table.add_row(*row)
    expected = sorted(word for row in rows for cell in row for word in cell.split())
    output = shown(table, width)
    assert all(len(line) <= width for line in output.splitlines())
    words = re.findall(r"[^\s│┃─━┏┳┓┡╇┩├┼┤└┴┘┌┬┐]+", output)
    for word in words:
        if word in expected:
            expected.remove(word)
    assert not expected


@pytest.mark.parametrize("width", [80, 60])
def test_a_table_that_fits_keeps_its_columns(width):
    table = Table("model", "a sentence")
    table.add_row("131,072", "many words " * 20)
    assert shown(table, width).startswith("model    a sentence ")


def test_a_terminal_has_room_for_more_columns_without_lines():
    """Ten columns of words of six letters take 9 gaps of two: 78 of 80 columns. With lines they would take 91."""
    table = Table(*["column"] * 10)
    table.add_row(*["131072", "200000"] * 5)
    assert shown(table, 78).splitlines()[-1] == "131072  200000" + "  131072  200000" * 4
    assert "column" in shown(table, 77).splitlines()[1] and len(shown(table, 77).splitlines()) == 12


def test_headers_fold_before_cells():
    table = Table("of one token", "kind")
    table.add_row("1", "some words")
    assert [line.rstrip() for line in shown(table, 18).splitlines()] == [
        "of one",
        "token   kind",
        "─" * 18,
        "1       some words",
    ]
    assert shown(Table("of one token", "kind"), 12).split() == ["of", "one", "token", "kind", "─" * 12]


def test_every_table_is_printed_by_one_function():
    """The file that makes a table names print_table, and none prints a table past it."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "benchmark_latency.py"]
    makers = [file for file in files if re.search(r"\bTable\(", file.read_text(encoding="utf-8"))]
    assert len(makers) > 25
    for file in makers:
        text = file.read_text(encoding="utf-8")
        assert "print_table" in text, file
        assert not re.search(r"\.print\(_?table", text), file
