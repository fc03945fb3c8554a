"""Snapshots in the memory of a PyTorch device, without a step of a model."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from granite4_neuron.devices.torch.options import DEVICES, check_format
from granite4_neuron.devices.torch.runtime import TorchRuntime, _check_memory, _check_pieces
from granite4_neuron.errors import UserError
from test.support.engines import engine_model
from test.support.quantizing import quantize_model


class _Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function.overloadpacket).removeprefix("aten.")] += 1
        return function(*args, **kwargs or {})


def test_the_calls_of_a_snapshot_do_not_grow_with_the_layers():
    """Windows, states, and keys with values are allocated and copied together: between two steps nothing else runs."""
    counts = []
    for layers in (1, 3):
        model = engine_model(layer_types=("mamba", "attention", "mamba") * layers)
        runtime = TorchRuntime(model, GenerationConfig(), (16,))
        state = runtime.allocate(2, 40)
        first = runtime.snapshot(state, 1, 20)
        with _Calls() as calls:
            runtime.snapshot(state, 1, 20)
        del calls.counts["slice"]  # of keys and values
        with _Calls() as restoring:
            runtime.restore(state, [first], 1)
        assert restoring.counts["_foreach_copy_"] == 3
        counts.append(calls.counts)
    assert counts[0] == counts[1] == {"stack": 3, "unbind": 3}


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


def test_a_gpu_needs_room_for_the_weights(monkeypatch):
    model = engine_model()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2**34))
    with pytest.raises(UserError, match=r"the weights need 0\.0 GiB, and cuda:1 has 0\.0 GiB free; --quantize int8"):
        _check_memory(model, torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    _check_memory(model, torch.device("cuda:1"))


def test_a_gpu_takes_pieces_whose_numbers_fit_into_32_bits():
    _check_pieces(())
    _check_pieces((128, 2**15))
    with pytest.raises(UserError, match="prefill_buckets has 131,072; on a GPU a piece of a prompt has at most 32"):
        _check_pieces((128, 2**17))


def test_quantized_weights_need_a_device_with_kernels_for_them(monkeypatch):
    model = engine_model(layer_types=("mamba",))
    quantize_model(model, "int8")
    with pytest.raises(UserError, match="int8 weights are for the backend cpu, some for a GPU; torch on cpu runs the"):
        TorchRuntime(model, GenerationConfig())
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], formats=("int4",)))
    with pytest.raises(UserError, match="torch on cpu runs the original in its dtype"):
        TorchRuntime(model, GenerationConfig())
    check_format("compressed-tensors", "cpu")
