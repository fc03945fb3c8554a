"""What neuronx-cc, the compiler for Trainium, is known to reject or to handle badly, found in a traced graph.

Source: the error codes and limits in the Neuron SDK's documentation up to release 2.32, and what other ports report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_RANK = 4

_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<result>\(.*?\)|\S+) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b(?P<dtype>pred|bf16|[a-z]\d\w*)\[(?P<dimensions>[\d,]*)\]")
_FORBIDDEN = {
    "infeed": "talks to the host inside a graph",
    "outfeed": "talks to the host inside a graph",
    "send": "talks to the host inside a graph",
    "recv": "talks to the host inside a graph",
    "while": "is a loop on the device; a scan is written as matrix products over chunks",
    "convolution": "is a convolution; a depthwise one is written as shifted multiply-adds",
}
_WIDE_DTYPES = ("f64", "c128")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO text. `operands` are names; `attributes` is all that follows them; `parameter` is a number."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    attributes: str
    parameter: int | None


def instructions(hlo_text: str) -> dict[str, Instruction]:
    """The instructions of all computations of a module in HLO text, by name (names are unique in a module)."""
    found = {}
    for line in hlo_text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            operands, _, attributes = match["rest"].partition(")")
            shapes = tuple(
                (shape["dtype"], tuple(int(size) for size in shape["dimensions"].split(",") if size))
                for shape in _SHAPE.finditer(match["result"])
            )
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            number = int(operands) if match["opcode"] == "parameter" else None
            found[match["name"]] = Instruction(match["name"], match["opcode"], shapes, names, attributes, number)
    return found


def findings(hlo_text: str) -> list[str]:
    """One sentence for each instruction that breaks a rule; empty for a graph that breaks none.

    The rules: no tensor of rank above 4; no 64-bit floating point; nothing that talks to the host; no loop; no
    convolution; a gather picks whole rows of its first axis (a slot, an expert, a token's embedding) and never places
    in a sequence; no gather or scatter at places that are known when the graph is made, where a slice would do. A
    scatter at places that depend on data is how a cache is written, and is let through. A loop over tokens that was
    unrolled while tracing cannot be told from other instructions: count them for two lengths.

    Args:
        hlo_text: a module before optimisation, as XLA prints it.
    """
    module = instructions(hlo_text)
    return [f"{instruction.name} {fault}." for instruction in module.values() for fault in _faults(instruction, module)]


def _faults(instruction: Instruction, module: dict[str, Instruction]) -> Iterator[str]:
    for dtype, dimensions in instruction.shapes:
        if len(dimensions) > MAX_RANK:
            yield f"({instruction.opcode}) has rank {len(dimensions)}, above {MAX_RANK}"
        if dtype in _WIDE_DTYPES and dimensions:  # a scalar is a Python number, folded by every compiler
            yield f"({instruction.opcode}) is {dtype}"
    if instruction.opcode in _FORBIDDEN:
        yield _FORBIDDEN[instruction.opcode]
    if instruction.opcode == "custom-call" and "host" in instruction.attributes.lower():
        yield _FORBIDDEN["send"]
    if instruction.opcode in ("gather", "scatter") and not _depends_on_input(instruction.operands[1], module):
        yield f"is a {instruction.opcode} at places that do not depend on any input, where a slice would do"
    elif instruction.opcode == "gather" and not _picks_rows(instruction, module):
        yield "is a gather at places in a sequence that depend on data"


def _depends_on_input(name: str, module: dict[str, Instruction]) -> bool:
    pending, seen = [name], set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            if module[name].opcode == "parameter" and module[name].shapes[0][1]:  # a scalar is a constant of the model
                return True
            pending.extend(module[name].operands)
    return False


def _picks_rows(gather: Instruction, module: dict[str, Instruction]) -> bool:
    """Whether it takes whole entries of the operand's first axis."""
    indexed = re.search(r"start_index_map=\{([\d,]*)\}", gather.attributes)[1]
    sizes = re.search(r"slice_sizes=\{([\d,]*)\}", gather.attributes)[1].split(",")
    operand = module[gather.operands[0]].shapes[0][1]
    return indexed == "0" and [int(size) for size in sizes[1:]] == list(operand[1:])
