"""Weights that are kept as they lie in memory are the same at the next start, and of the same checkpoint only."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint import loading
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.weight_cache import WeightCache
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import small_config

TOKENS = list(range(3, 40))


@pytest.fixture
def folder(tmp_path):
    save_model(random_model(small_config(layer_types=("mamba", "attention"))), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def reads(monkeypatch):
    """Return a list to which the name of each weight that is read from the checkpoint is added."""
    names, read = [], loading._Weights.read

    def counted(self, name, shape):
        names.append(name)
        return read(self, name, shape)

    monkeypatch.setattr(loading._Weights, "read", counted)
    return names


def logits(model, kernels):
    name = "torch" if kernels.pack is None else "fused"
    runtime = CPURuntime(model, GenerationConfig(), cpu_kernels=name)
    return runtime.step(runtime.allocate(1, len(TOKENS)), [Row(1, 0, TOKENS)])


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_second_start_has_the_same_weights(folder, tmp_path, reads, kernels, quantize):
    """Each weight is in a form of its own: norms, packed or quantized matrices, and a head that is tied or not."""
    cache, seen = WeightCache(tmp_path / "kept", "1"), []
    options = dict(dtype=torch.bfloat16, quantize=quantize, operators=kernels)
    expected = logits(load_model(folder, **options), kernels)
    assert torch.equal(logits(load_model(folder, cache=cache, **options), kernels), expected)
    reads.clear()
    model = load_model(folder, cache=cache, progress=lambda done, total: seen.append(done == total), **options)
    assert not reads and seen == [True]
    assert torch.equal(logits(model, kernels), expected)


def test_a_model_runs_on_the_file_and_keeps_its_weights_when_another_takes_its_place(folder, tmp_path, kernels):
    cache = WeightCache(tmp_path / "kept", "1")
    expected = logits(load_model(folder, cache=cache, operators=kernels), kernels)
    model = load_model(folder, cache=cache, operators=kernels)
    [file] = (tmp_path / "kept").iterdir()
    if sys.platform == "linux":
        assert str(file) in Path("/proc/self/maps").read_text()
    shutil.rmtree(folder)
    save_model(random_model(small_config(layer_types=("mamba", "attention")), seed=1), folder)
    other = logits(load_model(folder, cache=cache, operators=kernels), kernels)
    assert [file] == [*(tmp_path / "kept").iterdir()]
    assert torch.equal(logits(model, kernels), expected) and not torch.equal(other, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda file, weights: os.utime(weights, ns=(0, 0)),
        lambda file, weights: file.write_bytes(file.read_bytes()[:-1]),
        lambda file, weights: file.write_bytes(bytes(32) + file.read_bytes()[32:]),
    ],
    ids=["another checkpoint", "cut off", "another fingerprint"],
)
def test_other_weights_are_not_taken(folder, reads, change):
    """They are read again, and kept in place of the others. The folder is that of the checkpoint."""
    cache = WeightCache(folder, "1")
    for _ in range(2):
        load_model(folder, cache=cache)
    count = len(reads)
    [file] = folder.glob("*.weights")
    before = file.read_bytes()
    change(file, folder / "model.safetensors")
    for _ in range(2):
        load_model(folder, cache=cache)
    assert len(reads) == 2 * count
    assert [file] == [*folder.glob("*.weights*")] and file.read_bytes()[32:] == before[32:]


def test_each_form_and_each_checkpoint_has_its_own_file(folder, tmp_path, reads):
    shutil.copytree(folder, tmp_path / "other" / folder.name)
    kept = tmp_path / "kept"
    for options in ({}, dict(quantize="int8"), dict(dtype=torch.float16)):
        load_model(folder, cache=WeightCache(kept, "1"), **options)
    load_model(tmp_path / "other" / folder.name, cache=WeightCache(kept, "1"))
    assert len([*kept.iterdir()]) == 4
    reads.clear()
    load_model(folder, cache=WeightCache(kept, "1"))
    assert not reads
    load_model(folder, cache=WeightCache(kept, "another layout"))
    assert reads and len([*kept.iterdir()]) == 4


def test_weights_that_cannot_be_kept(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot read the weights kept in"):
        load_model(folder, cache=WeightCache(tmp_path / "file" / "kept", "1"))
