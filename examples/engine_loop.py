"""Continuous batching: requests come while others run, and one is cancelled: python examples/engine_loop.py [MODEL]"""

import sys

from granite4_neuron import load
from granite4_neuron.engine import Engine, PrefixCache, Request

runtime, tokenizer = load(*sys.argv[1:2])
cache = PrefixCache(runtime, 2**28, interval=runtime.tokens_per_step)  # 256 MiB
engine = Engine(runtime, num_sequences=4, max_length=512, tokenizer=tokenizer, prefix_cache=cache)


def add(prompt: str, **options) -> int:
    return engine.add(Request(tokenizer.encode(prompt), **options))


texts = {add("An assignment statement", max_tokens=40): "", add("The import statement", max_tokens=20): ""}
cancelled = add("Lambda expressions", max_tokens=400)
steps = 0
while engine.has_work:
    for output in engine.step():
        texts[output.id] = texts.get(output.id, "") + output.text
        if output.finish_reason:
            print(f"request {output.id}, step {steps}, {output.finish_reason}: {texts[output.id]!r}")
    steps += 1
    if steps == 5:
        texts[add("The assert statement", max_tokens=20, temperature=0.7, seed=1)] = ""
    if steps == 10:
        engine.cancel(cancelled)
