"""Loading and unloading adapters while the server runs, with vLLM's paths and bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from granite4_neuron.checkpoint.adapters import read_adapter
from granite4_neuron.serving.apis.chat.protocol import ModelBody, parse
from granite4_neuron.serving.apis.unsupported import accepts
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.http.service import Service

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadBody(ModelBody):
    """The body of /v1/load_lora_adapter.

    lora_path: a folder of this machine, as PEFT writes it.
    """

    unsupported = MappingProxyType({"load_inplace": accepts(False), "is_3d_lora_weight": accepts(False)})
    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadBody(ModelBody):
    """The body of /v1/unload_lora_adapter."""

    lora_name: _Name


class AdapterRoutes:
    """The routes. One request at a time is worked on.

    Args:
        service: whose adapters change.
        read: reads the body of a request.
    """

    def __init__(self, service: Service, read: Callable[[HTTPRequest], Awaitable[bytes]]):
        self._service = service
        self._read = read
        self._one_at_a_time = asyncio.Lock()

    async def load(self, http: HTTPRequest) -> Response:
        """Load an adapter. Requests may name it once this is answered."""
        body = parse(LoadBody, await self._read(http), 0)
        name, engine, maker = body.lora_name, self._service.engine, self._service.maker
        options = self._service.options
        async with self._one_at_a_time:
            if name in (options.model, *options.aliases, *engine.adapters):
                message = f"there already is a model {name}; choose another name, or unload the adapter first."
                raise RequestError(400, message, "lora_name")
            adapters = self._service.queues.adapters
            adapter = await adapters.run(lambda _: read_adapter(body.lora_path, maker.config))
            await engine.load_adapter(name, adapter)
            maker.adapters = (*maker.adapters, name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, http: HTTPRequest) -> Response:
        """Unload an adapter once the texts that use it have ended. New requests cannot name it from now on."""
        body = parse(UnloadBody, await self._read(http), 0)
        name, maker = body.lora_name, self._service.maker
        if name not in maker.adapters:
            raise RequestError(404, f"there is no adapter {name}.", "lora_name", code="model_not_found")
        maker.adapters = tuple(each for each in maker.adapters if each != name)
        await self._service.engine.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
