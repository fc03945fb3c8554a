"""From prompts to text: loading, sampling, the loop, stop strings."""

from granite4_neuron.generation.loading import bundled_checkpoint, load
from granite4_neuron.generation.loop import (
    GenerationResponse,
    GenerationStats,
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
