"""vLLM's engine with its NxD Inference plugin, in NxD Inference's CPU mode.

vLLM and the plugin are real. This module replaces the device: it reports one, and provides the graphs.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from test.support import nxdi

PACKAGES = {"vllm": "vLLM", "vllm_neuron": "vLLM's plugin for NxD Inference"}
ENVIRONMENT = dict(
    NXD_CPU_MODE="1",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # run the engine in this process, which has the stand-ins
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)


def why_not_importable() -> str | None:
    """Return why vLLM cannot be used here with NxD Inference, or None if it can."""
    for package, name in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            return f"{name} is not installed (requirements/vllm-neuron.txt)"
    return nxdi.why_not_importable()


def generate(
    folder: Path, prompts: Sequence[list[int]], max_tokens: int, arguments: Sequence[str], compiled: Path
) -> list[list[int]]:
    """Return greedy continuations of `prompts` by an engine in another process.

    Args:
        arguments: arguments of `vllm serve`, except the model.
        compiled: the folder in which the plugin looks for compiled graphs; it is empty.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_generate, folder, prompts, max_tokens, arguments, compiled).result()


def _generate(folder, prompts, max_tokens, arguments, compiled):
    os.environ.update(ENVIRONMENT, NEURON_COMPILED_ARTIFACTS=str(compiled))
    assert nxdi.why_not_importable() is None
    import vllm_neuron

    vllm_neuron._is_neuron_dev = lambda: True
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm_neuron.worker.neuronx_distributed_model_loader import NeuronCausalLM

    NeuronCausalLM._compile_and_load_model = _load_on_cpu
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", str(folder), *arguments])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), dict(prompt_token_ids=prompt), sampling)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    return [list(outputs[str(number)]) for number in range(len(prompts))]


def _load_on_cpu(loader, model_path, neuronx_model_cls, config, compiled_path):
    """Load a model on the CPU, in place of the plugin's method that compiles it and loads it on a device."""
    loader.model = neuronx_model_cls(model_path, config)
    loader.model.to_cpu()
