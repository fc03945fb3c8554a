"""Finds operators in a graph of ATen that must not reach the compiler for Trainium through torch.compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import fx

from granite4_neuron.planning.analysis.hlo_lint import MAX_RANK
from granite4_neuron.planning.analysis.torch_lowering import written_inputs

_FORBIDDEN = {
    "is a sort": ("sort", "argsort", "msort", "topk", "kthvalue", "median", "unique", "_unique", "_unique2"),
    "is a running sum": ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    "is a product of groups": ("_grouped_mm",),
    # A split has become a strided view here.
    "has strides": ("as_strided", "as_strided_scatter", "as_strided_copy"),
    "is a convolution": ("convolution", "_convolution", "conv1d"),
    # It is lowered as a scatter with an index as large as the values.
    "has an index of each element": ("index_copy",),
}
_REASONS = {name: reason for reason, names in _FORBIDDEN.items() for name in names}
_WIDE_DTYPES = (torch.float64, torch.complex32, torch.complex64, torch.complex128)


def findings(graph: fx.GraphModule, most_indices: int) -> list[str]:
    """Return one sentence for each rule that a graph breaks.

    An input is written at most once, by a `copy_` of its new value, and not used after that. Nothing else is written.
    Some output is not an input. No tensor has a rank above 4, or is float64 or complex. There is no sort, running sum,
    grouped product, strided view, convolution or random number, and no shape depends on values. Indices are
    int32 tensors of at most `most_indices` elements together.
    """
    nodes = list(graph.graph.nodes)
    found = [*_faults_of_writes(graph), *_faults_of_outputs(nodes[-1])]
    for node in nodes:
        found += [f"{node.name} {fault}" for fault in _faults(node, most_indices)]
    return found


def _faults_of_writes(graph: fx.GraphModule) -> Iterator[str]:
    writes = written_inputs(graph)
    for name, times in Counter(node.args[0].name for node in writes).items():
        if times > 1:
            yield f"{name} is written {times} times"
    for write in writes:
        if write.users or any(user > write for user in write.args[0].users):
            yield f"{write.args[0].name} is used after it is written"
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and node not in writes:
            yield f"{node.name} writes something that is not an input"


def _faults_of_outputs(output: fx.Node) -> Iterator[str]:
    values = [value for value in output.args[0] if isinstance(value, fx.Node)]
    if not values:
        yield "there is no output"
    for value in values:
        if value.op == "placeholder":
            yield f"{value.name} is an input and an output"


def _faults(node: fx.Node, most_indices: int) -> Iterator[str]:
    for value in _tensors(node):
        if value.dim() > MAX_RANK:
            yield f"has rank {value.dim()}"
        if value.dtype in _WIDE_DTYPES:
            yield f"is {value.dtype}"
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    name, tags, indices = node.target.overloadpacket.__name__, node.target.tags, _indices(node)
    if name in _REASONS:
        yield _REASONS[name]
    if torch.Tag.nondeterministic_seeded in tags:
        yield "is random"
    # Indexing has a data-dependent shape only with a mask, and the dtype check below reports masks.
    if not indices and (torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags):
        yield "depends on values"
    for index in indices:
        if index.dtype != torch.int32:
            yield f"has an index in {index.dtype}"
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel() if indices else 0
    if count > most_indices:
        yield f"has {count} indices"


def _tensors(value) -> list[torch.Tensor]:
    """Return the tensors that a node, or a list of nodes, stands for."""
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    values = value.meta.get("val") if isinstance(value, fx.Node) else None
    return [each for each in (values if isinstance(values, (list, tuple)) else [values]) if torch.is_tensor(each)]


def _indices(call: fx.Node) -> list[torch.Tensor]:
    """Return the index tensors of a call: ATen names these arguments index and indices."""
    names = [argument.name for argument in call.target._schema.arguments]
    arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return [tensor for name in ("index", "indices") for tensor in _tensors(arguments.get(name))]
