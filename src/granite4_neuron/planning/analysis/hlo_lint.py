"""Finds operations in a traced graph that neuronx-cc, Trainium's compiler, is reported to reject or to handle badly.

Source: the error codes and limits in the Neuron SDK's documentation up to release 2.32, and reports of other ports.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

MAX_RANK = 4

_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<result>\(.*?\)|\S+) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b(?P<dtype>pred|bf16|[a-z]\d\w*)\[(?P<dimensions>[\d,<=]*)\]")
_FORBIDDEN = {
    "infeed": "talks to the host inside a graph",
    "outfeed": "talks to the host inside a graph",
    "send": "talks to the host inside a graph",
    "recv": "talks to the host inside a graph",
    "while": "is a loop on the device; a scan is written as matrix products over chunks",
    "convolution": "is a convolution; a depthwise one is written as shifted multiply-adds",
    "reduce-window": "is a running sum; it is written as a product with a triangle",
    "sort": "is a sort; the largest values are found by comparison",
    "topk": "is a sort; the largest values are found by comparison",
    **dict.fromkeys(
        ("reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"),
        "is a collective other than a sum over the ranks, or their parts side by side",
    ),
}
COLLECTIVES = ("all-reduce", "all-gather")
_WIDE_DTYPES = ("f64", "c128")
# torch_xla compares integers with a constant in 64 bits, and reads an embedding's ids through 64 bits.
_WIDENED = ("parameter", "constant", "convert", "broadcast", "reshape", "compare")
_MAX_PRODUCT_RANK = 3


@dataclass(frozen=True)
class Instruction:
    """One line of HLO text.

    operands: names. attributes: the text after them. parameter: its number, if it is a parameter. is_dynamic: whether a
    dimension is known only while the graph runs; `shapes` then has its bound.
    """

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    attributes: str
    parameter: int | None
    is_dynamic: bool = False

    @property
    def parameter_number(self) -> int:
        """The number of an instruction that is a parameter."""
        assert self.parameter is not None, f"{self.name} is no parameter"
        return self.parameter


def instructions(hlo_text: str) -> dict[str, Instruction]:
    """Return the instructions of all computations of a module in HLO text, by name (names are unique in a module)."""
    found = {}
    for line in hlo_text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            operands, attributes = _split_at_end(match["rest"])
            shapes = tuple(
                (shape["dtype"], tuple(int(size) for size in re.findall(r"\d+", shape["dimensions"])))
                for shape in _SHAPE.finditer(match["result"])
            )
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            number = int(operands) if match["opcode"] == "parameter" else None
            is_dynamic = "<=" in match["result"]
            found[match["name"]] = Instruction(
                match["name"], match["opcode"], shapes, names, attributes, number, is_dynamic
            )
    return found


def collectives(module: Mapping[str, Instruction]) -> Counter[tuple[str, str]]:
    """Return how many collectives of each kind a module has, by their opcode in `COLLECTIVES` and their dtype."""
    found = (each for each in module.values() if each.opcode in COLLECTIVES)
    return Counter((each.opcode, each.shapes[0][0]) for each in found)


def findings_of_layer(kind: str, found: Counter[tuple[str, str]], needed: int) -> list[str]:
    """Return one sentence for each rule that the collectives of a layer break.

    There must be no more than needed, one for a mixer, and one for MLP and experts together. They must be in float32 or
    bfloat16.
    """
    sentences = []
    if found.total() > needed:
        sentences.append(f"{kind} layers have {found.total()} collectives each, and need {needed}.")
    for opcode, dtype in found:
        if dtype not in ("f32", "bf16"):
            sentences.append(f"{kind} layers have a collective ({opcode}) in {dtype}.")
    return sentences


def _split_at_end(rest: str) -> tuple[str, str]:
    """Return the text before and after the parenthesis that ends an instruction's operands."""
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def transposed_weights(module: Mapping[str, Instruction], states: Collection[int]) -> list[str]:
    """Return the names of the transposes whose results are operands of products and whose operands are parameters, but
    for a reshape or a change of dtype.

    Args:
        module: the instructions, each after its operands.
        states: numbers of the parameters that are state, which may be transposed.
    """
    unchanged = ("reshape", "convert", "copy")
    # For each value that is a parameter in another layout: the transpose that made it so, or None.
    made: dict[str, str | None] = {}
    found: dict[str, None] = {}
    for name, each in module.items():
        if each.opcode == "parameter":
            if each.parameter_number not in states:
                made[name] = None
        elif each.opcode in (*unchanged, "transpose") and each.operands[0] in made:
            made[name] = name if each.opcode == "transpose" else made[each.operands[0]]
        elif each.opcode == "dot":
            found |= {transpose: None for operand in each.operands if (transpose := made.get(operand)) is not None}
    return list(found)


def findings(
    hlo_text: str, widens_places: bool = False, num_experts: int = 0, states: Collection[int] | None = None
) -> list[str]:
    """Return one sentence for each instruction that breaks a rule; empty for a graph that breaks none.

    The rules are:

    * no tensor of rank above 4, no operand of a product of rank above 3, and no shape known only while the graph runs;
    * no 64-bit floats; no arithmetic on 64-bit integers and no 64-bit indices, except those that torch_xla adds to a
      comparison;
    * no transfer to or from the host, loop, convolution, sort, or running sum (cumsum is traced as reduce-window);
    * no collective except all-reduce and all-gather;
    * a gather picks whole rows of its first axes (a slot, an expert, a token's embedding), never places in a sequence;
    * no gather or scatter at places known when the graph is made, because a slice would do;
    * with `num_experts`, no gather of experts' weights at places that depend on data;
    * with `states`, no transpose of a weight, and no scatter of single elements.

    Another scatter at places that depend on data is allowed, because it writes a cache. A loop over tokens that was
    unrolled while tracing cannot be told from other instructions: count instructions for two lengths.

    Args:
        hlo_text: a module before optimisation, as XLA prints it.
        widens_places: whether the tool that made the module widens indices to 64 bits itself, as torch-mlir does. Then
            64-bit integers break no rule.
        num_experts: the number of experts if a step of decode must not fetch experts' weights by index; 0 to allow it,
            for one or two tokens. Other ports report that it is slow on Trainium2 for more.
        states: the numbers of the parameters that are state, for a graph of TorchNeuron. No pass of its stores a weight
            in another layout, so a graph would transpose it in each launch. Its scatters are reported to be slow. None
            for a graph of another tool.
    """
    module = instructions(hlo_text)
    rules = [_faults_of_shapes, _faults_of_operation, _faults_of_places]
    rules += [] if widens_places else [_faults_of_integers]
    faults = [(each.name, fault) for each in module.values() for rule in rules for fault in rule(each, module)]
    gathers = [each for each in module.values() if num_experts and _fetches_experts(each, module, num_experts)]
    faults += [(each.name, "is a gather of experts' weights at places that depend on data") for each in gathers]
    if states is not None:
        faults += [(name, "is a transpose of a weight") for name in transposed_weights(module, states)]
        faults += [(each.name, "is a scatter of single elements") for each in module.values() if _scatters_one(each)]
    return [f"{name} {fault}." for name, fault in faults]


def _faults_of_shapes(instruction: Instruction, module: dict[str, Instruction]) -> Iterator[str]:
    for dtype, dimensions in instruction.shapes:
        if len(dimensions) > MAX_RANK:
            yield f"({instruction.opcode}) has rank {len(dimensions)}, above {MAX_RANK}"
        if dtype in _WIDE_DTYPES and dimensions:  # a scalar is a Python number, which every compiler folds
            yield f"({instruction.opcode}) is {dtype}"
    if instruction.opcode == "dot":
        rank = max(len(module[name].shapes[0][1]) for name in instruction.operands)
        if rank > _MAX_PRODUCT_RANK:
            yield f"is a product of rank {rank}, above {_MAX_PRODUCT_RANK}"
    if instruction.is_dynamic:
        yield f"({instruction.opcode}) has a shape that is known only while the graph runs"


def _faults_of_operation(instruction: Instruction, module: dict[str, Instruction]) -> Iterator[str]:
    if instruction.opcode in _FORBIDDEN:
        yield _FORBIDDEN[instruction.opcode]
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        name = target[1].lower() if target else ""
        if "host" in name:
            yield _FORBIDDEN["send"]
        if "topk" in name or "sort" in name:
            yield _FORBIDDEN["topk"]


def _faults_of_places(instruction: Instruction, module: dict[str, Instruction]) -> Iterator[str]:
    if instruction.opcode in ("gather", "scatter") and not _depends_on_input(instruction.operands[1], module):
        yield f"is a {instruction.opcode} at places that do not depend on any input, where a slice would do"
    elif instruction.opcode == "gather" and not _picks_rows(instruction, module):
        yield "is a gather at places in a sequence that depend on data"


def _faults_of_integers(instruction: Instruction, module: dict[str, Instruction]) -> Iterator[str]:
    is_wide = any(dtype in ("s64", "u64") and dimensions for dtype, dimensions in instruction.shapes)
    if is_wide and instruction.opcode not in _WIDENED:
        yield f"({instruction.opcode}) is arithmetic on integers of 64 bits"
    if instruction.opcode in ("gather", "scatter") and module[instruction.operands[1]].shapes[0][0] == "s64":
        yield f"is a {instruction.opcode} at places in 64 bits"


def _scatters_one(instruction: Instruction) -> bool:
    """Return whether an instruction is a scatter with an index for each element."""
    return instruction.opcode == "scatter" and "update_window_dims={}" in instruction.attributes


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


def _fetches_experts(instruction: Instruction, module: dict[str, Instruction], num_experts: int) -> bool:
    """Return whether a gather picks whole matrices from a stack with one matrix for each expert."""
    if instruction.opcode != "gather" or not _picks_rows(instruction, module):
        return False
    operand, moved = module[instruction.operands[0]].shapes[0][1], instruction.shapes[0][1]
    return len(operand) == 3 and operand[0] == num_experts and moved[-2:] == operand[1:]


def _picks_rows(gather: Instruction, module: dict[str, Instruction]) -> bool:
    """Return whether a gather takes whole entries of the operand's first axis, or of its first axes together."""
    indexed, sizes = (
        [int(number) for number in re.findall(rf"{name}=\{{([\d,]*)\}}", gather.attributes)[0].split(",")]
        for name in ("start_index_map", "slice_sizes")
    )
    operand, axes = module[gather.operands[0]].shapes[0][1], len(indexed)
    return indexed == list(range(axes)) and axes < len(operand) and sizes == [1] * axes + list(operand[axes:])
