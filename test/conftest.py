import gc
import os
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import settings

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.cpu import operators as cpu
from test.support.checkpoints import CASES, NEMOTRON_EXPERTS, save_byte_tokenizer, small_config
from test.support.combinations import mark_combinations
from test.support.nki_emulator import provide_nki

provide_nki()

# The same examples on every machine, without a limit of time.
settings.register_profile("package", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("package")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist
def pytest_cmdline_main(config):
    """Give each core a worker. Tests of named files run in this process: starting workers takes longer than most do."""
    is_free = getattr(config.option, "numprocesses", 0) is None and not hasattr(config, "workerinput")
    if is_free and all(Path(each).is_dir() for each in config.args):
        config.option.numprocesses, config.option.dist = "auto", "worksteal"


def pytest_configure(config):
    if os.environ.get("PJRT_DEVICE") == "CPU":
        # Each graph is run a few times only, and compiling it for speed takes three times as long.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    # One thread per test worker: threads of two workers on one core would wait for each other at every step. One
    # compiling process per worker: inductor would start one for each core.
    if getattr(config.option, "numprocesses", None):
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(variable, "1")
        cpu.has_fused_kernels()  # Compile them once, before the workers start.


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(items):
    mark_combinations(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """See `test/__init__.py`."""
    gc.freeze()
    gc.enable()


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
    """Return a function that takes a case and a dtype and returns a checkpoint's folder, written once per session."""
    written = {}

    def folder(case, dtype=torch.float32):
        key = repr((case, dtype))
        if key not in written:
            path = tmp_path_factory.mktemp("checkpoints") / case.name
            save_model(random_model(case.config(), seed=len(case.name), dtype=dtype, max_A=case.max_A), path)
            written[key] = path
        return written[key]

    return folder


@pytest.fixture(scope="session", params=(*CASES, *NEMOTRON_EXPERTS), ids=lambda case: case.name)
def case_folder(request, random_checkpoints):
    """Return the folder of each random checkpoint in turn."""
    return random_checkpoints(request.param)


@pytest.fixture(scope="session", params=cpu.CPU_KERNELS)
def kernels(request):
    """Return the operators of each choice of CPU kernels in turn."""
    if request.param == "fused" and not cpu.has_fused_kernels():
        pytest.skip("the fused kernels need a C++ compiler")
    return cpu.choose_operators(request.param)


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
