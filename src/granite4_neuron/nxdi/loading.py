"""From a checkpoint to compiled graphs, and from both to something that generates."""

from __future__ import annotations

from pathlib import Path

import torch
from neuronx_distributed_inference.models.application_base import COMPILED_MODEL_FILE_NAME
from neuronx_distributed_inference.models.config import MoENeuronConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import GenerationConfig

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.nxdi.runtime import NeuronRuntime
from granite4_neuron.output_folder import complete_or_absent

CONFIG_FILE = "neuron_config.json"


def compile_model(
    folder: Path,
    output: Path,
    *,
    dtype: torch.dtype,
    tp_degree: int,
    batch_size: int,
    max_context_length: int,
    seq_len: int,
    verified_tokens: int = 0,
    prefill_scan: str = "chunked",
    decode_kernel: str = "torch",
    expert_path: str = "torch",
) -> None:
    """Compile the graphs that `load_compiled` runs; weights stay where they are.

    Args:
        folder: the checkpoint.
        output: where the graphs go; must not exist, or be empty.
        dtype: of weights and activations.
        batch_size: sequences at a time.
        max_context_length: tokens of the largest context encoding graph; a longer prompt takes several steps.
        seq_len: the longest sequence, prompt and continuation.
        verified_tokens: of a sequence, the last certain one and drafts; 0 for no graphs that verify.
        prefill_scan, decode_kernel, expert_path: see `GraniteMoeHybridInferenceConfig`.

    Raises:
        UserError: the folder is in use, or the model cannot be split so.
    """
    neuron_config = MoENeuronConfig(
        tp_degree=tp_degree,
        batch_size=batch_size,
        ctx_batch_size=1,
        is_continuous_batching=True,
        max_context_length=max_context_length,
        seq_len=seq_len,
        speculation_length=verified_tokens,
        torch_dtype=dtype,
        enable_bucketing=True,
    )
    config = GraniteMoeHybridInferenceConfig(
        neuron_config,
        load_config=load_pretrained_config(str(folder)),
        prefill_scan=prefill_scan,
        decode_kernel=decode_kernel,
        expert_path=expert_path,
    )
    model = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
    with complete_or_absent(output) as partial:
        model.compile(str(partial))


def load_compiled(folder: Path, compiled: Path, generation_config: GenerationConfig) -> NeuronRuntime:
    """A checkpoint on the device, run by graphs that `compile_model` made for it.

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
    if config.granite != GraniteMoeHybridConfig.from_file(folder / "config.json"):
        raise UserError(f"{compiled} was compiled for another model than the one in {folder}.")
    config._name_or_path = str(folder)
    model = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
    model.load(str(compiled))
    return NeuronRuntime(model, generation_config)
