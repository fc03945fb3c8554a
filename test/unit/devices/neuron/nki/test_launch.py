"""NKI kernels as operators of torch: their schemas, the shapes of results, and their registration."""

import pytest
import torch
from torch.library import infer_schema, opcheck

from granite4_neuron.devices.neuron.nki import launch, mamba  # noqa: F401 (it registers them)
from granite4_neuron.devices.neuron.nki.mamba_decode import mamba_decode, mamba_decode_torch
from test.support.nki_cases import conv_inputs, mamba_decode_inputs, scan_inputs

SCHEMA = (
    "(Tensor states, Tensor conv_states, Tensor xBC, Tensor dt, Tensor taps, Tensor A_D, Tensor? z=None, "
    "Tensor? accepted=None) -> Tensor[]"
)
DECODE = mamba_decode_inputs(batch=2, tokens=2, head_dim=32, d_state=64)
CALLS = {
    "conv1d_prefill": conv_inputs(length=9),
    "ssd_chunk_scan": scan_inputs(length=9, head_dim=32, d_state=64, dtype=torch.bfloat16),
    "tensor_tensor_scan": scan_inputs(length=9, head_dim=32, d_state=64),
    "mamba_decode": DECODE,
    "mamba_decode, outputs only": DECODE | {"accepted": None},
    "mamba_decode, states only": DECODE | {"z": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_shapes_are_known_without_a_run(call):
    """A traced call has the kernel's shapes, and no result shares memory with an argument."""
    operator = getattr(torch.ops.granite4_neuron, call.split(",")[0])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    opcheck(operator, tuple(CALLS[call].values()), test_utils=checks)


def test_torch_neuronx_registers_them_if_installed(monkeypatch):
    registered = []

    def nki_op(name, mutates_args):
        def register(function):
            registered.append((name, infer_schema(function, mutates_args=mutates_args)))
            return lambda *arguments: ["a node"]

        return register

    monkeypatch.setattr(launch, "nki_op", nki_op)
    run = launch.launcher(mamba_decode, mamba_decode_torch)
    assert registered == [("granite4_neuron::mamba_decode", SCHEMA)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert run(torch.zeros(1)) == ("a node",)
