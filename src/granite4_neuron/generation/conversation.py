"""A conversation with a model: each turn continues from the state of the turns before it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from granite4_neuron.config.json_files import parse_json
from granite4_neuron.engine import Engine, GenerationStats, Output, PrefixCache, Request
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.prefix.cache import PrefixCacheStats, common_length
from granite4_neuron.errors import UserError
from granite4_neuron.generation.answer_formats import END_THOUGHT, Thought
from granite4_neuron.generation.conversation_encoder import ConversationEncoder
from granite4_neuron.generation.tool_calls import Content, pieces_of
from granite4_neuron.state.snapshot import Snapshot
from granite4_neuron.system import available_memory
from granite4_neuron.system.regular_files import check_regular, read_bytes

_POINTER_BYTES = 8  # per token in a list


@dataclass(frozen=True)
class Turn:
    """A user's message and the model's answer.

    system: the system message at that time.
    answer: its text, with the thought and its end before it if the model thinks.
    prompt: all tokens of the conversation up to the answer.
    generated: the tokens of the answer, with the stop token that ended it, if any.
    finish_reason: "stop" (a stop token or stop string), "length", or "interrupted".
    """

    system: str | None
    user: str
    answer: str
    prompt: Sequence[int]
    generated: Sequence[int]
    finish_reason: str

    @property
    def stored(self) -> list[int]:
        """The tokens whose state is kept: all but the last generated one, which was chosen but not run."""
        return [*self.prompt, *self.generated[:-1]]


class Conversation:
    """Runs the turns of a conversation on an engine of one sequence. Use it from one thread only.

    The tokens of answers stay as they were generated, even if the tokenizer would split their text differently. So each
    turn's prompt begins with the tokens of the turn before, whose state is in the prefix cache, and only the rest is
    run.

    Args:
        engine: with a tokenizer and with `cache`.
        cache: the engine's prefix cache.
        encoder: of the engine's tokenizer.
        request: the options of answers; its tokens are not used. With a seed, answers use seed, seed + 1, ...
        system: the system message; it may be changed at any time.
        shown: tools and documents, which the template shows beside the messages; see `ConversationEncoder.encode`.
    """

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        encoder: ConversationEncoder,
        request: Request,
        system: str | None = None,
        shown: Mapping[str, Any] = {},
    ):
        self.system = system
        self.turns: list[Turn] = []
        self.last_stats = GenerationStats()
        self._engine = engine
        self._cache = cache
        self._encoder = encoder
        self._shown = shown
        self._request = request
        self._num_answers = 0
        self._is_interrupted = False

    def ask(self, user: str, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Send a message; yield the answer piece by piece, and add the turn when the answer ends.

        A turn is not added if it is interrupted before its answer begins, or if the caller does not read it to the end.

        Args:
            user: the message.
            progress: called with (prompt tokens done, prompt tokens in all) after each step of the prompt.

        Raises:
            UserError: the message is not text, the conversation is too long, or the model's logits are not finite.
        """
        self._is_interrupted = False
        prompt = self._prompt(user)
        request = self._encoder.for_answer(replace(self._request, tokens=prompt), bool(self._shown.get("tools")))
        request = request.with_seed_offset(self._num_answers)
        self._num_answers += 1
        before = replace(self._engine.stats)
        id = self._engine.add(request)
        answer, reason = "", None
        generated: list[int] = []
        try:
            while reason is None:
                for output in self._engine.step():
                    if output.id != id:  # of a question that was interrupted before it had its id
                        continue
                    _raise_error(output)
                    answer += output.text
                    if output.token is not None:
                        generated.append(output.token)
                    reason = output.finish_reason
                    yield output.text
                if progress is not None and not generated:
                    stats = _difference(self._engine.stats, before)
                    progress(stats.prompt_tokens + stats.cached_tokens, len(prompt))
                if self._is_interrupted and reason is None:
                    reason = "interrupted"
                    text = self._engine.finish(id)
                    answer += text
                    yield text
        finally:
            self._engine.cancel(id)
            self.last_stats = _difference(self._engine.stats, before)
        if generated:
            self.turns.append(Turn(self.system, user, answer, prompt, generated, reason))

    def option(self, name: str) -> Any:
        """Return an option of the next answers, a field of `engine.Request`; None for the checkpoint's value."""
        return getattr(self._request, name)

    def set_option(self, name: str, value: Any) -> None:
        """Set an option of the next answers.

        Raises:
            UserError: it does not take the value, or there is no such adapter.
        """
        if name == "adapter" and value is not None:
            AppliedAdapter.of(value, (), self._engine.runtime.adapters)
        self._request = replace(self._request, **{name: value})

    def interrupt(self) -> None:
        """End the answer after the current step. A signal handler may call this."""
        self._is_interrupted = True

    def undo(self) -> Turn:
        """Remove the last turn and return it; raise UserError if there is none."""
        if not self.turns:
            raise UserError("there is no turn to take back.")
        return self.turns.pop()

    def clear(self) -> None:
        """Remove all turns. The system message stays."""
        self.turns.clear()

    def save(self, file: Path) -> None:
        """Write the conversation and its state.

        Raises:
            UserError: there is no turn yet, an adapter answers, its state was evicted, or the file cannot be written.
        """
        if not self.turns:
            raise UserError("there is nothing to save yet.")
        if self._request.adapter is not None:
            raise UserError("only the state of the model without adapters can be saved, and an adapter answers here.")
        snapshot = self._cache.export_beginning(self.turns[-1].stored)
        if snapshot is None:
            raise UserError("the conversation's state is not in the prefix cache any more; give it more memory.")
        replace(snapshot, note=json.dumps({"system": self.system, "turns": self._saved_turns()})).save(file)

    def load(self, file: Path) -> None:
        """Replace this conversation with a saved one, or with the messages in a JSON list, which have no state and
        are run again at the next turn.

        Raises:
            UserError: the file cannot be read, holds no conversation, or one with another model or dtype.
        """
        messages = _messages_in(file)
        if messages is not None:
            self.system, self.turns = self._turns_of(messages)
            return
        snapshot = Snapshot.load(file, self._engine.runtime)
        if not snapshot.note:
            raise UserError(f"{file} holds the state of a prompt, and no conversation.")
        try:
            saved = _check_saved(json.loads(snapshot.note), self._engine.runtime.config.vocab_size)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is damaged ({error}); save the conversation again.") from None
        # A turn also has all tokens before it, so a short file may need more memory than there is.
        num_bytes = _POINTER_BYTES * sum(turn["start"] + len(turn["prompt"]) for turn in saved["turns"])
        available_memory.check_available(num_bytes, f"the turns in {file}", "take another conversation")
        turns = _loaded_turns(saved["turns"])
        if turns[-1].stored[: snapshot.length] != list(snapshot.tokens):
            raise UserError(f"{file} is damaged (its state is of other tokens); save the conversation again.")
        self._cache.load(snapshot)
        self.system, self.turns = saved["system"], turns

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """All messages, each with a "role" and a "content", and an answer's thought as "reasoning_content"."""
        messages: list[Mapping[str, str]] = [_message("system", self.system)] if self.system else []
        for turn in self.turns:
            messages += [_message("user", turn.user), self._answer_of(turn)]
        return messages

    def _answer_of(self, turn: Turn) -> Mapping[str, str]:
        stream = self._encoder.format.stream(None, self._encoder.is_thinking_after(turn.prompt))
        if stream.is_plain:
            return _message("assistant", turn.answer)
        pieces = pieces_of(turn.answer, stream)
        thought, said = ("".join(one.text for one in pieces if isinstance(one, kind)) for kind in (Thought, Content))
        return {**_message("assistant", said), "reasoning_content": thought}

    @property
    def cache_stats(self) -> PrefixCacheStats:
        return self._cache.stats

    @property
    def max_length(self) -> int:
        """The longest conversation, in tokens."""
        return self._engine.max_length

    @property
    def num_tokens(self) -> int:
        """The length of the conversation in tokens."""
        return len(self.turns[-1].prompt) + len(self.turns[-1].generated) if self.turns else 0

    @property
    def _stop_token_ids(self) -> Collection[int]:
        return self._request.stop_token_ids or ()

    def _prompt(self, user: str) -> list[int]:
        """Return the next turn's tokens: those of the last turn unchanged, and what the template adds after them."""
        messages = self.messages
        tokens = self._encoder.encode([*messages, _message("user", user)], **self._shown)
        last = self.turns[-1] if self.turns else None
        if last is None or last.system != self.system or self._is_cut_by_text(last):
            return tokens
        # The same part of the conversation as the template and the tokenizer spell it.
        spelled = [*self._encoder.encode(messages[:-1], **self._shown), *self._encoder.encode_answer(last.answer)]
        if tokens[: len(spelled)] != spelled:
            return tokens  # the template changes what was said before
        ended = last.generated[-1] in self._stop_token_ids
        return [*last.prompt, *last.generated[: -1 if ended else None], *tokens[len(spelled) :]]

    def _is_cut_by_text(self, turn: Turn) -> bool:
        """Return whether the answer ends before the generated tokens do, because of a stop string."""
        return turn.finish_reason == "stop" and turn.generated[-1] not in self._stop_token_ids

    def _turns_of(self, messages: Sequence[Mapping[str, str]]) -> tuple[str | None, list[Turn]]:
        """Return the system message, and the turns as if the model had answered in the tokens of `encode_text`."""
        first = 1 if messages[0]["role"] == "system" else 0
        system, turns = (messages[0]["content"] if first else None), []
        for end in range(first + 2, len(messages) + 1, 2):
            prompt = self._encoder.encode(messages[: end - 1], **self._shown)
            user, answer = (message["content"] for message in messages[end - 2 : end])
            generated = self._encoder.encode_text(answer)
            if self._encoder.is_thinking_after(prompt):
                thought = f"{messages[end - 1].get('reasoning_content', '')}\n{END_THOUGHT}"
                generated = [*self._encoder.encode_answer(thought), *self._encoder.encode_text(f"\n{answer}", False)]
                answer = f"{thought}\n{answer}"
            generated += sorted(self._stop_token_ids)[:1]
            turns.append(Turn(system, user, answer, prompt, generated, "stop"))
        return system, turns

    def _saved_turns(self) -> list[dict]:
        """Return the turns to save; each has only the tokens that the turn before it does not have."""
        saved: list[dict] = []
        before: list[int] = []
        for turn in self.turns:
            start = common_length(before, turn.prompt)
            saved.append({**asdict(turn), "start": start, "prompt": list(turn.prompt[start:])})
            before = [*turn.prompt, *turn.generated]
        return saved


def _messages_in(file: Path) -> list[Mapping[str, str]] | None:
    """Return the messages in a file that begins as a JSON list; None for another file.

    Raises:
        UserError: it cannot be read, or holds anything but turns of a user and an assistant.
    """
    try:
        check_regular(file)
        with file.open("rb") as stream:
            if stream.read(1) != b"[":
                return None
        messages = parse_json(read_bytes(file), str(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error}).") from None
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    is_talk = bool(turns) and turns == ["user", "assistant"] * (len(turns) // 2)
    if not is_talk or not all(
        isinstance(message.get("content"), str) and isinstance(message.get("reasoning_content", ""), str)
        for message in messages
    ):
        raise UserError(
            f"{file} must hold messages with a role and a content: system or none, then user and assistant in turn."
        )
    return messages


def _check_saved(note: object, vocab_size: int) -> dict[str, Any]:
    """Check that `Conversation.save` wrote the note: it has the system message, and turns as `_saved_turns` makes them.

    Raises:
        ValueError: the note is something else.
    """

    def check(values: object, fields: Mapping[str, Callable[[Any], bool]], which: str) -> dict[str, Any]:
        if not isinstance(values, dict) or values.keys() != fields.keys():
            raise ValueError(f"{which} must be an object of {', '.join(fields)}")
        for name, is_right in fields.items():
            if not is_right(values[name]):
                raise ValueError(f"{name} is {reprlib.repr(values[name])} in {which}")
        return values

    def is_tokens(value: object) -> bool:
        return isinstance(value, list) and all(type(token) is int and 0 <= token < vocab_size for token in value)

    def is_text(value: object) -> bool:
        return isinstance(value, str)

    def is_system(value: object) -> bool:
        return value is None or isinstance(value, str)

    fields = dict(system=is_system, user=is_text, answer=is_text, prompt=is_tokens)
    fields |= dict(generated=lambda value: is_tokens(value) and value != [])
    fields |= dict(finish_reason=lambda value: value in ("stop", "length", "interrupted"))
    fields |= dict(start=lambda value: type(value) is int and value >= 0)
    note = check(note, dict(system=is_system, turns=lambda value: isinstance(value, list) and value != []), "it")
    length = 0
    for number, turn in enumerate(note["turns"], start=1):
        check(turn, fields, f"turn {number}")
        if turn["start"] > length:
            raise ValueError(f"start is {reprlib.repr(turn['start'])} in turn {number}")
        length = turn["start"] + len(turn["prompt"]) + len(turn["generated"])
    return note


def _loaded_turns(saved: Sequence[Mapping]) -> list[Turn]:
    """Rebuild the turns: the reverse of `_saved_turns`."""
    turns: list[Turn] = []
    before: list[int] = []
    for values in saved:
        values = dict(values)
        prompt = [*before[: values.pop("start")], *values["prompt"]]
        turns.append(Turn(**{**values, "prompt": prompt}))
        before = [*prompt, *values["generated"]]
    return turns


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _raise_error(output: Output) -> None:
    if output.error is not None:
        raise UserError(output.error)


def _difference(after: GenerationStats, before: GenerationStats) -> GenerationStats:
    """Return the difference of the totals at two moments."""
    return GenerationStats(
        **{field.name: getattr(after, field.name) - getattr(before, field.name) for field in fields(GenerationStats)}
    )
