"""Conversations: texts equal those of a run from the beginning, and each turn runs only its new tokens."""

import json
import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from granite4_neuron import UserError, load
from granite4_neuron.engine import DraftModel, Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.generation import Conversation, ConversationEncoder, generate
from granite4_neuron.state.snapshot import Snapshot
from test.support.engines import PoisonedPrefixCache, poison_engine
from test.support.scripted import script_tokens

pytestmark = pytest.mark.versions

END = 1  # <|end|>, the stop token


@pytest.fixture
def new(texting):
    """Yield a function that begins a conversation in an engine of its own."""
    runtime, tokenizer = texting
    with closing(ConversationEncoder(tokenizer)) as encoder:

        def begin(system=None, cache=None, drafter=None, **options):
            cache = PoisonedPrefixCache(runtime, None, None) if cache is None else cache
            engine = Engine(runtime, 1, tokenizer=tokenizer, prefix_cache=cache, drafter=drafter)
            request = Request((), **{"max_tokens": 12, "stop_token_ids": frozenset([END]), **options})
            return Conversation(engine, cache, encoder, request, system)

        yield begin


def say(conversation, *messages):
    answers = []
    for message in messages:
        answers.append("".join(conversation.ask(message)))
        poison_engine(conversation._engine)
    return answers


def spelled(tokenizer, conversation, user):
    """Return the next prompt as transformers itself renders it."""
    messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for turn in conversation.turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": user})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_texts_are_those_of_a_run_from_the_beginning(new, texting):
    runtime, tokenizer = texting
    conversation = new("Be brief.")
    for message in ("Hello", "What else?", "And <|end|> then?"):
        before = list(conversation.turns)
        (answer,) = say(conversation, message)
        turn = conversation.turns[-1]
        assert generate(runtime, tokenizer, turn.prompt, max_tokens=12) == answer == turn.answer
        assert turn.generated[-1] == END or len(turn.generated) == 12
        stats = conversation.last_stats
        if before:
            assert turn.prompt[: len(before[-1].stored)] == before[-1].stored
            assert stats.cached_tokens == len(before[-1].stored)
        assert stats.cached_tokens + stats.prompt_tokens == len(turn.prompt)
    respelled = (ConversationEncoder(tokenizer).encode_text(turn.answer) for turn in conversation.turns)
    assert any(
        tokens != turn.generated[: len(tokens)] for tokens, turn in zip(respelled, conversation.turns, strict=True)
    ), "the test needs an answer that its text would give other tokens"


def test_prompts_equal_transformers(new, texting, monkeypatch):
    """Each byte is a token here, so a text has only one tokenization."""
    tokenizer = texting[1]
    conversation = new("Be brief.")
    replies = iter(["fine", "thanks", "what for"])
    script = []
    script_tokens(monkeypatch, lambda tokens: script.pop(0))
    for message in ("How are you?", "Good.", "Bye"):
        expected = spelled(tokenizer, conversation, message)
        script += [*tokenizer.encode(next(replies)), END]
        say(conversation, message)
        assert conversation.turns[-1].prompt == expected
    assert [turn.answer for turn in conversation.turns] == ["fine", "thanks", "what for"]
    assert all(turn.finish_reason == "stop" for turn in conversation.turns)


def test_a_new_system_message_replaces_the_first_one(new, texting):
    conversation = new("Be brief.")
    say(conversation, "Hello")
    conversation.system = "Be long."
    conversation.turns[-1] = replace(conversation.turns[-1], answer="an answer")
    expected = spelled(texting[1], conversation, "What else?")
    say(conversation, "What else?")
    assert conversation.turns[-1].prompt == expected
    conversation.undo()
    conversation.system = None
    say(conversation, "What else?")
    assert "Be" not in texting[1].decode(conversation.turns[-1].prompt)


def test_undo_retry_and_clear(new):
    conversation = new()
    first, second = say(conversation, "Hello", "What else?")
    turns = list(conversation.turns)
    assert conversation.undo() is turns[1] and conversation.turns == turns[:1]
    assert say(conversation, "What else?") == [second]
    assert (conversation.last_stats.prompt_tokens, conversation.last_stats.cached_tokens) == (0, len(turns[1].prompt))
    conversation.undo()
    say(conversation, "Another")
    assert conversation.last_stats.cached_tokens == len(turns[0].stored)
    conversation.clear()
    assert conversation.num_tokens == 0 and say(conversation, "Hello") == [first]
    conversation.undo()
    with pytest.raises(UserError, match="there is no turn to take back"):
        conversation.undo()


def test_an_interrupted_answer_is_part_of_the_conversation(new, texting):
    runtime, tokenizer = texting
    conversation, pieces = new(), []
    for text in conversation.ask("Hello"):
        pieces.append(text)
        if len(pieces) == 5:
            conversation.interrupt()
    turn = conversation.turns[-1]
    assert turn.finish_reason == "interrupted" and len(turn.generated) == 5 and turn.answer == "".join(pieces)
    poison_engine(conversation._engine)
    (answer,) = say(conversation, "Go on")
    assert conversation.last_stats.cached_tokens == len(turn.stored) == len(turn.prompt) + 4
    assert generate(runtime, tokenizer, conversation.turns[-1].prompt, max_tokens=12) == answer


def test_a_prompt_that_is_interrupted_leaves_no_turn(new, monkeypatch):
    conversation = new()
    monkeypatch.setattr(type(conversation._engine.runtime), "tokens_per_step", 16)
    progress = []

    def interrupt_at_once(done, total):
        progress.append((done, total))
        conversation.interrupt()

    message = "a message of many tokens, " * 4
    assert "".join(conversation.ask(message, interrupt_at_once)) == ""
    assert conversation.turns == [] and progress == [(16, len(message) + 3)]
    assert not conversation._engine.has_work
    assert say(conversation, message) and conversation.last_stats.cached_tokens == 16


def test_an_answer_that_is_not_read_to_its_end_leaves_no_turn(new):
    conversation = new()
    answer = conversation.ask("Hello")
    next(answer)
    answer.close()
    assert conversation.turns == [] and not conversation._engine.has_work
    assert len(say(conversation, "Hello")) == 1


def test_a_file_holds_the_conversation_and_its_state(new, texting, tmp_path):
    first = new("Be brief.", max_tokens=7)
    say(first, "Hello", "What else?")
    first.save(tmp_path / "chat")
    expected = say(first, "Go on")
    other = new()
    say(other, "Something else")
    other.load(tmp_path / "chat")
    assert other.system == "Be brief." and other.turns == first.turns[:2]
    other._request = first._request
    assert say(other, "Go on") == expected
    assert other.last_stats.cached_tokens == len(first.turns[1].stored)
    other.undo()
    other.undo()
    assert [turn.user for turn in other.turns] == ["Hello"] and say(other, "What else?") == [first.turns[1].answer]


def test_refusals_to_load_and_save(new, texting, tmp_path):
    runtime = texting[0]
    conversation = new()
    with pytest.raises(UserError, match="nothing to save yet"):
        conversation.save(tmp_path / "chat")
    say(conversation, "Hello")
    turns = list(conversation.turns)
    conversation.save(tmp_path / "chat")
    whole = Snapshot.load(tmp_path / "chat", runtime)

    def load_with(note):
        Snapshot(**{**vars(whole), "note": note}).save(tmp_path / "other")
        conversation.load(tmp_path / "other")

    for note, message in (
        ("", "holds the state of a prompt, and no conversation"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"system": null, "turns": [{"start": 0, "prompt": [3]}]}', "is damaged"),
        (whole.note.replace('"generated": [', '"generated": [999, '), "generated is"),
    ):
        with pytest.raises(UserError, match=message):
            load_with(note)
        assert conversation.turns == turns, "the conversation has changed"
    with pytest.raises(UserError, match=r"cannot be read|damaged"):
        conversation.load(tmp_path / "none")
    small = new(cache=PrefixCache(runtime, 100, None))
    say(small, "Hello")
    with pytest.raises(UserError, match="not in the prefix cache any more; give it more memory"):
        small.save(tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_an_answer_cut_by_a_stop_string_is_kept_as_its_text(new, texting):
    conversation = new()
    (whole,) = say(conversation, "Hello")
    stop = next(character for character in whole[2:] if character.isprintable() and character.isascii())
    conversation = new(stop=(stop,))
    assert say(conversation, "Hello") == [whole[: whole.index(stop)]]
    expected = spelled(texting[1], conversation, "Go on")
    say(conversation, "Go on")
    assert conversation.turns[-1].prompt == expected


def test_drafts_and_seeds(new):
    plain, drafting = new(temperature=1.0, seed=3), new(temperature=1.0, seed=3, drafter=NgramDrafter())
    messages = ["Hello", "Hello, hello, hello"]
    expected = say(plain, *messages)
    assert say(drafting, *messages) == expected
    plain.undo()
    assert say(plain, messages[1]) != expected[1:], "another try draws other numbers"


def test_a_draft_model_reads_only_the_new_tokens_of_a_turn(new, texting_folder, monkeypatch):
    small, _ = load(texting_folder)
    step, commit, read = small.step, small.commit, []

    def counted_step(state, rows):
        read.append(sum(len(row.tokens) for row in rows))
        return step(state, rows)

    def counted_commit(state, verification, accepted):
        read.append(sum(accepted))
        commit(state, verification, accepted)

    monkeypatch.setattr(small, "step", counted_step)
    monkeypatch.setattr(small, "commit", counted_commit)
    drafter = DraftModel(small, small.config.vocab_size, 1, 600, PoisonedPrefixCache(small, None, None))
    plain, drafting = new("Be brief."), new("Be brief.", drafter=drafter)

    def ask(message):
        read.clear()
        assert say(drafting, message) == say(plain, message)
        stats = drafting.last_stats
        assert stats.drafted_tokens and stats.acceptance_rate == 1
        # The draft model has not read the last accepted token when a turn ends.
        assert 0 <= sum(read) - (stats.prompt_tokens + stats.generated_tokens) + 6 <= 12
        return stats

    assert ask("Hello").cached_tokens == 0
    assert ask("What else?").cached_tokens > 25
    drafting.undo(), plain.undo()
    assert ask("What else?").prompt_tokens == 0
    drafting.undo(), plain.undo()
    assert ask("Go on").cached_tokens > 25


def test_errors_leave_the_conversation_as_it_was(new, monkeypatch):
    conversation = new()
    say(conversation, "Hello")
    turns = list(conversation.turns)
    with pytest.raises(UserError, match=r"the prompt has 6.. tokens; sequences here have at most 600"):
        say(conversation, "x" * 600)
    with pytest.raises(UserError, match="not text in UTF-8"):
        say(conversation, "\udc80")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="not finite"):
        runtime_class = type(conversation._engine.runtime)
        patch.setattr(runtime_class, "step", lambda self, state, rows, all_logits: torch.full((1, 264), math.nan))
        say(conversation, "Go on")
    assert conversation.turns == turns and not conversation._engine.has_work
    say(conversation, "Go on")
    assert conversation.last_stats.cached_tokens == len(turns[0].stored)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_messages_are_continued_without_their_state(new, texting, tmp_path, system):
    """The prompt is the template's, and the state is computed from the beginning."""
    runtime, tokenizer = texting
    messages = [{"role": "system", "content": system}] if system else []
    for user, answer in (("Hello", "Hi <|end|>!"), ("What else?", ""), ("Well?", "\ufffd yes")):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages))
    conversation = new()
    conversation.load(file)
    assert conversation.messages == messages and conversation.num_tokens > 40
    with pytest.raises(UserError, match="not in the prefix cache"):
        conversation.save(tmp_path / "state")
    with closing(ConversationEncoder(tokenizer)) as encoder:
        expected = encoder.encode([*messages, {"role": "user", "content": "Go on"}])
    (answer,) = say(conversation, "Go on")
    assert conversation.turns[-1].prompt == expected and conversation.last_stats.cached_tokens == 0
    assert generate(runtime, tokenizer, expected, max_tokens=12) == answer
    conversation.save(tmp_path / "state")
    again = new()
    again.load(tmp_path / "state")
    assert again.turns == conversation.turns


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "text",
    ["[", "[]", "[1]", "[null, {}]", '[{"role": "user"}]', '[{"role": "user", "content": "x"}]', "[" * 100_000]
    + [
        json.dumps([{"role": role, "content": content} for role in roles])
        for roles, content in (
            (["assistant", "user"], "x"),
            (["user", "assistant", "user"], "x"),
            (["system"], "x"),
            (["system", "system", "user", "assistant"], "x"),
            (["user", "assistant"], None),
            (["user", "assistant"], ["x"]),
            (["user", "tool"], "x"),
        )
    ]
    + ['[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]'],
    ids=lambda text: text[:60],
)
def test_invalid_messages_are_refused(new, tmp_path, text):
    file = tmp_path / "messages.json"
    file.write_text(text)
    conversation = new("Be brief.")
    say(conversation, "Hello")
    before = conversation.messages
    with pytest.raises(UserError, match=r"must hold messages|is not JSON|is not text|surrogate"):
        conversation.load(file)
    assert conversation.messages == before
