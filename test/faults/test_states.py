"""Prompt caches and conversation files that are damaged or were made to do harm."""

import io
import json
import os
import socket
import sys
from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from granite4_neuron import UserError
from granite4_neuron.commands.chat_session import Session
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.generation import Conversation, ConversationEncoder
from granite4_neuron.state.snapshot import Snapshot
from granite4_neuron.system.terminal import guard_streams

PROMPT = "A text of some length"
DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(scope="module")
def encoder(texting):
    encoder = ConversationEncoder(texting[1])
    yield encoder
    encoder.close()


@pytest.fixture
def conversation(texting, encoder):
    runtime, tokenizer = texting
    cache = PrefixCache(runtime, None, None)
    engine = Engine(runtime, 1, tokenizer=tokenizer, prefix_cache=cache)
    return Conversation(engine, cache, encoder, Request((), 3, stop_token_ids=frozenset([1])))


@pytest.fixture(scope="module")
def saved(texting, encoder, tmp_path_factory):
    """Return the tensors and the metadata of a file with a conversation of two turns."""
    file = tmp_path_factory.mktemp("saved") / "chat"
    cache = PrefixCache(texting[0], None, None)
    engine = Engine(texting[0], 1, tokenizer=texting[1], prefix_cache=cache)
    conversation = Conversation(engine, cache, encoder, Request((), 3, stop_token_ids=frozenset([1])))
    for message in ("Hello", "What else?"):
        "".join(conversation.ask(message))
    conversation.save(file)
    with safe_open(file, framework="pt") as stored:
        return load_file(file), json.loads(stored.metadata()["snapshot"])


def without(ending):
    """Damage: remove the tensors whose names have this ending."""

    def damage(tensors, about):
        for name in [name for name in tensors if name.endswith(ending)]:
            del tensors[name]

    return damage


def changed(ending, change):
    """Damage: let `change` replace the first tensor whose name has this ending."""

    def damage(tensors, about):
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = change(tensors[name]).contiguous()

    return damage


def says(**values):
    """Damage: change values of the metadata; the value `...` removes the key."""

    def damage(tensors, about):
        about.update(values)
        for name in [name for name, value in values.items() if value is ...]:
            del about[name]

    return damage


def metadata(text):
    """Damage: replace the metadata's JSON object with this text."""
    return lambda tensors, about: text


def turn(**values):
    """Damage: change values of the second turn; the value `...` removes the key."""

    def damage(tensors, about):
        note = json.loads(about["note"])
        says(**values)(tensors, note["turns"][1])
        about["note"] = json.dumps(note)

    return damage


def longer_than_memory(tensors, about):
    note = json.loads(about["note"])
    first, last = note["turns"]
    again = {**last, "start": 10, "prompt": []}
    note["turns"] = [first, *[again] * 20_000, last]
    about["note"] = json.dumps(note)


def without_digest(tensors, about):
    del about["digests"]["logits"]


def last_token(token):
    """Damage: replace the last token with this one."""

    def damage(tensors, about):
        about["tokens"][-1] = token

    return damage


STATES = {
    "no SSM states": (without(".ssm_state"), "lacks layers.0.ssm_state"),
    "no windows": (without(".conv_state"), "lacks layers.0.conv_state"),
    "no keys": (without(".key"), r"lacks layers.\d.key"),
    "no values": (without(".value"), r"lacks layers.\d.value"),
    "no logits": (without("logits"), "was not made from a prefix cache, with tokens and logits"),
    "a tensor too many": (
        lambda tensors, about: tensors.update({"x\n": torch.zeros(1)}),
        r"has x\\n, which a sequence",
    ),
    "short logits": (changed("logits", lambda logits: logits[:-1]), r"logits of shape \[263\] .* instead of \[264\]"),
    "logits in bfloat16": (changed("logits", torch.Tensor.bfloat16), "in torch.bfloat16 instead of .* torch.float32"),
    "logits that are numbers": (changed("logits", torch.Tensor.long), "in I64 instead of .* torch.float32"),
    "short keys": (changed(".key", lambda key: key[:, :-1]), r"key of shape \[2, \d+, 16\]"),
    "keys of other heads": (changed(".key", lambda key: key[:1]), r"key of shape \[1, \d+, 16\]"),
    "values in float16": (changed(".value", torch.Tensor.half), "value of shape .* in torch.float16"),
    "SSM states in bfloat16": (changed(".ssm_state", torch.Tensor.bfloat16), "has SSM states in torch.bfloat16"),
    "SSM states in float64": (changed(".ssm_state", torch.Tensor.double), "has SSM states in F64"),
    "an SSM state transposed": (changed(".ssm_state", lambda state: state.transpose(0, 1)), r"ssm_state of shape"),
    "a window of another kernel": (changed(".conv_state", lambda state: state[:, 1:]), "conv_state of shape"),
    "metadata is a list": (metadata("[]"), "is not a snapshot"),
    "metadata is a number": (metadata("17"), "is not a snapshot"),
    "metadata is null": (metadata("null"), "is not a snapshot"),
    "metadata is text": (metadata('"x"'), "is not a snapshot"),
    "metadata is deep": (metadata(DEEP), "is damaged or incomplete"),
    "metadata is not JSON": (metadata("{"), "is damaged or incomplete"),
    "a number of 5,000 digits": (metadata("9" * 5000), "is damaged or incomplete"),
    **{f"no {name}": (says(**{name: ...}), f"it has no {name}") for name in ("start", "length", "tokens", "note")},
    **{f"no {name}": (says(**{name: ...}), f"it has no {name}") for name in ("dtype", "fingerprint")},
    "no version": (says(version=...), "has version None"),
    "a version that is a list": (says(version=[1]), r"has version \[1\]"),
    "length is text": (says(length="3"), "length is '3'"),
    "length is true": (says(length=True), "length is True"),
    "length is a fraction": (says(length=3.0), "length is 3.0"),
    "length 0": (says(length=0, tokens=[]), "is of tokens 0 to 0"),
    "length 2**70": (says(length=2**70), "is of tokens 0 to 11805"),
    "another length": (says(length=5), r"tokens and the state after 5"),
    "start behind the end": (says(start=599), "is of tokens 599 to"),
    "another start": (says(start=1), "instead of"),
    "a negative start": (says(start=-1), "start is -1"),
    "tokens are text": (says(tokens="abc"), "tokens is 'abc'"),
    "tokens are fractions": (says(tokens=[0.5]), r"tokens is \[0.5\]"),
    "a negative token": (says(tokens=[-1]), r"tokens is \[-1\]"),
    "too few tokens": (says(tokens=[5]), "has 1 tokens and the state after"),
    "no tokens": (says(tokens=[]), "was not made from a prefix cache"),
    "a fingerprint that is a number": (says(fingerprint=3), "fingerprint is 3"),
    "a fingerprint of nothing": (says(fingerprint=""), "was made with other kernels or options, or another"),
    "a fingerprint of other weights": (
        lambda tensors, about: about.update(fingerprint="0" * 32 + about["fingerprint"][32:]),
        "was made with another checkpoint, or with other weights or adapters of it",
    ),
    "a token of the vocabulary's size": (last_token(264), "has a token id outside the vocabulary"),
    "a token of 2**70": (last_token(2**70), "has a token id outside the vocabulary"),
    "a tensor without a digest": (without_digest, r"is damaged \(logits has other numbers\)"),
    "no digests": (says(digests=...), "it has no digests"),
    "digests are a list": (says(digests=[]), r"digests is \[\]"),
    "a note that is an object": (says(note={}), "note is {}"),
}

CONVERSATIONS = {
    "a note that is null": (says(note="null"), "it must be an object of system, turns"),
    "a note that is deep": (says(note=DEEP), "is damaged"),
    "a note of 5,000 digits": (says(note="9" * 5000), "is damaged"),
    "turns are an object": (says(note='{"system": null, "turns": {}}'), r"turns is {} in it"),
    "no turns": (says(note='{"system": null, "turns": []}'), r"turns is \[\] in it"),
    "a turn that is a number": (
        says(note='{"system": null, "turns": [3]}'),
        "turn 1 must be an object of system, user",
    ),
    "a system message that is a list": (says(note='{"system": [], "turns": [3]}'), r"system is \[\] in it"),
    **{f"no {name}": (turn(**{name: ...}), "turn 2 must be") for name in ("start", "user", "generated", "system")},
    "one field more": (turn(more=1), "turn 2 must be an object of"),
    "user is a number": (turn(user=5), "user is 5 in turn 2"),
    "an answer that is null": (turn(answer=None), "answer is None in turn 2"),
    "a system message that is a number": (turn(system=5), "system is 5 in turn 2"),
    "generated is text": (turn(generated="abc"), "generated is 'abc' in turn 2"),
    "generated is empty": (turn(generated=[]), r"generated is \[\] in turn 2"),
    "generated is a number": (turn(generated=3), "generated is 3 in turn 2"),
    "generated are fractions": (turn(generated=[1.5]), r"generated is \[1.5\] in turn 2"),
    "generated are booleans": (turn(generated=[True]), r"generated is \[True\] in turn 2"),
    "the last token is outside the vocabulary": (turn(generated=[5, 264]), r"generated is \[5, 264\] in turn 2"),
    "a prompt that is text": (turn(prompt="abc"), "prompt is 'abc' in turn 2"),
    "a negative token": (turn(prompt=[-1]), r"prompt is \[-1\] in turn 2"),
    "another reason": (turn(finish_reason="tired"), "finish_reason is 'tired' in turn 2"),
    "start is negative": (turn(start=-1), "start is -1 in turn 2"),
    "start is text": (turn(start="0"), "start is '0' in turn 2"),
    "start is behind the turn before": (turn(start=100), "start is 100 in turn 2"),
    "a state of other tokens": (turn(generated=[5, 6]), "its state is of other tokens"),
}


def damaged(saved, damage, file):
    """Write the saved tensors and metadata to `file` after `damage` has changed them."""
    tensors, about = dict(saved[0]), json.loads(json.dumps(saved[1]))
    text = damage(tensors, about)
    save_file(tensors, file, metadata={"snapshot": text if isinstance(text, str) else json.dumps(about)})
    return file


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Chats here read a test's input, not a terminal's."""
    monkeypatch.setattr("granite4_neuron.commands.chat_session.keys_are_kept", nullcontext)


def is_a_sentence(error):
    return str(error).endswith(".") and str(error).isprintable() and len(str(error)) < 2000


@pytest.mark.parametrize("damage, message", STATES.values(), ids=STATES.keys())
def test_a_damaged_state_is_refused(texting, saved, tmp_path, damage, message):
    file = damaged(saved, damage, tmp_path / "file")
    cache = PrefixCache(texting[0], None, None)
    with pytest.raises(UserError, match=message) as error:
        cache.load(Snapshot.load(file, texting[0]))
    assert is_a_sentence(error.value)
    assert cache.stats.num_bytes == 0


def test_the_last_token_of_the_vocabulary_is_accepted(texting, saved, tmp_path):
    cache = PrefixCache(texting[0], None, None)
    cache.load(Snapshot.load(damaged(saved, last_token(263), tmp_path / "file"), texting[0]))
    assert cache.stats.snapshots == 1


@pytest.mark.parametrize("damage, message", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_a_damaged_conversation_is_refused(conversation, saved, tmp_path, damage, message):
    "".join(conversation.ask("Before"))
    turns = list(conversation.turns)
    with pytest.raises(UserError, match=message) as error:
        conversation.load(damaged(saved, damage, tmp_path / "file"))
    assert is_a_sentence(error.value)
    assert conversation.turns == turns


def test_an_undamaged_conversation_is_read(conversation, saved, tmp_path):
    """The saved file loads before it is damaged."""
    conversation.load(damaged(saved, says(), tmp_path / "file"))
    assert [turn.user for turn in conversation.turns] == ["Hello", "What else?"]


def test_turns_beyond_the_memory_are_refused(conversation, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("granite4_neuron.system.available_memory.available_bytes", lambda *_: 10**6)
    with pytest.raises(UserError, match=r"the turns in .* need 0.00 GB of memory, and 0.00 GB are available"):
        conversation.load(damaged(saved, longer_than_memory, tmp_path / "file"))


def test_a_tensor_larger_than_the_memory_is_not_read(texting, saved, tmp_path, monkeypatch):
    """A sparse file can claim such a tensor."""
    file = damaged(saved, changed(".key", lambda key: key.repeat(1, 1000, 1)), tmp_path / "file")
    before = [name for name in saved[0] if name.endswith(".key")]
    assert before
    reads = []
    monkeypatch.setattr("granite4_neuron.state.snapshot.replace", lambda *_, **__: reads.append(1))
    with pytest.raises(UserError, match="instead of"):
        Snapshot.load(file, texting[0])
    assert not reads


def irregular_files(folder):
    """Make one file of each irregular kind and return their names."""
    os.mkfifo(folder / "pipe")
    (folder / "zeros").symlink_to("/dev/zero")
    (folder / "null").symlink_to("/dev/null")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.close()
    (folder / "folder").mkdir()
    return ["pipe", "zeros", "null", "socket", "folder"]


def test_irregular_files_are_refused(texting_folder, refuses, tmp_path):
    for name in irregular_files(tmp_path):
        said = refuses("generate", "--model", texting_folder, "--prompt-cache", tmp_path / name, PROMPT)
        assert said == f"{tmp_path / name} is not a regular file."


def test_a_place_that_cannot_be_written_is_refused_before_any_work(texting_folder, refuses, tmp_path, monkeypatch):
    monkeypatch.setattr("granite4_neuron.commands.generate.load_runtime", lambda *_, **__: pytest.fail("it works"))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("none/file")
    reasons = {
        tmp_path / "loop": "Too many levels of symbolic links",
        tmp_path / "link": "No such file or directory",
        tmp_path / ("x" * 300): "File name too long",
    }
    for file, reason in reasons.items():
        said = refuses("generate", "--model", texting_folder, "--prompt-cache", file, PROMPT)
        assert said == f"{file} could not be written ({reason})."
    assert sorted(os.listdir(tmp_path)) == ["link", "loop"]


class Lines:
    """Lines that a person types."""

    def __init__(self, *lines):
        self._lines = list(lines)

    def read(self):
        return self._lines.pop(0) if self._lines else None


def test_a_chat_survives_failed_commands(conversation, tmp_path, capsys, monkeypatch):
    """A command that fails prints one sentence, and the conversation is still there."""
    monkeypatch.setattr("granite4_neuron.commands.chat_session.Session._answer", lambda self, text: None)
    "".join(conversation.ask("Hello"))
    names = irregular_files(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    files = [*(f"{tmp_path}/{name}" for name in [*names, "loop"]), "~nosuchuser/x", "a\0b", "x" * 5000]
    lines = [f"{command} {file}" for command in ("/save", "/load") for file in files]
    assert Session(conversation, Lines(*lines), is_terminal=True).run() == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(lines) and all(is_a_sentence(line) for line in said), said
    assert [turn.user for turn in conversation.turns] == ["Hello"]
    assert (tmp_path / "null").is_symlink() and (tmp_path / "loop").is_symlink() and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=repr)
def test_errors_of_the_system_do_not_end_the_chat(conversation, capsys, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(Conversation, "save", fail)
    assert Session(conversation, Lines("/save file", "/system"), is_terminal=True).run() == 0
    output, said = capsys.readouterr()
    assert "There is no system message." in output
    assert said in ("the system: Input/output error.\n", "there is not enough memory.\n")


def test_a_link_is_written_where_it_points_to(conversation, tmp_path):
    "".join(conversation.ask("Hello"))
    (tmp_path / "there").mkdir()
    for target in ("there/old", "there/new"):
        link = tmp_path / f"link to {target[6:]}"
        link.symlink_to(target)
    (tmp_path / "there" / "old").write_text("old")
    for which in ("old", "new"):
        conversation.save(tmp_path / f"link to {which}")
        assert (tmp_path / f"link to {which}").is_symlink()
        conversation.load(tmp_path / "there" / which)
    assert sorted(os.listdir(tmp_path / "there")) == ["new", "old"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_control_characters_of_a_file_do_not_reach_the_terminal(conversation, monkeypatch):
    "".join(conversation.ask("\x1b[31mHello"))
    conversation.system = "\x1b]0;title\x07Be brief."
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    guard_streams()
    assert Session(conversation, Lines("/system", "/undo"), is_terminal=True).run() == 0
    shown = sys.stdout.getvalue() + sys.stderr.getvalue()
    for mark in ("\x1b[?2004h", "\x1b[?2004l"):  # the chat's own, for bracketed paste
        shown = shown.replace(mark, "")
    assert "Be brief." in shown and "Hello" in shown and "\x1b" not in shown
