"""How much faster texts that follow JSON schemas are because forced tokens run together.

Each text is generated with and without, in turns, greedily and one at a time.

    python -m benchmarks.structured_outputs.forced_tokens
    python -m benchmarks.random_checkpoint h-350m FOLDER
    python -m benchmarks.structured_outputs.forced_tokens FOLDER --schemas 200

Schemas are random: some with long names and short values, and some with short names and long texts. Random checkpoints
get a tokenizer with as many tokens as the model's vocabulary, trained on Python's standard library.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.faults import ByMasks
from benchmarks.errors import reports_errors
from benchmarks.structured_outputs.masks import tokenizer_of_size
from granite4_neuron import UserError, load
from granite4_neuron.commands.options import at_least
from granite4_neuron.engine import Engine, Request
from granite4_neuron.generation.structured_outputs import Grammars
from granite4_neuron.runtime.interface import Runtime

_WORDS = """
account address amount billing category city code contact country created currency customer delivery description
discount email estimated first identifier invoice item language last location method number order payment phone
postal priority product quantity reference region shipping status street subtotal supplier updated value
""".split()  # noqa: SIM905 (a list of so many would be a page)
_MOST_TOKENS = 300


def schema_with_long_names(chance: random.Random) -> dict[str, Any]:
    """Draw a schema with names of several words and short values, as programs send them."""
    values: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"enum": chance.sample(_WORDS, 3)},
        {"type": "string", "pattern": "^[a-z]{2,6}$"},
    ]
    names = ["_".join(chance.sample(_WORDS, chance.randint(2, 4))) for _ in range(chance.randint(2, 5))]
    return _object({name: chance.choice(values) for name in names})


def schema_with_long_texts(chance: random.Random) -> dict[str, Any]:
    """Draw a schema with short names and long texts, whose tokens nothing forces."""
    text = {"type": "string", "minLength": 60, "maxLength": 120}
    return _object({name[:2]: text for name in chance.sample(_WORDS, chance.randint(1, 2))})


_KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "long names": schema_with_long_names,
    "long texts": schema_with_long_texts,
}


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint (default: the bundled model)")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS), help="default: both")
    parser.add_argument("--schemas", type=at_least(1), default=20, help="schemas of each kind (default: %(default)s)")
    parser.add_argument("--repeats", type=at_least(1), default=1, help="repeats of each text (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    runtime, tokenizer = load(options.folder)
    vocab_size = runtime.config.vocab_size
    if len(tokenizer) < vocab_size:
        tokenizer = tokenizer_of_size(vocab_size)
    with closing(Grammars(tokenizer, vocab_size)) as grammars:
        for kind in options.kinds:
            _measure(kind, runtime, grammars, tokenizer.eos_token_id, options)
    return 0


def _measure(kind: str, runtime: Runtime, grammars: Grammars, end: int, options: argparse.Namespace) -> None:
    chance = random.Random(0)
    totals, tokens, ratios = [0.0, 0.0], 0, []
    for _ in range(options.schemas):
        constraint = grammars.constraint("json", _KINDS[kind](chance))
        prompt = [chance.randrange(5, runtime.config.vocab_size) for _ in range(8)]
        ways = (ByMasks(constraint), constraint)
        seconds: list[list[float]] = [[], []]
        for _ in range(options.repeats):
            texts = []
            for way, times in zip(ways, seconds, strict=True):
                text, spent = _generate(runtime, Request(prompt, _MOST_TOKENS, constraint=way, stop_token_ids=[end]))
                texts.append(text)
                times.append(spent)
            if texts[0] != texts[1]:
                raise UserError(f"a text differs: {texts[0]} by masks, and {texts[1]}.")
        without, with_ = map(statistics.median, seconds)
        totals = [totals[0] + without, totals[1] + with_]
        tokens += len(texts[0])
        ratios.append(without / with_)
    least, median = min(ratios), statistics.median(ratios)
    print(
        f"{kind}: {options.schemas} schemas, {tokens} tokens; {1e3 * totals[0] / tokens:.2f} ms a token by masks, "
        f"{1e3 * totals[1] / tokens:.2f} ms; {totals[0] / totals[1]:.2f} times as fast (median {median:.2f}, least "
        f"{least:.2f})",
        flush=True,
    )


def _generate(runtime: Runtime, request: Request) -> tuple[list[int | None], float]:
    """Return a greedy text, and the seconds of decode."""
    engine = Engine(runtime, 1, max_length=len(request.tokens) + request.max_tokens)
    engine.add(request)
    outputs = engine.step()
    started = time.perf_counter()
    while engine.has_work:
        outputs += engine.step()
    return [output.token for output in outputs], time.perf_counter() - started


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


if __name__ == "__main__":
    sys.exit(main())
