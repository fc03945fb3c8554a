"""Loads weights of a checkpoint into a model: safetensors under Hugging Face's names, and GGUF files."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from granite4_neuron.checkpoint.checkpoint import Checkpoint, StoredWeight
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.sharding import rank_slice
from granite4_neuron.checkpoint.weight_cache import WeightCache
from granite4_neuron.checkpoint.weight_plan import WeightPlan, formats_for
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.families import model_of
from granite4_neuron.model.linear import Matrix
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.parameters import EMBEDDING, HEAD
from granite4_neuron.ops import FORMATS, QuantizedWeight, Weight
from granite4_neuron.ops.operators import TORCH, Operators
from granite4_neuron.system import available_memory
from granite4_neuron.system.large_memory import LargeMemory, give_back_freed

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_LESS_MEMORY = "bfloat16 takes half of float32, and quantized weights half of that or less"


def load_model(
    checkpoint: str | Path | Checkpoint,
    dtype: torch.dtype | None = None,
    parallel: Parallel = Parallel(),  # noqa: B008
    quantize: str | None = None,
    *,
    operators: Operators = TORCH,
    adapters: Sequence[Adapter] = (),
    must_be_finite: bool = False,
    keep_quantized: Collection[str] = (),
    cache: WeightCache | None = None,
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
) -> HybridForCausalLM:
    """Read a checkpoint into a model, tensor by tensor: peak memory is the model plus one tensor.

    With `quantize` the weights of all projections, experts and the head are quantized, see `ops.Format`. Routers,
    convolutions, norms and biases are not. The format decides about a head that is tied to the embedding.

    A quantized checkpoint is read as it is if it was written by `save_model` from a quantized model, or by
    compressed-tensors in one of the schemes of `quantization.WeightScheme`. Weights in an encoding of another tool are
    read as floats, see `checkpoint.encodings`, unless `keep_quantized` has their format.

    Args:
        checkpoint: an open checkpoint, or an argument of `open_checkpoint`.
        dtype: the weights' dtype in memory. None for the dtype that the embedding is stored in, or bfloat16 if the
            weights in a GGUF file are quantized.
        parallel: the rank whose part is read.
        quantize: one of `choices.QUANTIZATIONS`, or None for the weights as stored; not for a part of a model.
        operators: quantize and lay out the matrices; the model must be bound to the same operators.
        adapters: all are merged into the weights. They must be for this model, none of them activated. Not for a part
            of a model.
        must_be_finite: check every number. Without this check, numbers that are not finite show up in the logits.
        keep_quantized: formats in which weights of other tools stay if these represent them exactly, unless `quantize`
            or adapters are given, see `Checkpoint.quantized_weights`.
        cache: where the weights are kept as they lie in memory, and mapped from if they are there; not with adapters.
        progress: called with (bytes of weights in memory, bytes in all) after each tensor.
        remark: called with a sentence on weights that are converted or left out.

    Raises:
        UserError: the folder is not a complete checkpoint (the message lists the faults); there is not enough memory; a
            number that must be finite is not, or would not be in `dtype`; a quantized weight contradicts its format; or
            a lossless format does not represent the numbers of `dtype`, or a weight.
    """
    if quantize not in (None, *QUANTIZATIONS):
        raise UserError(f"quantize is {quantize!r}; it must be {' or '.join(QUANTIZATIONS)}.")
    checkpoint = open_checkpoint(checkpoint)
    check_quantization(checkpoint, quantize, parallel)
    _check_adapters(checkpoint, adapters)
    with torch.device("meta"):
        model = model_of(checkpoint.config, parallel)
    quantized = checkpoint.quantized_weights(model, keep=() if quantize or adapters else keep_quantized)
    dtype = _dtype(checkpoint, dtype, quantize)
    if (sentence := checkpoint.remark_on(quantized, quantize or str(dtype).removeprefix("torch."))) is not None:
        remark(sentence)
    formats = {name: each.format for name, each in quantized.items()} or formats_for(model, quantize)
    plan = WeightPlan(model, dtype, formats, operators)
    weights = _Weights(checkpoint, parallel, quantized, adapters)
    what = f"the weights in {checkpoint.path}"
    available_memory.check_available(plan.num_bytes, what, _LESS_MEMORY)
    with available_memory.enough_for(what):
        entry = None if cache is None else cache.entry(checkpoint, plan)
        kept = None if entry is None else entry.mapped()
        block, done = kept or LargeMemory(plan.tensors()), 0
        places = {name: plan.places(name, block) for name in plan.largest_first()}
        if kept is not None:
            for name, its_places in places.items():
                set_parameter(model, name, plan.lying_in(name, its_places))
            if progress is not None:
                progress(plan.num_bytes, plan.num_bytes)
            return _finished(model)
        for name, its_places in places.items():
            weight = weights.read(name, plan.shapes[name])
            if must_be_finite:
                held_in = plan.dtype_of(name) if name not in formats else torch.float32
                _check_finite(f"{name} in {checkpoint.path}", weight, held_in)
            set_parameter(model, name, plan.place(name, weight, its_places))
            del weight  # so that it is not in memory while the next one is read
            if checkpoint.folder is None:  # decoding has left pieces
                give_back_freed()
            done += plan.num_bytes_of(name)
            if progress is not None:
                progress(done, plan.num_bytes)
    if entry is not None:
        entry.write(block)
    return _finished(model)


def _finished(model: HybridForCausalLM) -> HybridForCausalLM:
    """Return a model whose weights are all there."""
    model.tie_weights()
    return model.eval()


class _Weights:
    """One rank's weights from a checkpoint, before they are quantized and laid out.

    quantized: those that are read quantized, by name.
    adapters: merged into the others.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parallel: Parallel,
        quantized: Mapping[str, StoredWeight],
        adapters: Sequence[Adapter],
    ):
        self._checkpoint, self._parallel = checkpoint, parallel
        self._quantized, self._adapters = quantized, adapters

    def read(self, name: str, shape: torch.Size) -> torch.Tensor | QuantizedWeight:
        stored, config = self._checkpoint.tensors, self._checkpoint.config
        if name in self._quantized:
            quantized = self._quantized[name].read(shape)
            _check_stored(f"{name} in {self._checkpoint.path}", quantized)
            return quantized
        source = EMBEDDING if name == HEAD and config.tie_word_embeddings else name
        weight = rank_slice(name, stored.read(source), config, self._parallel.rank, self._parallel.degree)
        for adapter in self._adapters:
            if name in adapter.additions:
                weight = adapter.additions[name].merged_into(weight)
        return weight


def check_quantization(checkpoint: Checkpoint, quantize: str | None, parallel: Parallel) -> None:
    """Check that the weights are quantized at most once, and not at all for a part of a model; raise UserError if not.

    Args: as for `load_model`.
    """
    stored = None if checkpoint.quantization is None else checkpoint.quantization.name
    if stored is not None and quantize not in (None, stored):
        raise UserError(f"the weights in {checkpoint.path} are in {stored}; {quantize} is made from the original.")
    name = quantize or stored
    if name is not None and parallel.degree > 1:
        raise UserError(f"{name} weights cannot be split over {parallel.degree} ranks; quantize runs on one.")


def _check_adapters(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> None:
    """Check that adapters can be merged into the weights."""
    if adapters and checkpoint.quantization is not None:
        raise UserError(
            f"the weights in {checkpoint.path} are in {checkpoint.quantization.name}; an adapter is merged into the "
            "original, which may be quantized in the same step."
        )
    if any(adapter.invocation is not None for adapter in adapters):
        raise UserError(
            "the adapter is an activated LoRA, which applies to a part of a text only, and so cannot be merged; the "
            "backend cpu takes it as it is, with --adapter."
        )


def _dtype(checkpoint: Checkpoint, dtype: torch.dtype | None, quantize: str | None) -> torch.dtype:
    """Return the dtype of weights that are not quantized."""
    dtype = dtype or getattr(torch, checkpoint.dtype)
    if dtype not in _DTYPES:
        raise UserError(f"the dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}.")
    if quantize and FORMATS[quantize].lossless_dtype not in (None, dtype):
        exact = str(FORMATS[quantize].lossless_dtype).removeprefix("torch.")
        raise UserError(f"{quantize} keeps the numbers of {exact}, and the dtype is {dtype}; choose --dtype {exact}.")
    return dtype


def _check_stored(what: str, weight: QuantizedWeight) -> None:
    """Check a weight that is stored quantized against the rules of its format."""
    if (fault := weight.format.fault(weight)) is not None:
        raise UserError(
            f"{what} has {fault}, which no weight in {weight.format.name} has; download or convert it again."
        )


def _check_finite(what: str, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> None:
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
    """Replace the parameter with this name in `model` by a weight."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(weight, torch.Tensor):
        setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
    else:
        assert isinstance(module, Matrix)  # no other weight is compact
        module.set_compact_weight(weight)
