"""llama.cpp in the comparison of texts: llama-server with the same weights, restarted for each way."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.errors import Failed
from benchmarks.one_text.engines import DRAFT_TOKENS, Groups, Row, Text, Way, check_way, chunk_of, half_of
from benchmarks.other_engines.llama_cpp import gguf_of
from benchmarks.other_engines.llama_server import complete, running

_LOOKUP = 2  # tokens per n-gram


class LlamaServer:
    """llama-server, with its own defaults. Its activations are in float32, its keys and values in float16."""

    def __init__(self, folder: Path, numbers: str, options: argparse.Namespace):
        self._programs, self._chunk, self._new = options.llama_cpp, chunk_of(options), options.output_length
        self._length = options.prompt_length + options.output_length
        self._files = tempfile.TemporaryDirectory()
        self._weights = gguf_of(folder, numbers, self._programs, Path(self._files.name))

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        with running(self._programs, self._weights, self._arguments(way)) as client:
            answers = [answer for group in groups for answer in self._group(client, way, group)]
        texts = [[_row(entry) for entry in answer.get("completion_probabilities", ())] for answer in answers]
        if any(len(text) != self._new for text in texts):
            raise Failed("it leaves out tokens that end within a character.")
        check_way(way, *(sum(answer["timings"].get(name, 0) for answer in answers) for name in ("cache_n", "draft_n")))
        return texts

    def _group(self, client: httpx.Client, way: Way, group: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        body = dict(temperature=0, ignore_eos=True, n_probs=1, cache_prompt=way.from_cache)
        if way.from_cache:  # a slot keeps its last sequence
            complete(client, body | dict(prompt=[half_of(prompt) for prompt in group], n_predict=1))
        return complete(client, body | dict(prompt=group, n_predict=self._new))

    def _arguments(self, way: Way) -> list[str]:
        slots, threads = str(way.batch), str(way.threads)
        arguments = ["-np", slots, "-c", str(way.batch * self._length), "-t", threads, "-tb", threads]
        if way.in_chunks:
            arguments += ["-b", str(self._chunk), "-ub", str(self._chunk)]
        if way.drafts:
            arguments += ["--spec-type", "ngram-simple"]
            arguments += ["--spec-ngram-simple-size-n", str(_LOOKUP), "--spec-ngram-simple-size-m", str(DRAFT_TOKENS)]
        return arguments

    def close(self) -> None:
        self._files.cleanup()


def _row(entry: dict[str, Any]) -> Row:
    """Return a token with its log-probability. llama-server reports none for tokens that it verifies."""
    return Row(entry["id"], entry["logprob"] if entry["top_logprobs"] else None)
