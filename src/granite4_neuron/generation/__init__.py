"""From prompts to text: loading, and a batch of prompts over an engine."""

from granite4_neuron.engine import GenerationStats
from granite4_neuron.generation.loading import bundled_checkpoint, load
from granite4_neuron.generation.loop import (
    GenerationResponse,
    chat_prompt,
    generate,
    stream_generate,
)

__all__ = [
    "GenerationResponse",
    "GenerationStats",
    "bundled_checkpoint",
    "chat_prompt",
    "generate",
    "load",
    "stream_generate",
]
