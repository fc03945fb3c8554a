"""The state that all routes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from granite4_neuron.serving.apis.chat.answers import TokenTexts
from granite4_neuron.serving.engine_client import EngineClient
from granite4_neuron.serving.metrics import Metrics
from granite4_neuron.serving.prompt_logprobs import PromptLogprobs
from granite4_neuron.serving.sequences import Limits, RequestBuilder
from granite4_neuron.serving.work_queue import WorkQueues
from granite4_neuron.system.sandbox.markdown import MarkdownProcess


@dataclass(frozen=True)
class ServerOptions:
    """What a server offers, and to whom.

    limits: of a request, and in all of the sequences that run and wait.
    model: the name that clients use for the model without adapters.
    api_key: that clients must send; None for none.
    hosts: that requests may name; None for any.
    max_body: limit of a request's body in bytes.
    keep_alive: how long a connection stays open between two requests, in seconds.
    shutdown_timeout: how long requests may take after the signal to end, in seconds; then they get an error.
    aliases: more names of the model.
    allowed_origins: web pages that may use the server; "*" for all.
    has_page: whether there is a chat for people at /.
    updates_adapters: whether clients may load and unload adapters.
    """

    limits: Limits
    model: str
    api_key: str | None
    hosts: frozenset[str] | None
    max_body: int
    keep_alive: int
    shutdown_timeout: float
    aliases: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    has_page: bool = True
    updates_adapters: bool = False


@dataclass
class Service:
    """State that all routes share.

    is_ending: whether new requests are refused.
    prompt_logprobs: those that requests in flight hold.
    markdown: parses answers for the page.
    """

    options: ServerOptions
    engine: EngineClient
    queues: WorkQueues
    maker: RequestBuilder
    texts: TokenTexts
    metrics: Metrics
    is_ending: bool = False
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    markdown: MarkdownProcess = field(default_factory=MarkdownProcess)

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests may use: the model's, and those of its adapters."""
        return self.options.model, *self.options.aliases, *self.maker.adapters
