"""A model with Nemotron 3's chat format, or another one, that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.generation.tool_calls import CLOSE, OPEN
from test.support.checkpoints import save_byte_tokenizer
from test.support.engines import engine_model
from test.support.scripted import script_tokens
from test.support.tool_template import NEMOTRON_TEMPLATE


def thinking_model(
    folder: Path, special: Sequence[str] = (), template: str = NEMOTRON_TEMPLATE
) -> tuple[CPURuntime, PreTrainedTokenizerFast]:
    """Return a runtime and its tokenizer.

    Args:
        folder: for the tokenizer's files.
        special: marks of thoughts and calls that are special tokens; others are ordinary texts.
        template: the chat template.
    """
    save_byte_tokenizer(folder, template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    network = engine_model(vocab_size=272, eos_token_id=1, max_position_embeddings=4096)
    return CPURuntime(network, GenerationConfig(top_k=None)), tokenizer


NEMOTRON_MARKS = ("<think>", "</think>", OPEN, CLOSE)


def say(
    monkeypatch,
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    reached=lambda number: None,
    thought="",
) -> None:
    """Set what the model answers.

    Args:
        reached: called with the number of each of the answer's tokens before it is chosen.
        thought: of an answer that is continued.
    """
    tokens = tokenizer.encode(text)
    begins = [tokenizer.encode(begin) for begin in (f"<think>{thought}</think>", "<think>\n", "")]

    def choose(past):
        answer = past[len(past) - past[::-1].index(3) :]  # behind the last <|assistant|>
        begin = next(begin for begin in begins if answer[: len(begin)] == begin)
        number = len(answer) - len(begin)
        reached(number)
        return tokens[number] if number < len(tokens) else 1

    script_tokens(monkeypatch, choose)
