"""Compiles a checkpoint's graphs, and loads checkpoint and graphs as a runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from neuronx_distributed_inference.models.application_base import COMPILED_MODEL_FILE_NAME
from neuronx_distributed_inference.models.config import MoENeuronConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import GenerationConfig

from granite4_neuron.checkpoint.output_folder import complete_or_absent
from granite4_neuron.config import config_from_file
from granite4_neuron.devices.neuron.compiled_graphs import CONFIG_FILE, default_context_buckets
from granite4_neuron.devices.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.devices.neuron.nxdi.runtime import NeuronRuntime
from granite4_neuron.devices.neuron.sdk import ATTENTION_KERNELS, DRAFT_GRAPHS
from granite4_neuron.errors import UserError

# The Neuron runtime reads it when it starts.
STOCHASTIC_ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


def compile_model(
    folder: Path,
    output: Path,
    *,
    draft_folder: Path | None = None,
    dtype: torch.dtype,
    tp_degree: int,
    batch_size: int,
    max_context_length: int,
    seq_len: int,
    context_buckets: Sequence[int] | None = None,
    token_buckets: Sequence[int] | None = None,
    verified_tokens: int = 0,
    jobs: int,
    attention: str = ATTENTION_KERNELS[0],
    **choices: str,
) -> None:
    """Compile the graphs that `load_compiled` runs. Weights are not copied.

    Args:
        folder: the checkpoint.
        output: where the graphs go; must not exist, or be empty.
        draft_folder: another checkpoint, whose graphs go to a folder `DRAFT_GRAPHS` there; None for none.
        dtype: of weights and activations.
        tp_degree: ranks. Neuron's runtime takes one core or the whole device: with another number it says that
            NEURON_RT_NUM_CORES "must request one core, or the whole device".
        batch_size: sequences at a time.
        max_context_length: tokens of the largest context encoding graph; a longer prompt takes several steps.
        seq_len: the longest sequence, prompt and continuation.
        context_buckets, token_buckets: tokens of context encoding graphs, up to max_context_length; and lengths of the
            cache that the other graphs read, up to seq_len. None for the defaults, see `GraphOptions`.
        verified_tokens: tokens of a sequence in a verification, the last one and drafts; 0 for no such graphs.
        jobs: how many graphs are compiled at a time.
        attention: one of `sdk.ATTENTION_KERNELS`.
        choices: prefill_scan, decode_kernel, expert_path and state_dtype, see `GraniteMoeHybridInferenceConfig`.

    Raises:
        UserError: the folder is in use, a model cannot be split so, or the draft model has another vocabulary.
    """
    options = dict(
        tp_degree=tp_degree,
        batch_size=batch_size,
        ctx_batch_size=1,
        is_continuous_batching=True,
        max_context_length=max_context_length,
        seq_len=seq_len,
        speculation_length=verified_tokens,
        torch_dtype=dtype,
        enable_bucketing=True,
        context_encoding_buckets=list(context_buckets or default_context_buckets(max_context_length)),
        token_generation_buckets=token_buckets and list(token_buckets),
        # NxD Inference decides by the number of tokens if this is None.
        attn_kernel_enabled=None if attention == "nxd" else False,
    )
    folders = [folder] if draft_folder is None else [folder, draft_folder]
    models = [_application(each, options, choices) for each in folders]
    sizes = {model.config.granite.vocab_size for model in models}
    if len(sizes) > 1:
        raise UserError(f"{draft_folder} has another vocabulary than the model; they must have the same.")
    with complete_or_absent(output) as incomplete, _compiling_at_a_time(jobs):
        for model, place in zip(models, (incomplete, incomplete / DRAFT_GRAPHS), strict=False):
            place.mkdir(exist_ok=True)
            model.compile(str(place))


@contextmanager
def _compiling_at_a_time(jobs: int) -> Iterator[None]:
    """Limit how many graphs NxD's ModelBuilder compiles at a time; its executor has no option for that."""
    bounded = partial(futures.ThreadPoolExecutor, max_workers=jobs)
    with mock.patch.object(futures, "ThreadPoolExecutor", bounded):
        yield


def _application(
    folder: Path, options: Mapping[str, object], choices: Mapping[str, str]
) -> NeuronGraniteMoeHybridForCausalLM:
    load_config = load_pretrained_config(str(folder))
    config = GraniteMoeHybridInferenceConfig(MoENeuronConfig(**options), load_config=load_config, **choices)
    return NeuronGraniteMoeHybridForCausalLM(str(folder), config)


def load_compiled(folder: Path, compiled: Path, generation_config: GenerationConfig) -> NeuronRuntime:
    """Load a checkpoint on the device, with the graphs that `compile_model` made for it.

    For SSM states in bfloat16 it enables stochastic rounding in this process's Neuron runtime, for all rounding of its
    engines from float32 to bfloat16.

    Raises:
        UserError: there are no such graphs, or they were made for another model.
    """
    for name in (CONFIG_FILE, COMPILED_MODEL_FILE_NAME):
        if not (compiled / name).is_file():
            raise UserError(f"{compiled} has no {name}; give the folder that the compile command wrote.")
    try:
        config = GraniteMoeHybridInferenceConfig.load(str(compiled))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{compiled / CONFIG_FILE} is damaged ({error}); compile the model again.") from None
    if config.granite != config_from_file(folder / "config.json"):
        raise UserError(f"{compiled} was compiled for another model than the one in {folder}.")
    config._name_or_path = str(folder)
    model = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
    if config.state_dtype != "float32":
        os.environ[STOCHASTIC_ROUNDING] = "1"
    model.load(str(compiled))
    return NeuronRuntime(model, generation_config)
