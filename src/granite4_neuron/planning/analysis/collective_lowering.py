"""Lowers functional collectives of a graph to StableHLO: torch-mlir imports them, but has no lowering for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_mlir import ir

_PREFIX = "torch._c10d_functional."
_TENSOR = re.compile(r"!torch\.vtensor<\[([\d,]*)\],(\w+)>")
# A pass with the dialects of the new operations.
_WITH_DIALECTS = "builtin.module(func.func(convert-torch-to-stablehlo))"


def lower_collectives(module: ir.Module, tp_degree: int) -> None:
    """Replace the functional collectives of an imported module in place; other operators stay unchanged.

    Args:
        tp_degree: number of ranks; each collective is among all of them.

    Raises:
        NotImplementedError: it has another collective than a sum over the ranks (all_reduce), a concatenation of the
            ranks' tensors (all_gather_into_tensor), and the wait for them.
    """
    from torch_mlir import ir
    from torch_mlir.passmanager import PassManager

    with module.context, ir.Location.unknown():
        PassManager.parse(_WITH_DIALECTS).run(ir.Module.create().operation)
        function = module.body.operations[0]
        for operator in list(function.regions[0].blocks[0].operations):
            if operator.operation.name != "torch.operator":
                continue
            name = operator.attributes["name"].value
            if name.startswith(_PREFIX):
                with ir.InsertionPoint(operator):
                    value = _lowered(name.removeprefix(_PREFIX), operator, tp_degree)
                operator.results[0].replace_all_uses_with(value)
                operator.operation.erase()


def _lowered(name: str, operator: ir.OpView, tp_degree: int) -> ir.Value:
    """Return the value that replaces a collective's result."""
    from torch_mlir import ir

    if name == "wait_tensor":
        return operator.operands[0]
    ranks = ", ".join(map(str, range(tp_degree)))
    attributes = {"replica_groups": ir.Attribute.parse(f"dense<[[{ranks}]]> : tensor<1x{tp_degree}xi64>")}
    value, result = operator.operands[0], operator.results[0]
    part = ir.Operation.create("torch_c.to_builtin_tensor", [_builtin(value.type)], [value]).result
    if name == "all_reduce":
        reduction = operator.operands[1].owner.attributes["value"].value
        if reduction != "sum":
            raise NotImplementedError(f"all_reduce of the kind {reduction} has no lowering")
        collective = ir.Operation.create("stablehlo.all_reduce", [part.type], [part], attributes, regions=1)
        _add_sum(collective.regions[0], part.type.element_type)
    elif name == "all_gather_into_tensor":
        attributes["all_gather_dim"] = ir.Attribute.parse("0 : i64")
        collective = ir.Operation.create("stablehlo.all_gather", [_builtin(result.type)], [part], attributes)
    else:
        raise NotImplementedError(f"the collective {name} has no lowering")
    return ir.Operation.create("torch_c.from_builtin_tensor", [result.type], [collective.result]).result


def _add_sum(region: ir.Region, dtype: ir.Type) -> None:
    """Give an all-reduce its function, the sum of two scalars."""
    from torch_mlir import ir

    scalar = ir.RankedTensorType.get([], dtype)
    with ir.InsertionPoint(ir.Block.create_at_start(region, [scalar, scalar])):
        total = ir.Operation.create("stablehlo.add", [scalar], list(region.blocks[0].arguments)).result
        ir.Operation.create("stablehlo.return", [], [total])


def _builtin(type: ir.Type) -> ir.Type:
    """Return MLIR's builtin type for a tensor type of torch-mlir."""
    from torch_mlir import ir

    match = _TENSOR.fullmatch(str(type))
    assert match is not None, f"{type} has no fixed shape and dtype"
    sizes = [int(size) for size in match[1].split(",") if size]
    return ir.RankedTensorType.get(sizes, ir.Type.parse(match[2]))
