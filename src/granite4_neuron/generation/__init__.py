"""Generation of text from prompts: loading a model, batches of prompts, conversations."""

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.engine import GenerationStats
from granite4_neuron.generation.conversation import Conversation, Turn
from granite4_neuron.generation.conversation_encoder import ConversationEncoder, chat_prompt
from granite4_neuron.generation.loading import load
from granite4_neuron.generation.loop import (
    GenerationError,
    GenerationResponse,
    end_of_sequence_tokens,
    stream_generate,
)
from granite4_neuron.generation.texts import GeneratedText, chat, generate

__all__ = [
    "Conversation",
    "ConversationEncoder",
    "GeneratedText",
    "GenerationError",
    "GenerationResponse",
    "GenerationStats",
    "Turn",
    "bundled_checkpoint",
    "chat",
    "chat_prompt",
    "end_of_sequence_tokens",
    "generate",
    "load",
    "stream_generate",
]
