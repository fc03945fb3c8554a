"""Memory of snapshots: each has its own block, at most one spare block is held, and a cache's limit includes it."""

import gc
import mmap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.state import snapshot_memory
from granite4_neuron.state.snapshot_memory import SnapshotMemory
from test.support.engines import VOCAB, ChunkRuntime, cached_bytes, generate_one
from test.support.stepping import random_tokens

LIKE = {"conv": torch.zeros(7, 3, dtype=torch.bfloat16), "ssm": torch.zeros(3, 2**18), "other": torch.zeros(2**18)}
TOKENS = random_tokens(VOCAB, 150).tolist()
OTHERS = random_tokens(VOCAB, 150, seed=1).tolist()


def addresses(tensors):
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_tensors_are_apart_and_their_own():
    memory = SnapshotMemory()
    snapshots = [memory.take(LIKE) for _ in range(3)]
    for number, tensors in enumerate(snapshots):
        for place, (name, tensor) in enumerate(tensors.items()):
            assert (tensor.shape, tensor.dtype) == (LIKE[name].shape, LIKE[name].dtype) and tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
            tensor.fill_(10 * number + place)
    for number, tensors in enumerate(snapshots):
        assert [tensor.unique().tolist() for tensor in tensors.values()] == [[10 * number + i] for i in range(3)]


def test_a_block_is_reused_after_its_last_tensor_is_freed():
    memory = SnapshotMemory()
    first, second = memory.take(LIKE), memory.take(LIKE)
    place, last = addresses(first), first["other"]
    del first
    third = memory.take(LIKE)
    assert addresses(third).keys() == place.keys() and not set(addresses(third).values()) & set(place.values())
    del last
    assert addresses(memory.take(LIKE)) == place
    del second, third


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="only Linux reports which pages are in memory")
def test_the_spare_block_is_in_physical_memory(monkeypatch):
    memory = SnapshotMemory()
    monkeypatch.setattr(memory, "_new", lambda new=memory._new: made.append(new()) or made[-1])
    made = []
    memory.make_ready()
    assert not made, "the size is unknown before the first snapshot"
    memory.take(LIKE)
    memory.give_back()
    memory.make_ready()
    memory.make_ready()
    memory.wait()
    assert len(made) == 2 and resident(made[0]) == 0 and resident(made[1]) > 2**22 - mmap.PAGESIZE
    assert memory.take(LIKE)["conv"].data_ptr() == made[1].data_ptr()
    memory.give_back()


def test_a_block_is_not_lent_while_it_is_written_to(monkeypatch):
    memory, may_write = SnapshotMemory(), threading.Event()
    write = snapshot_memory._write_to_pages
    monkeypatch.setattr(snapshot_memory, "_write_to_pages", lambda block: may_write.wait() and write(block))
    memory.take(LIKE)
    memory.give_back()
    memory.make_ready()
    threading.Timer(0.02, may_write.set).start()
    tensors = memory.take(LIKE)
    for tensor in tensors.values():
        tensor.fill_(7)
    memory.wait()
    assert may_write.is_set() and all((tensor == 7).all() for tensor in tensors.values())


def resident(block):
    """Return how many bytes of a block are in physical memory."""
    first, last = block.data_ptr() // mmap.PAGESIZE, (block.data_ptr() + block.nbytes) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE  # the highest bit: the page is in memory


def test_small_states_have_no_blocks():
    memory = SnapshotMemory()
    assert memory.take({"ssm": torch.zeros(2**10)}) == {}
    memory.make_ready()
    assert memory._ready is None


@pytest.fixture
def blocks(monkeypatch):
    """Use blocks for states of any size; return a function that counts the bytes of existing blocks."""
    monkeypatch.setattr(snapshot_memory, "HUGE_PAGE", 1)
    new, made = SnapshotMemory._new, weakref.WeakSet()

    def counted(self):
        block = new(self)
        made.add(block)
        return block

    monkeypatch.setattr(SnapshotMemory, "_new", counted)
    return lambda: sum(block.nbytes for block in made)


@pytest.mark.parametrize("entries", [*(pytest.param(number, marks=pytest.mark.slow) for number in (1.5, 6.5)), None])
def test_a_cache_stays_within_its_limit_with_its_spare_block(model, blocks, entries):
    runtime = ChunkRuntime(model)
    state_bytes = PrefixCache(runtime, None, None)._num_bytes(0)
    max_bytes = None if entries is None else int(entries * (state_bytes + 4 * VOCAB) + 1000)
    cache = PrefixCache(runtime, max_bytes, None, at_branches=True)
    engine, was_ready = Engine(runtime, 1, prefix_cache=cache), set()
    for shared, start in ((0, 0), (20, 0), (20, 30), (40, 0), (0, 50), (20, 60), (40, 70), (0, 0)):
        prompt = TOKENS[:shared] + OTHERS[start : start + 20]
        text = generate_one(engine, Request(prompt, 4))
        assert text == generate_one(Engine(ChunkRuntime(model), 1), Request(prompt, 4))
        gc.collect()
        num_bytes, snapshots = cached_bytes(cache)
        assert (num_bytes, snapshots) == (cache.stats.num_bytes, cache.stats.snapshots)
        ready = blocks() - snapshots * state_bytes
        assert ready in (0, state_bytes) and (max_bytes is None or num_bytes + ready <= max_bytes)
        was_ready.add(ready)
    assert was_ready == {1.5: {0}, 6.5: {0, state_bytes}, None: {state_bytes}}[entries]


def test_a_loaded_snapshot_replaces_the_spare_block(model, blocks):
    runtime, other = ChunkRuntime(model), ChunkRuntime(model)
    elsewhere = PrefixCache(other, None, None)
    generate_one(Engine(other, 1, prefix_cache=elsewhere), Request(OTHERS[:20], 1))
    snapshot = elsewhere.export(OTHERS[:20])
    cache = PrefixCache(runtime, elsewhere.stats.num_bytes * 2, None)
    generate_one(Engine(runtime, 1, prefix_cache=cache), Request(TOKENS[:20], 1))
    assert runtime._snapshot_memory._ready is not None
    cache.load(snapshot)
    assert cache.stats.snapshots == 2 and runtime._snapshot_memory._ready is None
