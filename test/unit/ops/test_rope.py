"""Rotary positions: products depend only on distances."""

import pytest
import torch

from granite4_neuron import ops

pytestmark = pytest.mark.versions


def test_rotary_is_a_rotation_by_position():
    """The product of two rotated vectors depends only on the distance of their positions."""
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(query_position, key_position):
        tables = [ops.rotary_tables(torch.tensor([[at]]), 16, 1e4) for at in (query_position, key_position)]
        return (ops.apply_rotary(q, tables[0]) * ops.apply_rotary(k, tables[1])).sum()

    assert torch.allclose(product(7, 3), product(104, 100), atol=1e-4)
    assert not torch.allclose(product(7, 3), product(7, 4), atol=1e-2)
    assert torch.equal(ops.apply_rotary(q, ops.rotary_tables(torch.zeros(1, 1), 16, 1e4)), q)
