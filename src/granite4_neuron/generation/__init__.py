"""From prompts to text: loading, sampling, the loop, stop strings."""

from granite4_neuron.generation.generate import (
    GenerationResponse,
    GenerationStats,
    chat_prompt,
    generate,
    stream_generate,
)
from granite4_neuron.generation.loading import bundled_checkpoint, load

__all__ = [
    "GenerationResponse",
    "GenerationStats",
    "bundled_checkpoint",
    "chat_prompt",
    "generate",
    "load",
    "stream_generate",
]
