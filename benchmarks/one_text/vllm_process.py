"""vLLM in the comparison of texts: a process that serves groups of prompts.

Its argument is a job in JSON: model, dtype, options of `LLM` and the number of new tokens. Each line of standard input
is a list of groups. The answer is a line with their texts, the prompt tokens cached so far, and the tokens drafted so
far.
"""

from __future__ import annotations

import json
import os
import sys

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import get_metrics_snapshot


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM itself writes to standard output
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=2**31,
        disable_log_stats=False,
        **job["options"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, detokenize=False, logprobs=0)
    for line in sys.stdin:
        texts, cached = [], 0
        for group in json.loads(line):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in group], sampling, use_tqdm=False)
            for output in outputs:
                cached += output.num_cached_tokens or 0
                rows = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                texts.append([(token, entries[token].logprob) for token, entries in rows])
        metrics = get_metrics_snapshot()
        drafts = sum(metric.value for metric in metrics if metric.name == "vllm:spec_decode_num_draft_tokens")
        print(json.dumps({"texts": texts, "cached": cached, "drafts": drafts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
