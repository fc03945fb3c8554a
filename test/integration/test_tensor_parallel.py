"""A model split over processes gives the logits of the whole model. The processes talk through gloo."""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from transformers import GenerationConfig

from granite4_neuron import load
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.split import SplitRuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.errors import UserError
from granite4_neuron.generation import stream_generate
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.runtime.bound_model import digest_of_weights
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.fingerprint import facts_digest
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.snapshot import Snapshot
from granite4_neuron.system import available_memory
from test.support.checkpoints import DENSE, granite_names, nemotron_config, small_config
from test.support.engines import KnownText, generate_one
from test.support.graph_contract import BUCKETS, FEW_LAYERS, STEPS, run_steps
from test.support.stepping import random_tokens, run_cuts

CUTS = [40, 1, 7, 1, 1, 30]
MODELS = [
    pytest.param(2, {}, id="moe, 2 ranks"),
    pytest.param(4, {}, marks=pytest.mark.exhaustive, id="kv heads replicated, 4 ranks"),
    pytest.param(
        2,
        dict(mamba_n_groups=2, mamba_proj_bias=True, attention_bias=True, position_embedding_type="rope"),
        marks=pytest.mark.exhaustive,
        id="groups split, biases, rope",
    ),
    pytest.param(2, dict(tie_word_embeddings=False, **DENSE), marks=pytest.mark.exhaustive, id="untied dense"),
]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_rank(rank, degree, folder, port, results):
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # torch's deprecations
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=degree)
    parallel = Parallel(rank, degree, torch.distributed.group.WORLD.group_name)
    model = load_model(folder, torch.float32, parallel=parallel)
    logits = run_cuts(model, random_tokens(model.config.vocab_size, 2, sum(CUTS)), CUTS)
    torch.save(logits, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("degree, changes", MODELS)
def test_every_rank_has_the_whole_models_logits(tmp_path, degree, changes):
    model = random_model(small_config(**changes))
    save_model(model, tmp_path / "model")
    arguments = (degree, tmp_path / "model", free_port(), str(tmp_path))
    torch.multiprocessing.start_processes(run_rank, args=arguments, nprocs=degree, start_method="spawn")
    expected = run_cuts(model, random_tokens(model.config.vocab_size, 2, sum(CUTS)), CUTS)
    for rank in range(degree):
        assert (torch.load(tmp_path / f"{rank}.pt") - expected).abs().max() <= 1e-5


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no 2 GPUs")


class TestSplitRuntime:
    """Two ranks, on a CPU or on two GPUs, give what the CPU runtime gives of the whole model."""

    CONFIG = small_config(**FEW_LAYERS)

    @pytest.fixture(scope="class", params=["cpu", pytest.param("cuda", marks=needs_two_gpus)])
    @classmethod
    def split(cls, request, tmp_path_factory):
        folder = tmp_path_factory.mktemp("split") / "model"
        save_model(random_model(cls.CONFIG), folder)
        options = dict(prefill_buckets=BUCKETS, compiler="eager" if request.param == "cpu" else None)
        runtime = SplitRuntime(
            folder, torch.float32, GenerationConfig(top_k=None), tp_degree=2, device=request.param, **options
        )
        yield runtime
        runtime.close()

    @pytest.fixture(scope="class")
    @classmethod
    def cpu(cls):
        return CPURuntime(random_model(cls.CONFIG), GenerationConfig(top_k=None))

    @pytest.mark.exhaustive
    def test_steps(self, split, cpu):
        for expected, logits in zip(run_steps(cpu, STEPS, 5, 200), run_steps(split, STEPS, 5, 200), strict=True):
            assert (logits - expected).abs().max() <= 1e-4

    @pytest.mark.exhaustive
    def test_two_states_at_once_are_kept_apart(self, split, cpu):
        """The ranks tell states apart, also after one state is freed."""
        runs = {}
        for runtime in (cpu, split):
            states = [runtime.allocate(1, 60) for _ in range(2)]
            for state, token in zip(states, (3, 4), strict=True):
                runtime.step(state, [Row(1, 0, [token] * 10)])
            after = [runtime.step(state, [Row(1, 10, [5])]) for state in states]
            del state, states[0]
            again = runtime.allocate(1, 60)
            runtime.step(again, [Row(1, 0, [6] * 10)])
            runs[runtime] = [*after, runtime.step(states[0], [Row(1, 11, [7])]), runtime.step(again, [Row(1, 10, [8])])]
        for expected, logits in zip(runs[cpu], runs[split], strict=True):
            assert (logits - expected).abs().max() <= 1e-4

    @pytest.mark.exhaustive  # four ranks do the same below
    def test_verification_and_copy(self, split, cpu):
        runs = {}
        for runtime in (cpu, split):
            state = runtime.allocate(3, 60)
            runtime.step(state, [Row(1, 0, [3] * 9), Row(2, 0, [4] * 5)])
            verification = runtime.verify(state, [Row(1, 9, [5, 6, 7]), Row(2, 5, [8])])
            runtime.commit(state, verification, [2, 0])
            runtime.copy(state, 1, 3, 11)
            after = runtime.step(state, [Row(3, 11, [9]), Row(2, 5, [10])])
            runs[runtime] = [verification.logits[0], verification.logits[1, :1], after]
        for expected, logits in zip(runs[cpu], runs[split], strict=True):
            assert (logits - expected).abs().max() <= 1e-4

    @pytest.mark.exhaustive
    def test_drafts_change_no_text(self, split, cpu):
        prompts = [random_tokens(self.CONFIG.vocab_size, length, seed=length).tolist() for length in (5, 40, 16)]
        prompts.append(prompts[0] * 6)
        options = dict(max_tokens=12, temperature=0, ignore_eos=True)

        def tokens(runtime, drafter):
            texts = [[] for _ in prompts]
            for response in stream_generate(runtime, None, prompts, drafter=drafter, **options):
                texts[response.index].append(response.token)
            return texts

        assert tokens(split, NgramDrafter(1, 3)) == tokens(cpu, None)

    @pytest.mark.exhaustive
    def test_a_refused_call_leaves_the_ranks_in_step(self, split):
        """A refused call leaves the ranks in step."""
        state = split.allocate(1, 60)
        with pytest.raises(ValueError, match="tokens of a row are to be verified"):
            split.verify(state, [Row(1, 0, [3] * 60)])
        assert split.step(state, [Row(1, 0, [3])]).isfinite().all()
        with pytest.raises(UserError, match="this process has a model that is split over devices"):
            SplitRuntime(bundled_checkpoint(), None, GenerationConfig(), tp_degree=2, device="cpu")

    @pytest.mark.slow
    def test_snapshots(self, split, cpu, tmp_path):
        """A sequence continues in another slot from two snapshots, one of them read from a file."""
        tokens = random_tokens(self.CONFIG.vocab_size, 21, seed=8).tolist()
        runs = []
        for runtime in (cpu, split):
            state = runtime.allocate(2, 60)
            runtime.step(state, [Row(1, 0, tokens[:10])])
            first = runtime.snapshot(state, 1, 10)
            runtime.step(state, [Row(1, 10, tokens[10:20])])
            second = runtime.snapshot(state, 1, 20, 10)
            second.check(runtime)
            second.save(tmp_path / "second")
            runtime.restore(state, [first, Snapshot.load(tmp_path / "second", runtime)], 2)
            runs.append(runtime.step(state, [Row(2, 20, tokens[20:])]))
        assert (runs[0] - runs[1]).abs().max() <= 1e-4

    @pytest.mark.slow
    def test_the_fingerprint_is_of_all_ranks_weights(self, split, tmp_path):
        """In `other` a row of the embedding that only the second rank holds is different."""
        other = random_model(self.CONFIG)
        with torch.no_grad():
            other.model.embed_tokens.weight[-1, 3] += 1
        digests = []
        for name, model in (("same", random_model(self.CONFIG)), ("other", other)):
            save_model(model, tmp_path / name)
            parts = [load_model(tmp_path / name, torch.float32, Parallel(rank, 2)) for rank in range(2)]
            digests.append([digest_of_weights(part) for part in parts])
        same, other = digests
        assert same[0] == other[0] and same[1] != other[1]
        assert str(split.fingerprint).startswith(facts_digest(*same))

    @pytest.mark.exhaustive  # four ranks do the same below
    def test_a_prefix_hit_changes_no_text(self, split, cpu):
        prompts = [[5, 6, 7, 8] * 10 + [end] for end in (1, 2, 3)]
        texts = []
        for runtime in (cpu, split):
            cache = PrefixCache(runtime, 2**30, None, at_branches=True)
            engine = Engine(runtime, 1, max_length=60, prefix_cache=cache)
            texts.append([])
            for prompt in prompts:
                engine.add(Request(prompt, max_tokens=5, temperature=0))
                while engine.has_work:
                    texts[-1] += [output.token for output in engine.step()]
            assert cache.stats.hit_tokens
        assert texts[0] == texts[1]


class _Recorded:
    """Records the logits of a runtime's steps and verifications, each with its row."""

    def __init__(self, runtime):
        self.rows: list[tuple[Row, torch.Tensor]] = []
        self._step, self._verify = runtime.step, runtime.verify
        runtime.step, runtime.verify = self.step, self.verify

    def step(self, state, rows, all_logits=False):
        logits = self._step(state, rows, all_logits)
        self.rows += [(row, each[None]) for row, each in zip(rows, logits, strict=True)]
        return logits

    def verify(self, state, rows):
        verification = self._verify(state, rows)
        self.rows += list(zip(rows, verification.logits, strict=True))
        return verification

    def error(self, tokens, uncut):
        """Return the largest error of the recorded logits against those of one uncut step, and their number."""
        errors = []
        for row, logits in self.rows:
            end = row.start + len(row.tokens)
            for position, each in enumerate(logits, start=end - len(logits)):
                if row.tokens[: position + 1 - row.start] == tokens[row.start : position + 1]:  # else a draft was wrong
                    errors.append(float((each - uncut[position]).abs().max()))
        return max(errors), len(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "config", "state_dtype"),
    [
        pytest.param(2, granite := small_config(layer_types=("mamba", "attention")), None, id="2-granite"),
        pytest.param(2, granite, torch.float16, id="2-granite, states in float16"),
        pytest.param(4, granite, None, id="4-granite", marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            nemotron_config(layer_types=("mamba", "moe", "attention", "mlp")),
            None,
            id="4-nemotron",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            nemotron_config(layer_types=("mamba", "moe", "attention"), mamba_n_groups=2, moe_latent_size=40),
            None,
            id="4-nemotron, latent, groups of two ranks",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_speculation_snapshots_and_a_prefix_cache(tmp_path, degree, config, state_dtype):
    """Logits are those of one process, in each step of prompts that share a prefix, and in verifications. States in 16
    bits are rounded.
    """
    model, drafter = random_model(config), KnownText()
    save_model(model, tmp_path)
    cpu = CPURuntime(model, GenerationConfig(top_k=None), cpu_kernels="torch")
    options = dict(prefill_buckets=(16,), compiler="eager", state_dtype=state_dtype)
    generation = GenerationConfig(top_k=None)
    split = SplitRuntime(tmp_path, torch.float32, generation, tp_degree=degree, device="cpu", **options)
    try:
        cache = PrefixCache(split, None, None, at_branches=True)
        engine = Engine(split, 1, max_length=100, prefix_cache=cache, drafter=drafter, draft_tokens=3)
        for end in (1, 2, 3):
            recorded = _Recorded(split)
            prompt = [5, 6, 7, 8] * 6 + [end] + [5, 6, 7, 8]
            request = Request(prompt, max_tokens=10, temperature=0)
            tokens = drafter.text = prompt + generate_one(Engine(cpu, 1, max_length=100), request)
            assert prompt + generate_one(engine, request) == tokens
            [uncut] = cpu.step(cpu.allocate(1, 100), [Row(1, 0, tokens)], all_logits=True)
            error, number = recorded.error(tokens, uncut)
            assert error <= (1e-5 if state_dtype is None else 5e-3) and number >= 10
        assert engine.stats.cached_tokens >= 24 and 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
        # Every rank draws the same tokens and runs them.
        sampled = Request(prompt, 8, temperature=0.8, top_k=20, seed=1)
        texts = [generate_one(Engine(runtime, 1, max_length=100), sampled) for runtime in (cpu, split)]
        assert texts[0] == texts[1]
    finally:
        split.close()


# In another process, because a process can have only one such model.
BROKEN_CALL = """
from granite4_neuron import UserError, load
from granite4_neuron.runtime.interface import Row
from granite4_neuron.devices.torch.runtime import TorchRuntime

def interrupted(*arguments):
    raise KeyboardInterrupt

runtime, _ = load(backend="torch", tp_degree=2)
state = runtime.allocate(1, 60)
TorchRuntime._run_prefill = interrupted
for _ in range(2):
    try:
        runtime.step(state, [Row(1, 0, [3])])
    except (KeyboardInterrupt, UserError) as error:
        print(type(error).__name__, error)
"""

DEAD_RANK = """
import psutil
from granite4_neuron import load
from granite4_neuron.runtime.interface import Row

runtime, _ = load(backend="torch", tp_degree=2, compiler="eager")
state = runtime.allocate(1, 60)
runtime.step(state, [Row(1, 0, [3])])
[rank] = [each for each in psutil.Process().children() if "spawn_main" in " ".join(each.cmdline())]
rank.kill()
for position in range(1, 50):
    runtime.step(state, [Row(1, position, [3])])
print("not reached")
"""


SIGNALS_TO_ALL = """
import os, signal
from granite4_neuron import load
from granite4_neuron.runtime.interface import Row

runtime, _ = load(backend="torch", tp_degree=2, compiler="eager")
state = runtime.allocate(1, 60)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
    os.killpg(0, number)
print(runtime.step(state, [Row(1, 0, [3])]).isfinite().all().item())
"""

WITHOUT_GUARD = """
from granite4_neuron import load
runtime, _ = load(backend="torch", tp_degree=2)
print("not reached")
"""

LOADED = """
import sys
from granite4_neuron import load
runtime, _ = load(backend="torch", tp_degree=2)
print("loaded", flush=True)
sys.stdin.read()
"""

INTERRUPTED_END = """
from granite4_neuron import load
from granite4_neuron.runtime.interface import Row
from granite4_neuron.devices.torch.rank_calls import Call, to_bytes

class Interrupted:
    def join(self, *seconds):
        raise KeyboardInterrupt

runtime, _ = load(backend="torch", tp_degree=2)
state = runtime.allocate(1, 60)
step = Call("step", [state, [Row(1, 0, [3])]], 9, list(runtime._numbered), False)
runtime._ranks.send([to_bytes(step, runtime._numbered)])  # waits for rank 0 in its first sum
runtime._ranks._watcher = Interrupted()
try:
    runtime.close()
except KeyboardInterrupt:
    print("interrupted")
"""


class TestCommand:
    @pytest.mark.slow
    def test_an_interrupt_while_ranks_end_leaves_no_rank(self):
        """A rank that waits for another within a step does not notice that it should end."""
        command = [sys.executable, "-c", INTERRUPTED_END]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.stdout == "interrupted\n" and done.returncode == 0, done.stderr

    @pytest.mark.exhaustive
    def test_only_rank_0_handles_signals_to_all_processes(self):
        """`serve` finishes its requests after such a signal, and needs its ranks until then."""
        command = [sys.executable, "-c", SIGNALS_TO_ALL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
        assert done.stdout == "True\n" and done.returncode == 0, done.stderr

    @pytest.mark.slow
    def test_a_rank_that_dies_during_steps_ends_the_process(self):
        done = subprocess.run([sys.executable, "-c", DEAD_RANK], capture_output=True, text=True, timeout=300)
        assert done.returncode == 1 and done.stdout == ""
        assert "the process of rank 1 has failed, and the others cannot continue without it" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.slow
    def test_an_interrupted_call_closes_the_runtime(self):
        done = subprocess.run([sys.executable, "-c", BROKEN_CALL], capture_output=True, text=True, timeout=300)
        assert done.stdout.splitlines() == [
            "KeyboardInterrupt ",
            "UserError the other processes of this split model have ended; load it again, in a new process.",
        ]
        assert done.returncode == 0 and "Traceback" not in done.stderr

    @pytest.mark.slow
    def test_an_interrupt_while_ranks_start_ends_them_silently(self):
        command = [sys.executable, "-m", "granite4_neuron", "generate", "--backend", "torch", "--tp-degree", "2", "a"]
        options = dict(stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        process = subprocess.Popen(command, **options)
        [rank] = self.ranks(process)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        rank.wait(timeout=60)
        assert process.returncode == 130 and "Traceback" not in errors

    @pytest.mark.slow
    def test_a_rank_that_dies_ends_the_command(self):
        """No rank is left waiting for it."""
        command = [sys.executable, "-m", "granite4_neuron", "generate", "--backend", "torch", "--tp-degree", "2", "a"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        [rank] = self.ranks(process)
        time.sleep(1)
        rank.kill()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "the process of rank 1 has failed, and the others cannot continue without it" in errors

    @pytest.mark.slow
    def test_ranks_end_with_the_command(self):
        command = [sys.executable, "-m", "granite4_neuron", "generate", "--backend", "torch", "--tp-degree", "2", "a"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        [rank] = self.ranks(process)
        process.kill()
        process.wait()
        rank.wait(timeout=60)

    @pytest.mark.slow
    @pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "starting"])
    @pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive), signal.SIGKILL])
    def test_no_file_outlives_the_processes(self, number, is_loaded, tmp_path):
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        process = subprocess.Popen([sys.executable, "-c", LOADED], env=environment, **options)
        [rank] = self.ranks(process)
        if is_loaded:
            assert process.stdout.readline() == "loaded\n"
        os.killpg(process.pid, number)
        process.communicate(timeout=120)
        rank.wait(timeout=60)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_a_program_without_a_guard_is_told_so(self, tmp_path):
        """Each rank imports the program's main module, and would load a model there again."""
        (tmp_path / "program.py").write_text(WITHOUT_GUARD)
        command = [sys.executable, tmp_path / "program.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "granite4-neuron: a model that is split over devices starts processes, which import this program's main "
            'module again; call load below `if __name__ == "__main__":` there.\n'
        )

    @pytest.mark.slow
    def test_an_unknown_network_interface_is_reported(self):
        command = [sys.executable, "-m", "granite4_neuron", "generate", "--backend", "torch", "--tp-degree", "2", "a"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "nosuch"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("granite4-neuron: the processes of a split model cannot connect to each other (")
        assert last.endswith("GLOO_SOCKET_IFNAME is 'nosuch', and must name a network interface of this machine.")

    def ranks(self, process):
        """Wait for the processes of the other ranks."""
        parent = psutil.Process(process.pid)
        while not (ranks := [each for each in parent.children() if "spawn_main" in " ".join(each.cmdline())]):
            assert process.poll() is None
            time.sleep(0.05)
        return ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tp_degree=0), r"tp_degree is 0, and must be a whole number of at least 1\."),
        (dict(tp_degree=3), r"tp_degree is 3; this model can be split by 1, 2, 4\."),
        (dict(tp_degree=2, device="cpu:0"), "the device is cpu:0; a model is split over cpu, cuda or neuron only"),
        (dict(tp_degree=2, device="neuron"), "the device neuron needs the torch-neuronx of Neuron SDK 2.33"),
        (dict(tp_degree=2, backend="cpu"), "tp_degree belong to the backend torch"),
    ],
)
def test_unsupported_splits_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        load(**dict(backend="torch") | options)


def test_too_little_memory_for_all_ranks_is_refused(monkeypatch):
    whole = sum(weight.nbytes for _, weight in load_model(bundled_checkpoint()).named_weights())
    monkeypatch.setattr(available_memory, "available_bytes", lambda *_: int(0.8 * whole))
    with pytest.raises(UserError, match=r"the weights in .* for 2 ranks need .* GB of memory"):
        load(backend="torch", tp_degree=2)


@pytest.mark.parametrize("name", granite_names())
@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_holds_its_share(name, degree):
    """Parameters and state of a rank, for every family member at its real size, are counted without allocating them."""
    config = published_config(name)
    with torch.device("meta"):
        whole = model_of(config)
        part = model_of(config, parallel=Parallel(1, degree))
        state = HybridState.allocate(config, 1, 64, torch.bfloat16, "meta", degree)
        whole_state = HybridState.allocate(config, 1, 64, torch.bfloat16, "meta")

    def size(tensors):
        return sum(tensor.numel() for tensor in tensors)

    # B and C of the one group, the router and the norms are not split.
    assert 1 / degree <= size(part.parameters()) / size(whole.parameters()) <= 1.05 / degree
    assert 1 / degree <= size(state.tensors()) / size(whole_state.tensors()) <= 1.02 / degree


def test_degrees_that_do_not_divide_are_refused():
    config = published_config("granite-4.0-h-350m")
    with pytest.raises(UserError, match=r"tp_degree is 5; this model can be split by 1, 2, 4\."):
        model_of(config, parallel=Parallel(0, 5))
    with pytest.raises(UserError, match="tp_degree is 0"):
        config.rank_dimensions(0)
