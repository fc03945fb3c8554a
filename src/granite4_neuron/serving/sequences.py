"""Turns a request's body into sequences for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from granite4_neuron.engine import Request
from granite4_neuron.engine.request import check_tokens
from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS
from granite4_neuron.generation import ConversationEncoder
from granite4_neuron.generation.loop import end_of_sequence_tokens
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.protocol import ChatBody, CompletionBody, ConversationBody, GenerationBody

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


class SequenceMaker:
    """Encodes prompts, and checks everything that needs no engine. Several threads may share one.

    Args:
        runtime, tokenizer: the model that will run the sequences.
        limits: of each request.
    """

    def __init__(self, runtime: Runtime, tokenizer: PreTrainedTokenizerFast, limits: Limits):
        self._encoder = ConversationEncoder(tokenizer)
        self._vocab_size = runtime.config.vocab_size
        self._stop_token_ids = end_of_sequence_tokens(tokenizer, runtime.generation_config)
        self.limits = limits
        # In characters. None if a normalizer could make a text shorter.
        has_normalizer = tokenizer.backend_tokenizer.normalizer is not None
        self._longest_token = None if has_normalizer else max(map(len, tokenizer.get_vocab()))

    def close(self) -> None:
        self._encoder.close()

    def completion_requests(self, body: CompletionBody) -> list[Request]:
        """Make requests: for each prompt in turn, one per choice.

        Without `max_tokens`, each gets `DEFAULT_COMPLETION_TOKENS` new tokens, or as many as there is room for.

        Raises:
            RequestError, UserError: there are too many prompts and choices, a prompt is empty, outside the vocabulary
                or too long, or more new tokens are asked for than there is room for.
        """
        self._check_number(len(body.prompt) * body.n)
        for prompt in body.prompt:
            if isinstance(prompt, str):
                self._check_characters("prompt", prompt)
        how = body.add_special_tokens, body.split_special_tokens
        prompts = [self.text_tokens(prompt, *how) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        requests: list[Request] = []
        for number, tokens in enumerate(prompts):
            which = "prompt" if len(prompts) == 1 else f"prompt.{number}"
            max_tokens = self._max_tokens(len(tokens), which, body.max_tokens, DEFAULT_COMPLETION_TOKENS)
            requests += self._requests(body, tokens, which, max_tokens, body.echo)
        return requests

    def chat_requests(self, body: ChatBody) -> list[Request]:
        """Make requests as `completion_requests` does; without `max_tokens`, each gets as many new tokens as there is
        room for.
        """
        self._check_number(body.n)
        tokens = self.chat_tokens(body)
        asked = body.max_completion_tokens or body.max_tokens
        return self._requests(body, tokens, "messages", self._max_tokens(len(tokens), "messages", asked), False)

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
            RequestError, UserError: it is too long, or the chat template does not take it.
        """
        messages = [message.model_dump() for message in body.messages]
        self._check_characters("messages", "".join(message["content"] for message in messages))
        continues = body.continue_final_message
        adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        return self._encoder.encode(messages, add_generation_prompt=adds, continue_final_message=continues)

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
            raise self._too_long(f"{which} has {len(text)} characters, which are more tokens than fit", which)

    def _too_long(self, what: str, field: str) -> RequestError:
        # Clients look for the code, or for these words, to tell this error from others.
        longest = f"this model's maximum context length is {self.limits.max_length} tokens (--max-model-len)"
        return RequestError(400, f"{what}; {longest}.", field, code="context_length_exceeded")

    def _requests(
        self, body: GenerationBody, tokens: Sequence[int], which: str, max_tokens: int, reports_prompt: bool
    ) -> list[Request]:
        options = body.model_dump(include=set(SAMPLING_OPTIONS)) | dict(
            stop_token_ids={*body.stop_token_ids, *(() if body.ignore_eos else self._stop_token_ids)},
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_logprobs if reports_prompt else None,
        )
        request = Request(tokens, max_tokens, **options)
        request.check(self._vocab_size, which)
        return [request.with_seed_offset(number) for number in range(body.n)]

    def _max_tokens(self, prompt_length: int, which: str, asked: int | None, default: int | None = None) -> int:
        """Return how many new tokens to generate. For 0, one token is generated and not shown.

        Args:
            asked: by the request; None for `default`, or for as many as there is room for.

        Raises:
            RequestError: 400, there is not enough room.
        """
        longest, most = self.limits.max_length, self.limits.max_tokens
        if prompt_length >= longest:
            raise self._too_long(f"{which} has {prompt_length} tokens, and at least one new one must fit", which)
        room = min(longest - prompt_length, most or longest)
        if asked is not None and asked > room:
            if room == most:
                raise RequestError(
                    400, f"max_tokens is {asked}; this server allows {most} (--max-tokens).", "max_tokens"
                )
            raise self._too_long(
                f"max_tokens is {asked}, and behind a prompt of {prompt_length} tokens at most {room} new ones fit",
                "max_tokens",
            )
        if asked is None:
            return room if default is None else min(room, default)
        return max(1, asked)
