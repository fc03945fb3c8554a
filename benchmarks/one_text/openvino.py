"""OpenVINO in the comparison of texts: an exported model with the same weights, loaded again for each way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.errors import Failed
from benchmarks.one_text.engines import NUMBERS, Groups, Row, Text, Way, check_way, chunk_of, half_of
from benchmarks.other_engines import openvino


class OpenVinoGenAI:
    """OpenVINO GenAI's engine. Its prefix cache is always on, and empty at first."""

    def __init__(self, folder: Path, numbers: str, options: argparse.Namespace):
        dtype, _ = NUMBERS[numbers]
        self._folder, self._dtype = options.openvino, getattr(torch, dtype)
        self._chunk, self._length, self._new = chunk_of(options), options.prompt_length, options.output_length

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        if way.drafts:
            raise Failed("it has no drafts for these models in this engine.")
        # It does not report hits. A whole prompt takes one step more than a prompt's rest after a hit.
        chunk = self._chunk if way.in_chunks else self._length - 1 if way.from_cache else None
        pipeline = openvino.load(self._folder, self._dtype, way.threads, way.batch, chunk)
        if way.from_cache:
            for group in groups:
                _finish(pipeline, list(map(half_of, group)), 1)
        served = [_finish(pipeline, group, self._new) for group in groups]
        check_way(way, sum(steps == self._new for _, steps in served), 0)
        return [text for texts, _ in served for text in texts]

    def close(self) -> None:
        pass


def _finish(pipeline: Any, prompts: Sequence[Sequence[int]], output_length: int) -> tuple[list[Text], int]:
    """Return the texts and the number of steps."""
    handles = openvino.add(pipeline, prompts, output_length, logprobs=1)
    steps = 0
    try:
        while pipeline.has_non_finished_requests():
            pipeline.step()
            steps += 1
    except RuntimeError as error:
        raise Failed(openvino.last_line(error)) from None
    outputs = [output for handle in handles for output in handle.read_all()]
    return [list(map(Row, output.generated_ids, output.generated_log_probs)) for output in outputs], steps
