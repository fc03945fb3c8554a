"""The bytes of a traced graph if element-wise work moved nothing: the optimistic extreme.

XLA's count before optimisation, the other extreme, moves every operand and result of every instruction. Here a value is
moved only if it must be in memory:

* inputs, and the results of products, sums over an axis, gathers, scatters, collectives, kernels and copies;
* operands of a product, a gather, a scatter, a collective or a kernel, unless they are inputs in another layout or
  dtype;
* an element-wise result from which several such values are computed; and the graph's outputs;

* a weight that is transposed for a product, if the device keeps weights as the graph takes them.

Such a value is written once, and read once for each such value that is computed from it. Constants, and values that
depend only on constants, are not moved. A compiler may do better or worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from math import prod

from granite4_neuron.planning.analysis.hlo_lint import Instruction, transposed_weights
from granite4_neuron.planning.analysis.kernel_costs import kernel_cost, kernel_name, size_of

_LAYOUTS = {"reshape", "broadcast", "convert", "slice", "transpose", "bitcast", "get-tuple-element"}
_CONSTANTS = {"constant", "iota"}
_ELEMENT_WISE = {
    *("abs", "add", "and", "ceil", "clamp", "compare", "cosine", "divide", "exponential", "exponential-minus-one"),
    *("floor", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "power"),
    *("reduce-precision", "remainder", "rsqrt", "select", "sign", "sine", "sqrt", "subtract", "tanh", "xor"),
}
_FREE = _LAYOUTS | _ELEMENT_WISE | _CONSTANTS | {"tuple"}
# Their operands may be computed on the fly and need not be in memory.
_READS_THROUGH = {"reduce", "pad", "concatenate", "copy"}


def fused_bytes(
    entry: dict[str, Instruction], outputs: tuple[str, ...], states: Collection[int] | None = None
) -> float:
    """Return the bytes that a graph moves.

    Args:
        entry: the graph's instructions, each after its operands.
        outputs: their names.
        states: as `hlo_lint.findings` takes it.
    """
    transposed = () if states is None else transposed_weights(entry, states)
    return _Graph(entry, outputs, set(transposed)).moved()


class _Graph:
    def __init__(self, entry: dict[str, Instruction], outputs: tuple[str, ...], transposed: set[str]):
        self._entry = entry
        self._transposed = transposed
        self._outputs = set(outputs)
        self._depends = self._values_of_inputs()
        self._in_memory = self._values_in_memory()

    def moved(self) -> float:
        return sum(self._cost(name) for name in self._in_memory if self._entry[name].opcode != "parameter")

    def _values_of_inputs(self) -> set[str]:
        depends: set[str] = set()
        for name, instruction in self._entry.items():
            # A scalar is a constant of the model.
            is_input = instruction.opcode == "parameter" and instruction.shapes[0][1]
            if is_input or depends.intersection(instruction.operands):
                depends.add(name)
        return depends

    def _values_in_memory(self) -> set[str]:
        in_memory: set[str] = set()
        # For each value that is not in memory: the values computed from it.
        readers: dict[str, set[str]] = defaultdict(set)
        is_taken_whole = set(self._outputs)
        for name, instruction in reversed(self._entry.items()):
            if name not in self._depends:
                continue
            opcode = instruction.opcode
            must_be_in_memory = name in is_taken_whole or len(readers[name]) > 1
            is_moved = opcode not in _FREE or name in self._transposed
            if is_moved or (must_be_in_memory and self._is_computed(name)):
                in_memory.add(name)
            for operand in instruction.operands:
                readers[operand] |= {name} if name in in_memory else readers[name]
                is_passed_on = name in is_taken_whole and name not in in_memory
                if is_passed_on or opcode not in _FREE | _READS_THROUGH:
                    is_taken_whole.add(operand)
        return in_memory

    def _is_computed(self, name: str) -> bool:
        """Return whether the value ends an element-wise computation, so that it is written if any of its values is."""
        if self._entry[name].opcode != "convert":
            return self._entry[name].opcode in _ELEMENT_WISE
        while self._entry[name].opcode in _LAYOUTS:
            name = self._entry[name].operands[0]
        return self._entry[name].opcode in _ELEMENT_WISE

    def _cost(self, name: str) -> float:
        instruction = self._entry[name]
        written = sum(map(size_of, instruction.shapes))
        if instruction.opcode == "custom-call":
            operands = [shape for operand in instruction.operands for shape in self._entry[operand].shapes]
            return kernel_cost(kernel_name(instruction), operands, instruction.shapes)[1]
        if instruction.opcode in ("gather", "dynamic-slice"):
            return 2 * written + self._read(instruction.operands[1:])
        if instruction.opcode == "scatter":
            return 2 * self._read(instruction.operands[2:]) + self._read(instruction.operands[1:2])
        if instruction.opcode == "dynamic-update-slice":
            return 2 * self._read(instruction.operands[1:])
        return written + self._read(instruction.operands)

    def _read(self, operands: tuple[str, ...]) -> float:
        """Return the bytes in memory from which these values are computed. A slice counts only its own part."""
        parts: dict[str, dict[str, float]] = {}
        pending = [(operand, operand, 1.0) for operand in operands]
        seen = set()
        while pending:
            name, taker, share = pending.pop()
            if name not in self._depends or (name, share) in seen:
                continue
            seen.add((name, share))
            instruction = self._entry[name]
            if name in self._in_memory:
                parts.setdefault(name, {})[taker] = share
                continue
            if instruction.opcode == "slice":
                taken, whole = (prod(self._entry[each].shapes[0][1]) for each in (name, instruction.operands[0]))
                taker, share = name, share * taken / max(whole, 1)
            pending += [(operand, taker, share) for operand in instruction.operands]
        return sum(
            min(1.0, sum(shares.values())) * sum(map(size_of, self._entry[name].shapes))
            for name, shares in parts.items()
        )
