"""From prompts to text: loading, sampling, the loop, stop strings."""

from granite4_neuron.checkpoint_folder import bundled_checkpoint
from granite4_neuron.generation.loading import load
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
