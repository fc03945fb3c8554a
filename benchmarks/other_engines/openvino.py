"""OpenVINO in benchmarks: OpenVINO GenAI's engine with paged attention, on an exported model."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from granite4_neuron import UserError

MODEL = "openvino_model.xml"
_CACHE_GB = 4  # a limit; a benchmark's random prompts need less


def load(folder: Path, dtype: torch.dtype, threads: int, most_sequences: int, chunk: int | None = None) -> Any:
    """Return a `ContinuousBatchingPipeline` of a model that `optimum-cli export openvino` has written.

    Args:
        dtype: float32 for activations in float32. With any other, OpenVINO takes the fastest on this processor.
        most_sequences: the most sequences at once.
        chunk: the most tokens per step; None to run all prompts in the first step.

    Raises:
        UserError: it cannot be loaded.
    """
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = most_sequences
    scheduler.dynamic_split_fuse = chunk is not None
    scheduler.max_num_batched_tokens = chunk or 2**20
    # Without it 2026.4.1 runs hybrid models on states of zeros.
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": threads}
    if dtype == torch.float32:
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    try:
        return genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
    except RuntimeError as error:
        raise UserError(f"OpenVINO cannot load {folder} ({last_line(error)}).") from None


def add(pipeline: Any, prompts: Sequence[Sequence[int]], output_length: int, **options: int) -> list[Any]:
    """Add greedy requests to a pipeline; return their handles.

    Args:
        options: further fields of `GenerationConfig`.
    """
    import openvino
    import openvino_genai as genai

    greedy = genai.GenerationConfig(max_new_tokens=output_length, ignore_eos=True, do_sample=False, **options)
    return [
        pipeline.add_request(number, openvino.Tensor(torch.tensor([prompt]).numpy()), greedy)
        for number, prompt in enumerate(prompts)
    ]


class OpenVino:
    """A pipeline of `load` in a latency benchmark. Random prompts differ from run to run, so there are no hits."""

    def __init__(self, folder: Path, dtype: torch.dtype, threads: int, most_sequences: int):
        self._pipeline = load(folder, dtype, threads, most_sequences)
        self.weight_bytes = (folder / MODEL).with_suffix(".bin").stat().st_size

    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """Run a point, as `Ours.run`."""
        times, started = [], time.perf_counter()
        handles = add(self._pipeline, prompts, output_length)
        try:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                times.append(time.perf_counter() - started)
        except RuntimeError as error:
            raise UserError(f"OpenVINO failed ({last_line(error)}).") from None
        tokens = [len(output.generated_ids) for handle in handles for output in handle.read_all()]
        if len(times) != output_length or tokens != [output_length] * len(prompts):
            raise UserError(f"OpenVINO took {len(times)} steps for {tokens} tokens of {output_length} each.")
        return times


def check(folder: Path) -> None:
    """Check that OpenVINO is installed and that a folder has an exported model.

    Raises:
        UserError: one of them is missing.
    """
    if importlib.util.find_spec("openvino_genai") is None:
        raise UserError("--compare openvino needs OpenVINO GenAI: pip install openvino-genai")
    if not (folder / MODEL).is_file():
        raise UserError(f"there is no file {folder / MODEL}; `optimum-cli export openvino` writes it.")


def last_line(error: RuntimeError) -> str:
    """Return the last line of an OpenVINO error, which says what is wrong."""
    return str(error).strip().splitlines()[-1]
