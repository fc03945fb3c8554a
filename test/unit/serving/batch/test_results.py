"""The output of a batch, whatever happened to it: each line has its result once, or the files stay as they are."""

import contextlib
import json
import os
import random

import pytest

from granite4_neuron import UserError
from granite4_neuron.serving.batch import results as module
from granite4_neuron.serving.batch.batch import Result
from granite4_neuron.serving.batch.lines import JSONLines
from granite4_neuron.serving.batch.results import Results

OPTIONS = {"max_tokens": 3, "temperature": None}
WRONG = b'{"prompt": "a", "generated_text": "b", "finish_reason": "stop", "error": null}\n'


class Killed(BaseException):
    """Nothing runs behind it."""


def answers(lines, start, options):
    """Yield results that depend on the line, its place and the options only, of various lengths."""
    for line in lines.read(start):
        chance = random.Random(f"{line.digest()} {options}")
        text = json.dumps({**json.loads(line.content), "generated_text": "é" * chance.choice([0, 1, 5, 400])})
        yield Result(line.place, line.digest(), text.encode() + b"\n", 1, False)


def run(folder, options, kill_after=None):
    """Run a batch; `kill_after` this many bytes the process ends, and nothing more is written. Return where in each
    file, by its inode, begins what was not forced to the disk.
    """
    left, unforced = kill_after, {}

    def write(file, content):
        nonlocal left
        content = bytes(content)
        unforced.setdefault(os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR))
        if left is None:
            return WRITE(file, content)
        written = WRITE(file, content[:left])
        left -= written
        if written < len(content):
            raise Killed
        return written

    lines = JSONLines(folder / "in.jsonl")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(os, "write", write)
        patch.setattr(os, "fsync", lambda file: unforced.pop(os.fstat(file).st_ino, None))
        with Results(folder / "out.jsonl", lines, options) as results:
            for result in answers(lines, results.start, options):
                results.append(result)
    return unforced


def lose_power(folder, unforced, chance):
    """Leave zeros in what was not forced to the disk but the record's first line: up to the end of the output, and up
    to any place of the record.
    """
    for path in folder.iterdir():
        content = path.read_bytes()
        start = unforced.get(path.stat().st_ino, len(content)) or content.find(b"\n") + 1
        first, last = sorted(chance.randrange(start, len(content) + 1) for _ in range(2))
        if path.name == "out.jsonl":
            last = len(content)
        path.write_bytes(content[:first] + b"\0" * (last - first) + content[last:])


WRITE = os.write


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(chance, content):
    """Return a file as somebody left it who removed, repeated, exchanged, edited or cut off something."""
    lines, place = content.splitlines(keepends=True), chance.randrange(len(content) + 1)
    one, other = (chance.randrange(len(lines) or 1) for _ in range(2))
    what = chance.randrange(9)
    if what == 0:
        return content[:place]
    if what == 1:
        return content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]
    if what == 2:
        return b"".join(lines[:one] + lines[one + 1 :])
    if what == 3:
        return b"".join(lines[:one] + lines[other:])
    if what == 4 and lines:
        lines[one], lines[other] = lines[other], lines[one]
        return b"".join(lines)
    if what == 5:
        return content + chance.choice([WRONG, b"\n", b"mine", b"{}", b"\0" * 9, content[-9:]])
    if what == 6:
        return chance.choice([b"", b"mine\n", b"{", WRONG, b"\0\0\0\x18ftypmp42 mine\n", b"\0" * 99])
    if what == 7:
        return content[:place] + b"\0" * chance.randrange(200)
    return content[:place] + chance.choice([b"\n", b"x", WRONG]) + content[place:]


def random_case(folder, chance):
    """Run, kill, damage, and run again; return what the last run refuses, if it does."""
    prompts = [chance.choice(["same", "same", str(number), "ü" * 50]) for number in range(chance.randrange(1, 9))]
    given = folder / "in.jsonl"
    given.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options, unforced = dict(OPTIONS), {}
    for _ in range(chance.randrange(1, 4)):
        lose_power(folder, unforced if chance.random() < 0.5 else {}, chance)
        unforced = run(folder, options, kill_after=chance.choice([None, chance.randrange(2000)]))
    for _ in range(chance.randrange(3)):
        target = chance.choice([*folder.iterdir()])
        if target != given or chance.random() < 0.3:
            content = changed(chance, target.read_bytes())
            target.write_bytes(content if target != given else b"\n".join(filter(is_object, content.splitlines())))
    if chance.random() < 0.1:
        options["max_tokens"] = 4
    if chance.random() < 0.1:
        chance.choice([*folder.iterdir()]).unlink()
        if not given.exists():
            given.write_text('{"prompt": "new"}\n')
    before = files(folder)
    try:
        run(folder, options)
    except UserError as error:
        assert files(folder) == before, "a refusal changes nothing"
        return str(error)
    lines = JSONLines(given)
    expected = b"".join(result.line for result in answers(lines, 0, options))
    assert files(folder).get("out.jsonl", b"") == expected, "each line has its result once"
    old = before.get("out.jsonl", b"")
    kept = next((at for at in range(len(old)) if old[: at + 1] != expected[: at + 1]), len(old))
    assert b"\n" not in old[kept:] or b"\0" in old[kept:], "nothing whole was overwritten"
    return None


def is_object(line):
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_accidents(tmp_path, monkeypatch, count):
    said = []
    for number in range(count):
        folder = tmp_path / "case"
        folder.mkdir()
        chance = random.Random(number)
        monkeypatch.setattr(module, "_SECONDS", chance.choice([-1.0, 1e9]))  # each alone, or all together
        said.append(random_case(folder, chance))
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert 0.3 * count < said.count(None) < 0.85 * count
    for sentence in (
        "is not the one that was written",
        "has more than the",
        "is not the one whose result",
        "lines, and there are results of",
        "was written with --max-tokens 3, which is 4 now",
        "is not the record of a batch",
        "is damaged",
        "no out.jsonl.record that says that batch wrote it",
    ):
        assert any(sentence in each for each in said if each), sentence
