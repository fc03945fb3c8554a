"""Snapshots in the memory of a PyTorch device, without a step of a model."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from granite4_neuron.devices.torch.options import DEVICES, check_format
from granite4_neuron.devices.torch.runtime import TorchRuntime, _check_formats, _check_memory, _check_pieces
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row
from test.support.engines import engine_model, generate_one
from test.support.quantizing import quantize_model
from test.support.stepping import random_tokens


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


TOKENS = random_tokens(160, 40).tolist()


@pytest.fixture(autouse=True)
def begins_snapshots(monkeypatch):
    """Steps begin snapshots, as on a GPU."""
    monkeypatch.setattr(TorchRuntime, "begins_snapshots", True)


def eager_runtime():
    model = engine_model(layer_types=("mamba", "attention", "mamba"))
    runtime = TorchRuntime(model, GenerationConfig(), (16,), compiler="eager")
    return runtime, runtime.allocate(3, 40)


def step_with_kept_row(runtime, state):
    """Run 20 tokens in slots 1 and 2, and begin a snapshot of positions 4 to 19 of slot 1."""
    runtime.step(state, [Row(slot, 0, TOKENS[:4], is_prompt=True) for slot in (1, 2)])
    rows = [Row(slot, 4, TOKENS[4 * slot : 4 * slot + 16], is_prompt=True, is_kept=slot == 1) for slot in (1, 2)]
    return runtime.step(state, rows)


def check_snapshot(runtime, state, start):
    """Check a snapshot of 20 tokens in slot 1 against the state itself; return the copies that were made."""
    with _Calls() as calls:
        snapshot = runtime.snapshot(state, 1, 20, start)
    assert (snapshot.start, snapshot.length) == (start, 20)
    views = state.slot_views(1)
    assert snapshot.tensors.keys() == views.keys()
    for name, view in views.items():
        expected = view[:, start:20] if name.endswith((".key", ".value")) else view
        assert torch.equal(snapshot.tensors[name], expected), name
        assert snapshot.tensors[name].untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    return calls.counts["stack"]


@pytest.mark.parametrize(("start", "copies"), [(4, 0), (9, 0), (20, 0), (0, 3), (3, 3)])
def test_a_step_begins_the_snapshot_of_a_row_that_is_kept(start, copies):
    """A snapshot from an earlier position on is made when it is asked for, as is a second one of the same slot."""
    runtime, state = eager_runtime()
    step_with_kept_row(runtime, state)
    assert check_snapshot(runtime, state, start) == copies
    assert check_snapshot(runtime, state, start) == 3


def test_a_step_begins_no_other_snapshots():
    runtime, state = eager_runtime()
    for slot, length in ((2, 20), (1, 19)):
        step_with_kept_row(runtime, state)
        with _Calls() as calls:
            snapshot = runtime.snapshot(state, slot, length, 4)
        assert calls.counts["stack"] == 3 and snapshot.length == length


def test_an_engine_keeps_the_snapshots_that_steps_have_begun(monkeypatch):
    runtime, _ = eager_runtime()
    cache, request = PrefixCache(runtime, None, 16), Request(TOKENS, 3)
    alone = generate_one(Engine(runtime, 1), request)
    snapshot, lengths = TorchRuntime.snapshot, []

    def begun(self, state, slot, length, start=0):
        with _Calls() as calls:
            kept = snapshot(self, state, slot, length, start)
        assert not calls.counts
        lengths.append(length)
        return kept

    monkeypatch.setattr(TorchRuntime, "snapshot", begun)
    engine = Engine(runtime, 1, prefix_cache=cache)
    assert generate_one(engine, request) == generate_one(engine, request) == alone
    assert lengths == [16, 32, 40] and cache.stats.hit_tokens == 40


CHANGES = {
    "a prompt": lambda runtime, state: runtime.step(state, [Row(1, 0, TOKENS[20:], is_prompt=True)]),
    "a token": lambda runtime, state: runtime.step(state, [Row(1, 19, TOKENS[:1])]),
    "a chosen token": lambda runtime, state: runtime.decode(state, [Row(1, 19, TOKENS[:1])]).tokens(),
    "a verified token": lambda runtime, state: runtime.commit(
        state, runtime.verify(state, [Row(1, 19, TOKENS[:2])]), [1]
    ),
    "another slot's copy": lambda runtime, state: runtime.copy(state, 2, 1, 20),
    "another slot's snapshot": lambda runtime, state: runtime.restore(state, [runtime.snapshot(state, 2, 20)], 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_snapshot_that_was_begun_before_a_change_is_not_returned(change):
    runtime, state = eager_runtime()
    step_with_kept_row(runtime, state)
    before = {name: view.clone() for name, view in state.slot_views(1).items()}
    change(runtime, state)
    assert any(not torch.equal(before[name], view) for name, view in state.slot_views(1).items())
    assert check_snapshot(runtime, state, 4) == 3


def test_a_state_that_is_allocated_again_has_no_snapshots_that_were_begun():
    runtime, state = eager_runtime()
    step_with_kept_row(runtime, state)
    del state
    state = runtime.allocate(3, 40)
    for view in state.slot_views(1).values():
        view.fill_(3)
    assert check_snapshot(runtime, state, 4) == 3


def test_a_step_does_not_fail_for_want_of_memory_for_a_snapshot(monkeypatch):
    runtime, state = eager_runtime()
    expected = step_with_kept_row(runtime, state)
    copy_slot, asked = TorchRuntime._copy_slot, []

    def failing(*arguments):
        asked.append(arguments)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TorchRuntime, "_copy_slot", failing)
    assert torch.equal(step_with_kept_row(runtime, state), expected) and len(asked) == 1
    monkeypatch.setattr(TorchRuntime, "_copy_slot", copy_slot)
    assert check_snapshot(runtime, state, 4) == 3


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


@pytest.mark.parametrize("scale", [2.0**-62, 2.0**64])
def test_experts_in_fp8_whose_digits_a_gpu_would_lose(scale):
    model = engine_model(dtype=torch.bfloat16, num_local_experts=4, num_experts_per_tok=2)
    quantize_model(model, "fp8")
    _check_formats(model, "cuda")
    name = "model.layers.1.block_sparse_moe.output_linear"
    matrix = model.get_submodule(name)
    group = 3, 5, 0
    matrix.weight.scales[group] = scale
    with pytest.raises(UserError, match=f"^{name} has scales below .* experts in fp8 lose digits .* --dtype float32"):
        _check_formats(model, "cuda")
    _check_formats(model.float(), "cuda")
    matrix.weight.values[3, 5] = 0.0
    _check_formats(model.bfloat16(), "cuda")
