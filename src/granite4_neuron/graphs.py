"""What the compiled graphs of a model cost, from the graphs themselves: nothing is run and no weight is allocated.

Graphs are traced by torch_xla over placeholders, counted by XLA's cost analysis as they are before any optimisation,
and compiled for the CPU to learn how much temporary memory they need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from granite4_neuron import hlo_lint
from granite4_neuron.checkpoint import set_parameter
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.layers.parallel import Parallel
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops.xla import XLA
from granite4_neuron.state import HybridState


class ToolsMissing(UserError):
    """torch_xla or jax, with which graphs are traced and counted, is not installed."""


@dataclass(frozen=True)
class GraphReport:
    """One graph of one rank; sizes in bytes.

    flops, bytes_accessed and instructions are of the graph before optimisation: every operand and result of every
    instruction counts as accessed. temporary_bytes is the peak of the CPU's compiled module, beside weights and state,
    which is donated there too.
    """

    graph: str
    weight_bytes: int
    state_bytes: int  # donated: the new state takes its memory
    flops: float
    bytes_accessed: float
    instructions: int
    temporary_bytes: int
    findings: tuple[str, ...]  # of hlo_lint


def report(
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    tp_degree: int,
    batch_size: int,
    buckets: Sequence[int],
    max_length: int,
) -> Iterator[GraphReport]:
    """The graphs of `runtime.xla.XLARuntime`: prefill of one sequence for each bucket, and decode of the whole batch.

    Args:
        config, dtype: the model.
        tp_degree: ranks; the graphs are those of one of them, without what the ranks say to each other.
        batch_size: sequences in the state, all of which the decode graph takes, in the order of their slots.
        buckets: tokens of the prefill graphs.
        max_length: of the cache, and what attention visits.

    Raises:
        ToolsMissing: torch_xla or jax is not installed.
        UserError: tp_degree does not divide the model.
    """
    for tokens in buckets:
        yield _graph(f"prefill {tokens}", config, dtype, tp_degree, batch_size, tokens, max_length)
    yield _graph(f"decode, batch {batch_size}", config, dtype, tp_degree, batch_size, None, max_length)


def _graph(
    name: str,
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    tp_degree: int,
    num_sequences: int,
    bucket: int | None,
    max_length: int,
) -> GraphReport:
    """Prefill of `bucket` tokens, or decode where it is None."""
    placeholder = tracer()
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config, Parallel(0, tp_degree)).bind(XLA)
        state = HybridState.allocate(config, num_sequences, max_length, dtype, "meta", tp_degree, has_null_slot=False)
    weights = dict(model.named_parameters())
    for weight_name, weight in weights.items():
        set_parameter(model, weight_name, placeholder(tuple(weight.shape), dtype))
    model.tie_weights()
    for layer in state.layers:
        for field, tensor in vars(layer).items():
            setattr(layer, field, placeholder(tuple(tensor.shape), tensor.dtype))
    rows, tokens = (num_sequences, 1) if bucket is None else (1, bucket)
    shapes = ((rows, tokens), (rows, tokens), (rows,), (rows,))
    *inputs, slots = (placeholder(shape, torch.int64) for shape in shapes)
    before = [tensor.clone() for tensor in state.tensors()]
    with torch.no_grad():
        logits = model(*inputs, None if bucket is None else slots, state, kv_length=max_length)
    aliases = state.input_output_aliases(first=1)
    outputs = [logits, *aliases]
    donated = dict(zip(_parameters(outputs, before), aliases.values(), strict=True))
    flops, accessed, temporary, text = analyse(hlo_proto(outputs), donated)
    return GraphReport(
        name,
        weight_bytes=sum(weight.numel() for weight in weights.values()) * dtype.itemsize,
        state_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.tensors()),
        flops=flops,
        bytes_accessed=accessed,
        instructions=len(hlo_lint.instructions(text)),
        temporary_bytes=temporary,
        findings=tuple(hlo_lint.findings(text)),
    )


def tracer() -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """What makes placeholders: tensors of a shape and dtype to trace graphs from, without memory of their own.

    Raises:
        ToolsMissing: torch_xla is not installed.
    """
    try:
        import torch_xla
        from torch_xla.core.xla_builder import create_placeholder_tensor
    except ImportError:
        raise ToolsMissing("graphs are traced by torch_xla, which is not installed.") from None
    torch_xla.device()  # starts the client, which placeholders need
    return create_placeholder_tensor


def hlo_proto(outputs: Sequence[torch.Tensor]) -> bytes:
    """The traced graph that computes these tensors, as a serialised HLO module, before any optimisation."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo_proto(list(outputs))


def analyse(proto: bytes, donated: Mapping[int, int] = {}) -> tuple[float, float, int, str]:
    """Of a serialised HLO module: FLOPs, bytes accessed, bytes of temporaries once compiled for the CPU, and its text.

    Args:
        donated: the number of each parameter whose memory an output takes, and that of the output.

    Raises:
        ToolsMissing: jax is not installed.
    """
    try:
        import jax
        from jaxlib import _hlo, _jax
    except ImportError:
        raise ToolsMissing("graphs are counted by jax, which is not installed.") from None
    module = _hlo.HloModule.from_serialized_hlo_module_proto(proto)
    device = jax.devices("cpu")[0]
    cost = _jax.hlo_module_cost_analysis(device.client, module)
    mlir = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    executable = device.client.compile_and_load(_with_donation(mlir, donated), _jax.DeviceList((device,)))
    temporary = executable.get_compiled_memory_stats().temp_size_in_bytes
    return cost["flops"], cost["bytes accessed"], temporary, module.to_string()


def _with_donation(mlir: str, donated: Mapping[int, int]) -> str:
    main = mlir.index("@main(")
    for parameter, output in donated.items():
        argument = re.compile(rf"(%arg{parameter}: tensor<[^>]*>)")
        mlir = mlir[:main] + argument.sub(rf"\1 {{tf.aliasing_output = {output} : i32}}", mlir[main:], count=1)
    return mlir


def _parameters(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """The number of the parameter that each of `inputs` is in the graph of `outputs`.

    Read off the graph that returns the inputs as well, which has the same numbers: parameters are numbered as the
    outputs, one after another, need them.
    """
    import torch_xla

    module = hlo_lint.instructions(torch_xla._XLAC._get_xla_tensors_hlo([*outputs, *inputs]))
    root = next(instruction for instruction in reversed(module.values()) if instruction.opcode == "tuple")
    return [module[name].parameter for name in root.operands[len(outputs) :]]
