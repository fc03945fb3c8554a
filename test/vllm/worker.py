"""A process that runs vLLM: one engine after another, each with the same prompts.

Reads {"engines": {name: {"model": folder, "options": {...}, "sampling": {...}, "rounds": 1}}, "prompts": [[token, ...],
...], "tokens": n} as JSON from standard input. "prompts" of an engine are numbers of those it is given, "sampling" may
also be a list with options per prompt. Writes {name: {"tokens": [per round [per prompt [token, ...]]], "cached": [per
round], "logprobs": [per prompt, of its tokens but the first and of the first round's], "metrics": {...}}}, or {name:
{"error": "..."}}, to the file that is its argument.
"""

import asyncio
import json
import multiprocessing
import sys
import tempfile
import traceback

from vllm import LLM, AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

from test.vllm import crowd

COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "drafts": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
DEFAULTS = dict(
    dtype="float32",
    enforce_eager=True,
    max_model_len=2048,
    kv_cache_memory_bytes=2**28,
    enable_prefix_caching=False,
    disable_log_stats=False,
)


def logprobs_of(output) -> list[float]:
    """Return the log-probabilities of a prompt's tokens except the first, then of the generated ones, if requested."""
    generated = output.outputs[0]
    pairs = [
        *zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [None])[1:], strict=False),
        *zip(generated.token_ids, generated.logprobs or [], strict=False),
    ]
    return [entries[token].logprob for token, entries in pairs]


def sampling_of(engine: dict, prompts: int, tokens: int) -> list[SamplingParams]:
    options = engine.get("sampling", {})
    per_prompt = options if isinstance(options, list) else [options] * prompts
    common = dict(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [SamplingParams(**{**common, **own}) for own in per_prompt]


def results_of(rounds: list[list[RequestOutput]]) -> dict:
    return {
        "tokens": [[list(output.outputs[0].token_ids) for output in outputs] for outputs in rounds],
        "logprobs": [logprobs_of(output) for output in rounds[0]],
        "cached": [sum(output.num_cached_tokens or 0 for output in outputs) for outputs in rounds],
        "metrics": {name: counted(metric) for name, metric in COUNTERS.items()},
    }


def counted(name: str) -> int:
    """Return the metric's sum over all engines of this process."""
    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == name)


def serve(engine: dict, prompts: list[list[int]], tokens: int) -> dict:
    llm = LLM(engine["model"], **{**DEFAULTS, **engine["options"]})
    sampling = sampling_of(engine, len(prompts), tokens)
    rounds = [
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for _ in range(engine.get("rounds", 1))
    ]
    results = results_of(rounds)
    llm.llm_engine.engine_core.shutdown()
    return results


def serve_in_parallel(engine: dict, prompts: list[list[int]], tokens: int) -> dict:
    """Serve by data parallelism, which LLM lacks. The engines take the prompts in turn, and all run at once."""
    ranks = engine["options"]["data_parallel_size"]
    sampling = sampling_of(engine, len(prompts), tokens)

    async def one(llm: AsyncLLM, nth: int, n: int) -> RequestOutput:
        prompt = {"prompt_token_ids": prompts[n]}
        stream = llm.generate(prompt, sampling[n], f"{nth}-{n}", data_parallel_rank=n % ranks)
        return [output async for output in stream][-1]

    async def every_round() -> list[list[RequestOutput]]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(engine["model"], **{**DEFAULTS, **engine["options"]}))
        try:
            return [
                await asyncio.gather(*(one(llm, nth, n) for n in range(len(prompts))))
                for nth in range(engine.get("rounds", 1))
            ]
        finally:
            llm.shutdown()

    return results_of(asyncio.run(every_round()))


def serve_crowd(engine: dict, *_: object) -> dict:
    """Serve the engine's own "requests", see crowd.py."""
    llm = LLM(engine["model"], **{**DEFAULTS, **engine["options"]})
    result = crowd.run(llm.llm_engine, engine["requests"], engine["acceptance"])
    return {**result, "metrics": {name: counted(metric) for name, metric in COUNTERS.items()}}


def serve_into(path: str, engine: dict, prompts: list[list[int]], tokens: int) -> None:
    try:
        run = serve_in_parallel if "data_parallel_size" in engine["options"] else serve
        run = serve_crowd if "requests" in engine else run
        result = run(engine, prompts, tokens)
    except Exception:  # any error of vLLM is the result
        result = {"error": traceback.format_exc()}
    with open(path, "w") as file:
        json.dump(result, file)


def main() -> None:
    job, results = json.load(sys.stdin), {}
    # vLLM is imported once. Each engine gets a fork, because a second engine in a process finds the leftovers of the
    # first.
    context = multiprocessing.get_context("fork")
    for name, engine in job["engines"].items():
        prompts = [job["prompts"][number] for number in engine.get("prompts", range(len(job["prompts"])))]
        with tempfile.NamedTemporaryFile("r") as file:
            process = context.Process(target=serve_into, args=(file.name, engine, prompts, job["tokens"]))
            process.start()
            process.join()
            text = file.read()
        results[name] = json.loads(text) if text else {"error": f"the process ended with {process.exitcode}"}
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
