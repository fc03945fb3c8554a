"""Long contexts: errors against float64 on each backend, and caches with more values than 32 bits can number.

benchmarks.accuracy.long_context prints the errors of 131,072 tokens with the sizes of h-small.
"""

import math

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.accuracy import long_context
from benchmarks.accuracy.long_context import errors
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import ATTENTION, MAMBA
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs.operators import XLA
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.ops import TORCH
from granite4_neuron.runtime.interface import Row
from test.support import oracles
from test.support.checkpoints import DENSE, small_config
from test.support.one_layer import expected, one_layer
from test.support.stepping import random_tokens

LENGTHS = (1024, 16384)
WINDOW = 16  # the number of compared tokens, both of decode and of a prompt's last piece
# Root mean square error and largest error, relative to the root mean square of the exact values.
TOLERANCES = {torch.float32: (1e-5, 2e-4), torch.bfloat16: (2e-2, 0.5)}

BUCKETS = (512,)
SIZES = dict(num_attention_heads=2, num_key_value_heads=1, mamba_n_heads=8, mamba_d_head=8, hidden_size=32)
CONTEXT = 131072
LAST = CONTEXT - 41  # the position of the first token
# A slot has 2^27 values of keys.
WIDE_ATTENTION = dict(
    layer_types=("attention",), num_attention_heads=8, num_key_value_heads=8, hidden_size=1024, **DENSE
)
# A slot has 2^20 values of an SSM state.
WIDE_MAMBA = dict(layer_types=("mamba",), mamba_n_heads=4, mamba_d_head=64, mamba_d_state=4096, hidden_size=128)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


@pytest.fixture(scope="module")
def layers():
    """Return a model, tokens and exact results for each kind of layer."""
    [tokens] = random_tokens(160, 1, LENGTHS[-1]).tolist()
    models = {kind: one_layer(small_config(**SIZES), kind, LENGTHS[-1]) for kind in (MAMBA, ATTENTION)}
    return {kind: (model, tokens, list(expected(model, tokens, LENGTHS, 2 * WINDOW))) for kind, model in models.items()}


def check(make_runtime, layers, kind, dtype):
    model, tokens, right = layers[kind]
    rms, maximum = TOLERANCES[dtype]
    for each in errors(make_runtime(model.to(dtype)), tokens, right):
        for error in (each.state, each.prompt, each.decode):
            assert error.rms <= rms, f"after {each.length} tokens: {each}"
            assert error.maximum <= maximum, f"after {each.length} tokens: {each}"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [MAMBA, ATTENTION])
class TestErrors:
    @pytest.mark.slow
    @pytest.mark.parametrize("kernels", ["fused", "torch"])
    def test_on_the_cpu(self, kernels, kind, dtype, layers):
        check(lambda model: CPURuntime(model, GenerationConfig(), cpu_kernels=kernels), layers, kind, dtype)

    @needs_gpu
    def test_on_a_gpu(self, kind, dtype, layers):
        check(lambda model: TorchRuntime(model, GenerationConfig(), BUCKETS, device="cuda"), layers, kind, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(MAMBA, torch.float32, marks=pytest.mark.exhaustive, id="mamba-float32"),
        pytest.param(MAMBA, torch.bfloat16, id="mamba-bfloat16"),
        pytest.param(ATTENTION, torch.float32, id="attention-float32"),
        pytest.param(ATTENTION, torch.bfloat16, marks=pytest.mark.exhaustive, id="attention-bfloat16"),
    ],
)
class TestErrorsOfGraphs:
    @pytest.mark.slow
    def test_of_torch(self, kind, dtype, layers):
        check(lambda model: TorchRuntime(model, GenerationConfig(), BUCKETS, compiler="aot_eager"), layers, kind, dtype)

    @pytest.mark.versions
    @pytest.mark.slow_cases
    def test_of_xla(self, kind, dtype, layers):
        pytest.importorskip("torch_xla", reason="torch_xla is not installed; the xla backend runs with torch 2.9")
        from granite4_neuron.devices.xla.runtime import XLARuntime

        check(lambda model: XLARuntime(model, GenerationConfig(), BUCKETS), layers, kind, dtype)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("operators", "index"),
    [(cpu.choose_operators("fused"), torch.int64), (TORCH, torch.int64), (XLA, torch.int32)],
    ids=["fused", "torch", "xla"],
)
def test_attention_to_131072_keys(operators, index):
    """Positions need more than 16 bits. The last tokens' keys and values are written at the cache's end."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 16
    query = 3 * torch.randn(1, tokens, heads, head_dim)
    keys, values = torch.randn(2, CONTEXT, kv_heads, head_dim)
    caches = [torch.full((2, kv_heads, CONTEXT, head_dim), math.nan) for _ in range(2)]
    positions = torch.arange(CONTEXT - tokens, CONTEXT, dtype=index)[None]
    lengths, slots = torch.tensor([tokens], dtype=index), torch.tensor([1], dtype=index)
    for cache, vectors in zip(caches, (keys, values), strict=True):
        cache[1, :, :-tokens] = vectors[:-tokens].transpose(0, 1)
        operators.write_cache(cache, vectors[None, -tokens:].contiguous(), positions, lengths, slots)
    output = operators.cached_attention(query, *caches, positions, lengths, slots, 0.3, CONTEXT)
    for token in range(tokens):
        seen = CONTEXT - tokens + token + 1
        right = oracles.attention(query[0, token], keys[:seen], values[:seen], 0.3)
        assert (output[0, token].double() - right).abs().max() <= 1e-6 + 1e-5 * right.abs().max()


def test_the_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(long_context, "published_config", lambda name: small_config())
    assert long_context.main(["--divide", "2", "--lengths", "300", "64", "--window", "32"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [kind, dtype, length]
        for kind in (MAMBA, ATTENTION)
        for dtype in ("float32", "bfloat16")
        for length in ("64", "300")
    ]
    for kind, dtype, _, *cells in rows:
        values = [float(cell) for cell in cells if cell != "/"]
        assert len(values) == (8 if kind == MAMBA else 6)
        assert all(1e-9 < value < (1e-4 if dtype == "float32" else 0.5) for value in values)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--divide", "3"],
        ["--lengths", "64"],
        ["--model", "granite-4.0-micro"],
        ["--backend", "xla", "--state-dtype", "bfloat16"],
    ],
)
def test_the_benchmark_refuses_bad_options(arguments, capsys):
    assert long_context.main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1


class TestMoreThan32Bits:
    """A sequence in the last slot of a large zeroed state gives the same as in a small one.

    A CPU allocates memory only where it is written, and little is.
    """

    def step(self, runtime, state, slot, start):
        """Run a prompt's piece and one token; return their logits."""
        [tokens] = random_tokens(160, 1, 41).tolist()
        logits = runtime.step(state, [Row(slot, start, tokens[:40])], all_logits=True)[0]
        return torch.cat([logits, runtime.step(state, [Row(slot, start + 40, tokens[40:])])])

    @pytest.mark.slow
    @pytest.mark.parametrize("kernels", ["fused", "torch"])
    def test_keys_and_values(self, kernels):
        config = small_config(**WIDE_ATTENTION, max_position_embeddings=CONTEXT)
        runtime = CPURuntime(random_model(config, dtype=torch.bfloat16), GenerationConfig(), cpu_kernels=kernels)
        small, large = runtime.allocate(1, CONTEXT), runtime.allocate(16, CONTEXT)
        assert large.layers[0].key[16].storage_offset() == 2**31
        logits = self.step(runtime, large, 16, LAST)
        assert torch.equal(logits, self.step(runtime, small, 1, LAST))
        assert logits.isfinite().all()
        snapshot = runtime.snapshot(large, 16, CONTEXT, LAST)
        for name, part in runtime.snapshot(small, 1, CONTEXT, LAST).tensors.items():
            assert part.count_nonzero() > 0.9 * part.numel()
            assert torch.equal(snapshot.tensors[name], part)
            assert large.slot_views(15)[name][:, LAST:].count_nonzero() == 0
        large.set_slot_tensors(snapshot.tensors, torch.tensor([15]), LAST, CONTEXT)
        assert torch.equal(large.slot_views(15)["layers.0.key"][:, LAST:], snapshot.tensors["layers.0.key"])

    @pytest.mark.parametrize("kernels", ["fused", "torch"])
    def test_recurrent_states(self, kernels):
        model = random_model(small_config(**WIDE_MAMBA))
        runtime = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels, state_dtype=torch.bfloat16)
        small, large = runtime.allocate(1, 41), runtime.allocate(2048, 41)
        assert large.layers[0].ssm_state[2048].storage_offset() == 2**31
        assert torch.equal(self.step(runtime, large, 2048, 0), self.step(runtime, small, 1, 0))
        assert torch.equal(large.layers[0].ssm_state[2048], small.layers[0].ssm_state[1])

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_pages(self):
        torch.manual_seed(0)
        tokens, heads, page_size, head_dim = 20, 8, 16, 128
        query, key, value = torch.randn(3, tokens, heads * head_dim, dtype=torch.bfloat16)
        rows = dict(starts=torch.tensor([0, tokens], dtype=torch.int32), lengths=torch.tensor([tokens]).int())

        def attend(pages, used):
            caches = [torch.empty(pages, heads, page_size, head_dim, dtype=torch.bfloat16) for _ in range(2)]
            return cpu.paged_attention(
                query, key, value, *caches, **rows, pages=torch.tensor([used], dtype=torch.int32), scale=0.1
            )

        pages = 2**31 // (heads * page_size * head_dim)
        assert torch.equal(attend(pages + 2, [pages, pages + 1]), attend(3, [1, 2]))

    @needs_gpu
    def test_keys_and_values_on_a_gpu(self):
        config = small_config(**WIDE_ATTENTION, max_position_embeddings=CONTEXT)
        model = random_model(config, dtype=torch.bfloat16)
        runtime = TorchRuntime(model, GenerationConfig(), (64,), device="cuda")
        outcomes = []
        for slots in (1, 32):  # the last slot's values have indices above 2^32
            state = runtime.allocate(slots, CONTEXT)
            for tensor in state.tensors():
                tensor.zero_()
            logits = self.step(runtime, state, slots, LAST)
            written = [tensor[slots, :, LAST:].cpu() for tensor in state.tensors()]
            assert all(tensor[slot].count_nonzero() == 0 for tensor in state.tensors() for slot in range(1, slots))
            outcomes.append((logits, torch.cat(written)))
            del state
        for small, large in zip(*outcomes, strict=True):
            assert small.count_nonzero() > 0.9 * small.numel()
            assert (large - small).float().square().mean().sqrt() <= 0.02 * small.float().square().mean().sqrt()

    @needs_gpu
    def test_a_head_with_more_on_a_gpu(self):
        from granite4_neuron.devices.cuda.attention import attend_tokens

        head_dim, length = 128, 2**24 + 2**16
        cache = torch.zeros(2, 2, 1, length, head_dim, dtype=torch.bfloat16, device="cuda")
        query = torch.ones(1, 1, 1, head_dim, dtype=torch.bfloat16, device="cuda")
        keys, values = cache
        keys[1, 0, -1], values[1, 0, -1] = 1.0, 3.0
        positions = torch.tensor([[length - 1]], dtype=torch.int32, device="cuda")
        lengths = torch.ones(1, dtype=torch.int32, device="cuda")
        output = attend_tokens(query, keys, values, positions, lengths, None, 1.0, length)
        assert torch.equal(output, torch.full_like(output, 3.0))
