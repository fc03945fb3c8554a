"""The functions that layers are made of, as one exchangeable set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from granite4_neuron.ops.attention import cached_attention, write_cache
from granite4_neuron.ops.head import logits
from granite4_neuron.ops.launch_parameters import HEURISTIC, LaunchParameters
from granite4_neuron.ops.mamba_operators import CHUNKED, QUADRATIC, SINGLE_TOKEN, MambaOperators
from granite4_neuron.ops.moe import fused_experts, mlp, router_logits, silu_and_mul, topk_sigmoid, topk_softmax
from granite4_neuron.ops.norm import residual_add, rms_norm, rms_norm_gated
from granite4_neuron.ops.quantization import embedding, linear
from granite4_neuron.ops.stochastic_rounding import stochastic_round
from granite4_neuron.ops.weight import CompactWeight, Format, QuantizedWeight, Weight, quantize

Operator = Callable[..., torch.Tensor]


class Quantize(Protocol):
    """A backend's function that makes a matrix of fewer bits."""

    def __call__(self, weight: torch.Tensor, format: Format) -> QuantizedWeight:
        """Return `format.quantize(weight)`, bit by bit."""


class Pack(Protocol):
    """A backend's layout of matrices for its products."""

    def __call__(self, weight: Weight, dtype: torch.dtype, out: torch.Tensor | None = None) -> CompactWeight:
        """Lay out a matrix for products with activations of `dtype`, in `out` if given: `num_bytes` of uint8."""

    def packed(self, shape: torch.Size, format: Format | None, out: torch.Tensor) -> CompactWeight:
        """Return the matrix that a call has laid out in `out`."""

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype, format: Format | None = None) -> int:
        """Return a packed matrix's bytes for activations of `dtype`: in that dtype, or quantized in `format`."""


class FunctionSet:
    """Functions that a device's forms of layers call: the public attributes of a subclass."""


@dataclass(frozen=True)
class Operators:
    """One implementation of each operator. All take the arguments and return the results of the plain definitions,
    which are the defaults.

    `select_operators` makes a set for a runtime; the model computes with it after `model.bind`.

    mamba_prefill, mamba_decode: for steps of several tokens, and of one. Both use one state layout.
    mamba_quadratic: replaces mamba_prefill if one decay matrix over all tokens is asked for.
    round_state: rounds a float32 SSM state to the 16-bit dtype that it is kept in, see `ops.stochastic_round`.
    fused_layers: functions that make kernels of whole layers; None if a layer's parts are computed one by one.
    stack_form: then the class of the layers as one call, which calls them, a `model.stack.LayersAsOne`.
    input_first_experts: whether fused_experts takes w1 and w2 with their last two axes exchanged; `bind` lays them out.
    input_first: whether linear, mlp, router_logits and logits take their matrices so, too.
    draw: draws tokens on a device, with the arguments of `devices.graphs.topk.drawn`; None if the host does.
    choose: chooses tokens on a device by all options, with the arguments of `devices.cuda.sampling.choose_tokens`, in
        place of draw; or None.
    token_operators: fuse products with their neighbours, in decode and verification of few sequences; None if these
        use the same operators as other steps.
    one_row_operators: of the same class, faster for decode of one sequence, where they add up in another order; None if
        it uses the same operators as several sequences.
    many_rows_operators: of the same class, for decode of more sequences; None if token_operators are for any number.
    decode_logits: takes the place of logits in decode; or None.
    layer_form: then the form of layers that calls these, a `model.decoder_layer.DecoderLayer` with `why_not`.
    mixer_form: the form of Mamba layers that calls the fused mixers, a `model.mamba2.Mamba2`; or None.
    launch_parameters: how Mamba layers divide a step on a CPU; graphs and NKI kernels have their own constants.
    quantize: quantizes matrices when weights are loaded.
    pack: lays out matrices for linear, mlp, fused_experts, router_logits, logits and embedding, which then take only
        packed ones; None if they take tensors.
    fallbacks: a sentence for each faster implementation that is not used, with the reason.
    """

    linear: Operator = linear
    rms_norm: Operator = rms_norm
    rms_norm_gated: Operator = rms_norm_gated
    residual_add: Operator = residual_add
    silu_and_mul: Operator = silu_and_mul
    mlp: Operator = mlp
    router_logits: Operator = router_logits
    topk_softmax: Callable[..., tuple[torch.Tensor, torch.Tensor]] = topk_softmax
    topk_sigmoid: Callable[..., tuple[torch.Tensor, torch.Tensor]] = topk_sigmoid
    fused_experts: Operator = fused_experts
    input_first_experts: bool = False
    input_first: bool = False
    write_cache: Callable[..., None] = write_cache
    draw: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    choose: Operator | None = None
    cached_attention: Operator = cached_attention
    embedding: Operator = embedding
    logits: Operator = logits
    mamba_prefill: MambaOperators = CHUNKED
    mamba_quadratic: MambaOperators = QUADRATIC
    mamba_decode: MambaOperators = SINGLE_TOKEN
    round_state: Operator = stochastic_round
    fused_layers: FunctionSet | None = None
    stack_form: type | None = None
    token_operators: FunctionSet | None = None
    one_row_operators: FunctionSet | None = None
    many_rows_operators: FunctionSet | None = None
    decode_logits: Operator | None = None
    layer_form: type | None = None
    mixer_form: type | None = None
    launch_parameters: LaunchParameters = HEURISTIC
    quantize: Quantize = quantize
    pack: Pack | None = None
    fallbacks: tuple[str, ...] = ()


TORCH = Operators()


def recording(operators: Operators, record: Callable[[str], None]) -> Operators:
    """Return operators that call `record` with their names, such as "ops.norm.rms_norm", whenever they run; in a graph
    of torch.compile, when it is traced. For fused layers, the functions that make them call `record`.
    """
    recorded: dict[str, Any] = {}
    for field in fields(operators):
        operator = getattr(operators, field.name)
        if isinstance(operator, MambaOperators):
            recorded[field.name] = _recording_mamba(operator, record)
        elif isinstance(operator, FunctionSet):
            recorded[field.name] = _recording_set(operator, record)
        elif callable(operator) and not isinstance(operator, type) and field.name not in ("quantize", "pack"):
            recorded[field.name] = _recording(operator, _name(operator), record)
    return replace(operators, **recorded)


def _recording_set(functions: FunctionSet, record: Callable[[str], None]) -> FunctionSet:
    recorded = copy.copy(functions)
    for name in dir(functions):
        function = getattr(functions, name)
        if callable(function) and not name.startswith("_"):
            setattr(recorded, name, _recording(function, _name(function), record))
    return recorded


def _recording_mamba(mamba: MambaOperators, record: Callable[[str], None]) -> MambaOperators:
    mixer = mamba.fused_mixer
    return replace(
        mamba,
        scan=_recording(mamba.scan, _name(mamba.scan), record),
        convolve=_recording(mamba.convolve, _name(mamba.convolve), record),
        fused_mixer=mixer and replace(mixer, mix=_recording(mixer.mix, _name(mixer.mix), record)),
    )


def _recording(function: Callable[..., Any], name: str, record: Callable[[str], None]) -> Callable[..., Any]:
    name = name.removeprefix("granite4_neuron.")

    # torch.compile calls this while it traces a graph, and takes the result as a constant.
    @torch.compiler.assume_constant_result
    def call_record() -> None:
        record(name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        call_record()
        return function(*arguments, **options)

    return recorded


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
