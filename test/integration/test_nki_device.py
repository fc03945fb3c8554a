"""The NKI kernels compiled and run on a Neuron device, against recurrences in float64."""

import importlib.util

import pytest
import torch

from granite4_neuron.devices.neuron.expert_blocks import combine_choices, expert_blocks
from test.support.nki_cases import (
    conv_inputs,
    conv_oracle,
    error,
    experts_arguments,
    experts_inputs,
    experts_oracle,
    mamba_decode_inputs,
    mamba_decode_oracle,
    mamba_prefill_inputs,
    scan_inputs,
    scan_oracle,
)

pytestmark = pytest.mark.versions

# ScalarE approximates exp and silu piece by piece.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
HEADS = dict(heads=16, head_dim=64, d_state=128)


@pytest.fixture(scope="module")
def device():
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("needs a Trainium machine with the Neuron SDK: torch_xla is not installed")
    import torch_xla
    from torch_xla.core import xla_model

    device = torch_xla.device()
    if xla_model.xla_device_hw(device) != "NEURON":
        pytest.skip(f"needs a Trainium machine with the Neuron SDK: torch_xla runs on {device}")
    return device


def check(device, kernel, inputs, exact, dtype):
    from granite4_neuron.devices.neuron.nki.launch import launch

    outputs = launch(kernel, *(None if tensor is None else tensor.to(device) for tensor in inputs))
    for output, expected in zip(outputs, exact, strict=True):
        assert error(output.cpu(), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["ssd_chunk_scan", "tensor_tensor_scan"])
@pytest.mark.parametrize("length", [128, 300])
def test_scans(device, name, length, dtype):
    kernels = importlib.import_module(f"granite4_neuron.devices.neuron.nki.{name}")
    inputs = scan_inputs(2, length, dtype=dtype, **HEADS)
    check(device, getattr(kernels, name), inputs.values(), scan_oracle(inputs), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_few_tokens(device, tokens, dtype):
    """Decode runs, then a verification, which gives outputs only, and its commit, which gives states only."""
    from granite4_neuron.devices.neuron.nki.mamba_decode import mamba_decode

    inputs = mamba_decode_inputs(3, tokens, dtype=dtype, accepted=[tokens, 0, tokens // 2], **HEADS)
    exact = mamba_decode_oracle(inputs)
    check(device, mamba_decode, inputs.values(), exact, dtype)
    check(device, mamba_decode, (inputs | dict(accepted=None)).values(), exact[:1], dtype)
    check(device, mamba_decode, (inputs | dict(z=None)).values(), exact[1:], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_prompts(device, dtype):
    from granite4_neuron.devices.neuron.nki.mamba_prefill import mamba_prefill

    inputs = mamba_prefill_inputs(2, 300, dtype=dtype, lengths=[300, 299], **HEADS)
    check(device, mamba_prefill, inputs.values(), mamba_decode_oracle(inputs), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_convolution(device, dtype):
    from granite4_neuron.devices.neuron.nki.conv1d_prefill import conv1d_prefill

    inputs = conv_inputs(2, 300, 1280, dtype=dtype, lengths=[300, 299])
    check(device, conv1d_prefill, inputs.values(), conv_oracle(inputs), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_experts(device, tokens, dtype):
    """The kernel also gets tokens without experts: it skips the last slots, and some at the start."""
    from granite4_neuron.devices.neuron.nki.experts_decode import experts_decode

    inputs = experts_inputs(tokens, 32, 4096, 192, 10, dtype)
    check(device, experts_decode, experts_arguments(inputs), experts_oracle(inputs), dtype)
    idle = experts_inputs(tokens + 1, 32, 4096, 192, 2, dtype, idle=tuple(range(tokens)))
    check(device, experts_decode, experts_arguments(idle), experts_oracle(idle), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_by_blocks(device, dtype):
    """Some blocks keep the expert before, some rows have no token, and some blocks have no rows."""
    from granite4_neuron.devices.neuron.nki.experts_prefill import experts_prefill
    from granite4_neuron.devices.neuron.nki.launch import launch

    inputs = experts_inputs(500, 8, 4096, 192, 3, dtype, idle=tuple(range(450, 500)))
    x, gate_up_proj, down_proj, topk_ids, topk_weights = inputs.values()
    arguments = (x, gate_up_proj, down_proj, *expert_blocks(topk_ids, 8))
    (y,) = launch(experts_prefill, *(tensor.to(device) for tensor in arguments))
    combined = combine_choices(y.cpu(), topk_ids, topk_weights, 8)
    assert error(combined, sum(experts_oracle(inputs))) <= TOLERANCE[dtype]
