"""Turns a conversation into a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from granite4_neuron.checkpoint.tokenizing import encode, encode_beside_others
from granite4_neuron.engine import Request
from granite4_neuron.engine.request import check_text
from granite4_neuron.engine.sampling_params import is_list
from granite4_neuron.errors import UserError
from granite4_neuron.generation.answer_formats import BEGIN_THOUGHT, END_THOUGHT, ThoughtMarks, answer_format
from granite4_neuron.generation.structured_outputs import GrammarConstraint
from granite4_neuron.system.sandbox import chat_template

_FIRST_PRIVATE_CHARACTER = 0xF0000
_MARK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_MOST_LEVELS = 100  # of lists and objects


def chat_prompt(
    tokenizer: PreTrainedTokenizerFast,
    user: str,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a conversation with one user message, up to the assistant's answer, by the tokenizer's chat
    template.

    Args:
        chat_template_kwargs: see `ConversationEncoder.encode`.

    Raises:
        UserError: as `ConversationEncoder`.
    """
    messages = [{"role": "system", "content": system}] if system else []
    with closing(ConversationEncoder(tokenizer)) as encoder:
        return encoder.encode([*messages, {"role": "user", "content": user}], chat_template_kwargs=chat_template_kwargs)


class ConversationEncoder:
    """Encodes conversations with a tokenizer's chat template, and texts from other people.

    format: of answers.

    In a conversation only the template writes control tokens: in messages, their spelling is ordinary text. Control
    tokens are all special tokens, and marks such as `<tool_call>` that tokenizers have beside them. A template that
    cuts pieces out of a message could still assemble the spelling of one; none of the family's templates does.

    Raises:
        UserError: at the first conversation, if the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        self._as_text = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._as_text.encode_special_tokens = True
        added = tokenizer.added_tokens_decoder.items()
        self._control_ids = {
            token.content: id for id, token in added if token.special or _MARK.fullmatch(token.content)
        }
        self._special = {token.content for _, token in added if token.special}
        self._as_text.add_special_tokens(list(self._control_ids))  # they are in the vocabulary, and become special
        self._control_tokens = sorted(self._control_ids, key=len, reverse=True)
        # An empty pattern would match everywhere.
        self._control_pattern = re.compile("|".join(map(re.escape, self._control_tokens)) or r"(?!)")
        self.format = answer_format(tokenizer)
        self._thought_marks = (self.format.thoughts or ThoughtMarks()).written
        marks = {*self._thought_marks, self.format.marks.open, self.format.marks.close} & self._control_ids.keys()
        self._answer_pattern = re.compile("|".join(map(re.escape, sorted(marks))) or r"(?!)")
        self._renderer = chat_template.Renderer()
        # The last grammar, and the one that begins after a thought.
        self._waiting: tuple[GrammarConstraint, GrammarConstraint] | None = None

    def encode_text(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = True) -> list[int]:
        """Encode a text.

        Args:
            add_special_tokens: also give the tokens that the tokenizer adds to every text.
            split_special_tokens: take the spelling of a control token as ordinary text.

        Raises:
            UserError: it is not text, or the tokenizer fails.
        """
        check_text(text, "the prompt")
        if split_special_tokens:
            return list(encode_beside_others(self._as_text, text, add_special_tokens))
        return encode(self._tokenizer, text, add_special_tokens)

    def encode_answer(self, text: str) -> list[int]:
        """Encode a text of the model, in which the marks of its thoughts and calls are control tokens, and others not.

        Raises:
            UserError: as `encode_text`.
        """
        tokens, end = [], 0
        for match in self._answer_pattern.finditer(text):
            tokens += [*self.encode_text(text[end : match.start()], False), self._control_ids[match[0]]]
            end = match.end()
        return [*tokens, *self.encode_text(text[end:], not tokens)]

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Encode a conversation.

        Args:
            messages: each with a "role" and a "content"; of an assistant also with "tool_calls", whose arguments are
                objects, and "reasoning_content", or a "content" that begins with the thought and its mark. Granite 3's
                templates do not know the calls, which are then written behind the content.
            tools: as OpenAI describes them: {"type": "function", "function": {"name", "description", "parameters"}}.
            documents: to answer from. IBM's templates show each as JSON, such as {"doc_id", "title", "text"}.
            chat_template_kwargs: further variables of the template.
            add_generation_prompt: end with the beginning of the assistant's next answer.
            continue_final_message: end with the last message's text, without what the template writes after it.

        Raises:
            UserError: the tokenizer has no chat template; the template refuses the messages or fails, or leaves out the
                message to be continued; it takes too much time or memory; a further variable has the name of one that
                is set here; something is nested too deeply; the texts have all private characters; or the tokenizer
                fails.
        """
        for message in messages:
            check_text(message.get("content"), "the message")
        thoughts = self.format.thoughts
        is_field = thoughts is not None and not thoughts.by_model
        shown = list(map(_with_thought, messages)) if is_field else list(messages)
        variables = {**(chat_template_kwargs or {}), "messages": shown, "tools": tools, "documents": documents}
        _check_levels(variables)
        texts = "".join(texts_of(variables))
        check_text(texts, "the conversation")
        self._check_variables(chat_template_kwargs or {})
        mark, end = _two_not_in(texts)
        hidden = _changed(variables, lambda text: self._hide(text, mark))
        if continue_final_message:
            hidden["messages"][-1]["content"] += f"{end} "  # the space shows whether the template strips messages
        if self.format.marks.is_list and "tool_calls" not in _template(self._tokenizer, tools):
            hidden["messages"] = list(map(self._with_calls, hidden["messages"]))
        text = self._render({**hidden, "add_generation_prompt": add_generation_prompt})
        if continue_final_message:
            text = _up_to(end, text)
        if not self._control_pattern.search(texts):
            return encode(self._tokenizer, text, add_special_tokens=False)
        return self._encode_rendered(text, mark)

    def is_thinking_after(self, prompt: Sequence[int]) -> bool:
        """Return whether the answer to a conversation begins within a thought."""
        return self.format.is_thinking_after(prompt, self._tokenizer.backend_tokenizer)

    def shows_special_tokens(self, is_thinking: bool, may_call: bool) -> bool:
        """Return whether the text of an answer has special tokens, because they are marks of thoughts or calls.

        Args:
            is_thinking: whether it begins within a thought.
            may_call: whether it may call tools.
        """
        thoughts = self.format.thoughts
        may_think = is_thinking or (thoughts is not None and thoughts.by_model)
        return (may_think and not self._special.isdisjoint(self._thought_marks)) or (
            may_call and self.format.marks.are_special(self._special)
        )

    def for_answer(self, request: Request, may_call: bool = False) -> Request:
        """Return a request of a conversation as its answer needs it. If the answer begins with a thought, a grammar
        begins after it. Special tokens that are marks are shown; see `shows_special_tokens`.

        Raises:
            UserError: see `GrammarConstraint.after_thought`.
        """
        is_thinking = self.is_thinking_after(request.tokens)
        if self.shows_special_tokens(is_thinking, may_call):
            request = replace(request, skip_special_tokens=False)
        if not is_thinking or not isinstance(request.constraint, GrammarConstraint):
            return request
        if self._waiting is None or self._waiting[0] is not request.constraint:
            self._waiting = request.constraint, request.constraint.after_thought(self.format.ends_thought)
        return replace(request, constraint=self._waiting[1])

    def shows(self, name: str, objects: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the chat template shows the "tools" or "documents" that it gets.

        Raises:
            UserError: as `encode`.
        """
        messages = [{"role": "user", "content": "a message"}]
        shown: dict[str, Any] = {name: objects}
        return self.encode(messages, **shown) != self.encode(messages)

    def close(self) -> None:
        """End the template's process; it starts again when it is needed."""
        self._renderer.close()

    def _with_calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message whose text ends with its calls, for a template that shows no others."""
        functions = [call["function"] for call in message.get("tool_calls") or []]
        if not functions:
            return message
        written = [{"name": each["name"], "arguments": each["arguments"]} for each in functions]
        marks = self.format.marks
        said = f"{message['content']}{marks.open}{json.dumps(written, ensure_ascii=False)}{marks.close}"
        return {**message, "content": said}

    def _hide(self, content: str, mark: str) -> str:
        """Replace the spelling of control tokens, so that it differs from the template's own control tokens."""
        return self._control_pattern.sub(lambda match: f"{mark}{self._control_tokens.index(match[0])}{mark}", content)

    def _encode_rendered(self, text: str, mark: str) -> list[int]:
        """Encode a rendered text; hidden control tokens become text again."""
        tokens: list[int] = []
        end = 0
        for match in (*self._control_pattern.finditer(text), None):
            between = text[end : match.start() if match else None]
            shown = re.sub(f"{mark}([0-9]+){mark}", lambda hidden: self._control_tokens[int(hidden[1])], between)
            tokens += encode_beside_others(self._as_text, shown, add_special_tokens=False)
            if match:
                tokens.append(self._control_ids[match[0]])
                end = match.end()
        return tokens

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        taken = {"messages", "tools", "documents", "add_generation_prompt", *self._tokenizer.special_tokens_map}
        for name in sorted(variables.keys() & taken):
            raise UserError(f"{name} is a variable of the chat template that has its value already; leave it out.")

    def _render(self, variables: Mapping[str, Any]) -> str:
        given = {**self._tokenizer.special_tokens_map, **variables}
        try:
            return self._renderer.render(_template(self._tokenizer, variables.get("tools")), given)
        except chat_template.TemplateFailed as error:
            raise UserError(f"this checkpoint's chat template does not render the conversation ({error}).") from None


def _two_not_in(texts: str) -> tuple[str, str]:
    """Return two of Unicode's private characters that a conversation does not have, to mark places in it."""
    used = set(texts)
    unused = (chr(code) for code in range(_FIRST_PRIVATE_CHARACTER, 0x110000) if chr(code) not in used)
    first, second = next(unused, None), next(unused, None)
    if first is None or second is None:
        raise UserError("the conversation has all characters of Unicode's private planes; it may have all but two.")
    return first, second


def _up_to(end: str, rendered: str) -> str:
    """Return a rendered conversation up to the end of its last message, which the mark `end` and a space mark."""
    text, found, after = rendered.rpartition(end)
    if not found:
        raise UserError("this checkpoint's chat template does not write the last message's end.")
    return text if after.startswith(" ") else text.rstrip()


def _with_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose thought is a field of its own. A template could not find the mark in its text any more."""
    content = message.get("content") or ""
    if message.get("role") != "assistant" or message.get("reasoning_content") or END_THOUGHT not in content:
        return message
    thought, _, said = content.partition(END_THOUGHT)
    return {**message, "reasoning_content": thought.replace(BEGIN_THOUGHT, "").strip(), "content": said.lstrip()}


def _check_levels(variables: Mapping[str, Any]) -> None:
    """Check that nothing is nested so deeply that recursive functions reach Python's limit."""
    for name, value in variables.items():
        level = [value]
        for _ in range(_MOST_LEVELS):
            level = [part for each in level for part in _parts(each)]
        if level:
            raise UserError(f"{name} are nested more than {_MOST_LEVELS} levels deep, the most that a template shows.")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if is_list(value) else ()


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts of a value in JSON, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from texts_of(each)
    elif is_list(value):
        for each in value:
            yield from texts_of(each)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a value in JSON with all of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _changed(each, change) for name, each in value.items()}
    return [_changed(each, change) for each in value] if is_list(value) else value


def _template(tokenizer: PreTrainedTokenizerFast, tools: Sequence[Mapping[str, Any]] | None) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name; transformers chooses so
        name = "tool_use" if tools is not None and "tool_use" in template else "default"
        if name not in template:
            names = ", ".join(sorted(template))
            raise UserError(f"this checkpoint's tokenizer has the chat templates {names}, and none named default.")
        template = template[name]
    if not isinstance(template, str) or not template:
        raise UserError("this checkpoint's tokenizer has no chat template; give a prompt without a conversation.")
    return template
