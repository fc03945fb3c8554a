"""Graphs in StableHLO: rules that they must keep, and their numbers on the CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from granite4_neuron.planning.analysis import hlo_lint
from granite4_neuron.planning.analysis.hlo_cost import hlo_text
from granite4_neuron.planning.analysis.torch_lowering import hlo_proto_of

# A Python number, which is converted to the tensor's dtype where it is used.
_NUMBER = re.compile(
    r"(%\w+ = stablehlo\.constant dense<[^>]*> : tensor<1xf64>|"
    r"%\w+ = stablehlo\.convert %\w+ : \(tensor<1xf64>\) -> tensor<1x(f32|bf16)>)$"
)


def findings(stablehlo: str, most_indices: int) -> list[str]:
    """Return one sentence for each rule that a module breaks.

    The rules are those of `hlo_lint` and these: no float64 except numbers that are converted at once; no dimension or
    operation that depends on values; a gather or scatter has at most `most_indices` indices, each of a window.
    """
    hlo = hlo_text(hlo_proto_of(stablehlo))
    indices = _index_findings(hlo_lint.instructions(hlo), most_indices)
    return [*text_findings(stablehlo), *hlo_lint.findings(hlo, widens_places=True), *indices]


def text_findings(stablehlo: str) -> list[str]:
    """Return the findings that need the text only."""
    found = []
    for line in map(str.strip, stablehlo.splitlines()):
        if "f64" in line and not _NUMBER.match(line):
            found.append(f"is in float64: {line}")
        if ("stablehlo.dynamic_" in line and "dynamic_slice" not in line) or re.search(r"tensor<[^>]*\?", line):
            found.append(f"depends on values: {line}")
    return found


def _index_findings(module: dict[str, hlo_lint.Instruction], most_indices: int) -> Iterator[str]:
    for instruction in module.values():
        if instruction.opcode == "gather":
            moved, window = instruction.shapes[0][1], _numbers(instruction, "slice_sizes")
        elif instruction.opcode == "scatter":
            moved = module[instruction.operands[2]].shapes[0][1]
            window = [moved[axis] for axis in _numbers(instruction, "update_window_dims")]
        else:
            continue
        count = math.prod(moved) // math.prod(window)
        if count > most_indices:
            operand = module[instruction.operands[0]].shapes[0][1]
            yield f"{instruction.name} of {operand} has {count} indices"


def _numbers(instruction: hlo_lint.Instruction, name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", re.search(rf"{name}=\{{(.*?)\}}", instruction.attributes)[1])]


def execute(stablehlo: str, arguments: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Compile a module for the CPU, with little optimisation, and run it."""
    import jax
    from jaxlib import _jax

    device, options = jax.devices("cpu")[0], _jax.CompileOptions()
    options.executable_build_options.debug_options.xla_backend_optimization_level = 0
    options.executable_build_options.debug_options.xla_llvm_disable_expensive_passes = True
    executable = device.client.compile_and_load(stablehlo, _jax.DeviceList((device,)), options)
    return [np.asarray(result) for result in executable.execute([jax.device_put(each.numpy()) for each in arguments])]
