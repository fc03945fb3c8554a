"""Requests that come and go while others run. worker.py serves them by an engine of vLLM.

A request is {"prompt": [token, ...], "tokens": how many it asks for, "arrives": before which step, "leaves": before
which step at the latest, or None}.
"""

from __future__ import annotations

from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from test.vllm.drafter import KnownTexts


def run(engine: LLMEngine, requests: list[dict], acceptance: str) -> dict:
    """Return {"alone": [per request [token, ...]], "tokens": the same when served together, "cached": the number
    that found a prefix}."""
    longest: dict[tuple[int, ...], int] = {}
    for request in requests:
        prompt = tuple(request["prompt"])
        longest[prompt] = max(longest.get(prompt, 0), request["tokens"])
    alone = {}
    for prompt, tokens in longest.items():
        engine.reset_prefix_cache()
        request = dict(prompt=prompt, tokens=tokens, arrives=0, leaves=None)
        alone[prompt] = _serve(engine, [request], f"alone {len(alone)} ")[0][0]
    engine.reset_prefix_cache()
    KnownTexts.learn(alone, acceptance)
    texts, cached = _serve(engine, requests)
    return {
        "alone": [alone[tuple(request["prompt"])][: request["tokens"]] for request in requests],
        "tokens": texts,
        "cached": sum(count > 0 for count in cached),
    }


def _serve(engine: LLMEngine, requests: list[dict], names: str = "") -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each request, and the length of its prefix that was in the cache."""
    texts: list[list[int]] = [[] for _ in requests]
    cached = [0] * len(requests)
    waiting = sorted(range(len(requests)), key=lambda number: requests[number]["arrives"])
    staying = [number for number in waiting if requests[number]["leaves"] is not None]
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and requests[waiting[0]]["arrives"] <= step:
            number = waiting.pop(0)
            request = requests[number]
            params = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
            engine.add_request(f"{names}{number}", {"prompt_token_ids": list(request["prompt"])}, params)
        leaving = [number for number in staying if requests[number]["leaves"] <= step]
        engine.abort_request([f"{names}{number}" for number in leaving])
        staying = [number for number in staying if number not in leaving]
        for output in engine.step():
            number = int(output.request_id.removeprefix(names))
            texts[number], cached[number] = list(output.outputs[0].token_ids), output.num_cached_tokens or 0
        step += 1
    return texts, cached
