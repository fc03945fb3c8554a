"""Turns a request's body into sequences for the engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Request
from granite4_neuron.engine.request import check_tokens
from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS
from granite4_neuron.generation import ConversationEncoder
from granite4_neuron.generation.conversation_encoder import texts_of
from granite4_neuron.generation.loop import end_of_sequence_tokens
from granite4_neuron.generation.structured_outputs import CompiledGrammar, Grammars
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.serving.apis.chat.protocol import (
    ALL_THAT_FIT,
    AS_MANY_AS_FIT,
    ChatBody,
    CompletionBody,
    ConversationBody,
    GenerationBody,
)
from granite4_neuron.serving.apis.structured import Structure, structure_of
from granite4_neuron.serving.apis.tools import structure_of_calls
from granite4_neuron.serving.engine_loop import ServedModel
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.system.sandbox.limited_process import Stop

# To see whether a chat template shows such objects.
_OBJECTS: dict[str, list[dict[str, Any]]] = {
    "tools": [{"type": "function", "function": {"name": "f", "description": "a tool", "parameters": {}}}],
    "documents": [{"doc_id": 1, "title": "a title", "text": "a text"}],
}
_LONG = "the prompt is too long"

# New tokens of a completion that does not say how many, as with OpenAI.
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    max_length: the most tokens of a sequence, prompt and new ones.
    max_tokens: the most new ones; None for no limit.
    num_sequences: the most sequences.
    """

    max_length: int
    max_tokens: int | None
    num_sequences: int

    @property
    def num_tokens(self) -> int:
        """The most tokens of all sequences together."""
        return self.max_length * self.num_sequences


@dataclass(frozen=True)
class Prepared:
    """The sequences of a request.

    requests: without constraints.
    structure: that their texts must follow; None for any texts.
    """

    requests: Sequence[Request]
    structure: Structure | None


class RequestBuilder:
    """Encodes prompts, and checks everything that needs no engine. Several threads may share one.

    Args:
        model, tokenizer: what will run the sequences.
        limits: of each request.
        names: of the model without adapters, in requests.
    """

    def __init__(
        self,
        model: Runtime | ServedModel,
        tokenizer: PreTrainedTokenizerFast,
        limits: Limits,
        names: Collection[str],
    ):
        self._encoder = ConversationEncoder(tokenizer)
        self._vocab_size = model.config.vocab_size
        self._grammars = Grammars(tokenizer, self._vocab_size)
        self._stop_token_ids = end_of_sequence_tokens(tokenizer, model.generation_config)
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._shown: dict[str, bool] = {}  # by the name of such objects
        self.config = model.config
        self.adapters = tuple(model.adapters)  # that requests may name
        self.limits = limits
        self._names = names
        # In characters. None if a normalizer could make a text shorter.
        has_normalizer = tokenizer.backend_tokenizer.normalizer is not None
        self._longest_token = None if has_normalizer else max(map(len, tokenizer.get_vocab()))

    def close(self) -> None:
        self._encoder.close()
        self._grammars.close()

    def completion_requests(self, body: CompletionBody) -> Prepared:
        """Make requests: for each prompt in turn, one per choice.

        Without `max_tokens`, each gets `DEFAULT_COMPLETION_TOKENS` new tokens, or as many as there is room for.

        Raises:
            RequestError, UserError: there are too many prompts and choices, or a prompt is empty, outside the
                vocabulary or too long.
        """
        self._check_number(len(body.prompt) * body.n)
        for prompt in body.prompt:
            if isinstance(prompt, str):
                self._check_characters("prompt", prompt)
        how = body.add_special_tokens, body.split_special_tokens
        prompts = [self.text_tokens(prompt, *how) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        structure = self._asked_structure(body)
        options = self._options(body, structure)
        requests: list[Request] = []
        asked = (None, None) if body.max_tokens == AS_MANY_AS_FIT else (body.max_tokens, DEFAULT_COMPLETION_TOKENS)
        for number, whole in enumerate(prompts):
            tokens = self._truncated(whole, body, body.max_tokens)
            which = "prompt" if len(prompts) == 1 else f"prompt.{number}"
            max_tokens = self._max_tokens(len(tokens), which, *asked)
            request = Request(tokens, max_tokens, **_with_room(options, max_tokens, body.max_tokens))
            requests += self._requests(request, which, body.n)
        return Prepared(requests, structure)

    def chat_requests(self, body: ChatBody) -> Prepared:
        """Make requests as `completion_requests` does; without `max_tokens`, each gets as many new tokens as there is
        room for.
        """
        self._check_number(body.n)
        asked = body.max_completion_tokens or body.max_tokens
        tokens, which = self._truncated(self.chat_tokens(body), body, asked), body.called("messages")
        max_tokens = self._max_tokens(len(tokens), which, asked)
        is_thinking = self._encoder.is_thinking_after(tokens)
        ends_thought = self._encoder.format.ends_thought if is_thinking else None
        structure = self._chat_structure(body, ends_thought)
        options = self._options(body, structure)
        shows_marks = self._encoder.shows_special_tokens(is_thinking, body.may_call_tools)
        options = _with_room(options, max_tokens, asked)
        request = Request(tokens, max_tokens, skip_special_tokens=not shows_marks, **options)
        return Prepared(self._requests(request, which, body.n), structure)

    def compile(self, structure: Structure, stop: Stop | None = None) -> CompiledGrammar:
        """Compile the structure of a request's texts.

        Args:
            stop: ends this from another thread.

        Raises:
            RequestError: 400, it does not compile; see `Grammars.compile`.
            Stopped: `stop` was set.
        """
        return structure.compile(self._grammars, stop)

    def constrained(self, prepared: Prepared) -> Sequence[Request]:
        """Return the requests with the constraint of their structure, if there is one. Only a text that runs has a
        process. Raise what `compile` raises.
        """
        if prepared.structure is None:
            return prepared.requests
        constraint = self._grammars.deferred_constraint_of(self.compile(prepared.structure))
        return [replace(request, constraint=constraint) for request in prepared.requests]

    def _chat_structure(self, body: ChatBody, ends_thought: str | None) -> Structure | None:
        answer = self._asked_structure(body)
        if answer is not None:
            answer = replace(answer, field=body.called(answer.field), ends_thought=ends_thought)
        if not body.may_call_tools:
            return answer
        return structure_of_calls(
            body.tools,
            body.tool_choice,
            body.parallel_tool_calls,
            answer,
            self._special,
            self._encoder.format,
            ends_thought,
        )

    def _asked_structure(self, body: GenerationBody) -> Structure | None:
        return structure_of(body.response_format, body.structured_outputs, body.json_schema, body.grammar)

    def _truncated(self, tokens: Sequence[int], body: GenerationBody, max_tokens: int | None) -> Sequence[int]:
        """Return the last tokens of a prompt, as many as the body wants: with `ALL_THAT_FIT` as many as leave room for
        `max_tokens`, or for one new token.
        """
        most = body.truncate_prompt_tokens
        if most == ALL_THAT_FIT:
            most = max(1, self.limits.max_length - max(1, max_tokens or 1))
        return tokens if most is None else tokens[-most:]

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each word, at the beginning of a text and after a space. As in vLLM, the second spelling
        counts only if it has another first token and the same number of tokens.
        """
        found = []
        for word in words:
            bare, spaced = (self.text_tokens(text + word.lstrip(), False) for text in ("", " "))
            if not bare:
                raise RequestError(400, f"bad_words has {word!r}, which is no token.", "bad_words")
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return found

    def text_tokens(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Encode a text; see `ConversationEncoder.encode_text`.

        Raises:
            RequestError, UserError: it is too long, or not text.
        """
        self._check_characters("prompt", text)
        return self._encoder.encode_text(text, add_special_tokens, split_special_tokens)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check token ids that are to become a text.

        Raises:
            RequestError, UserError: there are none or too many, or one is outside the vocabulary.
        """
        if len(tokens) > self.limits.max_length:
            raise self._too_long(f"tokens has {len(tokens)} token ids", "tokens")
        check_tokens(tokens, self._vocab_size, "tokens")

    def chat_tokens(self, body: ConversationBody) -> list[int]:
        """Encode a conversation.

        Raises:
            RequestError, UserError: it is too long, or the chat template does not take all of it.
        """
        parts = body.template_variables()
        for name, part in parts.items():
            self._check_characters(body.called(name), "".join(texts_of(part)))
        for name in body.must_be_shown:
            self._check_shown(name)
        return self._encoder.encode(**parts)

    def _check_number(self, asked: int) -> None:
        most = self.limits.num_sequences
        if asked > most:
            raise RequestError(400, f"the request asks for {asked} texts; this server takes {most} at most.")

    def _check_characters(self, which: str, text: str) -> None:
        """Refuse a text that is too long for any tokens before encoding it: a megabyte would take seconds.

        Raises:
            RequestError: 400, the text is too long.
        """
        if self._longest_token is not None and len(text) > self.limits.max_length * self._longest_token:
            raise self._too_long(f"{_LONG}: {which} has {len(text)} characters, which are more tokens than fit", which)

    def _check_shown(self, name: str) -> None:
        if name not in self._shown:
            self._shown[name] = self._encoder.shows(name, _OBJECTS[name])
        if not self._shown[name]:
            message = f"{name}: this checkpoint's chat template does not show {name} to the model; leave them out."
            raise RequestError(400, message, name)

    def _too_long(self, what: str, field: str) -> RequestError:
        # Clients look for the code, or for these words or `_LONG`, to tell this error from others.
        longest = f"this model's maximum context length is {self.limits.max_length} tokens (--max-model-len)"
        return RequestError(400, f"{what}; {longest}.", field, code="context_length_exceeded")

    def _options(self, body: CompletionBody | ChatBody, structure: Structure | None) -> dict[str, Any]:
        """Return the sampling options and the adapter of a body whose texts have a structure, or none. A structured
        text ends where it is complete, also with `ignore_eos`.
        """
        never_ends = body.ignore_eos and structure is None
        return body.model_dump(include=set(SAMPLING_OPTIONS)) | dict(
            stop_token_ids={*body.stop_token_ids, *(() if never_ends else self._stop_token_ids)},
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_prompt_logprobs,
            bad_words_ids=self._bad_words(body.bad_words) or None,
            priority=body.priority,
            cache_salt=body.cache_salt,
            # Whether it is still loaded, the engine says: it may be unloaded meanwhile.
            adapter=None if body.model in (None, *self._names) else body.model,
        )

    def _requests(self, request: Request, which: str, choices: int) -> list[Request]:
        request.check(self._vocab_size, which)
        first = request if choices == 1 else request.with_seed()
        return [first.with_seed_offset(number) for number in range(choices)]

    def _max_tokens(self, prompt_length: int, which: str, asked: int | None, default: int | None = None) -> int:
        """Return how many new tokens to generate, at most as many as there is room for. For 0, one token is generated
        and not shown.

        Args:
            which: the field of the prompt.
            asked: by the request; None for `default`, or for as many as there is room for.

        Raises:
            RequestError: 400, there is no room for a new token.
        """
        longest, most = self.limits.max_length, self.limits.max_tokens
        if prompt_length >= longest:
            raise self._too_long(
                # Claude Code reads both numbers, and shortens the session by their difference.
                f"{_LONG}: {which} has {prompt_length} tokens > {longest - 1}, and at least one new one must fit",
                which,
            )
        room = min(longest - prompt_length, most or longest)
        wanted = default if asked is None else max(1, asked)
        return room if wanted is None else min(room, wanted)


def _with_room(options: dict[str, Any], max_tokens: int, asked: int | None) -> dict[str, Any]:
    """Return options of a text of at most `max_tokens`: where more are asked for, its `min_tokens` are cut, too."""
    least = options["min_tokens"]
    return {**options, "min_tokens": min(least, max_tokens)} if least and max_tokens < (asked or 0) else options
