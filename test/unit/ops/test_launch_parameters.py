"""Launch parameters: reading and refusing files, the kernels that use them, and the tune command's choices."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config.choices import FOLDER_VARIABLE
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu import tuning
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.model.step import step_of
from granite4_neuron.ops import LaunchParameters, launch_parameters, mamba_operators
from granite4_neuron.ops.launch_parameters import (
    CHOICES,
    HEURISTIC,
    file_name,
    find_launch_parameters,
    tuned_config_folder,
    write_launch_parameters,
)
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import HybridState
from test.support.checkpoints import small_config

SIZE = (16, 16, torch.float32)  # of small_config: head_dim, d_state, cache_dtype
OTHER = LaunchParameters(32, 2, 128)
VALID = asdict(OTHER)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return the path of the file for small_config on this processor. The file does not exist yet."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    return tmp_path / file_name(*SIZE)


class TestFile:
    def test_a_file_is_for_one_size_of_layers_and_one_processor(self, file, monkeypatch):
        assert find_launch_parameters(*SIZE, None) == find_launch_parameters(*SIZE, file.parent) == HEURISTIC
        write_launch_parameters(file, OTHER)
        assert find_launch_parameters(*SIZE, file.parent) == OTHER
        assert find_launch_parameters(*SIZE, None) == HEURISTIC
        for other in ((17, 16, torch.float32), (16, 17, torch.float32), (16, 16, torch.bfloat16)):
            assert find_launch_parameters(*other, file.parent) == HEURISTIC
        monkeypatch.setattr(launch_parameters, "processor_name", lambda: "Intel(R) Xeon(R) CPU @ 2.20GHz/8")
        assert "device=Intel_R_Xeon_R_CPU_2.20GHz_8.json" in file_name(*SIZE)
        assert find_launch_parameters(*SIZE, file.parent) == HEURISTIC

    def test_every_choice_can_be_written_and_read(self, file):
        assert list(CHOICES) == list(asdict(HEURISTIC))
        for name, choices in CHOICES.items():
            for value in choices:
                parameters = replace(HEURISTIC, **{name: value})
                write_launch_parameters(file, parameters)
                assert find_launch_parameters(*SIZE, file.parent) == parameters
        assert list(file.parent.iterdir()) == [file]

    def test_a_failed_write_leaves_the_old_file(self, file, monkeypatch):
        write_launch_parameters(file, OTHER)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(file), "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_launch_parameters(file, HEURISTIC)
        assert list(file.parent.iterdir()) == [file]
        assert find_launch_parameters(*SIZE, file.parent) == OTHER


BROKEN = {
    "empty": "",
    "cut off": '{"chunk_size": 64,',
    "not an object": "[]",
    "too deep": "[" * 100_000,
    "no parameters": "{}",
    "parameters by batch": json.dumps({"48": VALID}),
    "an unknown parameter": json.dumps({**VALID, "num_warps": 4}),
    **{f"{name} is missing": json.dumps({k: v for k, v in VALID.items() if k != name}) for name in VALID},
    **{
        f"{name} is {value!r}": json.dumps({**VALID, name: value})
        for name in VALID
        for value in (0, -32, 33, 32.0, 1.0, "32", True, None, [32], {"a": 1}, 2**70, 4096, float("nan"))
    },
}


class TestBrokenFiles:
    def refused(self, file, reason):
        with pytest.raises(UserError, match=reason) as error:
            find_launch_parameters(*SIZE, file.parent)
        message = str(error.value)
        assert message.startswith(str(file)) and message.endswith(".") and "\n" not in message and len(message) < 600

    @pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
    def test_text(self, file, text):
        file.write_text(text)
        self.refused(file, "does not hold launch parameters|is not valid JSON|must hold an object")

    def test_the_message_lists_the_valid_values(self, file):
        file.write_text(json.dumps({**VALID, "chunk_size": 65}))
        self.refused(file, "it must have one of each of these: chunk_size: 32, 64, 128; heads_per_task: 1, 2, 4")

    def test_a_device_is_refused(self, file):
        file.symlink_to("/dev/zero")
        self.refused(file, "is not a regular file")


class TestUserFolder:
    def test_the_argument_comes_before_the_variable(self, tmp_path, monkeypatch):
        folders = [tmp_path / "argument", tmp_path / "variable"]
        for folder in folders:
            folder.mkdir()
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
        assert tuned_config_folder() is None
        monkeypatch.setenv(FOLDER_VARIABLE, str(folders[1]))
        assert tuned_config_folder() == folders[1]
        assert tuned_config_folder(folders[0]) == tuned_config_folder(str(folders[0])) == folders[0]
        monkeypatch.setenv(FOLDER_VARIABLE, "/no/such/folder")
        assert tuned_config_folder(folders[0]) == folders[0]
        monkeypatch.setenv(FOLDER_VARIABLE, "")
        assert tuned_config_folder() is None

    def test_a_wrong_folder_is_refused(self, tmp_path, monkeypatch):
        file = tmp_path / "file"
        file.touch()
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
        for wrong in (file, tmp_path / "none", "", "a\0b"):
            with pytest.raises(UserError, match=r"tuned_configs is .*, which is not a folder"):
                tuned_config_folder(wrong)
        monkeypatch.setenv(FOLDER_VARIABLE, str(file))
        with pytest.raises(UserError, match=f"{FOLDER_VARIABLE} is '{file}', which is not a folder"):
            tuned_config_folder()


class TestRuntime:
    @pytest.fixture
    def chunk_sizes(self, monkeypatch):
        """Record the chunk size of each scan in plain torch, in order."""
        sizes = []
        scan = mamba_operators.mamba_chunk_scan_combined

        def record(*arguments, **options):
            sizes.append(arguments[5])
            return scan(*arguments, **options)

        monkeypatch.setattr(mamba_operators, "mamba_chunk_scan_combined", record)
        return sizes

    def runtime(self, kernels="torch", **options):
        model = random_model(small_config(layer_types=("mamba",)))
        return CPURuntime(model, GenerationConfig(), cpu_kernels=kernels, **options)

    def prefill(self, runtime, tokens=3):
        state = runtime.allocate(1, tokens + 3)
        return state, runtime.step(state, [Row(1, 0, range(tokens))])

    def test_plain_torch_uses_the_file(self, file, chunk_sizes, monkeypatch):
        """The chunk size comes from the argument's folder or from the variable's."""
        write_launch_parameters(file, OTHER)
        self.prefill(self.runtime())
        self.prefill(self.runtime(tuned_configs=file.parent))
        monkeypatch.setenv(FOLDER_VARIABLE, str(file.parent))
        self.prefill(self.runtime())
        assert chunk_sizes == [HEURISTIC.torch_chunk_size, OTHER.torch_chunk_size, OTHER.torch_chunk_size]

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_the_fused_kernels_use_the_file(self, file, monkeypatch):
        """Logits stay the same, in prefill and in decode."""
        logits, given, make = [], [], cpu.layers.mamba_mixer

        def noted(weights, parameters):
            given.append(parameters)
            return make(weights, parameters)

        monkeypatch.setattr(cpu.layers.LayerMakers, "mamba_mixer", staticmethod(noted))
        for chunk_size, heads_per_task in ((32, 16), (64, 1), (128, 4)):
            write_launch_parameters(file, LaunchParameters(chunk_size, heads_per_task, 64))
            runtime = self.runtime("fused", tuned_configs=file.parent)
            state, prompt_logits = self.prefill(runtime, 140)
            logits.append(torch.cat([prompt_logits, runtime.step(state, [Row(1, 140, [5])])]))
        assert given == [LaunchParameters(32, 16, 64), LaunchParameters(64, 1, 64), LaunchParameters(128, 4, 64)]
        for other in logits[1:]:
            assert torch.allclose(logits[0], other, atol=1e-4)

    def test_a_model_without_a_runtime_reads_no_file(self, file, chunk_sizes, monkeypatch):
        """Graphs are traced from such a model."""
        monkeypatch.setenv(FOLDER_VARIABLE, str(file.parent))
        write_launch_parameters(file, OTHER)
        model = random_model(small_config(layer_types=("mamba",)))
        state = HybridState.allocate(model.config, 1, 10, model.dtype)
        step = step_of(torch.arange(3)[None], torch.tensor([3]), torch.tensor([1]), state)
        model(torch.ones(1, 3, dtype=torch.int64), step, state)
        assert chunk_sizes == [HEURISTIC.torch_chunk_size]

    def test_a_broken_file_or_folder_is_refused_when_the_runtime_is_made(self, file, tmp_path):
        with pytest.raises(UserError, match="which is not a folder"):
            self.runtime(tuned_configs=tmp_path / "none")
        file.write_text("")
        with pytest.raises(UserError, match=file.name):
            self.runtime(tuned_configs=file.parent)


class TestTuning:
    """Tuning with times that the test invents. Nothing is timed."""

    @pytest.fixture
    def tune(self, monkeypatch):
        """Return a function that tunes with invented times(name, value, nth measurement): (choices, values)."""

        def tune(times):
            measured = []

            def step_times(model, name, value):
                measured.append((name, value))
                return times(name, value, measured.count((name, value)))

            monkeypatch.setattr(tuning, "_step_times", step_times)
            monkeypatch.setattr(tuning.cpu, "has_fused_kernels", lambda: True)
            return list(tuning.tune(small_config(), torch.float32)), measured

        return tune

    def test_the_fastest_is_chosen(self, tune):
        choices, _ = tune(lambda name, value, _: [1.0 if value == CHOICES[name][-1] else 2.0])
        assert [(choice.name, choice.value) for choice in choices] == [(n, CHOICES[n][-1]) for n in CHOICES]
        assert choices[0].seconds == {32: 2.0, 64: 2.0, 128: 1.0}

    @pytest.mark.parametrize("gain, value", [(tuning.MARGIN / 2, 64), (tuning.MARGIN * 2, 128)])
    def test_the_default_stays_where_it_is_almost_as_fast(self, tune, gain, value):
        choices, _ = tune(lambda name, value, _: [1.0 if value == 128 else 1 + gain])
        assert choices[0].value == value

    def test_values_take_turns(self, tune):
        _, measured = tune(lambda *_: [1.0])
        assert [value for name, value in measured if name == "chunk_size"] == [32, 64, 128] * 5

    def test_outliers_count_little(self, tune):
        choices, _ = tune(lambda _, value, turn: [99.0 if turn % 2 == 0 else 1.0] if value == 32 else [2.0])
        assert choices[0].value == 32 and choices[0].seconds[32] == 1.0

    def test_nothing_to_tune(self, monkeypatch):
        with pytest.raises(UserError, match="no Mamba layers"):
            next(tuning.tune(small_config(layer_types=("attention",)), torch.float32))
        monkeypatch.setattr(tuning.cpu, "has_fused_kernels", lambda: False)
        with pytest.raises(UserError, match=r"need a C\+\+ compiler"):
            next(tuning.tune(small_config(), torch.float32))
