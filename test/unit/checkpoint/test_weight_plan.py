"""Weights take the memory that was planned before they are read, at aligned addresses."""

import itertools
import math

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.system.large_memory import LargeMemory
from test.support.checkpoints import DENSE, small_config

LAYERS = dict(layer_types=("mamba", "attention"))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    """Return (folder, the number of weights in it)."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    model = random_model(small_config(**LAYERS, tie_word_embeddings=request.param))
    save_model(model, folder)
    return folder, sum(parameter.numel() for parameter in model.parameters())


def held(model):
    """Return the bytes of all weights, counting a tied one once."""
    weights = {id(weight): weight for _, weight in model.named_weights()}
    return sum(each.nbytes if isinstance(each, torch.Tensor) else each.num_bytes for each in weights.values())


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_known_before(checkpoint, dtype, quantize):
    folder, number = checkpoint
    seen = []
    model = load_model(folder, dtype, quantize=quantize, progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {held(model)} and seen[-1][0] == held(model)
    # The fused kernels' layout adds padding, and it is not counted.
    assert CPURuntime(model, GenerationConfig()).weight_bytes == held(model)
    if quantize is None:
        assert held(model) == number * dtype.itemsize


def test_the_largest_are_read_first(checkpoint):
    """At that time little else is in memory."""
    done = [0]
    load_model(checkpoint[0], torch.float32, progress=lambda so_far, _: done.append(so_far))
    sizes = [after - before for before, after in itertools.pairwise(done)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_tensors_begin_at_cache_lines_and_do_not_overlap():
    shapes = [
        ((3,), torch.float32),
        ((5, 7), torch.bfloat16),
        ((1,), torch.uint8),
        ((65,), torch.int8),
        ((4, 4), torch.float32),
    ]
    memory = LargeMemory([(torch.Size(shape), dtype) for shape, dtype in shapes])
    tensors = [memory.empty(torch.Size(shape), dtype).fill_(number) for number, (shape, dtype) in enumerate(shapes, 1)]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True), start=1):
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.float().sum() == number * math.prod(shape)
    assert tensors[0].data_ptr() % 2**21 == 0, "a page of 2 MiB begins with the first"


@pytest.mark.parametrize("changes", [{}, DENSE], ids=["experts", "dense"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_which_weights_are_quantized(tmp_path, is_tied, changes):
    """With int8 a tied head gets its own values, and the embedding stays. With int4 both share one int8 matrix."""
    save_model(random_model(small_config(**LAYERS, tie_word_embeddings=is_tied, **changes)), tmp_path / "model")
    projections = {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"}
    for quantize in ("int8", "int4"):
        model = load_model(tmp_path / "model", torch.float32, quantize=quantize)
        weights = dict(model.named_weights())
        formats = {name: each.format.name for name, each in weights.items() if not isinstance(each, torch.Tensor)}
        expected = {name: quantize for name in weights if name.split(".")[-2] in projections}
        is_shared = is_tied and quantize == "int4"
        expected["model.embed_tokens.weight" if is_shared else "lm_head.weight"] = "int8"
        assert formats == expected
