"""A slot's state is copied, taken out and put back, as an object and as a file. All other memory is NaN."""

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import NULL_SLOT, MambaState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Snapshot
from test.support.checkpoints import DENSE, small_config
from test.support.stepping import random_tokens

pytestmark = pytest.mark.versions

TOKENS = random_tokens(160, 80).tolist()
LENGTH = 37


def runtime_of(config, seed=0, dtype=torch.float32, kernels="torch"):
    return CPURuntime(random_model(config, seed, dtype), GenerationConfig(), cpu_kernels=kernels)


@pytest.fixture(scope="module", params=["moe", "dense", "only_attention", "only_mamba"])
def runtime(request):
    changes = {
        "moe": {},
        "dense": DENSE,
        "only_attention": dict(layer_types=("attention", "attention")),
        "only_mamba": dict(layer_types=("mamba", "mamba")),
    }
    return runtime_of(small_config(**changes[request.param]))


def poison(state):
    for layer in state.layers:
        for tensor in vars(layer).values():
            tensor[NULL_SLOT + isinstance(layer, MambaState) :] = math.nan
    return state


def allocated(runtime, num_sequences=4, max_length=80):
    return poison(runtime.allocate(num_sequences, max_length))


def continue_in(runtime, state, slot, start=LENGTH):
    """Return logits of a few more steps: a chunk, then single tokens."""
    cuts = [start, start + 20, *range(start + 21, start + 26)]
    rows = [Row(slot, a, TOKENS[a:b]) for a, b in itertools.pairwise(cuts)]
    return torch.cat([runtime.step(state, [row]) for row in rows])


@pytest.fixture
def begun(runtime):
    """Return a state with a sequence of LENGTH tokens in slot 2."""
    state = allocated(runtime)
    runtime.step(state, [Row(2, 0, TOKENS[:LENGTH])])
    return state


@pytest.fixture
def expected(runtime, begun):
    other = allocated(runtime)
    runtime.step(other, [Row(2, 0, TOKENS[:LENGTH])])
    return continue_in(runtime, other, 2)


def test_a_copy_goes_on_as_the_original_does(runtime, begun, expected):
    before = [tensor[2].clone() for tensor in begun.tensors()]
    runtime.copy(begun, 2, 4, LENGTH)
    assert torch.equal(continue_in(runtime, begun, 4), expected)
    assert all(map(torch.equal, map(torch.nan_to_num, before), (t[2].nan_to_num() for t in begun.tensors())))
    assert torch.equal(continue_in(runtime, begun, 2), expected)


def test_a_snapshot_goes_on_as_the_original_does(runtime, begun, expected):
    snapshot = runtime.snapshot(begun, 2, LENGTH)
    poison(begun)
    runtime.restore(begun, [snapshot], 1)
    assert torch.equal(continue_in(runtime, begun, 1), expected)
    elsewhere = allocated(runtime, 1, 70)
    runtime.restore(elsewhere, [snapshot], 1)
    assert torch.equal(continue_in(runtime, elsewhere, 1), expected), "it owns its memory, and fits a state of any size"


def test_its_bytes(runtime, begun):
    config = runtime.config
    size = sequence_bytes(config, torch.float32.itemsize) + LENGTH * token_bytes(config, torch.float32.itemsize)
    assert runtime.snapshot(begun, 2, LENGTH).num_bytes == size
    size -= 16 * token_bytes(config, torch.float32.itemsize)
    assert runtime.snapshot(begun, 2, LENGTH, start=16).num_bytes == size


def test_snapshots_of_one_prompt_hold_its_keys_once(runtime, expected):
    state, chain = allocated(runtime), []
    for start, stop in ((0, 16), (16, 17), (17, LENGTH)):
        runtime.step(state, [Row(3, start, TOKENS[start:stop])])
        chain.append(runtime.snapshot(state, 3, stop, start))
    poison(state)
    runtime.restore(state, chain, 2)
    assert (continue_in(runtime, state, 2) - expected).abs().max() <= 1e-5
    runtime.restore(state, chain[:2], 1)
    again = runtime.step(state, [Row(1, 17, TOKENS[17:LENGTH])])
    assert torch.isfinite(again).all()
    with pytest.raises(ValueError, match="are not one sequence"):
        runtime.restore(state, chain[1:], 1)


def test_a_file_holds_all_of_it(runtime, begun, expected, tmp_path):
    file = tmp_path / "prompt.safetensors"
    runtime.snapshot(begun, 2, LENGTH).save(file)
    loaded = Snapshot.load(file, runtime)
    assert (loaded.start, loaded.length) == (0, LENGTH)
    poison(begun)
    runtime.restore(begun, [loaded], 4)
    assert torch.equal(continue_in(runtime, begun, 4), expected)
    assert os.listdir(tmp_path) == [file.name]


def test_only_the_owner_may_read_a_file(runtime, begun, tmp_path):
    """The new file is private even if others could read the one that it replaces."""
    file = tmp_path / "prompt.safetensors"
    file.touch(0o666)
    file.chmod(0o666)
    runtime.snapshot(begun, 2, LENGTH).save(file)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def ours():
    return runtime_of(small_config(layer_types=("mamba", "attention")))


@pytest.fixture(scope="module")
def snapshot(ours):
    state = ours.allocate(1, 80)
    ours.step(state, [Row(1, 0, TOKENS[:LENGTH])])
    return ours.snapshot(state, 1, LENGTH)


@pytest.fixture
def file(snapshot, tmp_path):
    snapshot.save(tmp_path / "file")
    return tmp_path / "file"


class TestRefused:
    def refused(self, runtime, snapshot, file, message):
        for attempt in (
            lambda: runtime.restore(runtime.allocate(1, 80), [snapshot], 1),
            lambda: Snapshot.load(file, runtime),
        ):
            with pytest.raises(UserError, match=message) as error:
                attempt()
            assert str(error.value).endswith(".") and "\n" not in str(error.value)

    def test_other_weights(self, ours, snapshot, file):
        other = runtime_of(ours.config, seed=1)
        self.refused(other, snapshot, file, "another checkpoint")

    def test_one_other_weight_matrix(self, ours, snapshot, file):
        model = random_model(ours.config)
        with torch.no_grad():
            model.model.layers[1].shared_mlp.output_linear.weight.mul_(1.01)
        self.refused(CPURuntime(model, GenerationConfig(), cpu_kernels="torch"), snapshot, file, "another checkpoint")

    def test_another_constant_of_the_model(self, ours, snapshot, file):
        other = runtime_of(small_config(layer_types=("mamba", "attention"), attention_multiplier=0.08))
        self.refused(other, snapshot, file, "another checkpoint")

    def test_another_dtype(self, ours, snapshot, file):
        other = runtime_of(ours.config, dtype=torch.bfloat16)
        self.refused(other, snapshot, file, "made in torch.float32 and the model runs in torch.bfloat16")

    def test_another_version(self, ours, file):
        with safe_open(file, framework="pt") as stored:
            about = stored.metadata()["snapshot"].replace('"version": 3', '"version": 4')
        save_file(load_file(file), file, metadata={"snapshot": about})
        with pytest.raises(UserError, match="has version 4 of the format and this package reads 3"):
            Snapshot.load(file, ours)

    def test_a_state_that_is_too_short(self, ours, snapshot):
        with pytest.raises(UserError, match="the snapshot has 37 tokens and the state has room for 36"):
            ours.restore(ours.allocate(1, 36), [snapshot], 1)

    @pytest.mark.parametrize("length", [0, 5, 100, -1])
    def test_a_truncated_file(self, ours, file, length):
        file.write_bytes(file.read_bytes()[:length])
        with pytest.raises(UserError, match="is damaged or incomplete"):
            Snapshot.load(file, ours)

    @pytest.mark.parametrize("place", [-1, -3000])
    def test_a_flipped_bit(self, ours, file, place):
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"is damaged .* has other numbers"):
            Snapshot.load(file, ours)

    def test_files_that_are_not_snapshots(self, ours, tmp_path):
        save_file({"x": torch.zeros(1)}, tmp_path / "other")
        with pytest.raises(UserError, match="is not a snapshot"):
            Snapshot.load(tmp_path / "other", ours)
        with pytest.raises(UserError, match="cannot be read"):
            Snapshot.load(tmp_path / "none", ours)
        with pytest.raises(UserError, match="is not a regular file"):
            Snapshot.load(tmp_path, ours)
        with pytest.raises(UserError, match=r"'a\\x00b' cannot be the name of a file"):
            Snapshot.load(Path("a\0b"), ours)

    def test_no_place_to_write_to(self, snapshot, tmp_path):
        with pytest.raises(UserError, match=r"file could not be written \(No such file or directory\)\."):
            snapshot.save(tmp_path / "none" / "file")
        with pytest.raises(UserError, match="cannot be the name of a file"):
            snapshot.save(Path("a\0b"))

    def test_an_interrupted_write_leaves_the_old_file(self, snapshot, file, monkeypatch):
        before = file.read_bytes()

        def interrupted(tensors, path, metadata):
            with open(path, "wb") as partial:
                partial.write(b"half of it")
            raise KeyboardInterrupt

        monkeypatch.setattr("granite4_neuron.state.snapshot.save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            snapshot.save(file)
        assert file.read_bytes() == before and os.listdir(file.parent) == [file.name]
