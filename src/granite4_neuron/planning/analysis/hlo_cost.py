"""Graphs traced by torch_xla over placeholders, and XLA's counts of them. Nothing runs, and no memory is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

from granite4_neuron.devices.neuron.sdk import WITHOUT_TORCH_XLA
from granite4_neuron.errors import UserError
from granite4_neuron.planning.analysis import hlo_lint
from granite4_neuron.planning.analysis.fused_bytes import fused_bytes
from granite4_neuron.planning.analysis.kernel_costs import kernel_cost, kernel_name, size_of

if TYPE_CHECKING:
    from jaxlib import _hlo


class ToolsMissing(UserError):
    """torch_xla or jax, which trace and count graphs, is not installed."""


@dataclass(frozen=True)
class Cost:
    """Cost by XLA's analysis of a graph before optimisation: every operand and result of every instruction counts.

    fused_bytes: see the module of this name. A kernel, which is a custom call, counts as `kernel_costs` says.
    collectives, collective_bytes: their number, and the bytes that this rank sends through them.

    Costs add up like their graphs.
    """

    flops: float = 0.0
    bytes_accessed: float = 0.0
    instructions: int = 0
    fused_bytes: float = 0.0
    collectives: int = 0
    collective_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(each * times for each in astuple(self)))

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1


def tracer() -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """Return a function that makes placeholders: tensors of a shape and dtype without memory, to trace graphs from.

    Raises:
        ToolsMissing: torch_xla is not installed.
    """
    try:
        import torch_xla
        from torch_xla.core.xla_builder import create_placeholder_tensor
    except ImportError:
        raise ToolsMissing(WITHOUT_TORCH_XLA) from None
    torch_xla.device()  # starts the client that placeholders need
    return create_placeholder_tensor


def hlo_proto(outputs: Sequence[torch.Tensor]) -> bytes:
    """Return the traced graph that computes these tensors, as a serialised HLO module, before any optimisation."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo_proto(list(outputs))


def parameter_numbers(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Return the parameter number of each of `inputs` in the graph of `outputs`.

    They are read from the graph that also returns the inputs. It has the same numbers, because parameters are numbered
    in the order in which the outputs, one after another, need them.
    """
    import torch_xla

    module = hlo_lint.instructions(torch_xla._XLAC._get_xla_tensors_hlo([*outputs, *inputs]))
    root = next(instruction for instruction in reversed(module.values()) if instruction.opcode == "tuple")
    return [module[name].parameter_number for name in root.operands[len(outputs) :]]


def hlo_text(proto: bytes) -> str:
    """Return a serialised HLO module as XLA prints it; raise ToolsMissing if jax is not installed."""
    return _module(proto).to_string()


def count(proto: bytes, states: Collection[int] | None = None) -> Cost:
    """Count the cost of a serialised HLO module; `states` as `hlo_lint.findings` takes it.

    A reshape moves nothing. XLA counts it as a copy, which is subtracted here.

    Raises:
        ToolsMissing: jax is not installed.
    """
    module = _module(proto)
    import jax
    from jaxlib import _jax

    properties = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    instructions = hlo_lint.instructions(module.to_string())
    root = next(reversed(instructions.values()))
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    moved = fused_bytes(instructions, outputs, states)
    cost = Cost(properties.get("flops", 0.0), properties.get("bytes accessed", 0.0), len(instructions), moved)
    reshapes = [each for each in instructions.values() if each.opcode == "reshape"]
    cost -= Cost(bytes_accessed=2.0 * sum(size_of(reshape.shapes[0]) for reshape in reshapes))
    for each in instructions.values():
        if each.opcode in hlo_lint.COLLECTIVES:
            given = sum(size_of(shape) for operand in each.operands for shape in instructions[operand].shapes)
            cost += Cost(collectives=1, collective_bytes=float(given))
    for call in (each for each in instructions.values() if each.opcode == "custom-call"):
        operands = [shape for operand in call.operands for shape in instructions[operand].shapes]
        cost += Cost(*kernel_cost(kernel_name(call), operands, call.shapes))
    return cost


def temporary_bytes(proto: bytes, donated: Mapping[int, int] = {}) -> int:
    """Return the peak memory that a serialised HLO module, compiled for the CPU, needs besides its inputs and outputs.

    The CPU's compiler makes float32 copies of weights in bfloat16. Memory inside kernels is not counted.

    Args:
        donated: for each parameter whose memory an output takes, its number and the output's number.

    Raises:
        ToolsMissing: jax is not installed.
    """
    _module(proto)
    import jax
    from jaxlib import _hlo, _jax

    device = jax.devices("cpu")[0]
    mlir = _without_kernels(_jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto)))
    executable = device.client.compile_and_load(_with_donation(mlir, donated), _jax.DeviceList((device,)))
    return executable.get_compiled_memory_stats().temp_size_in_bytes


def _module(proto: bytes) -> _hlo.HloModule:
    try:
        from jaxlib import _hlo
    except ImportError:
        raise ToolsMissing("graphs are counted by jax, which is not installed.") from None
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto)


def _without_kernels(mlir: str) -> str:
    """Replace kernels' results by any values, because the CPU's compiler does not know the kernels."""
    lines = []
    for line in mlir.splitlines():
        call = re.match(r"\s*(%\w+) = stablehlo\.custom_call .* -> (tuple<(.*)>|tensor<[^>]*>)", line)
        if call is None:
            lines.append(line)
        elif call[3] is None:
            lines.append(f"{call[1]} = stablehlo.iota dim = 0 : {call[2]}")
        else:
            types = re.findall(r"tensor<[^>]*>", call[3])
            parts = [f"%kernel{call[1][1:]}_{index}" for index in range(len(types))]
            lines += [f"{part} = stablehlo.iota dim = 0 : {type}" for part, type in zip(parts, types, strict=True)]
            lines.append(f"{call[1]} = stablehlo.tuple {', '.join(parts)} : {call[2]}")
    return "\n".join(lines)


def _with_donation(mlir: str, donated: Mapping[int, int]) -> str:
    main = mlir.index("@main(")
    for parameter, output in donated.items():
        argument = re.compile(rf"(%arg{parameter}: tensor<[^>]*>)")
        mlir = mlir[:main] + argument.sub(rf"\1 {{tf.aliasing_output = {output} : i32}}", mlir[main:], count=1)
    return mlir
