"""A fingerprint changes with any byte of any weight and with the kernels, and with nothing else."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu import runtime as cpu_runtime
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.model.adapters import Adapter, LowRank
from granite4_neuron.ops import FORMATS
from granite4_neuron.runtime import bound_model
from granite4_neuron.state import fingerprint as module
from granite4_neuron.state.fingerprint import Fingerprint, weights_digest
from test.support.checkpoints import DENSE, small_config

pytestmark = pytest.mark.versions

needs_compiler = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
FUSED = pytest.param("fused", marks=needs_compiler)
LAYERS = dict(layer_types=("mamba", "attention"))
NUMBERS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
    "int4": (torch.bfloat16, "int4"),
    "lossless12": (torch.bfloat16, "lossless12"),
}


@pytest.fixture(scope="module", params=NUMBERS)
def numbers(request):
    return NUMBERS[request.param]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, numbers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "model"
    save_model(random_model(small_config(**LAYERS, tie_word_embeddings=request.param), dtype=numbers[0]), folder)
    return folder


@pytest.fixture(scope="module", params=["torch", FUSED])
def runtime(request, folder, numbers):
    dtype, quantize = numbers
    model = load_model(folder, dtype, quantize=quantize, operators=cpu.choose_operators(request.param))
    return CPURuntime(model, GenerationConfig(), cpu_kernels=request.param)


def memory_of(runtime):
    """Return the bytes of each tensor that holds weights, by name."""
    tensors = {}
    for name, weight in runtime.model.named_weights():
        parts = {"": weight.detach()} if isinstance(weight, torch.Tensor) else weight.tensors()
        tensors |= {f"{name} {part}": tensor.flatten().view(torch.uint8) for part, tensor in parts.items()}
    for number, adapter in enumerate(runtime.adapters.values()):
        for name, addition in adapter.additions.items():
            for matrix in dataclasses.fields(addition):
                tensor = getattr(addition, matrix.name)
                tensors[f"{number} {name} {matrix.name}"] = tensor.flatten().view(torch.uint8)
    return tensors


def is_seen(runtime, memory, place, mask):
    before = runtime.weights_digest()
    memory[place] ^= mask
    after = runtime.weights_digest()
    memory[place] ^= mask
    return before != after and before == runtime.weights_digest()


class TestBytes:
    @pytest.mark.slow_cases
    @given(data=st.data())
    def test_any_flipped_bit_anywhere(self, runtime, data):
        memory = data.draw(st.sampled_from(sorted(memory_of(runtime).items())))[1]
        assert is_seen(runtime, memory, data.draw(st.integers(0, len(memory) - 1)), 1 << data.draw(st.integers(0, 7)))

    @pytest.mark.slow_cases
    def test_the_first_the_last_and_the_middle_byte_of_each(self, runtime):
        memory_of_all = memory_of(runtime)
        quantized = runtime.is_quantized and runtime.model.operators.pack is None
        assert any("_scale" in name for name in memory_of_all) == quantized
        for name, memory in memory_of_all.items():
            for place in (0, len(memory) // 2, len(memory) - 1):
                assert is_seen(runtime, memory, place, 1), name

    @needs_compiler
    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("part", ["down", "up"])
    def test_an_adapters(self, number, part):
        runtime = adapted(lora(0), lora(1))
        [memory] = [
            memory for name, memory in memory_of(runtime).items() if name.startswith(f"{number} ") and part in name
        ]
        for place in (0, len(memory) // 2, len(memory) - 1):
            assert is_seen(runtime, memory, place, 1)

    @given(place=st.integers(0, 70 * 30 * 2 - 1), size=st.sampled_from([1, 16, 100, 4200, 10000]))
    def test_of_a_matrix_in_pieces(self, place, size):
        weight = torch.randn(70, 30, dtype=torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_PIECE", size)
            before = weights_digest([("weight", weight)])
            weight.flatten().view(torch.uint8)[place] ^= 1
            assert weights_digest([("weight", weight)]) != before

    def test_rows_that_change_places(self, monkeypatch):
        monkeypatch.setattr(module, "_PIECE", 16)
        weight = torch.randn(9, 8)
        assert weights_digest([("weight", weight)]) != weights_digest([("weight", weight.roll(1, 0))])

    def test_names_shapes_dtypes_and_formats(self):
        weight = torch.zeros(4, 256, dtype=torch.bfloat16)
        quantized = FORMATS["int8"].quantize(weight)
        other_format = dataclasses.replace(quantized, format=FORMATS["int4"])
        weights = [weight, weight.view(2, 512), weight.half(), weight.float()[:2], quantized, other_format]
        assert len({weights_digest([("a", each)]) for each in weights} | {weights_digest([("b", weight)])}) == 7
        assert weights_digest([("a", weight)], 1) != weights_digest([("a", weight)], 2)


def lora(seed, name="model.layers.0.mamba.in_proj.weight"):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = random_model(small_config(**LAYERS)).get_parameter(name).shape
    sizes = {"down": (4, columns), "up": (rows, 4)}
    return Adapter({name: LowRank(**{part: torch.randn(size, generator=generator) for part, size in sizes.items()})})


def adapted(*adapters):
    model = random_model(small_config(**LAYERS))
    return CPURuntime(model, GenerationConfig(), adapters={str(number): each for number, each in enumerate(adapters)})


@needs_compiler
def test_adapters():
    """Their order, projections and invocations count. Their names do not, because states do not contain them."""
    one, two = lora(0), lora(1)
    elsewhere = lora(0, "model.layers.1.self_attn.q_proj.weight")
    activated = dataclasses.replace(one, invocation=(5, 6))
    texts = {str(adapted(*each).fingerprint) for each in ((), (one,), (two,), (one, two), (two, one))}
    texts |= {str(adapted(each).fingerprint) for each in (elsewhere, activated)}
    assert len(texts) == 7
    renamed = CPURuntime(random_model(small_config(**LAYERS)), GenerationConfig(), adapters={"another name": one})
    assert str(renamed.fingerprint) in texts


class TestTheSame:
    """The same weights and kernels have the same fingerprint, whatever their source."""

    def test_however_they_were_loaded(self, folder, numbers, runtime):
        dtype, quantize = numbers
        kernels = "torch" if runtime.model.operators.pack is None else "fused"
        for operators in (cpu.choose_operators("torch"), cpu.choose_operators(kernels)):
            model = load_model(folder, dtype, quantize=quantize, operators=operators)
            for each in (model, model.bind(operators)):
                again = CPURuntime(each, GenerationConfig(), cpu_kernels=kernels)
                assert again.fingerprint.difference(runtime.fingerprint) is None

    def test_stored_quantized(self, tmp_path, folder, numbers, runtime):
        dtype, quantize = numbers
        kernels = "torch" if runtime.model.operators.pack is None else "fused"
        save_model(load_model(folder, dtype, quantize=quantize), tmp_path / "stored")
        model = load_model(tmp_path / "stored", dtype, operators=cpu.choose_operators(kernels))
        again = CPURuntime(model, GenerationConfig(), cpu_kernels=kernels)
        assert again.fingerprint.difference(runtime.fingerprint) is None

    @pytest.mark.slow
    def test_in_another_process(self, texting_folder):
        script = "import sys; from granite4_neuron import load; print(load(sys.argv[1])[0].fingerprint)"
        other = subprocess.run([sys.executable, "-c", script, texting_folder], capture_output=True, text=True)
        text = str(load(texting_folder)[0].fingerprint)
        assert other.stdout == f"{text}\n" and len(text) == 64

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_in_any_number_of_threads(self, runtime, threads, monkeypatch):
        expected = runtime.weights_digest()
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert runtime.weights_digest() == expected

    @pytest.mark.parametrize(
        "change",
        [
            lambda weight: weight.t().contiguous().t(),
            lambda weight: torch.stack([weight, weight], -1)[..., 0],
            lambda weight: torch.nn.Parameter(weight),
        ],
        ids=["transposed", "every other value", "a parameter"],
    )
    def test_in_other_strides(self, change):
        weight = torch.randn(50, 30)
        assert weights_digest([("weight", change(weight))]) == weights_digest([("weight", weight)])

    def test_an_expanded_row_and_a_scalar(self):
        row = torch.randn(1, 30).expand(50, 30)
        assert weights_digest([("weight", row)]) == weights_digest([("weight", row.clone())])
        digests = {weights_digest([("weight", each)]) for each in (torch.tensor(1.0), torch.ones(1), torch.ones(0, 3))}
        assert len(digests) == 3

    @needs_compiler
    @pytest.mark.parametrize("format", [None, *FORMATS.values()], ids=["plain", *FORMATS])
    @pytest.mark.parametrize("shape", [(33, 97), (3, 5, 32)], ids=str)
    def test_packing_writes_every_byte(self, format, shape):
        weight = torch.randn(shape, dtype=torch.bfloat16)
        weight = weight if format is None else format.quantize(weight)
        size = cpu.pack.num_bytes(torch.Size(shape), torch.bfloat16, format)
        ones, zeros = (
            cpu.pack(weight, torch.bfloat16, torch.full((size,), value, dtype=torch.uint8)) for value in (255, 0)
        )
        assert weights_digest([("weight", ones)]) == weights_digest([("weight", zeros)])


def fingerprint_of(kernels="fused", changes=LAYERS, **options):
    model = random_model(small_config(**changes))
    return CPURuntime(model, GenerationConfig(), cpu_kernels=kernels, **options).fingerprint


class TestKernels:
    @needs_compiler
    def test_other_kernels(self):
        ways = [dict(), dict(kernels="torch"), dict(prefill_scan="quadratic"), dict(state_dtype=torch.bfloat16)]
        ways.append(dict(kernels="torch", prefill_scan="quadratic"))
        fingerprints = [fingerprint_of(**way) for way in ways]
        assert len(set(map(str, fingerprints))) == len(ways)
        assert {one.difference(fingerprints[0]) for one in fingerprints[1:]} == {"numerics"}

    def test_a_state_dtype_without_a_state(self):
        only_attention = dict(layer_types=("attention",) * 2, **DENSE)
        some, others = (fingerprint_of("torch", only_attention, state_dtype=dtype) for dtype in (None, torch.float16))
        assert some.difference(others) is None

    @pytest.mark.parametrize("what", ["instruction_sets", "installed_version"])
    def test_another_version(self, monkeypatch, what):
        before = fingerprint_of("torch")
        monkeypatch.setattr(bound_model, what, lambda: "another")
        assert fingerprint_of("torch").difference(before) == "numerics"

    @needs_compiler
    def test_another_library(self, monkeypatch):
        before = fingerprint_of()
        monkeypatch.setattr(cpu_runtime, "library_key", lambda: "another")
        assert fingerprint_of().difference(before) == "numerics"

    def test_another_config(self):
        other = fingerprint_of("torch", dict(LAYERS, attention_multiplier=0.08))
        assert other.difference(fingerprint_of("torch")) == "weights"


class TestWhenItIsMade:
    @pytest.fixture
    def made(self, monkeypatch):
        """Return a list that gets an entry each time weights are read for a fingerprint."""
        made = []

        def counting(*arguments):
            made.append(1)
            return weights_digest(*arguments)

        monkeypatch.setattr(bound_model, "weights_digest", counting)
        return made

    def test_states_in_memory_need_no_fingerprint(self, made, tmp_path):
        runtime = CPURuntime(random_model(small_config(**LAYERS)), GenerationConfig())
        cache = PrefixCache(runtime, None, None)
        engine = Engine(runtime, 1, prefix_cache=cache)
        for _ in range(2):
            engine.add(Request([5] * 20, 3))
            while engine.has_work:
                engine.step()
        snapshot = cache.export([5] * 20)
        cache.load(snapshot)
        assert cache.stats.hit_tokens == 20 and not made
        for name in ("one", "two"):
            snapshot.save(tmp_path / name)
        assert len(made) == 1

    def test_it_keeps_no_reference_to_the_weights(self):
        """A written snapshot does not keep the model in memory."""
        made = []
        fingerprint = Fingerprint(lambda made=made: made.append(1) or "0" * 32, "1" * 32)
        assert str(fingerprint) == str(fingerprint) == "0" * 32 + "1" * 32
        assert made == [1] and fingerprint._make is None

    def test_fingerprints_are_read_from_files(self):
        text = "0123456789abcdef" * 4
        assert str(Fingerprint.parse(text)) == text
        for other in ("", "x", text[:-1], f"{text}0", text.upper()):
            assert Fingerprint.parse(other).difference(Fingerprint.parse(text)) is not None
