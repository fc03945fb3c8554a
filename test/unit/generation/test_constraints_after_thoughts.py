"""A grammar of a conversation begins where the model's thought has ended, in each way to ask for a text."""

import re
from contextlib import closing

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from granite4_neuron import chat, generate
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.generation import Conversation, ConversationEncoder
from granite4_neuron.generation.structured_outputs import Grammars
from test.support.thinking import NEMOTRON_MARKS, thinking_model

MESSAGES = [{"role": "user", "content": "a"}]
GRAMMARS = {
    "json": {"enum": ["yes"]},
    "regex": '"ye(s)"',
    "choice": ['"yes"'],
    "grammar": 'root ::= "\\"y" rest\nrest ::= "es\\""',
    "lark": 'start: /"yes"/',
}
ANSWER = re.compile(r'</think>\n{0,2}"yes"')


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return thinking_model(tmp_path_factory.mktemp("thinking"), NEMOTRON_MARKS)


@pytest.fixture(scope="module")
def grammars(model):
    with closing(Grammars(model[1], model[0].config.vocab_size)) as grammars:
        yield grammars


@pytest.fixture(scope="module")
def ending(model):
    """Options with which a thought ends at once, where a grammar lets it."""
    return dict(max_tokens=12, temperature=0, logit_bias={model[1].convert_tokens_to_ids("</think>"): 100.0})


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", GRAMMARS)
def test_texts(model, grammars, ending, kind):
    options = dict(ending, constraint=grammars.constraint(kind, GRAMMARS[kind]))
    assert ANSWER.fullmatch(chat(*model, MESSAGES, **options))
    texts = [*chat(*model, [MESSAGES, MESSAGES], **options), *chat(*model, iter([MESSAGES, "b"]), **options)]
    assert len(texts) == 4 and all(map(ANSWER.fullmatch, texts))
    assert generate(*model, "a", **options) == '"yes"', "no conversation"
    options |= dict(chat_template_kwargs={"enable_thinking": False})
    assert [chat(*model, MESSAGES, **options), *chat(*model, iter([MESSAGES]), **options)] == ['"yes"'] * 2


def test_a_thought_is_free(model, grammars):
    """It may be of any length, and the grammar is not ended by it."""
    text = chat(*model, MESSAGES, constraint=grammars.constraint("json", GRAMMARS["json"]), max_tokens=40, seed=1)
    assert len(text) >= 20 and "yes" not in text


def test_a_conversation(model, grammars, ending):
    runtime, tokenizer = model
    options = dict(ending, constraint=grammars.constraint("json", GRAMMARS["json"]))
    cache = PrefixCache(runtime, 2**24, None)
    engine = Engine(runtime, 1, max_length=200, tokenizer=tokenizer, prefix_cache=cache)
    request = Request((), stop_token_ids={tokenizer.eos_token_id}, **options)
    with closing(ConversationEncoder(tokenizer)) as encoder:
        conversation = Conversation(engine, cache, encoder, request)
        for question in ("a", "b"):
            assert ANSWER.fullmatch("".join(conversation.ask(question)))
    assert [message["content"] for message in conversation.messages] == ["a", '"yes"', "b", '"yes"']
