"""The option --json-schema of generate and chat."""

import io
import json
import sys

import pytest

from granite4_neuron.commands.cli import main

CHOICE = {"enum": ["a", "bcd", 1.5]}  # each on one line


@pytest.fixture
def run(capsys, monkeypatch, texting_folder):
    def command(name, *arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = main([name, "--model", str(texting_folder), *map(str, arguments)])
        return status, *capsys.readouterr()

    return command


def test_generate(run, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(CHOICE))
    for schema in (json.dumps(CHOICE), file):
        status, out, _ = run("generate", "x", "--json-schema", schema, "--temperature", 2, "--ignore-eos")
        assert status == 0 and json.loads(out) in CHOICE["enum"]


def test_several_prompts_and_drafts(run):
    status, out, _ = run(
        "generate", "x", "yz", "--json-schema", json.dumps(CHOICE), "--speculate", "ngram:3", "--temperature", 2
    )
    answers = [line for line in out.splitlines() if line and not line.startswith("===")]
    assert status == 0 and len(answers) == 2 and all(json.loads(answer) in CHOICE["enum"] for answer in answers)


def test_chat(run):
    status, out, _ = run("chat", "--json-schema", json.dumps(CHOICE), stdin="hello\nagain\n")
    assert status == 0 and [json.loads(line) in CHOICE["enum"] for line in out.splitlines()] == [True, True]


@pytest.mark.parametrize(
    "schema, message",
    [
        ('{"type": "foo"}', "the JSON schema cannot be used (Invalid type: foo)."),
        ("{", "the JSON schema is not JSON ("),
        ("/no/such/file", "/no/such/file cannot be read (No such file or directory)."),
    ],
)
@pytest.mark.parametrize("name", ["generate", "chat"])
def test_refusals(run, name, schema, message):
    status, out, error = run(name, *(["x"] if name == "generate" else []), "--json-schema", schema)
    assert status == 2 and out == "" and message in error and "Traceback" not in error
