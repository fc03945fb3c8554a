"""SSM states in 16 bits: the same text however it is served, half the memory, and snapshots for this dtype only."""

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron import load
from granite4_neuron.devices.backends import BACKENDS
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.declaration import Backend
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import MambaState
from granite4_neuron.state.sizes import sequence_bytes
from granite4_neuron.state.snapshot import Snapshot
from test.support.engines import VOCAB, engine_model

pytestmark = pytest.mark.versions

MODEL = engine_model()
TOKENS = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
DTYPES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])


def runtime_of(dtype, kernels="fused"):
    if kernels == "compiled":  # layers share graphs
        return TorchRuntime(MODEL, GenerationConfig(), (16, 32), compiler="aot_eager", state_dtype=dtype)
    return CPURuntime(MODEL, GenerationConfig(), cpu_kernels=kernels, state_dtype=dtype)


def logits_of(runtime, state, slots, tokens, prompt=20):
    """Return logits [sequences, 21, vocab] of sequences in those slots, together: after the prompt and each token."""
    logits = [runtime.step(state, [Row(slot, 0, one[:prompt]) for slot, one in zip(slots, tokens, strict=True)])]
    for at in range(prompt, len(tokens[0])):
        logits.append(runtime.step(state, [Row(s, at, [one[at]]) for s, one in zip(slots, tokens, strict=True)]))
    return torch.stack(logits, 1)


@every_dtype
@pytest.mark.parametrize("kernels", ["fused", "torch", "compiled"])
def test_rounding_does_not_depend_on_other_sequences(dtype, kernels):
    """Rows, slots and neighbours do not change the rounding. Fused kernels give the same bits. Elsewhere sums in other
    orders may round single numbers the other way, which changes logits far less than other random numbers would.
    """
    runtime = runtime_of(dtype, kernels)
    together = logits_of(runtime, runtime.allocate(3, 64), [3, 1, 2], TOKENS)
    alone = logits_of(runtime, runtime.allocate(3, 64), [2], TOKENS[1:2])
    exact = runtime_of(torch.float32, kernels)
    expected = logits_of(exact, exact.allocate(3, 64), [3, 1, 2], TOKENS)
    error = (together - expected).abs().max()
    assert 1e-6 < error <= {torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    difference = (together[1:2] - alone).abs().max()
    assert difference == 0 if kernels == "fused" else difference <= error / 2


@every_dtype
def test_memory(dtype):
    runtime = runtime_of(dtype)
    mamba = [layer for layer in runtime.allocate(2, 8).layers if isinstance(layer, MambaState)]
    assert all(layer.ssm_state.dtype == dtype for layer in mamba)
    held = sum(tensor[1].nbytes for layer in mamba for tensor in vars(layer).values())
    assert held == sequence_bytes(MODEL.config, MODEL.dtype.itemsize, state_itemsize=2)


def test_a_snapshot_of_another_state_dtype_is_refused(tmp_path):
    runtime, other = runtime_of(torch.float16), runtime_of(torch.float32)
    state = runtime.allocate(2, 64)
    expected = logits_of(runtime, state, [1], TOKENS[:1])[:, -1]
    logits_of(runtime, state, [2], [TOKENS[0][:39]])
    snapshot = runtime.snapshot(state, 2, 39)
    snapshot.save(tmp_path / "file")
    runtime.restore(state, [Snapshot.load(tmp_path / "file", runtime)], 1)
    assert torch.equal(runtime.step(state, [Row(1, 39, TOKENS[0][39:])]), expected)
    message = "SSM states in torch.float16 and the model runs with torch.float32; make it again"
    with pytest.raises(UserError, match=message):
        other.restore(other.allocate(1, 64), [snapshot], 1)
    with pytest.raises(UserError, match=message):
        Snapshot.load(tmp_path / "file", other)


def test_the_nki_kernel_has_no_float16():
    with pytest.raises(UserError, match="in float32 or bfloat16, and not in float16"):
        CPURuntime(MODEL, GenerationConfig(), decode_kernel="nki", state_dtype=torch.float16)


@pytest.mark.parametrize("backend", ["xla", "another"])
def test_other_backends_refuse_it(backend, monkeypatch):
    monkeypatch.setitem(BACKENDS, "another", Backend("another", (), load=lambda *_, **__: pytest.fail("it was loaded")))
    message = f"SSM states in 16 bits are for the backends cpu, torch and nxdi; {backend} has them in float32"
    with pytest.raises(UserError, match=message):
        load(backend=backend, state_dtype=torch.float16)
