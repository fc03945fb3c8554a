"""Snapshots in the memory of a PyTorch device, without a step of a model."""

import torch
from transformers import GenerationConfig

from granite4_neuron.devices.torch.runtime import TorchRuntime
from test.support.engines import engine_model


def test_a_chain_of_snapshots_writes_its_own_positions():
    """It has each bit of the slot that it was made from, whatever became of that slot."""
    runtime = TorchRuntime(engine_model(layer_types=("mamba", "attention", "mamba")), GenerationConfig(), (16,))
    state = runtime.allocate(2, 40)
    source, other = (state.slot_views(slot) for slot in (1, 2))
    for view in (*source.values(), *other.values()):
        view.copy_(torch.randn(view.shape))
    expected = {name: view.clone() for name, view in source.items()}
    for name, view in other.items():
        if name.endswith((".key", ".value")):
            expected[name][:, 33:] = view[:, 33:]
    chain = [runtime.snapshot(state, 1, 20), runtime.snapshot(state, 1, 33, start=20)]
    for name, tensor in chain[1].tensors.items():
        part = source[name][:, 20:33] if name.endswith((".key", ".value")) else source[name]
        assert torch.equal(tensor, part), name
    for view in source.values():
        view.zero_()
    runtime.restore(state, chain, 2)
    assert other.keys() == expected.keys() and all(torch.equal(view, expected[name]) for name, view in other.items())
