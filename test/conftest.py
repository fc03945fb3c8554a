import os

import pytest
import torch
import transformers
from hypothesis import settings

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model, save_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.ops import cpu
from test.support.checkpoints import CASES, save_byte_tokenizer, small_config
from test.support.nki_emulator import provide_nki

provide_nki()

# These tests do not depend on the versions of torch and transformers, so one environment is enough.
ONCE = (
    "test/faults/",
    "test/integration/test_adapters.py::TestEngine",
    "test/integration/test_adapters.py::test_beside_others_and_in_any_steps",
    "test/integration/test_adapters.py::test_verified_tokens_are_those_of_decode",
    "test/integration/test_benchmark",
    "test/integration/test_bundled.py::test_40000_tokens_of_prompt",
    "test/integration/test_bundled.py::test_a_planted_bug_changes_tokens",
    "test/integration/test_compile.py",
    "test/integration/test_compressed_tensors.py",
    "test/integration/test_int8.py",
    "test/integration/test_logits.py::test_bfloat16_error_is_not_above_that_of_transformers",
    "test/integration/test_long_context.py::TestErrors::test_of_torch",
    "test/integration/test_long_context.py::TestMoreThan32Bits",
    "test/integration/test_long_context.py::test_",
    "test/integration/test_new_format.py",
    "test/integration/test_one_text.py",
    "test/integration/test_other_processors.py",
    "test/integration/test_quantized_checkpoints.py",
    "test/integration/test_serve.py",
    "test/integration/test_serve_adapters.py",
    "test/integration/test_serve_clients.py",
    "test/integration/test_serve_connections.py",
    "test/integration/test_serve_hostile.py",
    "test/integration/test_serve_page.py",
    "test/integration/test_serve_process.py",
    "test/integration/test_serve_refusals.py",
    "test/integration/test_serve_structured.py",
    "test/integration/test_serve_tools.py",
    "test/integration/test_soak.py",
    "test/integration/test_tensor_parallel.py",
    "test/integration/test_torch_device.py",
    "test/integration/test_tune.py",
    "test/unit/engine/test_cache_budgets.py",
    "test/unit/checkpoint/test_loading.py::test_peak_memory_is_near_the_size_of_the_model",
    "test/unit/test_cli",
    "test/unit/commands/",
    "test/unit/engine/test_constraint.py",
    "test/unit/ops/cpu/kernels/test_kernels.py",
    "test/unit/test_documented_commands.py",
    "test/unit/checkpoint/test_loading.py::test_a_write_that_fails_leaves_nothing",
    "test/unit/engine/test_backoff.py",
    "test/unit/engine/test_engine.py::test_every_sequence_is_what_it_is_alone",
    "test/unit/ops/cpu/kernels/test_checks.py",
    "test/unit/neuron/analysis/test_latency.py",
    "test/unit/ops/test_launch_parameters.py",
    "test/unit/test_layering.py",
    "test/unit/ops/nki/",
    "test/unit/support/test_nki_",
    "test/unit/benchmarks/test_kernels.py",
    "test/unit/ops/cpu/kernels/test_paged",
    "test/unit/evaluation/test_perplexity.py",
    "test/unit/neuron/analysis/test_plan.py",
    "test/unit/engine/test_prefix_cache.py",
    "test/unit/engine/test_prefix_folder.py",
    "test/unit/vllm/test_rejection_sampler.py",
    "test/unit/engine/test_slot_prefix_cache.py",
    "test/unit/engine/test_speculation.py",
    "test/unit/ops/test_stochastic_rounding.py",
    "test/unit/generation/test_structured_outputs.py",
    "test/unit/engine/test_text.py",
    "test/unit/ops/cpu/kernels/test_tile_products.py",
    "test/unit/generation/test_tokenizer_growth.py",
    "test/unit/generation/test_tool_calls.py",
    "test/unit/vllm/test_operators.py",
    "test/unit/checkpoint/test_weight_plan.py",
)

# Each compiles many graphs, starts several processes, or takes many steps, of kinds that other tests have too.
_DEVICE = "test/integration/test_torch_device.py::"
_CPU_LOGITS = f"{_DEVICE}TestSteps::test_logits_equal_the_cpu_runtimes[cpu-"
_XLA_LOGITS = "test/integration/test_xla.py::TestSteps::test_logits_equal_the_cpu_runtimes"
_SPLIT = "test/integration/test_tensor_parallel.py::TestSplitRuntime::"
_RANKS = "test/integration/test_tensor_parallel.py::test_every_rank_has_the_whole_models_logits"
SLOW = (
    *(f"{_CPU_LOGITS}{case.name}]" for case in CASES if case.name != "moe"),
    f"{_DEVICE}TestSteps::test_a_sequence_of_nan_stays_alone[cpu]",
    f"{_DEVICE}TestSteps::test_a_step_leaves_other_slots_alone[cpu-dtype0]",
    f"{_DEVICE}TestSteps::test_all_logits[cpu]",
    f"{_DEVICE}TestSlots::test_snapshots_are_those_of_the_cpu[cpu]",
    f"{_DEVICE}TestVerify::test_whatever_is_accepted[cpu-dense]",
    f"{_DEVICE}TestVerify::test_a_verification_changes_no_recurrent_state[cpu]",
    f"{_DEVICE}TestEngine::test_a_hit_gives_the_logits_of_a_run_without[cpu]",
    f"{_DEVICE}TestEngine::test_both_add_a_constant_number_of_graphs[cpu]",
    f"{_DEVICE}TestEngine::test_speculation_prints_the_cpus_texts[cpu-same model]",
    f"{_DEVICE}TestEngine::test_speculation_prints_the_cpus_texts[cpu-other model]",
    f"{_DEVICE}TestOneGraphOfTheModel::",
    f"{_DEVICE}TestKernels::test_logits[ssd-aot_eager]",
    f"{_DEVICE}TestGraphs::test_warming_up[model]",
    f"{_DEVICE}test_every_form_of_state_gives_the_same[moe",
    f"{_DEVICE}test_every_form_of_state_gives_the_same[attention_only_rope-index",
    f"{_RANKS}[groups split, biases, rope]",
    *(f"{_XLA_LOGITS}[{case.name}]" for case in CASES if case.name not in ("moe", "rope", "mamba_only")),
    "test/integration/test_xla.py::test_the_end_of_a_context_of_131072_tokens",
    "test/integration/test_long_context.py::TestErrors::test_of_torch[device-attention-bfloat16]",
    "test/integration/test_long_context.py::TestErrors::test_of_xla[attention-bfloat16]",
    f"{_DEVICE}TestKernels::test_verification",
    "test/integration/test_compile.py::test_each_kind_of_step_is_one_graph[two_groups]",
    f"{_SPLIT}test_steps[cpu]",
    f"{_SPLIT}test_a_second_state_beside_the_first[cpu]",
    f"{_SPLIT}test_texts_with_drafts[cpu]",
    f"{_SPLIT}test_what_every_rank_refuses[cpu]",
    f"{_RANKS}[untied dense]",
    f"{_RANKS}[kv heads replicated, 4 ranks]",
    "test/integration/test_bundled.py::test_40000_tokens_of_prompt",
    "test/integration/test_benchmark.py::TestLlamaCpp::test_its_failure_is_reported",
    "test/integration/test_other_processors.py::test_the_kernels_compile[x86 without AVX]",
    "test/integration/test_other_processors.py::test_the_kernels_compile[AVX-512 with bfloat16]",
    "test/integration/test_other_processors.py::test_the_kernels_compile[AVX-512 without bfloat16]",
    "test/integration/test_other_processors.py::test_the_kernels_compile[AVX-512 with permutations of bytes]",
    "test/unit/ops/test_stochastic_rounding.py::test_states_of_slow_heads_do_not_drift",
)

# The same examples on every machine, without a limit of time.
settings.register_profile("package", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("package")


def pytest_configure(config):
    if os.environ.get("PJRT_DEVICE") == "CPU":
        # Each graph is run a few times only, and compiling it for speed takes three times as long.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    # One thread per test worker: threads of two workers on one core would wait for each other at every step. And one
    # process that compiles, where inductor would start as many for each worker as there are cores.
    if getattr(config.option, "numprocesses", None):
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(variable, "1")
        cpu.has_fused_kernels()  # Compile them once, before the workers start.


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(ONCE):
            item.add_marker("once")
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter):
    """Print how many of the faults in test/faults were tried."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    faults = [report for report in reports if report.when == "call" and report.nodeid.startswith("test/faults/")]
    if faults:
        answered = sum(report.passed for report in faults)
        terminalreporter.write_line(f"faults: {len(faults)} tried, {answered} answered as they should be")


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory):
    """Return a function from a case and a dtype to the folder of a checkpoint, which is written once a session."""
    written = {}

    def folder(case, dtype=torch.float32):
        key = repr((case, dtype))
        if key not in written:
            path = tmp_path_factory.mktemp("checkpoints") / case.name
            save_model(random_model(case.config(), seed=len(case.name), dtype=dtype, max_A=case.max_A), path)
            written[key] = path
        return written[key]

    return folder


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def case_folder(request, random_checkpoints):
    """Return the folder of each random checkpoint in turn."""
    return random_checkpoints(request.param)


@pytest.fixture(scope="session", params=cpu.CPU_KERNELS)
def kernels(request):
    """Return the operators of each choice of CPU kernels in turn."""
    if request.param == "fused" and not cpu.has_fused_kernels():
        pytest.skip("the fused kernels need a C++ compiler")
    return cpu.operators(request.param)


@pytest.fixture(scope="session")
def case_model(case_folder, kernels):
    """Load each random checkpoint in float32 and bind it to each choice of kernels in turn."""
    return load_model(case_folder, torch.float32).bind(kernels)


@pytest.fixture(scope="session")
def texting_folder(tmp_path_factory):
    """Write a random checkpoint with a tokenizer of one token per byte and a chat template."""
    folder = tmp_path_factory.mktemp("texting") / "model"
    save_model(
        random_model(
            small_config(
                vocab_size=264,
                tie_word_embeddings=False,
                max_position_embeddings=600,
                eos_token_id=1,
                mamba_n_heads=4,
                mamba_d_head=32,
                mamba_d_state=32,
            )
        ),
        folder,
    )
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def texting(texting_folder):
    """Load the checkpoint of `texting_folder`: (runtime, tokenizer)."""
    return load(texting_folder)


@pytest.fixture(scope="module")
def client(server):
    """Return OpenAI's client of the module's server, see `test.support.serving`."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client
