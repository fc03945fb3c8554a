"""Conversations with a model that thinks before it answers: the model sees thoughts as its template shows them."""

import json
from contextlib import closing

import pytest
from transformers import PreTrainedTokenizerFast

from granite4_neuron import UserError
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.generation import Conversation, ConversationEncoder
from test.support.checkpoints import save_byte_tokenizer
from test.support.scripted import script_tokens
from test.support.tool_template import NEMOTRON_TEMPLATE

ANSWERS = ["so\n</think>\n\nHi.", "then </think>Yes.", "on and on"]


@pytest.fixture(params=[False, True], ids=["texts", "special tokens"])
def tokenizer(request, tmp_path):
    save_byte_tokenizer(tmp_path, NEMOTRON_TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    if request.param:  # the model has 264 tokens
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


@pytest.fixture
def new(texting, tokenizer, monkeypatch):
    """Yield a function that begins a conversation; its answers are `ANSWERS`."""
    runtime, _ = texting

    def choose(past):
        number, begin = past.count(3) - 1, len(past) - past[::-1].index(3) + len(tokenizer.encode("<think>\n"))
        return [*tokenizer.encode(ANSWERS[number]), 1][len(past) - begin]

    script_tokens(monkeypatch, choose)
    with closing(ConversationEncoder(tokenizer)) as encoder:

        def begin():
            cache = PrefixCache(runtime, None, None)
            request = Request((), 40, stop_token_ids=frozenset([1]))
            return Conversation(Engine(runtime, 1, tokenizer=tokenizer, prefix_cache=cache), cache, encoder, request)

        yield begin


def said(thought, text):
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def test_thoughts_are_kept_beside_the_text(new, tokenizer):
    conversation = new()
    assert ["".join(conversation.ask(text)) for text in "abc"] == ANSWERS
    answers = [said("so", "Hi."), said("then", "Yes."), said("on and on", "")]
    assert conversation.messages[1::2] == answers
    prompt = tokenizer.decode(conversation.turns[2].prompt)
    assert prompt == (
        "<|user|>a<|end|><|assistant|><think>so</think>Hi.<|end|>"
        "<|user|>b<|end|><|assistant|><think>then</think>Yes.<|end|><|user|>c<|end|><|assistant|><think>\n"
    )


def test_messages_of_a_file_have_their_thoughts(new, tmp_path):
    conversation, file = new(), tmp_path / "talk.json"
    file.write_text(json.dumps([{"role": "user", "content": "a"}, said("so", "Hi.")]))
    conversation.load(file)
    assert conversation.messages[1] == said("so", "Hi.")
    assert "".join(conversation.ask("b")) == ANSWERS[1]
    file.write_text(json.dumps([{"role": "user", "content": "a"}, said(1, "Hi.")]))
    with pytest.raises(UserError, match="must hold messages"):
        conversation.load(file)


def test_a_saved_conversation(new, tmp_path):
    conversation = new()
    "".join(conversation.ask("a"))
    conversation.save(tmp_path / "talk")
    loaded = new()
    loaded.load(tmp_path / "talk")
    assert loaded.messages == conversation.messages
