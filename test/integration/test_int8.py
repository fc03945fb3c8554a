"""A model with int8 weights gives what the model with dequantized weights gives, however its sequences are cut."""

import os
import subprocess
import sys

import pytest
import torch

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model, set_parameter
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.errors import UserError
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import QuantizedWeight
from granite4_neuron.ops.formats.int8 import FORMAT as INT8
from test.support.checkpoints import CASES, large_config
from test.support.stepping import poisoned_state, random_tokens, run_cuts

LEFT_ALONE = ("embed_tokens", "norm", "router", "conv1d", "bias", "A_log", ".D")


def dequantized_model(folder, dtype=torch.float32):
    """Load the model in plain torch, with each weight that int8 applies to quantized and dequantized."""
    model = load_model(folder, dtype)
    head = INT8.quantize(model.lm_head.weight)
    for name, parameter in list(model.named_parameters()):
        if not any(part in name for part in LEFT_ALONE):
            set_parameter(model, name, INT8.quantize(parameter).dequantize(dtype))
    set_parameter(model, "lm_head.weight", head.dequantize(dtype))
    return model


@pytest.fixture(scope="module")
def quantized_model(case_folder, kernels):
    return load_model(case_folder, torch.float32, quantize="int8").bind(kernels)


@pytest.fixture(scope="module")
def expected_model(case_folder):
    return dequantized_model(case_folder)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "cuts", [[100], [60] + [1] * 40, [50, 50], [1, 2, 5, 8, 9, 75]], ids=["prefill", "decode", "halves", "short steps"]
)
def test_logits_equal_those_of_dequantized_weights(quantized_model, expected_model, cuts):
    tokens = random_tokens(quantized_model.config.vocab_size, 2, 100)
    expected = run_cuts(expected_model, tokens, [100])
    assert (run_cuts(quantized_model, tokens, cuts) - expected).abs().max() <= 1e-5


@pytest.mark.slow_cases
@torch.inference_mode()
def test_ragged_batches_give_each_rows_logits(quantized_model, expected_model):
    """Rows have any length, one of them is idle, slots are out of order, and memory is poisoned."""
    lengths, slots = [[40, 23, 1, 0], [1, 0, 1, 7], [1, 1, 1, 1]], torch.tensor([4, 2, 1, 3])
    vocab_size = quantized_model.config.vocab_size
    tokens = random_tokens(vocab_size, 4, 64)
    state, done = poisoned_state(quantized_model, 4, 64), [0] * 4
    for counts in lengths:
        ids = random_tokens(vocab_size, 4, max(counts), seed=1)
        for row, length in enumerate(counts):
            ids[row, :length] = tokens[row, done[row] : done[row] + length]
        positions = torch.tensor(done)[:, None] + torch.arange(max(counts))
        step = step_of(positions, torch.tensor(counts), slots, state)
        logits = quantized_model(ids, step, state, all_logits=True)
        for row, length in enumerate(counts):
            if length:
                total = done[row] + length
                alone = run_cuts(expected_model, tokens[row : row + 1, :total], [total])[0, done[row] :]
                assert (logits[row, :length] - alone).abs().max() <= 1e-5
            done[row] += length


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_in_a_reduced_dtype(random_checkpoints, kernels, dtype):
    """int8 weights add no error: it is at most a plain model's in this dtype, each against its float32 model."""
    folder = random_checkpoints(CASES[1])
    models = [load_model(folder, dtype, quantize="int8"), load_model(folder, dtype)]
    tokens = random_tokens(models[0].config.vocab_size, 4, 100)
    exact = [load_model(folder, torch.float32, quantize=quantize) for quantize in ("int8", None)]
    for cuts in ([100], [60] + [1] * 40):
        errors = []
        for model, reference in zip(models, exact, strict=True):
            errors.append(
                (run_cuts(model.bind(kernels), tokens, cuts) - run_cuts(reference, tokens, [100])).abs().mean()
            )
        assert errors[0] <= 1.2 * errors[1]


@pytest.mark.slow_cases
def test_the_right_weights_are_quantized(case_folder):
    stored = dict(load_model(case_folder).named_parameters())
    model = load_model(case_folder, quantize="int8")
    assert model.is_quantized and model.dtype == torch.float32
    weights = dict(model.named_weights())
    assert weights.keys() == {*stored, "lm_head.weight"}
    for name, weight in weights.items():
        source = stored.get(name, stored["model.embed_tokens.weight"])
        if any(part in name for part in LEFT_ALONE):
            assert torch.equal(weight, source) and not weight.requires_grad
        else:
            expected = INT8.quantize(source)
            assert isinstance(weight, QuantizedWeight) and weight.shape == source.shape
            assert torch.equal(weight.values, expected.values) and torch.equal(weight.scales, expected.scales)


@pytest.mark.slow_cases
@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_packed_while_loading(case_folder, quantize):
    """Packing while loading gives the same model as packing when the model is bound, and nothing is packed twice."""
    packed = load_model(case_folder, quantize=quantize, operators=cpu.choose_operators())
    plain = load_model(case_folder, quantize=quantize)
    matrices = [module.weight for module in packed.matrices().values()]
    assert all(isinstance(weight, cpu.PackedWeight) for weight in matrices)
    assert packed.is_quantized == (quantize is not None) and packed.dtype == plain.dtype
    bound = packed.bind(cpu.choose_operators())
    assert [module.weight for module in bound.matrices().values()] == matrices
    tokens = random_tokens(packed.config.vocab_size, 2, 30)
    expected = run_cuts(plain.bind(cpu.choose_operators()), tokens, [30])
    assert torch.equal(run_cuts(bound, tokens, [30]), expected)
    assert (run_cuts(packed, tokens, [30]) - expected).abs().max() <= 1e-5, "plain torch reads packed weights too"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc/self/status")
def test_loading_takes_little_more_than_the_weights(tmp_path):
    """All weights except the embedding take half of bfloat16's memory. Loading adds one tensor, stored and in int8."""
    save_model(random_model(large_config(vocab_size=40_000), dtype=torch.bfloat16), tmp_path / "model")
    size, embedding = (tmp_path / "model" / WEIGHTS).stat().st_size, 2 * 40_000 * 512
    program = f"""
import re
from pathlib import Path
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.generation import bundled_checkpoint
# Not ru_maxrss, which begins at what the process that started this one held.
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
load_model(bundled_checkpoint(), quantize="int8")  # what it takes besides the weights
before = peak()
model = load_model({str(tmp_path / "model")!r}, quantize="int8")
sizes = [weight.num_bytes if hasattr(weight, "num_bytes") else weight.nbytes for _, weight in model.named_weights()]
print(peak() - before, sum(sizes))
"""
    # A fixed threshold keeps the C library from fragmenting its heap. The fragments would be counted as ours.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    peak, weights = map(int, done.stdout.split())
    assert weights <= 0.51 * (size - embedding) + 1.51 * embedding
    # The largest tensor is mapped from the file, read, and held in int8. The whole model in bfloat16 would be 200 MB
    # more.
    assert peak <= weights + 2.5 * embedding + 15e6


class TestRefusals:
    def test_other_backends_and_splits_refuse_int8(self, random_checkpoints, texting_folder):
        for backend in ("xla", "nxdi"):
            compiled = "graphs" if backend == "nxdi" else None
            with pytest.raises(UserError, match=f"int8 weights are for the backend cpu, some for a GPU; {backend}"):
                load(texting_folder, backend=backend, compiled=compiled, quantize="int8")
        with pytest.raises(UserError, match="int8 weights cannot be split over 2 ranks"):
            load_model(texting_folder, parallel=Parallel(0, 2), quantize="int8")
        with pytest.raises(UserError, match="quantize is 'int3'; it must be int4 or int8"):
            load_model(texting_folder, quantize="int3")
