"""The server's routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from importlib import metadata
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from granite4_neuron.engine import Output, Request
from granite4_neuron.errors import UserError
from granite4_neuron.generation.structured_outputs import CompiledGrammar
from granite4_neuron.serving.apis.chat.answers import Answer
from granite4_neuron.serving.apis.chat.protocol import (
    Body,
    DetokenizeBody,
    MarkdownBody,
    SamplingBody,
    TokenizeBody,
    parse,
)
from granite4_neuron.serving.apis.endpoints import API, BY_PATH, check_model
from granite4_neuron.serving.apis.messages.body import PromptBody
from granite4_neuron.serving.engine_client import Batch, Generation
from granite4_neuron.serving.errors import RequestError, json_response, server_failed, to_json, to_short_json
from granite4_neuron.serving.http.adapter_routes import AdapterRoutes
from granite4_neuron.serving.http.bodies import in_utf8, too_long
from granite4_neuron.serving.http.connection import CONNECTION, IS_EVENT_STREAM, Connection
from granite4_neuron.serving.http.middleware import LOG, PATHS, Middleware
from granite4_neuron.serving.http.request_log import HEADER, IGNORED_HEADER
from granite4_neuron.serving.http.service import Service
from granite4_neuron.serving.page.page import MARKDOWN, page_files
from granite4_neuron.serving.work_queue import WorkQueue
from granite4_neuron.system.sandbox.limited_process import NoProcess, Stop
from granite4_neuron.system.sandbox.markdown import MarkdownFailed

_LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")

_PART = 2**16  # bytes
_FEW = 64  # tokens whose events are written between two turns of the loop
_MODEL = "/v1/models/{name:path}"
_TOLD = RequestError, UserError, NoProcess  # whose messages clients get
# Parts of paths of other servers, and what they have there.
_NOT_SERVED = {
    "/embed": "embeddings",
    "/images": "images",
    "/audio": "audio",
    "/realtime": "audio",
    "/rerank": "reranking",
    "/score": "scores",
    "/moderations": "moderation",
    "/files": "files",
    "/batches": "batches (granite4-neuron batch has)",
}


def make_app(service: Service) -> ASGIApp:
    """Make the ASGI application. It ends the engine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.engine.close()
            service.queues.close()
            service.maker.close()
            service.markdown.close()

    app = Starlette(lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect would go where Host says
    for kind in (*_TOLD, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _error_response)
    routes = _Routes(service)
    app.add_route("/v1/models", routes.models, methods=["GET"])
    app.add_route(_MODEL, routes.model, methods=["GET"])
    for path, api in BY_PATH.items():
        app.add_route(path, partial(routes.generated, api), methods=["POST"])
    app.add_route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"])
    app.add_route("/tokenize", routes.tokenize, methods=["POST"])
    app.add_route("/detokenize", routes.detokenize, methods=["POST"])
    app.add_route("/health", routes.health, methods=["GET"])
    app.add_route("/ping", routes.health, methods=["GET", "POST"])
    app.add_route("/version", routes.version, methods=["GET"])
    app.add_route("/load", routes.load, methods=["GET"])
    app.add_route("/metrics", routes.metrics, methods=["GET"])
    if service.options.updates_adapters:
        adapters = AdapterRoutes(service, routes.read)
        app.add_route("/v1/load_lora_adapter", adapters.load, methods=["POST"])
        app.add_route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"])
    if service.options.has_page:
        app.add_route(MARKDOWN, routes.markdown, methods=["POST"])
        for path, served in page_files():
            app.add_route(path, served, methods=["GET"])
    checked = Middleware(app, service)
    if not service.options.allowed_origins:
        return checked
    # Outside of the checks: a browser asks without the key, and reads refusals only if they name its page.
    return CORSMiddleware(
        checked,
        allow_origins=service.options.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[HEADER.decode(), IGNORED_HEADER.decode()],
    )


class _Routes:
    def __init__(self, service: Service):
        self._service = service
        self._started = int(time.time())

    async def models(self, _: HTTPRequest) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._service.models]})

    async def model(self, http: HTTPRequest) -> Response:
        if not http.path_params["name"]:
            raise HTTPException(404)
        self._check_model(http.path_params["name"])
        return json_response(self._model(http.path_params["name"]))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "granite4-neuron",
            "max_model_len": self._service.maker.limits.max_length,
            **({"parent": self._service.options.model} if name != self._service.options.model else {}),
        }

    def _check_model(self, name: str | None) -> None:
        check_model(name, self._service.models)

    async def health(self, _: HTTPRequest) -> Response:
        if self._service.is_ending or not self._service.engine.is_alive:
            raise RequestError(503, "the server is ending.")
        return json_response({"status": "ok"})

    async def version(self, _: HTTPRequest) -> Response:
        return json_response({"version": metadata.version("granite4-neuron")})

    async def load(self, _: HTTPRequest) -> Response:
        queues = self._service.queues
        waiting = queues.prompts.num_requests + queues.grammars.num_requests
        return json_response({"server_load": waiting + self._service.engine.num_requests})

    async def metrics(self, _: HTTPRequest) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def count_tokens(self, http: HTTPRequest) -> Response:
        def counted(body: PromptBody) -> Response:
            return json_response({"input_tokens": len(self._service.maker.chat_tokens(body.chat))})

        return await self._only_prepared(http, PromptBody, counted)

    async def generated(self, api: API, http: HTTPRequest) -> Response:
        content, engine = await self.read(http), self._service.engine
        with engine.preparing():
            prompts, make = self._service.queues.prompts, partial(api.requests, self._service.maker)
            body, prepared = await self._prepared(http, prompts, content, api.body, make)
        requests = prepared.requests
        self._service.prompt_logprobs.check(requests)
        grammar = None
        if prepared.structure is not None:
            engine.check_room(len(requests))
            compiling = self._service.queues.grammars.run(partial(self._service.maker.compile, prepared.structure))
            grammar = await _unless_gone(http.receive, compiling)
        answer = api.answer(self._service.texts, body.model or self._service.options.model, requests, body)
        return await self._answer(http, body, answer, requests, grammar)

    async def tokenize(self, http: HTTPRequest) -> Response:
        return await self._only_prepared(http, TokenizeBody, self._tokenized)

    async def detokenize(self, http: HTTPRequest) -> Response:
        return await self._only_prepared(http, DetokenizeBody, self._detokenized)

    async def _only_prepared(self, http: HTTPRequest, kind: type[Body], make: Callable[[Body], Response]) -> Response:
        content = await self.read(http)
        _, response = await self._prepared(http, self._service.queues.tokenize, content, kind, make)
        return response

    def _tokenized(self, body: TokenizeBody) -> Response:
        maker = self._service.maker
        if body.prompt is None:
            tokens = maker.chat_tokens(body)
        else:
            tokens = maker.text_tokens(body.prompt, body.add_special_tokens is not False, body.split_special_tokens)
        answer = {"count": len(tokens), "max_model_len": maker.limits.max_length, "tokens": tokens}
        names = self._service.texts.names(tokens) if body.return_token_strs else None
        return json_response({**answer, "token_strs": names})

    def _detokenized(self, body: DetokenizeBody) -> Response:
        self._service.maker.check_tokens(body.tokens)
        return json_response({"prompt": self._service.texts.texts(body.tokens)})

    async def markdown(self, http: HTTPRequest) -> Response:
        """Parse the Markdown of a text, for the page."""
        content = await self.read(http)

        def parsed(stop: Stop) -> Response:
            body = parse(MarkdownBody, content, self._service.maker.limits.num_tokens)
            try:
                return json_response({"blocks": self._service.markdown.blocks(body.text, stop)})
            except MarkdownFailed as error:
                raise RequestError(400, f"the text's Markdown cannot be parsed: {error}.", "text") from None

        return await _unless_gone(http.receive, self._service.queues.markdown.run(parsed))

    async def _prepared(
        self, http: HTTPRequest, queue: WorkQueue, content: bytes, kind: type[Body], make: Callable[[Body], Result]
    ) -> tuple[Body, Result]:
        """Parse the body; return it and what is made of it."""

        def prepare(_: Stop) -> tuple[Body, Result]:
            body = parse(kind, content, self._service.maker.limits.num_tokens, http.scope[LOG].ignored)
            self._check_model(body.model)
            return body, make(body)

        return await _unless_gone(http.receive, queue.run(prepare))

    async def read(self, http: HTTPRequest) -> bytes:
        """Read the body.

        Raises:
            RequestError: 413 if it is longer than `max_body`; 415 if it is not declared as JSON, or compressed in
                another way than gzip. A browser declares a body as JSON for another origin's page only if the server
                allows that.
        """
        kind = http.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            given = f"the body's Content-Type is {kind}" if kind else "the body has no Content-Type"
            raise RequestError(415, f"{given}; it must be application/json.")
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self._service.options.max_body:
                raise too_long(self._service.options.max_body)
        http.scope[LOG].arrived = time.perf_counter()
        return in_utf8(bytes(body), http.headers.get("content-encoding", ""), self._service.options.max_body)

    async def _answer(
        self,
        http: HTTPRequest,
        body: SamplingBody,
        answer: Answer,
        requests: Sequence[Request],
        grammar: CompiledGrammar | None,
    ) -> Response:
        """Return the whole response, or a stream."""
        with ExitStack() as at_end:
            at_end.callback(self._service.prompt_logprobs.hold(requests))
            arrived = http.scope[LOG].arrived
            generation = self._service.engine.submit(requests, grammar, answer.choices, arrived, answer.times)
            at_end.callback(self._service.engine.end, generation)
            http.scope[LOG].generated = generation, answer
            if not body.stream:
                text = await _unless_gone(http.receive, self._whole(generation, answer))
                return _LongText(text, on_end=at_end.pop_all().close)
            return _EventStream(generation, answer, self._service.queues.answers, on_end=at_end.pop_all().close)

    async def _whole(self, generation: Generation, answer: Answer) -> str:
        def take(batch: Batch) -> bool:
            if any(outputs[-1].finish_reason is not None for outputs in batch.values()):
                return False
            for index, outputs in batch.items():
                answer.add(index, outputs)
            return True

        generation.take = take
        async for batch in generation:
            for index, outputs in batch.items():
                _raise_error(outputs[-1])
                answer.add(index, outputs)
        return await self._service.queues.answers.run(lambda _: to_json(answer.whole()))


async def _events(generation: Generation, answer: Answer, queue: WorkQueue) -> AsyncIterator[str]:
    """Yield the events of a stream, those together that are there together; an error is the last one. A pause is said,
    so that neither the client nor a proxy gives up.
    """
    try:
        async for batch in generation:
            parts = [] if batch else [answer.pause]
            for index, outputs in batch.items():
                last = outputs[-1]
                if last.error is not None:
                    outputs.pop()
                answer.add(index, outputs)
                # A text's first event may have all of the prompt's log-probabilities, and the last ones all of its own.
                if outputs and (outputs[0].prompt is not None or len(outputs) > _FEW):
                    parts.append(await queue.run(partial(_text, answer, index, outputs, to_json)))
                elif outputs:
                    encode = to_short_json if last.finish_reason is None else to_json
                    parts.append(_text(answer, index, outputs, encode))
                if last.error is not None:
                    yield "".join(parts)
                    _raise_error(last)
            yield "".join(parts)
        yield "".join(map(str, answer.last_events()))
    except Exception as error:  # whatever it is: the status has been sent, so that only an event can say it
        if not isinstance(error, _TOLD):
            _LOGGER.error("A stream failed.", exc_info=error)
        yield "".join(map(str, answer.failure(_request_error(error))))


def _text(
    answer: Answer, index: int, outputs: list[Output], encode: Callable[[object], str], _: Stop | None = None
) -> str:
    return "".join([event.text(encode) for event in answer.events(index, outputs)])


def _raise_error(output: Output) -> None:
    if output.error is not None:
        raise RequestError(400 if output.is_requests_fault else 500, output.error)


class _LongText(Response):
    """JSON that is sent part by part, each when there is room for it: the client may be slow."""

    media_type = "application/json"

    def __init__(self, text: str, on_end: Callable[[], None]):
        super().__init__(text)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), _PART):
                part = self.body[start : start + _PART]
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()


class _EventStream(Response):
    """Server-sent events, until they end or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, queue: WorkQueue, on_end: Callable[[], None]):
        # nginx would collect events before it hands them on.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._generation = generation
        self._answer = answer
        self._events = _events(generation, answer, queue)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[IS_EVENT_STREAM] = True
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _unless_gone(receive, self._send_all(scope[CONNECTION]))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            pass  # no client is left to tell
        finally:
            self._on_end()

    async def _send_all(self, connection: Connection) -> None:
        self._generation.take = partial(self._take, connection)
        async for events in self._events:
            if events:
                await connection.room()
                connection.write(events.encode())

    def _take(self, connection: Connection, batch: Batch) -> bool:
        """Write the events of a step if they are of tokens alone and there is room."""
        for outputs in batch.values():
            if outputs[0].prompt is not None or outputs[-1].finish_reason is not None or len(outputs) > _FEW:
                return False
        if not connection.has_room:
            return False
        parts = []
        for index, outputs in batch.items():
            self._answer.add(index, outputs)
            parts.append(_text(self._answer, index, outputs, to_short_json))
        if events := "".join(parts):
            connection.write(events.encode())
        return True


async def _unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Return the result of the work, or cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client went away first, and the work was cancelled.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def awaited() -> Result:
        return await work

    tasks = working, _ = asyncio.create_task(awaited()), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _error_response(http: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        wrong = "there is no such path" if error.status_code == 404 else "the path has no such method"
        for part, what in _NOT_SERVED.items():
            if part in http.url.path:
                wrong = f"this server answers texts with texts, and has no {what}"
        error = RequestError(error.status_code, f"{wrong}; there are {', '.join(PATHS)}.", None, error.headers)
    return _request_error(error).response_for(http.url.path)


def _request_error(error: Exception) -> RequestError:
    """Return an error as the client sees it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, NoProcess):
        return RequestError(503, str(error))
    return RequestError(400, str(error)) if isinstance(error, UserError) else server_failed()
