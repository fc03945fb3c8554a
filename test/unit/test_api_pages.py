"""docs/api has every class and function that the package, the engine and the operators offer."""

import re
from pathlib import Path

import pytest

import granite4_neuron
from granite4_neuron import engine, ops

API = Path(__file__).parents[2] / "docs" / "api"
NAMES = {
    name.rpartition(".")[2]
    for page in API.glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("module", [granite4_neuron, engine, ops], ids=lambda module: module.__name__)
def test_a_public_name_has_a_place(module):
    offered = {name for name in module.__all__ if callable(getattr(module, name))}
    assert not offered - NAMES
