"""Surroundings that are not as they should be: memory, disks, closed streams, signals, users, forks, the network.

Most tests need a process of their own.
"""

import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.checkpoint import hub
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.output_folder import complete_or_absent, remove_leftovers
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.devices.cpu import build
from granite4_neuron.devices.neuron.stand_ins import SOURCES, checkout
from granite4_neuron.devices.neuron.torchneuron.cores import visible_cores
from granite4_neuron.system import available_memory
from granite4_neuron.system.sandbox.limited_process import NoProcess
from test.faults.conftest import sentence
from test.support.checkpoints import small_config

COMMAND = [sys.executable, "-m", "granite4_neuron"]
NO_PROCESS = "no further process or thread can be started; raise the limit (ulimit -u, or a container's)."
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
needs_fused_kernels = pytest.mark.skipif(
    build.load_kernels() is not None, reason="the fused kernels need a C++ compiler"
)


def run(*arguments):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True)


class TestMemory:
    def test_a_model_that_does_not_fit_is_refused_with_the_numbers(self, folder, refuses, monkeypatch):
        monkeypatch.setattr(available_memory, "available_bytes", lambda *_: 1_000_000)
        said = refuses("generate", "--model", folder, "x")
        assert "the weights in" in said and "GB of memory, and 0.00 GB are available; bfloat16 takes half" in said

    def test_a_state_that_does_not_fit_is_refused(self, texting):
        """The state is so large that the system refuses it at once."""
        with pytest.raises(UserError, match="not enough memory for the state of 1,000,000,000 sequences of up to 600"):
            texting[0].allocate(10**9, 600)

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit of the address space")
    @pytest.mark.skipif(torch.version.cuda is not None, reason="torch's CUDA build alone is larger")
    @pytest.mark.parametrize("gigabytes", [1, 2])
    def test_a_small_address_space(self, texting_folder, gigabytes):
        """The command may succeed or be refused, because Python and torch alone take most of the space."""
        limit = f"ulimit -v {gigabytes * 2**20}; exec {shlex.join(COMMAND)}"
        command = f"{limit} generate --model {texting_folder} --max-tokens 3 --cpu-kernels torch x"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr
        if done.returncode == 2:
            assert "not enough memory" in done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("times", [0.5, 1.5])
    def test_too_few_addresses_for_a_file(self, tmp_path, times):
        """A file is mapped twice, and the first time or the second one may fail."""
        header = json.dumps({"x": {"dtype": "U8", "shape": [2**28], "data_offsets": [0, 2**28]}}).encode()
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(tmp_path / "x", 8 + len(header) + 2**28)
        code = """
import resource, sys, torch
from pathlib import Path
from granite4_neuron.checkpoint.stored_tensors import UserError, open_tensors
taken = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, (taken + int(float(sys.argv[2]) * 2**28), -1))
try:
    with open_tensors(Path(sys.argv[1]), "pt") as tensors:
        tensors.get_tensor("x")
except UserError as error:
    print(error)
"""
        command = [sys.executable, "-c", code, tmp_path / "x", str(times)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"not enough memory to map {tmp_path / 'x'}, which takes 0.54 GB of addresses" in done.stdout
        assert "raise its limit (ulimit -v), or store the weights in smaller shards." in done.stdout

    @pytest.mark.parametrize(
        "error, expected",
        [
            (MemoryError(), "there is not enough memory."),
            (OSError(12, "Cannot allocate memory"), "there is not enough memory."),
            (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "there is not enough memory."),
            (RuntimeError("can't start new thread"), NO_PROCESS),
            (RuntimeError("Resource temporarily unavailable"), NO_PROCESS),
            (BlockingIOError(11, "Resource temporarily unavailable"), NO_PROCESS),
        ],
        ids=repr,
    )
    def test_running_out_of_what_the_system_has_gives_a_sentence(
        self, texting_folder, refuses, monkeypatch, error, expected
    ):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr("granite4_neuron.generation.stream_generate", fail)
        assert refuses("generate", "--model", texting_folder, "x") == expected

    def test_a_server_without_threads_ends_with_a_sentence(self, monkeypatch):
        front_end = pytest.importorskip("granite4_neuron.serving.front_end", reason="[serve] is not installed")

        def fail(*_, **__):
            raise NoProcess

        monkeypatch.setattr(front_end.os, "setsid", lambda: None)
        monkeypatch.setattr(front_end, "Server", fail)
        channel = SimpleNamespace(receive=lambda: [(None, None, {})])
        with pytest.raises(SystemExit, match=re.escape(NO_PROCESS)):
            front_end._serve(None, channel, None, ())

    def test_available_memory_heeds_limits(self, monkeypatch):
        assert 10**6 < available_memory.available_bytes() < 10**14
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
        assert available_memory.available_bytes() == 0

    @pytest.mark.parametrize(
        "controllers, most, used, cached",
        [
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ],
    )
    def test_available_memory_heeds_all_groups_that_it_is_in(
        self, tmp_path, monkeypatch, controllers, most, used, cached
    ):
        """A job's group is within another, and a container may see a path that only its host has."""
        job = tmp_path / "jobs/7"
        job.mkdir(parents=True)
        for folder, limit in ((job.parent, 5000), (job, 9000)):
            (folder / most).write_text(f"{limit}\n")
            (folder / used).write_text("3000\n")
            (folder / "memory.stat").write_text(f"{cached} 400\n")
        (tmp_path / most).write_text("max\n")
        own = tmp_path / "own"
        monkeypatch.setattr(available_memory, "_OWN_GROUPS", own)
        monkeypatch.setitem(available_memory._VERSIONS, controllers, (tmp_path, most, used, f"{cached} "))
        for place, available in (("/jobs/7", 2400), ("/jobs", 2400), ("/elsewhere", None), ("/", None)):
            own.write_text(f"5:cpu,cpuacct:/jobs/7\n3:{controllers}:{place}\n")
            assert available_memory._of_groups() == available
        (job / most).write_text("3500\n")
        own.write_text(f"3:{controllers}:/jobs/7\n")
        assert available_memory.available_bytes() == 900

    def test_a_limit_counts_for_each_process(self, monkeypatch):
        monkeypatch.setattr(available_memory, "_of_limit", lambda: 10**6)
        assert [available_memory.available_bytes(processes) for processes in (1, 2)] == [10**6, 2 * 10**6]


class TestStreams:
    @pytest.mark.slow
    @needs_full
    @pytest.mark.parametrize(
        "command", [("info",), ("plan", "--model", "350m", "--context", "512"), ("generate", "x")], ids=" ".join
    )
    def test_a_full_disk_under_standard_output(self, command):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*COMMAND, *command], stdout=full, stderr=subprocess.PIPE, text=True)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert last == "granite4-neuron: the output cannot be written (No space left on device)."

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("command", ["info --model h-350m", "generate x"])
    def test_standard_output_is_closed(self, command):
        line = f"{shlex.join(COMMAND)} {command} >&-"
        done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == "granite4-neuron: the output cannot be written (it is closed)."

    def test_standard_error_is_closed(self):
        line = f"{shlex.join(COMMAND)} info 2>&-"
        done = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0 and "parameters" in done.stdout and "Using the small" not in done.stdout

    def test_standard_input_is_closed(self, texting_folder):
        line = f"{shlex.join(COMMAND)} generate --model {texting_folder} <&-"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
        assert "there is no prompt" in sentence(done.returncode, done.stdout, done.stderr)

    @needs_full
    @pytest.mark.exhaustive  # the benchmark runs to its end
    def test_the_benchmark_cannot_write_its_numbers(self):
        script = Path(__file__).parents[2] / "benchmark_latency.py"
        options = "--prompt-length 5 --output-length 2 --repeats 1 --warmup 0 --json /dev/full"
        done = subprocess.run([sys.executable, script, *options.split()], capture_output=True, text=True)
        assert done.returncode == 2 and "prefill tok/s" in done.stdout, done.stderr
        assert done.stderr.endswith("/dev/full cannot be written (No space left on device).\n")
        assert "Traceback" not in done.stderr


class TestInterrupts:
    @pytest.mark.slow_cases
    @pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7, 1.5, 3])
    def test_ctrl_c_ends_a_command(self, seconds):
        """An interrupt while Python starts is Python's own matter, so the clock starts in the package's code."""
        marker = "import granite4_neuron.__main__ as main, sys; print('started', flush=True); sys.exit(main.main())"
        command = [sys.executable, "-c", marker, "generate", "x", "--max-tokens", "100000", "--ignore-eos"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "started\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in error
        assert error in ("", "Using the small model that comes with the package; --model chooses another.\n")


class TestConvert:
    def test_a_place_in_use_is_refused_before_anything_is_loaded(self, folder, refuses, monkeypatch):
        load_model = "granite4_neuron.checkpoint.loading.load_model"
        monkeypatch.setattr(load_model, lambda *_, **__: pytest.fail("it was loaded"))
        assert "not an empty folder" in refuses("convert", "--model", folder, "--output", folder)
        assert "there is no folder" in refuses("convert", "--model", folder, "--output", folder / "none" / "x")

    @pytest.mark.slow
    def test_a_conversion_that_was_killed_is_cleared_away(self, folder, tmp_path, capsys):
        program = f"""
import os, signal
from pathlib import Path
from granite4_neuron.checkpoint.output_folder import complete_or_absent
with complete_or_absent(Path({str(tmp_path / "new")!r})) as partial:
    (partial / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""
        assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
        (leftover,) = tmp_path.glob(".new.*")
        done = run("convert", "--model", folder, "--output", tmp_path / "new")
        assert done.returncode == 0 and f"removed {leftover}" in done.stderr
        assert not list(tmp_path.glob(".new.*")) and load_model(tmp_path / "new")

    def test_a_conversion_that_still_runs_is_left_alone(self, tmp_path):
        with complete_or_absent(tmp_path / "new") as partial:
            assert remove_leftovers(tmp_path / "new") == []
            assert partial.is_dir()

    def test_folders_of_others_are_left_alone(self, tmp_path):
        (tmp_path / ".new.backup").mkdir()
        (tmp_path / ".new.backup" / "file").write_text("precious")
        assert remove_leftovers(tmp_path / "new") == []
        save_model(random_model(small_config()), tmp_path / "new")
        assert (tmp_path / ".new.backup" / "file").exists()


@needs_fused_kernels
class TestKernelCache:
    """The compiled library is loaded into this process, so it must be complete and belong to the user."""

    @pytest.fixture
    def cache(self, tmp_path, monkeypatch):
        """Make a cache that holds the real library, with a compiler that always fails."""
        real = build._library()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CXX", "false")
        folder = tmp_path / "granite4-neuron"
        folder.mkdir(mode=0o700)
        (folder / real.name).write_bytes(real.read_bytes())
        (folder / real.name).chmod(0o700)
        return folder / real.name

    def test_a_complete_library_is_loaded(self, cache):
        assert build._library() == cache

    @pytest.mark.parametrize(
        "damage",
        [
            lambda file: os.truncate(file, file.stat().st_size // 2),
            lambda file: os.truncate(file, 0),
            lambda file: file.write_bytes(os.urandom(10_000)),
            lambda file: file.write_bytes(b"\x7fELF" + file.read_bytes()[5:]),
            lambda file: file.chmod(0o777),
            lambda file: (file.rename(file.with_suffix(".moved")), file.symlink_to(file.with_suffix(".moved"))),
        ],
        ids=["truncated", "empty", "random", "one byte", "writable by all", "a link"],
    )
    def test_a_damaged_library_is_compiled_again(self, cache, caplog, damage):
        damage(cache)
        with pytest.raises(subprocess.CalledProcessError):
            build._library()
        assert f"{cache} is damaged or may be written to by others; it is compiled again" in caplog.text
        assert not cache.exists() and not cache.is_symlink()

    def test_a_library_without_the_operators_is_refused(self, monkeypatch, caplog):
        monkeypatch.setattr(build, "_ONE_OPERATOR", "an_operator_that_it_does_not_have")
        assert build.load_kernels.__wrapped__()
        assert "the library that was loaded does not have them" in caplog.text

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_the_folder_is_private(self, tmp_path, umask):
        before = os.umask(umask)
        try:
            folder = build._private_folder(tmp_path / "cache")
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o700

    def test_another_users_folder_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(build._Unavailable, match="belongs to another user"):
            build._private_folder(tmp_path)

    def test_a_malformed_compiler_command_is_reported(self, cache, monkeypatch, caplog):
        cache.unlink()
        monkeypatch.setenv("CXX", 'g++ "')
        assert build.load_kernels.__wrapped__()
        assert "CXX is 'g++ \"', which is not a command" in caplog.text

    def test_a_user_without_home_and_name_has_a_cache(self, monkeypatch):
        """The user has neither a home nor a name, as with `docker run --user`."""
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def nobody():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", nobody)
        assert build._cache_folder().name == f"granite4-neuron-{os.getuid()}"

    def test_a_library_gets_its_name_when_it_is_complete(self, cache, tmp_path):
        compiler = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done\nprintf built >"$2"')
        built = build._build([str(compiler)], one_source(tmp_path), cache.parent, "kernels", "key")
        assert built.read_text() == "built" and built.stem == f"kernels-key-{build._digest(built)}"
        assert built.stat().st_mode & 0o777 == 0o700

    def test_a_quantisation_is_compiled_when_weights_are_in_it(self, cache, tmp_path, monkeypatch):
        cache.unlink()
        write = 'while [ "$1" != -o ]; do shift; done\nprintf built >"$2"'
        monkeypatch.setenv("CXX", str(script(tmp_path / "compiler", f'echo "$*" >>{tmp_path}/log\n{write}')))
        kernels = build._library()
        assert not re.search("FORMAT=(?!plain)", (tmp_path / "log").read_text())
        (tmp_path / "log").unlink()
        build._library("int8")
        _, unit, link = (tmp_path / "log").read_text().splitlines()  # first the header
        assert "products.cpp -DGRANITE4_FORMAT=int8 " in unit and f" {kernels} " in link

    def test_a_quantisation_that_does_not_compile_is_refused(self, cache):
        with pytest.raises(UserError, match=r"no kernels for int8 here: they do not compile .*--cpu-kernels torch"):
            build.load_format.__wrapped__("int8")

    def test_one_process_compiles_and_others_wait_for_it(self, cache, tmp_path, monkeypatch, caplog):
        """Threads stand in for processes: they lock each other out in the same way."""
        cache.unlink()
        wait_for_go = f"until [ -e {tmp_path}/go ]; do sleep 0.01; done"
        note_link = f'case "$*" in *-shared*) echo link >>{tmp_path}/log; esac'
        write = 'while [ "$1" != -o ]; do shift; done\nprintf built >"$2"'
        compiler = script(tmp_path / "compiler", f"{wait_for_go}\n{note_link}\n{write}")
        monkeypatch.setenv("CXX", str(compiler))
        with ThreadPoolExecutor(2) as pool:
            libraries = [pool.submit(build._library) for _ in range(2)]
            until = time.monotonic() + 10
            while "another process is compiling" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
            (tmp_path / "go").touch()
        assert libraries[0].result() == libraries[1].result()
        assert (tmp_path / "log").read_text() == "link\n"

    @pytest.mark.slow
    def test_leftovers_of_a_killed_build_are_removed_and_a_running_build_stays(self, cache, tmp_path):
        compiler = script(tmp_path / "killer", 'while [ "$1" != -o ]; do shift; done\nprintf half >"$2"\nkill -9 $PPID')
        program = f"""
from pathlib import Path
from granite4_neuron.devices.cpu import build
build._build([{str(compiler)!r}], Path({str(one_source(tmp_path))!r}), Path({str(cache.parent)!r}), "kernels", "key")
"""
        assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
        (left,) = cache.parent.glob("building-*")
        assert "half" in [file.read_text() for file in left.iterdir()]
        build._remove_leftovers(cache.parent)
        assert left.is_dir(), "it may be of another process, which is building"
        os.utime(left, (0, 0))
        build._remove_leftovers(cache.parent)
        assert not left.exists() and cache.exists()

    def test_the_compilers_end_with_the_first_that_fails(self, tmp_path):
        slow = script(tmp_path / "slow", f"sleep 60 &\necho $! >{tmp_path}/started\nwait")
        failing = script(
            tmp_path / "failing", f"until [ -s {tmp_path}/started ]; do :; done\necho error: no >&2\nexit 3"
        )
        with pytest.raises(subprocess.CalledProcessError) as raised:
            build._run_all([[str(failing)], [str(slow)]], 2)
        assert raised.value.returncode == 3 and raised.value.stderr == "error: no\n"
        assert has_ended(int((tmp_path / "started").read_text()))

    def test_a_compiler_that_writes_bytes_outside_utf_8(self, tmp_path):
        compiler = script(tmp_path / "c++", r"printf 'error: \377\376' >&2; exit 1")
        with pytest.raises(subprocess.CalledProcessError) as raised:
            build._run_all([[str(compiler)]], 1)
        assert raised.value.stderr == "error: \ufffd\ufffd"

    @pytest.mark.slow
    def test_the_compilers_end_with_an_interrupt(self, cache, tmp_path):
        compiler = script(tmp_path / "slow", f"sleep 60 &\necho $! >{tmp_path}/started\nkill -INT $PPID\nwait")
        program = f"""
import signal
from pathlib import Path
from granite4_neuron.devices.cpu import build
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
build._build([{str(compiler)!r}], Path({str(one_source(tmp_path))!r}), Path({str(cache.parent)!r}), "kernels", "key")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "KeyboardInterrupt" in done.stderr
        assert has_ended(int((tmp_path / "started").read_text()))
        assert list(cache.parent.iterdir()) == [cache], "nothing half-built stays"

    def test_as_many_compilers_at_a_time_as_there_are_cores(self, tmp_path):
        compiler = script(tmp_path / "compiler", f"echo + >>{tmp_path}/log\nsleep 0.1\necho - >>{tmp_path}/log")
        build._run_all([[str(compiler)]] * 5, 2)
        at_a_time = [0]
        for line in (tmp_path / "log").read_text().split():
            at_a_time.append(at_a_time[-1] + {"+": 1, "-": -1}[line])
        assert max(at_a_time) == 2 and at_a_time[-1] == 0


def script(path, commands):
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return path


def one_source(folder):
    sources = folder / "sources"
    sources.mkdir()
    (sources / "kernels.cpp").touch()
    return sources


def has_ended(process, seconds=10):
    """Return whether the process ends in that time. A zombie counts as ended."""
    status, until = Path(f"/proc/{process}/stat"), time.monotonic() + seconds
    while time.monotonic() < until:
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


FORKS = """
import os, sys, warnings
from granite4_neuron import generate, load
runtime, tokenizer = load(sys.argv[1], cpu_kernels=sys.argv[2])
expected = generate(runtime, tokenizer, "Some text", max_tokens=5, temperature=0)
child = os.fork()
if child == 0:
    os._exit(0 if generate(runtime, tokenizer, "Some text", max_tokens=5, temperature=0) == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_a_fork_after_a_generation(texting_folder, kernels):
    command = [sys.executable, "-c", FORKS, str(texting_folder), kernels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "was forked from one that had loaded a model, and computes in one thread" in done.stderr


@pytest.mark.parametrize("value", ["all", "0-", "-1", "0..3", "0,,1", "0, 1"])
def test_malformed_numbers_of_neuron_cores_are_refused(value, monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", value)
    with pytest.raises(UserError) as error:
        visible_cores()
    assert str(error.value) == (
        f"NEURON_RT_VISIBLE_CORES is '{value}'; it must be numbers and ranges of cores, such as 0-3."
    )


class TestSourcesOfNxDInference:
    """NXDI_SRC and NXD_SRC must name the roots of checkouts."""

    PACKAGE = "src/neuronx_distributed_inference"

    @pytest.fixture
    def source(self, tmp_path):
        (tmp_path / "checkout" / self.PACKAGE).mkdir(parents=True)
        return tmp_path / "checkout"

    def test_the_root_of_a_checkout_is_accepted(self, source, monkeypatch):
        monkeypatch.chdir(source.parent)
        monkeypatch.setenv("NXDI_SRC", "checkout")
        assert checkout("NXDI_SRC", self.PACKAGE) == source

    @pytest.mark.parametrize("inside", ["src", PACKAGE])
    def test_a_folder_in_a_checkout_is_refused_with_its_root(self, source, inside, monkeypatch):
        monkeypatch.setenv("NXDI_SRC", str(source / inside))
        with pytest.raises(UserError) as error:
            checkout("NXDI_SRC", self.PACKAGE)
        assert str(error.value) == (
            f"NXDI_SRC is {source / inside}, which has no {self.PACKAGE}; it must name the root of a checkout, like "
            f"{source}."
        )

    @pytest.mark.parametrize("value", [".", "none"])
    def test_another_folder_is_refused(self, value, tmp_path, monkeypatch):
        monkeypatch.setenv("NXD_SRC", str(tmp_path / value))
        with pytest.raises(UserError, match=r"which has no src/x; it must name the root of a checkout\.$"):
            checkout("NXD_SRC", "src/x")

    def test_commands_report_a_wrong_folder(self, tmp_path):
        pytest.importorskip("torch_xla", reason="torch_xla is not installed")
        environment = os.environ | dict.fromkeys(SOURCES, str(tmp_path))
        command = [*COMMAND, "graphs", "--backend", "nxdi", "--model", "h-350m"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert "it must name the root of a checkout" in sentence(done.returncode, done.stdout, done.stderr)
        command = [sys.executable, "-m", "granite4_neuron.devices.neuron.inference_demo"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and done.stderr.startswith(f"inference_demo: NXDI_SRC is {tmp_path}, which has no ")


class TestNetwork:
    def test_a_missing_network_is_reported_at_once(self, refuses, monkeypatch):
        """The command says so at once. huggingface_hub by itself would retry for half a minute."""
        monkeypatch.setattr(socket, "create_connection", no_network)
        said = refuses("generate", "--model", "somebody/some-model", "x")
        assert "cannot be reached (Network is unreachable)" in said and "HF_HUB_OFFLINE" in said

    def test_an_address_that_never_answers_is_given_up(self, monkeypatch):
        monkeypatch.setattr(hub, "_SECONDS_TO_CONNECT", 0.01)
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: time.sleep(0.5) or no_network())
        assert "does not answer within" in hub._why_unreachable("https://huggingface.co")

    def test_a_download_that_is_cut_off_is_reported(self, refuses, monkeypatch):
        client = pytest.importorskip("httpx2", reason="huggingface_hub 2 sends requests with it")

        def cut_off(*_, **__):
            raise client.RemoteProtocolError("peer closed connection")

        monkeypatch.setattr(hub, "_why_unreachable", lambda _: None)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", cut_off)
        said = refuses("generate", "--model", "somebody/some-model", "x")
        assert "cannot be loaded from Hugging Face (peer closed connection)" in said

    def test_a_proxy_is_asked_instead(self, monkeypatch):
        asked = []
        monkeypatch.setattr(socket, "create_connection", lambda place, **_: asked.append(place) or no_network())
        monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
        monkeypatch.delenv("no_proxy", raising=False)
        hub._why_unreachable("https://huggingface.co")
        assert asked == [("proxy.example", 3128)]

    def test_offline_mode_is_reported(self, refuses, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        said = refuses("generate", "--model", "somebody/some-model", "x")
        assert "HF_HUB_OFFLINE is set, and there is no copy of it in the cache" in said


def no_network(*_, **__):
    raise OSError(101, "Network is unreachable")
