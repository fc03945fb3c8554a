"""The cost of kernels in counted graphs."""

import pytest
import torch

from granite4_neuron.planning.analysis import hlo_cost
from granite4_neuron.planning.analysis.kernel_costs import kernel_cost

pytestmark = pytest.mark.versions


def test_costs_are_added_and_subtracted():
    one, other = hlo_cost.Cost(7.0, 50.0, 9), hlo_cost.Cost(2.0, 30.0, 4)
    assert one + other == hlo_cost.Cost(9.0, 80.0, 13)
    assert one - other == hlo_cost.Cost(5.0, 20.0, 5)
    assert other * 3 == hlo_cost.Cost(6.0, 90.0, 12)


def test_an_unknown_kernel_reads_and_writes_everything_once():
    flops, accessed = kernel_cost("any", [("bf16", (4, 8)), ("s32", ())], [("f32", (2, 3))])
    assert (flops, accessed) == (0, 4 * 8 * 2 + 4 + 2 * 3 * 4)


def test_attention_visits_the_prior_and_half_of_the_step():
    heads, kv_heads, tokens, prior, head_dim = 8, 2, 512, 16384, 128
    query, key = ("bf16", (heads, tokens, head_dim)), ("bf16", (kv_heads, tokens, head_dim))
    pairs = sum(position + 1 for position in range(tokens))
    flops, _ = kernel_cost("attention_cte", [query, key, key], [query])
    assert flops == 2 * 2 * heads * head_dim * pairs  # scores, and the sum of the values
    cached = ("bf16", (kv_heads, prior, head_dim))
    flops, _ = kernel_cost("attention_cte", [query, key, key, cached, cached, ("s32", (1,))], [query])
    assert flops == 2 * 2 * heads * head_dim * (pairs + tokens * prior)


def test_a_reshape_costs_nothing():
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; graphs are traced with torch 2.9")
    pytest.importorskip("jax", reason="jax is not installed; it counts the graphs")
    x = hlo_cost.tracer()((64, 32), torch.float32)
    plain, reshaped = (hlo_cost.count(hlo_cost.hlo_proto([y])) for y in (x + 1, (x.view(32, 64) + 1).view(2048)))
    assert reshaped.bytes_accessed == plain.bytes_accessed


def test_a_graph_with_kernels_is_counted_and_compiled():
    pytest.importorskip("torch_xla", reason="torch_xla is not installed; graphs are traced with torch 2.9")
    pytest.importorskip("jax", reason="jax is not installed; it counts the graphs")
    import torch_xla

    placeholder = hlo_cost.tracer()
    x = placeholder((64, 32), torch.float32)
    without = hlo_cost.count(hlo_cost.hlo_proto([x + 1]))
    call = torch_xla._XLAC._xla_custom_call
    (y,) = call([x], "one", [(64, 32)], [torch.float32], False, "", 1, {})
    values, places = call([y], "two", [(64, 1), (64, 1)], [torch.float32, torch.int32], False, "", 1, {})
    proto = hlo_cost.hlo_proto([y + 1, values, places])
    kernels = 3 * 64 * 32 * 4 + 2 * 64 * 4  # one's argument and result, two's argument and both results
    assert hlo_cost.count(proto).bytes_accessed - without.bytes_accessed == pytest.approx(kernels, abs=16)
    assert hlo_cost.temporary_bytes(proto) < 2 * x.nbytes
