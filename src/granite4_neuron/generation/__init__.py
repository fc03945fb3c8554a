"""From prompts to text: loading, and a batch of prompts over an engine."""

from granite4_neuron.checkpoint_folder import bundled_checkpoint
from granite4_neuron.engine import GenerationStats
from granite4_neuron.generation.chat import ConversationEncoder, chat_prompt
from granite4_neuron.generation.loading import load
from granite4_neuron.generation.loop import (
    GenerationResponse,
    generate,
    stream_generate,
)

__all__ = [
    "ConversationEncoder",
    "GenerationResponse",
    "GenerationStats",
    "bundled_checkpoint",
    "chat_prompt",
    "generate",
    "load",
    "stream_generate",
]
