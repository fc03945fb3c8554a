"""Reads and writes weights: safetensors checkpoints under Hugging Face's names, and GGUF files, which are read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn

from granite4_neuron.checkpoint.gguf.file import is_gguf, open_gguf
from granite4_neuron.checkpoint.gguf.kept import kept_weights, remark_on
from granite4_neuron.checkpoint.gguf.tensors import GGUFTensors
from granite4_neuron.checkpoint.gguf.tokenizer import has_tokenizer, read_tokenizer
from granite4_neuron.checkpoint.output_folder import complete_or_absent
from granite4_neuron.checkpoint.quantized import quantized_weights
from granite4_neuron.checkpoint.source import dtype_of, quantization_of, read_config
from granite4_neuron.checkpoint.stored_tensors import INDEX, StoredTensors
from granite4_neuron.checkpoint.weight_plan import WeightPlan, formats_for, model_format
from granite4_neuron.choices import QUANTIZATIONS
from granite4_neuron.config import DTYPES, GraniteMoeHybridConfig
from granite4_neuron.config.quantization import quantization_config
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.parameters import EMBEDDING, HEAD, parameter
from granite4_neuron.ops import FORMATS, Format, QuantizedWeight, Weight, as_tensor
from granite4_neuron.ops.operators import TORCH, Operators
from granite4_neuron.system import available_memory
from granite4_neuron.system.large_memory import LargeMemory

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
GENERATION_CONFIG = "generation_config.json"

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_LESS_MEMORY = "bfloat16 takes half of float32, and quantized weights half of that or less"


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    parallel: Parallel = Parallel(),  # noqa: B008
    quantize: str | None = None,
    *,
    operators: Operators = TORCH,
    adapters: Sequence[Adapter] = (),
    must_be_finite: bool = False,
    keep_quantized: bool = False,
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
) -> GraniteMoeHybridForCausalLM:
    """Read a checkpoint folder or a GGUF file into a model, tensor by tensor: peak memory is the model and one tensor.

    With `quantize` the weights of all projections, experts and the head are quantized, see `ops.Format`. Routers,
    convolutions, norms and biases are not. The format says what becomes of a head that is tied to the embedding.

    A quantized checkpoint is read as it is, if `save_model` wrote it from a quantized model, or compressed-tensors in
    one of the schemes of `quantization_config.WeightScheme`.

    Args:
        folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json; or a GGUF file.
        dtype: of the weights in memory; None for the dtype that the embedding is stored in, and for bfloat16 if the
            weights in a GGUF file are quantized.
        parallel: the rank whose part is read.
        quantize: one of `choices.QUANTIZATIONS`, or None for the weights as stored; not for a part of a model.
        operators: quantize the matrices and lay them out: those that the model will be bound to.
        adapters: merged into the weights, all of them; of this model, and none of them activated. Not for a part of a
            model.
        must_be_finite: look at every number. Where it is not asked for, the logits will tell.
        keep_quantized: keep weights of a GGUF file quantized of which int4 or int8 has the same numbers, unless
            `quantize` or adapters are given.
        progress: called with (bytes of weights in memory, bytes in all) after each tensor.
        remark: called with a sentence on the weights of a GGUF file that are not kept as they are.

    Raises:
        UserError: the folder is not a complete Granite checkpoint, and the message lists what is wrong; there is not
            enough memory for it; a number that must be finite is not, or would not be in `dtype`; a
            quantized weight contradicts its format; or a format without loss has not the numbers of `dtype`, or does
            not hold a weight.
    """
    if quantize not in (None, *QUANTIZATIONS):
        raise UserError(f"quantize is {quantize!r}; it must be {' or '.join(QUANTIZATIONS)}.")
    folder = Path(folder)
    config, quantization = read_config(folder), quantization_of(folder)
    stored = GGUFTensors(folder) if is_gguf(folder) else StoredTensors(folder)
    if quantization is not None and quantize not in (None, quantization.name):
        raise UserError(f"the weights in {folder} are in {quantization.name}; {quantize} is made from the original.")
    if parallel.degree > 1 and (quantize or quantization):
        name = quantize or quantization.name
        raise UserError(f"{name} weights cannot be split over {parallel.degree} ranks; quantize runs on one.")
    if adapters and quantization is not None:
        raise UserError(
            f"the weights in {folder} are in {quantization.name}; an adapter is merged into the original, which may be "
            "quantized in the same step."
        )
    if any(adapter.invocation is not None for adapter in adapters):
        raise UserError(
            "the adapter is an activated LoRA, which applies to a part of a text only, and so cannot be merged; the "
            "backend cpu takes it as it is, with --adapter."
        )
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config, parallel)
    if isinstance(stored, GGUFTensors):
        quantized = kept_weights(stored, model) if keep_quantized and not quantize and not adapters else {}
    else:
        quantized = quantized_weights(stored, model, quantization)
        stored.check(config, {name: each.layout(model.get_parameter(name).shape) for name, each in quantized.items()})
    dtype = dtype or getattr(torch, stored.dtype())
    if dtype not in _DTYPES:
        raise UserError(f"the dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}.")
    if quantize and FORMATS[quantize].lossless_dtype not in (None, dtype):
        exact = str(FORMATS[quantize].lossless_dtype).removeprefix("torch.")
        raise UserError(f"{quantize} keeps the numbers of {exact}, and the dtype is {dtype}; choose --dtype {exact}.")
    if isinstance(stored, GGUFTensors) and (sentence := remark_on(stored, quantized, dtype)):
        remark(sentence)
    formats = {name: each.format for name, each in quantized.items()} or formats_for(model, quantize)
    plan = WeightPlan(model, dtype, formats, operators)
    available_memory.check_available(plan.num_bytes, f"the weights in {folder}", _LESS_MEMORY)
    with available_memory.enough_for(f"the weights in {folder}"):
        block, done = LargeMemory(plan.tensors()), 0
        for name in plan.largest_first():
            if name in quantized:
                weight = quantized[name].read(name, plan.shapes[name], stored)
                _check_stored(f"{name} in {folder}", weight)
            else:
                source = EMBEDDING if name == HEAD and config.tie_word_embeddings else name
                weight = rank_slice(name, stored.read(source), config, parallel.rank, parallel.degree)
            for adapter in adapters:
                if name in adapter.additions:
                    weight = adapter.additions[name].merged_into(weight)
            if must_be_finite:
                _check_finite(f"{name} in {folder}", weight, dtype if name not in formats else torch.float32)
            set_parameter(model, name, plan.place(name, weight, block))
            done += plan.num_bytes_of(name)
            if progress is not None:
                progress(done, plan.num_bytes)
    model.tie_weights()
    return model.eval()


def check_memory_of_ranks(folder: Path, dtype: torch.dtype | None, degree: int) -> None:
    """Check that this machine has memory for the parts of all ranks, before they load them at once.

    Raises:
        UserError: it has not; or the config cannot be split so.
    """
    with torch.device("meta"):
        part = GraniteMoeHybridForCausalLM(read_config(folder), Parallel(0, degree))
    num_bytes = degree * WeightPlan(part, dtype or stored_dtype(folder), {}, TORCH).num_bytes
    what = f"the weights in {folder} for {degree} ranks"
    available_memory.check_available(num_bytes, what, "bfloat16 takes half of float32", processes=degree)


def check_weights(folder: Path, config: GraniteMoeHybridConfig) -> None:
    """Check names, shapes and dtypes of a checkpoint's tensors without reading them.

    Raises:
        UserError: they are not those of the model, and the message lists what is wrong; or they are quantized.
    """
    if (quantization := quantization_of(folder)) is not None:
        raise UserError(f"the weights in {folder} are in {quantization.name}, which is for the backend cpu.")
    StoredTensors(folder).check(config)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype in which a checkpoint's embedding, and so the model, is stored; see `source.dtype_of`."""
    return getattr(torch, dtype_of(folder))


def save_model(
    model: GraniteMoeHybridForCausalLM, folder: str | Path, files_from: Path | None = None, max_shard_size: str = "5GB"
) -> None:
    """Write a checkpoint: all of it, or nothing. Transformers 4.57 and 5.x read it too, unless it is quantized.

    Args:
        model: its weights are written in their dtype; quantized ones as `Format.layout` has them, not packed.
        folder: must not exist, or be empty.
        files_from: a checkpoint folder whose tokenizer and generation config are copied along, or a GGUF file, whose
            tokenizer is written.
        max_shard_size: larger checkpoints are split into files of at most this size.

    Raises:
        UserError: the folder is in use, or writing failed (no space, no permission).
    """
    weights: dict[str, torch.Tensor] = {}
    formats: dict[str, Format] = {}
    for name, weight in model.named_weights():
        if isinstance(weight, QuantizedWeight):
            formats[name] = weight.format
            weights |= {f"{name}{ending}": tensor for ending, tensor in weight.tensors().items()}
        else:
            weights[name] = as_tensor(weight, model.dtype)
    about = {**model.config.to_dict(), "torch_dtype": str(model.dtype).removeprefix("torch.")}
    if formats:
        about["quantization_config"] = quantization_config(model_format(formats).name)
    plan = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_size)
    with complete_or_absent(Path(folder)) as partial:
        for file, names in plan.filename_to_tensors.items():
            save_file({name: weights[name].detach() for name in names}, partial / file, metadata={"format": "pt"})
        if plan.is_sharded:
            _write_json(partial / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
        _write_json(partial / "config.json", about)
        if files_from is not None:
            _write_files(files_from, partial)


def _write_files(files_from: Path, folder: Path) -> None:
    """Write a checkpoint's tokenizer and generation config."""
    if is_gguf(files_from):
        if has_tokenizer(file := open_gguf(files_from)):
            read_tokenizer(file).save_pretrained(folder)
        return
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
        if (files_from / name).is_file():
            shutil.copyfile(files_from / name, folder / name)


def _check_stored(what: str, weight: QuantizedWeight) -> None:
    """Check a weight that is stored quantized by the rules of its format."""
    if (fault := weight.format.fault(weight)) is not None:
        raise UserError(
            f"{what} has {fault}, which no weight in {weight.format.name} has; download or convert it again."
        )


def _check_finite(what: str, weight: Weight, dtype: torch.dtype) -> None:
    """Check that all numbers of a stored weight, or its scales, are finite and will be in `dtype`."""
    numbers = weight if isinstance(weight, torch.Tensor) else weight.scales
    least, most = (float(extreme) for extreme in numbers.aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):
        raise UserError(f"{what} holds numbers that are not finite (NaN or infinity); convert a checkpoint without.")
    if max(-least, most) > torch.finfo(dtype).max:
        raise UserError(
            f"{what} holds {max(-least, most):.4g}, and {dtype} ends at {torch.finfo(dtype).max:.4g}; choose another "
            "dtype."
        )


def set_parameter(model: nn.Module, name: str, weight: Weight) -> None:
    """Put a weight in the place of the parameter with this name in `model`."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(weight, torch.Tensor):
        setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
    else:
        module.set_compact_weight(weight)


def rank_slice(name: str, tensor: torch.Tensor, config: GraniteMoeHybridConfig, rank: int, degree: int) -> torch.Tensor:
    """Return the part of a stored tensor that belongs to one of `degree` ranks."""
    whole, part = (parameter(name, config, ranks) for ranks in (1, degree))
    axis = whole.split_axis
    if degree == 1 or axis is None:
        return tensor
    pieces, start = [], 0
    for size, length in zip(whole.axes[axis], part.axes[axis], strict=True):
        # With fewer parts than ranks, neighbours have the same one.
        number = rank * (size // length) // degree
        pieces.append(tensor.narrow(axis, start + number * length, length))
        start += size
    return torch.cat(pieces, dim=axis)


def rank_slices(name: str, tensor: torch.Tensor, config: GraniteMoeHybridConfig, degree: int) -> torch.Tensor:
    """Return every rank's slice, one after another, for a framework that gives each rank an equal run of a tensor.

    The result is longer than `tensor` if ranks share a part.
    """
    axis = parameter(name, config).split_axis
    if axis is None:
        return tensor
    return torch.cat([rank_slice(name, tensor, config, rank, degree) for rank in range(degree)], dim=axis)


def _write_json(file: Path, values: dict) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
