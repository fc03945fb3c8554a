"""IBM Granite 4.0 hybrid models and NVIDIA Nemotron 3 on AWS Trainium, CPUs and GPUs.

>>> from granite4_neuron import generate, load
>>> runtime, tokenizer = load()
>>> text = generate(runtime, tokenizer, "An assignment statement", max_tokens=20)
"""

from typing import TYPE_CHECKING, Any

from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.generation import (
        GeneratedText,
        GenerationError,
        GenerationResponse,
        chat,
        generate,
        load,
        stream_generate,
    )

__all__ = [
    "GeneratedText",
    "GenerationError",
    "GenerationResponse",
    "UserError",
    "chat",
    "generate",
    "load",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    """Import names that need torch when they are first used: parts of the command line do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from granite4_neuron import generation

    return getattr(generation, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
