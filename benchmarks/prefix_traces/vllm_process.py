"""vLLM in a replay of traces: a process that answers prompts one after another.

Its argument is a JSON object of options of `LLM`. Each line of standard input is a prompt and the number of new tokens.
The answer is a line with these tokens, the seconds to the first, and the number of the prompt's cached tokens.
"""

from __future__ import annotations

import json
import os
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM itself writes to standard output
    os.dup2(2, 1)
    llm = LLM(
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_num_seqs=1,
        disable_log_stats=False,
        **json.loads(sys.argv[1]),
    )
    for line in sys.stdin:
        prompt, length = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = dict(cached=output.num_cached_tokens or 0, tokens=list(output.outputs[0].token_ids))
        answer |= dict(seconds=output.metrics.first_token_latency)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
