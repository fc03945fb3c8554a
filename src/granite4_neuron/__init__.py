"""IBM Granite 4.0 hybrid models for AWS Trainium2 and for any CPU.

>>> from granite4_neuron import generate, load
>>> runtime, tokenizer = load()
>>> text = generate(runtime, tokenizer, "An assignment statement", max_tokens=20)
"""

from granite4_neuron.errors import UserError
from granite4_neuron.generation import GenerationResponse, generate, load, stream_generate

__all__ = ["GenerationResponse", "UserError", "generate", "load", "stream_generate"]
