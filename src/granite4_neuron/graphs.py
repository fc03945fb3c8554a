"""What the compiled graphs of a model cost, from the graphs themselves: nothing is run and no weight is allocated.

Graphs are traced by torch_xla over placeholders, counted by XLA's cost analysis as they are before any optimisation,
and compiled for the CPU to learn how much temporary memory they need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from granite4_neuron import hlo_lint
from granite4_neuron.checkpoint import set_parameter
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.layers.parallel import Parallel
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
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
    """The prefill graph of each bucket, for one sequence, and the decode graph for the whole batch.

    Args:
        config, dtype: the model.
        tp_degree: ranks; the graphs are those of one of them, without what the ranks say to each other.
        batch_size: sequences in the state and rows of the decode graph.
        buckets: tokens of the prefill graphs.
        max_length: of the cache, and what attention visits.

    Raises:
        ToolsMissing: torch_xla or jax is not installed.
        UserError: tp_degree does not divide the model.
    """
    for tokens in buckets:
        yield _graph(f"prefill {tokens}", config, dtype, tp_degree, batch_size, 1, tokens, max_length)
    yield _graph(f"decode, batch {batch_size}", config, dtype, tp_degree, batch_size, batch_size, 1, max_length)


def _graph(
    name: str,
    config: GraniteMoeHybridConfig,
    dtype: torch.dtype,
    tp_degree: int,
    num_sequences: int,
    rows: int,
    tokens: int,
    max_length: int,
) -> GraphReport:
    placeholder = tracer()
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config, parallel=Parallel(0, tp_degree))
        state = HybridState.allocate(config, num_sequences, max_length, dtype, "meta", tp_degree)
    weights = dict(model.named_parameters())
    for weight_name, weight in weights.items():
        set_parameter(model, weight_name, placeholder(tuple(weight.shape), dtype))
    model.tie_weights()
    for layer in state.layers:
        for field, tensor in vars(layer).items():
            setattr(layer, field, placeholder(tuple(tensor.shape), tensor.dtype))
    shapes = ((rows, tokens), (rows, tokens), (rows,), (rows,))
    with torch.no_grad():
        logits = model(*(placeholder(shape, torch.int64) for shape in shapes), state, kv_length=max_length)
    proto = hlo_proto([logits, *state.input_output_aliases(first=1)])
    flops, accessed, temporary, text = analyse(proto)
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


def analyse(proto: bytes) -> tuple[float, float, int, str]:
    """Of a serialised HLO module: FLOPs, bytes accessed, bytes of temporaries once compiled for the CPU, and its text.

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
    text = module.to_string()
    mlir = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    executable = device.client.compile_and_load(_with_donation(mlir, text), _jax.DeviceList((device,)))
    temporary = executable.get_compiled_memory_stats().temp_size_in_bytes
    return cost["flops"], cost["bytes accessed"], temporary, text


def _with_donation(mlir: str, hlo_text: str) -> str:
    """The module with each output that is written over a parameter aliased to it, as the runtime has it."""
    main = mlir.index("@main(")
    for parameter, output in _written_parameters(hlo_text).items():
        argument = re.compile(rf"(%arg{parameter}: tensor<[^>]*>)")
        mlir = mlir[:main] + argument.sub(rf"\1 {{tf.aliasing_output = {output} : i32}}", mlir[main:], count=1)
    return mlir


def _written_parameters(hlo_text: str) -> dict[int, int]:
    """Which output is which parameter with rows scattered into it."""
    module = hlo_lint.instructions(hlo_text)
    root = next(name for name in reversed(module) if module[name].opcode == "tuple")
    written = {}
    for output, name in enumerate(module[root].operands):
        opcodes = set()
        while module[name].opcode in ("scatter", "transpose"):
            opcodes.add(module[name].opcode)
            name = module[name].operands[0]
        if "scatter" in opcodes and module[name].opcode == "parameter":
            written[module[name].parameter] = output
    return written
