"""The time that a JSON schema adds to a step of decode, with a vocabulary of the model's size.

python -m benchmarks.random_checkpoint h-350m FOLDER
python -m benchmarks.structured_outputs.masks FOLDER --sequences 1 8

The tokenizer is trained on Python's standard library, because a random checkpoint has the bundled model's small one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.errors import reports_errors
from granite4_neuron import load
from granite4_neuron.engine import Constraint, Engine, Request
from granite4_neuron.generation.structured_outputs import Grammars

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}}, "required": ["street"]},
    },
    "required": ["name", "age", "tags", "address"],
}
_PEOPLE = {"type": "array", "items": _PERSON, "minItems": 100}
_END = "<|end|>"


@dataclass
class Timed:
    """A constraint that adds up the time of its calls."""

    inner: Constraint
    seconds: list[float] = field(default_factory=list)

    def fork(self) -> Timed:
        return Timed(self.inner.fork(), self.seconds)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        masked = self.inner.mask(logits)
        self.seconds.append(time.perf_counter() - started)
        return masked

    def accept(self, token: int) -> None:
        started = time.perf_counter()
        self.inner.accept(token)
        self.seconds.append(time.perf_counter() - started)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        return self.inner.count_allowed(tokens)

    def forced(self, most: int) -> Sequence[int]:
        return ()  # each token has a mask


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shares; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1], help="sequences at a time (default: 1)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    runtime, _ = load(options.folder)
    vocab_size = runtime.config.vocab_size
    tokenizer = tokenizer_of_size(vocab_size)
    with closing(Grammars(tokenizer, vocab_size)) as grammars:
        constraint = Timed(grammars.constraint("json", _PEOPLE))
    for sequences in options.sequences:
        constraint.seconds.clear()
        engine = Engine(runtime, sequences, max_length=options.tokens + 8)
        for seed in range(sequences):
            engine.add(Request([5, 6, 7], options.tokens, temperature=1.0, seed=seed, constraint=constraint))
        while engine.has_work:
            engine.step()
        seconds, stats = sum(constraint.seconds), engine.stats
        step, masks = (1e3 * each / options.tokens for each in (stats.decode_seconds, seconds))
        print(
            f"{len(tokenizer)} tokens, {sequences} sequences: {step:.1f} ms a step, of which masks {masks:.2f} ms",
            end="",
        )
        print(f", {masks / step:.1%}")
    return 0


def tokenizer_of_size(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that was trained on Python's standard library."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(os.__file__).parent.rglob("*.py"))
    tokenizer.train_from_iterator((file.read_text("utf-8", "replace") for file in files), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)


if __name__ == "__main__":
    sys.exit(main())
