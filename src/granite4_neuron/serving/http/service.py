"""The state that all routes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from granite4_neuron.serving.apis.chat.answers import TokenTexts
from granite4_neuron.serving.engine_client import EngineClient
from granite4_neuron.serving.metrics import Metrics
from granite4_neuron.serving.prompt_logprobs import PromptLogprobs
from granite4_neuron.serving.sequences import RequestBuilder
from granite4_neuron.serving.work_queue import WorkQueues
from granite4_neuron.system.sandbox.markdown import MarkdownProcess


@dataclass
class Service:
    """State that all routes share.

    model: the name that clients use for the model without adapters.
    api_key: that clients must send; None for none.
    hosts: that requests may name; None for any.
    max_body: limit of a request's body in bytes.
    allowed_origins: web pages that may use the server; "*" for all.
    has_page: whether there is a chat for people at /.
    updates_adapters: whether clients may load and unload adapters.
    is_ending: whether new requests are refused.
    aliases: more names of the model.
    prompt_logprobs: those that requests in flight hold.
    markdown: parses answers for the page.
    """

    model: str
    engine: EngineClient
    queues: WorkQueues
    maker: RequestBuilder
    texts: TokenTexts
    metrics: Metrics
    api_key: str | None
    hosts: frozenset[str] | None
    max_body: int
    allowed_origins: Sequence[str] = ()
    has_page: bool = True
    updates_adapters: bool = False
    is_ending: bool = False
    aliases: Sequence[str] = ()
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    markdown: MarkdownProcess = field(default_factory=MarkdownProcess)

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests may use: the model's, and those of its adapters."""
        return self.model, *self.aliases, *self.maker.adapters
