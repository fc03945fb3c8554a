"""The runtime of PyTorch devices keeps the contract of all graph runtimes, on the CPU and on a GPU if there is one."""

import gc
import math
import weakref
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

from granite4_neuron import UserError, load
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.commands.cli import main
from granite4_neuron.config.choices import KV_WRITES
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.cuda.operators import GPU
from granite4_neuron.devices.graphs.operators import INPUT_FIRST
from granite4_neuron.devices.graphs.runtime import TOKENS
from granite4_neuron.devices.torch import runtime as torch_device
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.engine import DraftModel, Engine, Request, Sampler, SamplingParams
from granite4_neuron.engine.drafting.drafters import DraftRequest, NgramDrafter
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import CASES, DENSE, small_config
from test.support.engines import engine_model, generate_one, run, tokens_of
from test.support.graph_contract import (
    BUCKETS,
    FEW_LAYERS,
    STEPS,
    Backend,
    DecodeContract,
    EngineContract,
    OneTextContract,
    SlotContract,
    StepContract,
    VerifyContract,
    check_tokens_by_all_options,
    exhaustive_except,
    run_steps,
)
from test.support.neuron_compiler import Recorder
from test.support.verification import LONGEST, streams, verified_error

NAMED = {case.name: case for case in CASES}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


class FewRows(TorchRuntime):
    """Has graphs of two and three rows besides those of all."""

    def row_counts(self, num_sequences):
        return [count for count in (2, 3) if count < num_sequences] + [num_sequences]


def backend_of(tolerance=1e-5, runtime=TorchRuntime, **options):
    return Backend(
        make=lambda model, buckets: runtime(model, GenerationConfig(), buckets, **options),
        compilations=lambda runtime: runtime.num_compilations,
        tolerance=tolerance,
    )


LAYER = backend_of(compiler="aot_eager")
EAGER = backend_of(compiler="eager")  # takes half the time of AOTAutograd
INDUCTOR = backend_of(1e-4)
CUDA = backend_of(1e-4, device="cuda")
FEW_ROWS = backend_of(compiler="eager", runtime=FewRows)
FEW_ROWS_ON_CUDA = backend_of(1e-4, device="cuda", runtime=FewRows)


class OnLayers:
    """Runs on the CPU without a compiler behind AOTAutograd, and on a GPU with inductor and CUDA graphs."""

    @pytest.fixture(params=[LAYER, pytest.param(CUDA, marks=needs_gpu)], ids=["cpu", "cuda"])
    def backend(self, request):
        return request.param


class OnFewRows:
    """Runs graphs of two or three rows if a step has no more; on the CPU without AOTAutograd."""

    @pytest.fixture(params=[FEW_ROWS, pytest.param(FEW_ROWS_ON_CUDA, marks=needs_gpu)], ids=["cpu", "cuda"])
    def backend(self, request):
        return request.param


class TestSteps(OnLayers, StepContract):
    @pytest.mark.slow_cases
    @pytest.mark.parametrize("case", exhaustive_except("moe"))
    def test_logits_equal_the_cpu_runtimes(self, backend, case):
        super().test_logits_equal_the_cpu_runtimes(backend, case)

    @pytest.mark.slow
    def test_logits_where_sequences_outgrow_a_bucket_of_the_cache(self, backend):
        super().test_logits_where_sequences_outgrow_a_bucket_of_the_cache(backend)

    @pytest.mark.exhaustive
    def test_a_sequence_of_nan_stays_alone(self, backend):
        super().test_a_sequence_of_nan_stays_alone(backend)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16])
    def test_a_step_leaves_other_slots_alone(self, backend, dtype):
        super().test_a_step_leaves_other_slots_alone(backend, dtype)

    @pytest.mark.exhaustive
    def test_all_logits(self, backend):
        super().test_all_logits(backend)


@pytest.mark.slow_cases
class TestDecode(DecodeContract):
    @pytest.fixture(
        params=[LAYER, FEW_ROWS, *(pytest.param(each, marks=needs_gpu) for each in (CUDA, FEW_ROWS_ON_CUDA))],
        ids=["cpu", "cpu, few rows", "cuda", "cuda, few rows"],
    )
    def backend(self, request):
        return request.param


@pytest.mark.slow
class TestSlots(OnFewRows, SlotContract):
    @pytest.mark.exhaustive
    def test_snapshots_are_those_of_the_cpu(self, backend, runtime, begun):
        super().test_snapshots_are_those_of_the_cpu(backend, runtime, begun)


class TestVerify(OnFewRows, VerifyContract):
    @pytest.mark.slow
    @pytest.mark.parametrize("changes", [{}, pytest.param(DENSE, marks=pytest.mark.exhaustive)], ids=["moe", "dense"])
    def test_whatever_is_accepted(self, backend, changes):
        super().test_whatever_is_accepted(backend, changes)

    @pytest.mark.exhaustive
    def test_a_verification_changes_no_recurrent_state(self, backend):
        super().test_a_verification_changes_no_recurrent_state(backend)


class TestEngine(OnFewRows, EngineContract):
    @pytest.mark.exhaustive
    def test_a_hit_gives_the_bits_of_a_run_without(self, backend, model):
        super().test_a_hit_gives_the_bits_of_a_run_without(backend, model)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "kind", ["n-gram", *(pytest.param(f"{kind} model", marks=pytest.mark.exhaustive) for kind in ("same", "other"))]
    )
    def test_speculation_prints_the_cpus_texts(self, backend, model, kind):
        super().test_speculation_prints_the_cpus_texts(backend, model, kind)

    @pytest.mark.exhaustive
    def test_both_add_a_constant_number_of_graphs(self, backend, model):
        super().test_both_add_a_constant_number_of_graphs(backend, model)


@pytest.mark.slow
class TestOneText(OneTextContract):
    @pytest.fixture(
        params=[
            EAGER,
            pytest.param(INDUCTOR, marks=pytest.mark.exhaustive),
            pytest.param(CUDA, marks=needs_gpu),
        ],
        ids=["cpu", "inductor", "cuda"],
    )
    def backend(self, request):
        return request.param


@pytest.mark.exhaustive
class TestOneGraphOfTheModel(VerifyContract, DecodeContract):
    @pytest.fixture(params=["model", "2"])
    def backend(self, request):
        return backend_of(compiler="aot_eager", graphs=request.param)


@pytest.mark.slow
def test_inductor():
    """inductor's kernels add in another order, so the tolerance is larger."""
    cpu, ours = INDUCTOR.runtimes(lambda: random_model(small_config(**FEW_LAYERS)))
    steps = [[(1, 12)], [(1, 1)]]
    expected_logits = run_steps(cpu, steps, 1, 200)
    for expected, logits in zip(expected_logits, run_steps(ours, steps, 1, 200, INDUCTOR.poison), strict=True):
        assert (logits - expected).abs().max() <= INDUCTOR.tolerance


def runtime_of(model, **options):
    return TorchRuntime(model, GenerationConfig(), BUCKETS, compiler="aot_eager", **options)


FORMS_OF_STATE = list(zip(KV_WRITES, (False, True, False), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_write", "prefill_by_view"),
    [
        *(pytest.param("moe", *form, marks=pytest.mark.exhaustive) for form in FORMS_OF_STATE),
        *(
            pytest.param("attention_only_rope", *form, marks=[pytest.mark.exhaustive] if form[0] == "index" else [])
            for form in FORMS_OF_STATE
        ),
    ],
)
def test_every_form_of_state_gives_the_same(name, kv_write, prefill_by_view):
    config = NAMED[name].config()
    cpu = CPURuntime(random_model(config), GenerationConfig())
    runtime = runtime_of(random_model(config), kv_write=kv_write, prefill_by_view=prefill_by_view)

    def poison(state):
        for tensor in state.tensors():
            tensor.fill_(math.nan)

    expected_logits = run_steps(cpu, STEPS, 5, 200)
    for expected, logits in zip(expected_logits, run_steps(runtime, STEPS, 5, 200, poison), strict=True):
        assert (logits - expected).abs().max() <= 1e-5


KERNEL_SIZES = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64, mamba_n_groups=2, **FEW_LAYERS)


class TestKernels:
    """NKI kernels are operators of the graphs. Here they run in NKI's simulator."""

    @pytest.mark.parametrize(
        ("prefill_scan", "compiler"),
        [
            pytest.param("ssd", "aot_eager", marks=pytest.mark.exhaustive),
            pytest.param("scan", "inductor", marks=pytest.mark.exhaustive),
        ],
    )
    def test_logits(self, prefill_scan, compiler):
        backend = backend_of(compiler=compiler, prefill_scan=prefill_scan, decode_kernel="nki")
        cpu, ours = backend.runtimes(lambda: random_model(small_config(**KERNEL_SIZES)))
        expected_logits = run_steps(cpu, STEPS, 5, 200)
        for expected, logits in zip(expected_logits, run_steps(ours, STEPS, 5, 200, backend.poison), strict=True):
            assert (logits - expected).abs().max() <= backend.tolerance

    @pytest.mark.exhaustive
    def test_verification(self):
        backend = backend_of(compiler="aot_eager", decode_kernel="nki")
        cpu, ours = backend.runtimes(lambda: random_model(small_config(**DENSE, **KERNEL_SIZES)))
        rows = [Row(i + 1, 0, tokens) for i, tokens in enumerate(streams(160, 4))]
        uncut = cpu.step(cpu.allocate(4, LONGEST), rows, all_logits=True)
        options = dict(prepare=backend.poison, after_commit=lambda state, lengths: None)
        assert verified_error(ours, uncut, (0, 1, 2, 40), VerifyContract.ROUNDS, **options) <= backend.tolerance

    @pytest.mark.slow
    def test_each_is_one_node_of_its_graph(self):
        recorder = Recorder()
        model = random_model(small_config(**DENSE, **KERNEL_SIZES))
        options = dict(compiler=recorder, prefill_scan="ssd", decode_kernel="nki")
        runtime = TorchRuntime(model, GenerationConfig(), BUCKETS, **options)
        state = runtime.allocate(1, 60)
        for recorder.step, tokens in (("prefill", [3] * 20), ("decode", [3])):
            runtime.step(state, [Row(1, 0 if len(tokens) > 1 else 20, tokens)])

        def kernels(step):
            (graph,) = (graph for graph in recorder.graphs if (graph.step, graph.function) == (step, "mamba_layer"))
            names = (str(node.target) for node in graph.module.graph.nodes)
            return [name.split(".")[1] for name in names if name.startswith("granite4_neuron.")]

        assert kernels("prefill") == ["mamba_prefill"]
        assert kernels("decode") == ["mamba_decode"]

    @pytest.mark.exhaustive
    def test_the_experts_kernel_of_few_tokens(self):
        """The kernel runs decode and prompts of one bucket, with its own layout of weights. The CPU has no kernel."""
        backend = backend_of(compiler="aot_eager", experts_decode="kernel")
        config = small_config(layer_types=("attention",), hidden_size=128, mamba_n_heads=16, num_local_experts=12)
        cpu, ours = backend.runtimes(lambda: random_model(config))
        assert ours.model.operators.fused_experts is not cpu.model.operators.fused_experts
        states = [runtime.allocate(2, 60) for runtime in (cpu, ours)]
        for row in (Row(1, 0, [3, 4, 5]), Row(1, 3, [7])):
            expected, logits = (runtime.step(state, [row]) for runtime, state in zip((cpu, ours), states, strict=True))
            assert (logits - expected).abs().max() <= backend.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", "projection_bias"])
def test_operators_of_neuron(name, monkeypatch):
    """Matrices lie with the inputs first, and steps write caches by selecting: with poisoned states, in many slots."""
    monkeypatch.setattr(torch_device, "LOOPS", INPUT_FIRST)
    config = NAMED[name].config()
    cpu = CPURuntime(random_model(config), GenerationConfig())
    ours = TorchRuntime(random_model(config), GenerationConfig(), (16, 64), compiler="eager", kv_write="select")

    def poison(state):
        for tensor in state.tensors():
            tensor.fill_(math.nan)

    expected_logits = run_steps(cpu, STEPS, 5, 200)
    for expected, logits in zip(expected_logits, run_steps(ours, STEPS, 5, 200, poison), strict=True):
        assert (logits - expected).abs().max() <= 1e-5


class OverwrittenGraph:
    """A CUDA graph on a CPU: inputs and outputs keep their places, and a replay may write to the outputs of graphs that
    were captured later.
    """

    captured: ClassVar[list] = []

    def __init__(self, function, from_host, others, device, pool):
        self.function, self.inputs = function, [each.clone() for each in (from_host, *others)]
        self.outputs = function(*self.inputs)
        self.captured.append(self)

    def replay(self, from_host, others):
        for ours, given in zip(self.inputs, (from_host, *others), strict=True):
            ours.copy_(given)
        outputs = self.function(*self.inputs)
        for later in self.captured[self.captured.index(self) + 1 :]:
            for tensor in tree_leaves(later.outputs):
                tensor.fill_(7)
        for ours, new in zip(tree_leaves(self.outputs), tree_leaves(outputs), strict=True):
            ours.copy_(new)
        return self.outputs


def as_captured(monkeypatch):
    """Let a runtime capture on a CPU."""
    monkeypatch.setattr(OverwrittenGraph, "captured", [])  # so that nothing is kept after the test
    monkeypatch.setattr(torch_device, "CudaGraph", OverwrittenGraph)
    monkeypatch.setattr(torch_device, "start_copy", lambda tensor: partial(torch.clone, tensor.clone()))


def shapes_of_prompts(monkeypatch, runtime):
    """Return a list that gets the numbers of prompts and of tokens of each graph of prompts that the runtime runs."""
    shapes, run_prefill = [], runtime._run_prefill

    def recorded(state, inputs, *rest, **options):
        shapes.append((inputs.shape[0], inputs.shape[1] - TOKENS))
        return run_prefill(state, inputs, *rest, **options)

    monkeypatch.setattr(runtime, "_run_prefill", recorded)
    return shapes


class TestOperatorsOfAGPU:
    """The operators' definitions run on the CPU. Only decode of one sequence has joined operators."""

    @pytest.fixture(autouse=True)
    def gpu_operators(self, monkeypatch):
        monkeypatch.setattr(torch_device, "LOOPS", GPU)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "sequences"),
        [
            ("moe", 1),
            ("dense", 2),
            pytest.param("moe", 2, marks=pytest.mark.exhaustive),
            pytest.param("dense", 1, marks=pytest.mark.exhaustive),
        ],
    )
    def test_logits(self, name, sequences):
        config = NAMED[name].config()
        cpu, ours = LAYER.runtimes(lambda: random_model(config))
        steps = [[(slot, 20) for slot in range(1, sequences + 1)], *[[(1, 1)]] * 3, [(1, 4)], [(1, 1)]]
        expected_logits = run_steps(cpu, steps, sequences, 200)
        for expected, logits in zip(expected_logits, run_steps(ours, steps, sequences, 200, LAYER.poison), strict=True):
            assert (logits - expected).abs().max() <= LAYER.tolerance

    def test_tokens_by_all_options(self, monkeypatch):
        model = engine_model(layer_types=FEW_LAYERS["layer_types"])
        check_tokens_by_all_options(EAGER.make(model, BUCKETS), monkeypatch)

    def test_tokens_of_graphs_whose_outputs_are_overwritten(self, monkeypatch):
        """Tokens that a device chooses by all options, and drafts."""
        as_captured(monkeypatch)
        backend = backend_of(compiler="eager", prefill_by_view=False)
        runtime = backend.make(engine_model(layer_types=FEW_LAYERS["layer_types"]), BUCKETS)
        engines = [Engine(runtime, 4, max_length=60, drafter=drafter) for drafter in (None, NgramDrafter(1, 3))] * 2
        runtime._captures, texts = False, []
        for engine in engines:
            texts.append(generate_one(engine, Request([3, 4, 5] * 4, 20, temperature=0)))
            runtime._captures = True
        assert None not in texts[0] and texts[1:] == texts[:1] * 3 and engines[1].stats.drafted_tokens
        check_tokens_by_all_options(runtime, monkeypatch)

    def test_logits_of_graphs_whose_outputs_are_overwritten(self, monkeypatch):
        """Steps of several pieces, and of prompts beside decode, begin to copy logits before the next graph runs."""
        as_captured(monkeypatch)
        model = random_model(small_config(**FEW_LAYERS))
        cpu = CPURuntime(model, GenerationConfig())
        ours = TorchRuntime(model, GenerationConfig(), BUCKETS, compiler="eager", prefill_by_view=False)
        ours._captures = True
        for logits, expected in zip(*(run_steps(each, STEPS, 5, 200) for each in (ours, cpu)), strict=True):
            assert (logits - expected).abs().max() <= 1e-5

    @pytest.mark.parametrize("sequences", [3, 4])
    def test_prompts_of_a_warm_engine_share_graphs(self, sequences, monkeypatch):
        """Texts are those of a CPU. Without `warm_up` a prompt would wait for the compiler, so it has a graph alone."""
        monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], prompts_per_graph=4))
        as_captured(monkeypatch)
        model = engine_model(layer_types=FEW_LAYERS["layer_types"])
        runtime = TorchRuntime(model, GenerationConfig(top_k=None), BUCKETS, compiler="eager", prefill_by_view=False)
        runtime._captures = True
        prompts = [[slot] * length for slot, length in zip((3, 4, 5, 6), (16, 5, 9, 12), strict=True)][:sequences]
        shapes = shapes_of_prompts(monkeypatch, runtime)

        def texts(runtime, engine):
            shapes.clear()
            ids = [engine.add(Request(prompt, 20, temperature=0)) for prompt in prompts]
            outputs = run(engine)
            return [tokens_of(outputs[id]) for id in ids]

        cpu = CPURuntime(model, GenerationConfig(top_k=None))
        expected = texts(cpu, Engine(cpu, sequences))
        engine = Engine(runtime, sequences, max_length=60)
        assert texts(runtime, engine) == expected and shapes == [(1, 16)] * sequences
        engine.warm_up()
        assert {(2, 16), (2, 64)} <= set(shapes) and ((4, 64) in shapes) == (sequences == 4)
        assert texts(runtime, engine) == expected
        assert shapes == {3: [(2, 16), (1, 16)], 4: [(4, 16)]}[sequences]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("changes", "feed_forward"),
        [({}, ["route", "activate_experts", "add_feed_forward"]), (DENSE, ["activate", "add_product"])],
        ids=["moe", "dense"],
    )
    def test_nodes_of_a_layer(self, changes, feed_forward):
        recorder = Recorder()
        model = random_model(small_config(**{**FEW_LAYERS, **changes}))
        runtime = TorchRuntime(model, GenerationConfig(), BUCKETS, compiler=recorder)
        recorder.step = "decode"
        runtime.step(runtime.allocate(1, 60), [Row(1, 20, [3])])
        (graph,) = (graph for graph in recorder.graphs if graph.function == "mamba_layer")
        # An operator that writes an operand is an argument of a wrapper.
        names = (str(each) for node in graph.module.graph.nodes for each in (node.target, *node.args))
        own = [name.split(".")[1] for name in names if name.startswith("granite4_neuron.")]
        own = [name.removesuffix("_of_one") for name in own]
        assert own == ["mixer_inputs", "advance_mixer", "add_product", *feed_forward]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no 2 GPUs")
def test_a_gpu_that_is_not_the_current_one():
    """Graphs are captured on it, those that choose sampled tokens too."""
    texts = []
    for device in ("cuda:0", "cuda:1"):
        runtime = TorchRuntime(engine_model(), GenerationConfig(), BUCKETS, device=device)
        texts.append(generate_one(Engine(runtime, 2, max_length=60), Request([3] * 5, 20, temperature=1.0, seed=1)))
    assert texts[0] == texts[1]


class TestMemory(OnLayers):
    @pytest.mark.slow
    def test_memory_is_freed_with_the_runtime(self, backend):
        runtime = backend.make(random_model(small_config(**FEW_LAYERS)), BUCKETS)
        state = runtime.allocate(2, 60)
        runtime.step(state, [Row(1, 0, [3] * 9)])
        runtime.step(state, [Row(1, 9, [3])])
        held = [runtime, *runtime.model.parameters(), *state.tensors()]
        references = [weakref.ref(each) for each in held]
        del held, runtime, state
        gc.collect()
        assert not [each() for each in references if each() is not None]


class TestGraphs:
    @pytest.mark.slow
    def test_layers_of_a_kind_share_a_graph(self):
        runtime = runtime_of(random_model(small_config(layer_types=("mamba", "attention") * 3)))
        state = runtime.allocate(2, 200)
        runtime.step(state, [Row(1, 0, [3] * 9)])
        parts = 4  # embedding, Mamba layer, attention layer, head
        assert runtime.num_compilations == parts
        runtime.step(state, [Row(1, 9, [3]), Row(2, 0, [3] * 16)])
        assert runtime.num_compilations == 2 * parts
        runtime.commit(state, runtime.verify(state, [Row(1, 10, [3, 4])]), [1])
        assert runtime.num_compilations == 3 * parts + 1

    @pytest.mark.slow
    def test_a_longer_cache_adds_graphs_of_attention_layers(self):
        runtime = runtime_of(random_model(small_config(**DENSE, **FEW_LAYERS, max_position_embeddings=5000)))
        state = runtime.allocate(1, 5000)
        runtime.step(state, [Row(1, 0, [3] * 9)])
        before = runtime.num_compilations
        for end, more in ((1024, 0), (1025, 1), (4096, 1), (4097, 2), (5000, 2)):
            runtime.step(state, [Row(1, end - 9, [3] * 9)])
            assert runtime.num_compilations == before + more, end

    @pytest.mark.slow
    def test_after_a_warm_up_nothing_is_compiled_for_a_draft_model(self, caplog):
        """However many tokens it has to catch up with."""
        layers = FEW_LAYERS["layer_types"]
        target, small = (
            TorchRuntime(engine_model(seed=seed, layer_types=layers), GenerationConfig(), BUCKETS, compiler="eager")
            for seed in (0, 1)
        )
        drafter = DraftModel(small, small.config.vocab_size, 2, 100)
        engine = Engine(target, 2, max_length=100, drafter=drafter, draft_tokens=3)
        engine.warm_up()
        compiled = target.num_compilations, small.num_compilations
        assert min(compiled) > 0
        tokens = [3, 4, 5] * 20
        for length in (1, 5, 40):
            engine.add(Request(tokens[:length], 30))
        run(engine)
        assert engine.stats.drafted_tokens > 10 and "drafter" not in caplog.text
        chooser = Sampler(SamplingParams(temperature=0), 0)
        for more in range(1, 20):
            for length in (20, 20 + more):
                [drafts] = drafter.propose([DraftRequest(-more, tokens[:length], 4, chooser)])
                assert len(drafts) == 4
            drafter.end(-more)
        assert (target.num_compilations, small.num_compilations) == compiled

    @pytest.mark.parametrize(
        ("graphs", "max_length", "compilations"),
        # Graphs for prompts of 16 and 64 tokens, the two heads, decode, draws, verification of 4 tokens, and commit.
        # An attention layer has two of each, for the two lengths of the cache.
        [
            pytest.param("layer", 1200, 2 * 4 + 2 + 5 + 1 + 5 + 1, marks=pytest.mark.exhaustive),
            pytest.param("model", 100, 2 * 3 + 2 + 1 + 1 + 1 + 1, marks=pytest.mark.exhaustive),
        ],
        ids=["layer", "model"],
    )
    def test_after_a_warm_up_nothing_is_compiled(self, graphs, max_length, compilations):
        """After warm-up, prompts, decode, prompt log-probabilities and drafts compile no graph; compiling is an error.

        Slots in use keep their state. Nothing before the warm-up has log-probabilities or a long cache.
        """
        runtime = runtime_of(random_model(small_config(**FEW_LAYERS)), graphs=graphs)
        engine = Engine(runtime, 2, max_length=max_length, drafter=NgramDrafter(1, 3), draft_tokens=3)
        text = generate_one(engine, Request([3, 4, 5] * 6, 20))
        state = engine._slots.state
        before = [{name: view.clone() for name, view in state.slot_views(slot).items()} for slot in (1, 2)]
        engine.warm_up()
        compiled = runtime.num_compilations
        assert compiled == compilations
        for slot, old in enumerate(before, start=1):
            # Unused memory may hold NaN.
            torch.testing.assert_close(state.slot_views(slot), old, rtol=0, atol=0, equal_nan=True)
        assert generate_one(engine, Request([3, 4, 5] * 6, 20, prompt_logprobs=1)) == text
        generate_one(engine, Request([3] * 5, 5, prompt_logprobs=1))
        drafted = engine.stats.drafted_tokens
        generate_one(engine, Request([3, 4, 5] * (max_length // 3 - 12), 20, prompt_logprobs=1))
        assert engine.stats.drafted_tokens > drafted > 0 and runtime.num_compilations == compiled
        with pytest.raises(Exception, match="would be compiled again"):
            runtime.step(runtime.allocate(3, 50), [Row(1, 0, [3])])

    @pytest.mark.slow
    def test_the_memory_of_a_freed_state_is_used_again(self):
        runtime = runtime_of(random_model(small_config(**FEW_LAYERS)))
        addresses = []
        for sequences in (2, 2, 1, 2):
            state = runtime.allocate(sequences, 50)
            addresses.append([tensor.data_ptr() for tensor in state.tensors()])
            other = runtime.allocate(sequences, 50)
            assert not {tensor.data_ptr() for tensor in other.tensors()} & set(addresses[-1])
            del state, other
            gc.collect()
        assert addresses[0] == addresses[1]


class TestCommands:
    @pytest.mark.exhaustive
    def test_generate(self, capsys):
        """The bundled model, in its dtype, on inductor."""
        texts = []
        for options in ((), ("--backend", "torch", "--device", "cpu")):
            assert main(["generate", "An assignment statement", "--max-tokens", "8", *options]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]

    @pytest.mark.slow
    def test_the_options_that_the_probe_advises_work(self, capsys, monkeypatch):
        """Each option reaches the runtime, and the text stays the same."""
        given = []

        class Runtime(TorchRuntime):
            def __init__(self, *arguments, **options):
                given.append(options)
                super().__init__(*arguments, **options)

        monkeypatch.setattr("granite4_neuron.devices.torch.runtime.TorchRuntime", Runtime)
        command = ["generate", "An assignment statement", "--max-tokens", "4"]
        assert main(command) == 0
        expected = capsys.readouterr().out
        forms = ["--compiler", "eager", "--kv-write", "rows", "--no-prefill-by-view", "--prefill-scan", "quadratic"]
        assert main([*command, "--backend", "torch", *forms]) == 0
        assert capsys.readouterr().out == expected
        chosen = dict(compiler="eager", kv_write="rows", prefill_by_view=False, prefill_scan="quadratic")
        assert given[0].items() >= chosen.items()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--backend", "torch", "--device", "tpu"), "device is 'tpu'"),
            (("--backend", "torch", "--compiler", "gcc"), "compiler is 'gcc'; the backends of torch.compile here are "),
            (("--kv-write", "rows"), "kv_write is an option of the backend torch; the backend here is cpu"),
            (("--no-prefill-by-view",), "prefill_by_view is an option of the backend torch; the backend here is cpu"),
            (("--backend", "torch", "--device", "neuron"), "needs the torch-neuronx of Neuron SDK 2.33"),
            (("--backend", "torch", "--graphs", "0"), "graphs is '0'; it must be one of layer, model, or a number of"),
            (("--device", "cuda"), "belong to the backend torch"),
            (("--backend", "torch", "--quantize", "int8"), "some for a GPU; torch on cpu runs the original"),
            (("--backend", "xla", "--state-dtype", "bfloat16"), "SSM states in 16 bits are for"),
        ],
    )
    def test_bad_options_are_refused(self, capsys, options, message):
        assert main(["generate", "x", *options]) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_a_missing_gpu_is_reported(self):
        with pytest.raises(UserError, match="torch finds no GPU here"):
            load(backend="torch", device="cuda")
