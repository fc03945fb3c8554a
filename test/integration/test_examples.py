"""Each program in examples/ runs with the small model, and prints what it should."""

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = {
    "batch_over_ray": ["ray"],
    "serve_lora": ["openai", "peft"],
}
# The small model recites its training text, because the examples choose greedy tokens.
EXPECTED = {
    "batch_over_ray": r"0 An assignment statement evaluates the expression.*\n3 The assert statement.",
    "chat_with_tools": r'^length_of\(\{"word": "(assert|import)"\}\) = 6\n\S',
    "engine_loop": r"^request \d+, step 19, length: .*request \d+, step 39, length: ' evaluates the expression list",
    "generate": r"^ evaluates the expression list .*\n\nThe import statement.* \[length\]\n\nLambda .* \[\w+\]\n$",
    "serve_lora": r"tiny: ' evaluates the expression.*\nmine: '(?! evaluates)",
    "structured_output": r"^\{'keyword': '\w+', 'lines': \d+, 'is_expression': (True|False)\}\n3\.\d+\n$",
    "vllm_operators": r"^one token more: True\nchannel by channel: True\ntokens: \[\[7, 4, -1\]\]\n$",
}


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_should(name, capfd, monkeypatch):
    for package in PACKAGES.get(name, []):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(EXPECTED[name], capfd.readouterr().out, re.DOTALL)


def test_each_example_is_short():
    assert all(file.read_text(encoding="utf-8").count("\n") < 40 for file in EXAMPLES.glob("*.py"))
