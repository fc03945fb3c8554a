"""The rules of the lint for traced graphs, each on a graph that breaks it and on one that does not."""

import pytest
import torch

from granite4_neuron.planning.analysis.hlo_lint import collectives, findings, findings_of_layer, instructions

pytestmark = pytest.mark.versions

MODULE = """HloModule test, entry_computation_layout={{()->f32[]}}

ENTRY %main (p0.1: s32[2], p1.2: f32[3,8,16], p2.3: f32[]) -> f32[] {{
  %p0.1 = s32[2]{{0}} parameter(0)
  %p1.2 = f32[3,8,16]{{2,1,0}} parameter(1)
  %p2.3 = f32[] parameter(2)
  %constant.4 = f64[] constant(1)
  %iota.5 = s32[2]{{0}} iota(), iota_dimension=0
  %convert.6 = s64[2]{{0}} convert(s32[2]{{0}} %p0.1)
  %reshape.7 = f32[1,3,8,16]{{3,2,1,0}} reshape(%p1.2)
  {line}
}}
"""
BREAKING = {
    "rank 5": "%reshape.9 = f32[1,3,2,4,16]{4,3,2,1,0} reshape(%p1.2)",
    "f64": "%convert.9 = f64[3,8,16]{2,1,0} convert(%p1.2)",
    "integers of 64 bits": "%add.9 = s64[2]{0} add(%convert.6, %convert.6)",
    "places in 64 bits": "%gather.9 = f32[2,8,16]{2,1,0} gather(%p1.2, %convert.6), offset_dims={1,2}, "
    "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,8,16}",
    "a product of rank 4": "%dot.9 = f32[1,3,8,8]{3,2,1,0} dot(%reshape.7, %reshape.7), lhs_batch_dims={0,1}, "
    "lhs_contracting_dims={3}, rhs_batch_dims={0,1}, rhs_contracting_dims={3}",
    "infeed": "%infeed.9 = (f32[3]{0}, token[]) infeed(%token.8)",
    "to the host": '%custom-call.9 = f32[] custom-call(%p2.3), custom_call_target="MoveToHost"',
    "a loop": "%while.9 = (s64[], f32[3]{0}) while(%tuple.8), condition=%c, body=%b",
    "a running sum": "%reduce-window.9 = f32[3,8,16]{2,1,0} reduce-window(%p1.2, %p2.3), window={size=1x8x1 "
    "pad=0_0x7_0x0_0}, to_apply=%c",
    "a sort": "%sort.9 = (f32[3,8,16]{2,1,0}, s32[3,8,16]{2,1,0}) sort(%p1.2, %p0.1), dimensions={2}, to_apply=%c",
    "a sort, of the largest": "%topk.9 = (f32[3,8,4]{2,1,0}, s32[3,8,4]{2,1,0}) topk(%p1.2), k=4, largest=true",
    "a sort, by name": '%custom-call.9 = f32[3,8,4]{2,1,0} custom-call(%p1.2), custom_call_target="TopK"',
    "only while the graph runs": '%slice.9 = f32[3,<=8,16]{2,1,0} custom-call(%p1.2), custom_call_target="Slice"',
    "a collective other than": "%all-to-all.9 = f32[3,8,16]{2,1,0} all-to-all(%p1.2), dimensions={0}",
    "a convolution": "%convolution.9 = f32[3,8,16]{2,1,0} convolution(%p1.2, %p1.2), window={size=4}, dim_labels=b0f",
    "in a sequence": "%gather.9 = f32[3,2,16]{2,1,0} gather(%p1.2, %p0.1), offset_dims={0,2}, "
    "collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1, slice_sizes={3,1,16}",
    "part of a row": "%gather.9 = f32[2,4,16]{2,1,0} gather(%p1.2, %p0.1), offset_dims={1,2}, "
    "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4,16}",
    "a slice": "%gather.9 = f32[2,8,16]{2,1,0} gather(%p1.2, %iota.5), offset_dims={1,2}, collapsed_slice_dims={0}, "
    "start_index_map={0}, index_vector_dim=1, slice_sizes={1,8,16}",
    "a slice, written": "%scatter.9 = f32[3,8,16]{2,1,0} scatter(%p1.2, %iota.5, %p1.2), update_window_dims={1,2}, "
    "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%c",
}
GOOD = {
    "rows of the first axis": "%gather.9 = f32[2,8,16]{2,1,0} gather(%p1.2, %p0.1), offset_dims={1,2}, "
    "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,8,16}",
    "rows of the first two axes": "%gather.9 = f32[2,16]{1,0} gather(%p1.2, %p0.1), offset_dims={1}, "
    "collapsed_slice_dims={0,1}, start_index_map={0,1}, index_vector_dim=1, slice_sizes={1,1,16}",
    "a scatter of data": "%scatter.9 = f32[3,8,16]{2,1,0} scatter(%p1.2, %p0.1, %p1.2), update_window_dims={1,2}, "
    "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%c",
    "a product of rank 3": "%dot.9 = f32[3,8,8]{2,1,0} dot(%p1.2, %p1.2), lhs_batch_dims={0}, "
    "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}",
    "a comparison with a constant": "%compare.9 = pred[2]{0} compare(%convert.6, %convert.6), direction=GE",
    "rank 4": "%reshape.9 = f32[3,2,4,16]{3,2,1,0} reshape(%p1.2)",
}


@pytest.mark.parametrize("line", BREAKING.values(), ids=BREAKING.keys())
def test_broken_rules_are_found(line):
    (finding,) = findings(MODULE.format(line=line))
    assert ".9 " in finding and finding.endswith(".")


@pytest.mark.parametrize("line", GOOD.values(), ids=GOOD.keys())
def test_correct_graphs_have_no_findings(line):
    assert findings(MODULE.format(line=line)) == []


def _conv1d(x, index):
    return torch.nn.functional.conv1d(x.transpose(1, 2), torch.ones(16, 1, 4, device=x.device), groups=16)


TRACED = {
    "nn.Conv1d": (_conv1d, "convolution"),
    "a gather over the sequence": (lambda x, index: x[:, index], "places in a sequence"),
    "index_select over the sequence": (lambda x, index: x.index_select(1, index), "places in a sequence"),
    "float64": (lambda x, index: x.double(), "f64"),
    "cumsum": (lambda x, index: x.cumsum(1), "running sum"),
    "topk": (lambda x, index: x.topk(3)[0], "a sort"),
    "sort": (lambda x, index: x.argsort(1), "a sort"),
    "einsum": (lambda x, index: torch.einsum("abij,abkj->abik", *[x.view(2, 2, 4, 16)] * 2), "product of rank 4"),
    "int64 arithmetic": (lambda x, index: index + index, "integers of 64 bits"),
    "five dimensions": (lambda x, index: x.view(2, 4, 2, 4, 4) + 1, "rank 5"),
}


@pytest.mark.parametrize(("program", "expected"), TRACED.values(), ids=TRACED.keys())
def test_traced_programs(program, expected):
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; graphs are traced with torch 2.9")
    from granite4_neuron.planning.analysis.hlo_cost import hlo_proto, hlo_text, tracer

    placeholder = tracer()
    output = program(placeholder((2, 8, 16), torch.float32), placeholder((2,), torch.int64))
    found = findings(hlo_text(hlo_proto([output])))
    assert any(expected in finding for finding in found)


def test_operands_of_a_tuple():
    """The types of a tuple's operands have parentheses of their own."""
    text = "  %x.3 = f32[2]{0} get-tuple-element((f32[2]{0}, s32[2]{0}) %call.2), index=0"
    (found,) = instructions(text).values()
    assert found.operands == ("call.2",) and found.attributes == ", index=0"


def layer_with(*lines):
    text = MODULE.format(line="\n  ".join(lines))
    assert findings(text) == []
    return collectives(instructions(text))


def test_collectives_of_a_layer():
    total = "%all-reduce.{} = {}[3,8,16]{{2,1,0}} all-reduce(%p1.2), replica_groups={{{{0,1}}}}, to_apply=%c"
    two = layer_with(total.format(9, "f32"), total.format(10, "bf16"))
    assert two == {("all-reduce", "f32"): 1, ("all-reduce", "bf16"): 1} and findings_of_layer("mamba", two, 2) == []
    whole = layer_with(total.format(9, "s32"))
    assert findings_of_layer("mamba", whole, 2) == ["mamba layers have a collective (all-reduce) in s32."]
    parts = "%all-gather.11 = f32[6,8,16]{2,1,0} all-gather(%p1.2), dimensions={0}"
    three = layer_with(total.format(9, "f32"), total.format(10, "f32"), parts)
    assert findings_of_layer("mamba", three, 2) == ["mamba layers have 3 collectives each, and need 2."]
    assert findings_of_layer("mamba", two, 1) == ["mamba layers have 2 collectives each, and need 1."]
