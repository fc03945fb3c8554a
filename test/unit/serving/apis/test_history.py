"""A conversation of items as messages of a chat."""

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")

from granite4_neuron.serving.apis.history import History


def test_a_thought_stands_with_what_follows_it():
    history = History()
    history.think("I need to look.")
    history.say("assistant", "Let me look.")
    history.think("f knows.")
    for id in "ab":
        history.call(id, "f", {})
    for id in "ab":
        history.answer(id, "sun")
    history.think("So it is.")
    history.say("assistant", "It is sunny.")
    messages = [(each.content, each.reasoning_content, len(each.tool_calls or ())) for each in history.messages()]
    assert messages == [
        ("Let me look.", "I need to look.", 0),
        ("", "f knows.", 2),
        ("sun", None, 0),
        ("sun", None, 0),
        ("It is sunny.", "So it is.", 0),
    ]
