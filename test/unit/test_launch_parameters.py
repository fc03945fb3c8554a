"""Tables of launch parameters: which one is used, which entry of it, what is refused, and who looks at them."""

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from granite4_neuron import UserError
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.choices import FOLDER_VARIABLE
from granite4_neuron.config.json_files import without_duplicates
from granite4_neuron.ops import LaunchParameters, cpu, launch_parameters, mamba_kernels
from granite4_neuron.ops.launch_parameters import (
    CHOICES,
    HEURISTIC,
    LaunchTable,
    device_name,
    find_launch_table,
    read_table,
    table_name,
    tuned_config_folder,
    write_table,
)
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import small_config

HEAD_DIM, D_STATE = 16, 16  # of small_config
SIZE = (HEAD_DIM, D_STATE, torch.float32)
VALID = {"chunk_size": 32, "heads_per_task": 2, "torch_chunk_size": 128}
parameters = st.builds(LaunchParameters, **{name: st.sampled_from(choices) for name, choices in CHOICES.items()})


def distinct(number):
    """Parameters that differ for each number below 6."""
    return LaunchParameters(64, CHOICES["heads_per_task"][number], 64)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The two files that may hold the table, in the order in which they are looked for; neither is there yet."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    return [tmp_path / table_name(*SIZE, device) for device in (device_name(), "cpu")]


class TestWhichTable:
    @pytest.mark.parametrize("present", range(4))
    def test_the_first_that_exists(self, places, present):
        for number, file in enumerate(places):
            if present >> number & 1:
                write_table(file, LaunchTable({1: distinct(number)}))
        table = find_launch_table(*SIZE, places[0].parent)
        assert table.at(1) == (distinct((present & -present).bit_length() - 1) if present else HEURISTIC)

    def test_without_a_folder_there_is_none(self):
        assert find_launch_table(*SIZE).at(1) == HEURISTIC

    @pytest.mark.parametrize("other", [(17, 16, torch.float32), (16, 17, torch.float32), (16, 16, torch.bfloat16)])
    def test_another_size_is_another_table(self, places, other):
        write_table(places[1], LaunchTable({1: distinct(1)}))
        assert find_launch_table(*other, places[0].parent).at(1) == HEURISTIC

    def test_a_broken_file_is_refused_although_the_next_one_is_good(self, places):
        places[0].write_text("{")
        write_table(places[1], LaunchTable({1: distinct(1)}))
        with pytest.raises(UserError, match="is not a table"):
            find_launch_table(*SIZE, places[0].parent)

    def test_the_device_is_a_part_of_a_file_name(self, monkeypatch):
        monkeypatch.setattr(launch_parameters, "processor_name", lambda: "Intel(R) Xeon(R) CPU @ 2.20GHz/8")
        assert device_name.__wrapped__() == "Intel_R_Xeon_R_CPU_2.20GHz_8"
        assert device_name() in table_name(*SIZE, device_name()) and os.sep not in device_name()


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

    def test_what_is_no_folder_is_refused(self, tmp_path, monkeypatch):
        file = tmp_path / "file"
        file.touch()
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
        for wrong in (file, tmp_path / "none", "", "a\0b"):
            with pytest.raises(UserError, match=r"tuned_configs is .*, which is not a folder"):
                tuned_config_folder(wrong)
        monkeypatch.setenv(FOLDER_VARIABLE, str(file))
        with pytest.raises(UserError, match=f"{FOLDER_VARIABLE} is '{file}', which is not a folder"):
            tuned_config_folder()


class TestWhichEntry:
    @given(st.dictionaries(st.integers(1, 300), parameters, min_size=1), st.integers(1, 400))
    def test_the_closest(self, entries, batch_heads):
        distance = {size: abs(size - batch_heads) for size in entries}
        closest = [size for size in sorted(entries) if distance[size] == min(distance.values())]
        table = LaunchTable(entries)
        for _ in range(2):  # looked up, and as it was kept
            assert table.at(batch_heads) == entries[closest[0]]

    def test_of_two_equally_close_ones_the_smaller(self):
        for sizes in ((48, 96), (96, 48)):
            assert LaunchTable({size: distinct(size // 48) for size in sizes}).at(72) == distinct(1)


BROKEN = {
    "empty": "",
    "cut off": '{"48": {"chunk_size": 64,',
    "not an object": "[]",
    "a number": "64",
    "null": "null",
    "no entry": "{}",
    "too deep": "[" * 100_000,
    "a parameter instead of an entry": json.dumps(VALID),
    "an entry that is no object": '{"48": 64}',
    "an entry without anything": '{"48": {}}',
    "one broken entry of two": json.dumps({"48": VALID, "96": {}}),
    "an entry twice": f'{{"48": {json.dumps(VALID)}, "48": {json.dumps(VALID)}}}',
    "a parameter twice": '{"48": ' + json.dumps(VALID)[:-1] + ', "chunk_size": 64}}',
    **{f"{name} is missing": json.dumps({"48": {k: v for k, v in VALID.items() if k != name}}) for name in VALID},
    **{
        f"entry {size!r}": json.dumps({size: VALID})
        for size in ("0", "-1", "048", "1.5", "", "all", " 1", "²", "9" * 20)
    },
    "an unknown parameter": json.dumps({"48": {**VALID, "num_warps": 4}}),
    **{
        f"{name} is {value!r}": json.dumps({"48": {**VALID, name: value}})
        for name in VALID
        for value in (0, -32, 33, 32.0, 1.0, "32", True, None, [32], {"a": 1}, 2**70, 4096, float("nan"))
    },
}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["48", *VALID]), inner),
)


class TestBrokenFiles:
    def refused(self, file, reason=r"is not a table of launch parameters \("):
        with pytest.raises(UserError, match=reason) as error:
            read_table(file)
        message = str(error.value)
        assert message.startswith(str(file)) and message.endswith(".") and "\n" not in message and len(message) < 500

    @pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
    def test_text(self, tmp_path, text):
        (tmp_path / "table.json").write_text(text)
        self.refused(tmp_path / "table.json")

    def test_what_is_right_is_said(self, tmp_path):
        file = tmp_path / "table.json"
        for text, reason in (
            (json.dumps({"48": {**VALID, "chunk_size": 65}}), "entry 48: chunk_size is 65; .* one of 32, 64, 128"),
            ('{"48": {}}', "entry 48 must be an object of exactly chunk_size, heads_per_task, torch_chunk_size"),
            (json.dumps({"all": VALID}), "'all' is no batch \\* num_heads; it must be a positive integer"),
            ('{"48": 1, "48": 1}', "'48' is in it twice"),
        ):
            file.write_text(text)
            self.refused(file, reason)

    def test_what_is_no_text(self, tmp_path):
        (tmp_path / "table.json").write_bytes(b"\xff\xfe{}")
        self.refused(tmp_path / "table.json")
        self.refused(tmp_path, "is not a regular file")

    def test_what_has_no_end(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "zeros").symlink_to("/dev/zero")
        for name in ("pipe", "zeros"):
            self.refused(tmp_path / name, "is not a regular file")
        (tmp_path / "hole").touch()
        os.truncate(tmp_path / "hole", 2**30)
        self.refused(tmp_path / "hole", "too many for a file of settings")

    def test_a_name_twice_among_many(self):
        """Looking for it at every name would take an hour."""
        pairs = [(str(number), 0) for number in range(1_000_000)]
        with pytest.raises(ValueError, match="'999999' is in it twice"):
            without_duplicates([*pairs, pairs[-1]])

    @given(JSON)
    def test_any_other_json(self, tmp_path_factory, value):
        file = tmp_path_factory.getbasetemp() / "any.json"
        file.write_text(json.dumps(value))
        self.refused(file)

    @given(st.text() | st.binary())
    def test_anything(self, tmp_path_factory, content):
        file = tmp_path_factory.getbasetemp() / "anything.json"
        file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        self.refused(file)


class TestParameters:
    @pytest.mark.parametrize("name", CHOICES)
    @pytest.mark.parametrize("value", [0, 65, True, 64.0, "64", None])
    def test_others_are_refused(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is .*; it must be one of "):
            LaunchParameters(**{**VALID, name: value})

    def test_choices_name_every_parameter(self):
        assert list(CHOICES) == list(asdict(HEURISTIC))


class TestWriting:
    @given(st.dictionaries(st.integers(1, 10**9), parameters, min_size=1))
    def test_what_is_written_is_read(self, tmp_path_factory, entries):
        file = tmp_path_factory.getbasetemp() / "new folder" / "table.json"
        write_table(file, LaunchTable(entries))
        assert read_table(file) == LaunchTable(entries)
        assert [path.name for path in file.parent.iterdir()] == ["table.json"]

    def test_what_cannot_be_written_leaves_the_old(self, tmp_path, monkeypatch):
        file = tmp_path / "table.json"
        write_table(file, LaunchTable({48: distinct(1)}))

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(UserError, match=r"table\.json cannot be written \(No space left on device\)"):
            write_table(file, LaunchTable({48: distinct(2)}))
        assert read_table(file) == LaunchTable({48: distinct(1)})
        assert list(tmp_path.iterdir()) == [file]

    def test_no_folder(self, tmp_path):
        (tmp_path / "file").touch()
        for folder in (tmp_path / "file", tmp_path / "no" / "folder"):
            with pytest.raises(UserError, match="cannot be written"):
                write_table(folder / "table.json", LaunchTable({1: HEURISTIC}))


class TestRuntime:
    @pytest.fixture
    def chunk_sizes(self, monkeypatch):
        """The chunk size of each scan in plain torch, as they come."""
        sizes = []
        scan = mamba_kernels.mamba_chunk_scan_combined

        def record(*arguments, **options):
            sizes.append(arguments[5])
            return scan(*arguments, **options)

        monkeypatch.setattr(mamba_kernels, "mamba_chunk_scan_combined", record)
        return sizes

    def step(self, runtime, rows):
        state = runtime.allocate(rows, 10)
        return runtime.step(state, [Row(slot + 1, 0, [1, 2, 3]) for slot in range(rows)])

    def test_the_entry_of_each_batch_is_used(self, places, chunk_sizes, monkeypatch):
        """Of 8 heads and two rows, or one. The variable's folder and the argument's."""
        for file, sizes in ((places[1], (32, 128)),):
            entries = {8 * (n + 1): LaunchParameters(64, 4, size) for n, size in enumerate(sizes)}
            write_table(file, LaunchTable(entries))
        model = random_model(small_config(layer_types=("mamba",)))
        make = partial(CPURuntime, model, GenerationConfig(), kernels="torch")
        without, given = make(), make(tuned_configs=places[0].parent)
        monkeypatch.setenv(FOLDER_VARIABLE, str(places[0].parent))
        of_variable = make()
        for runtime in (without, given, of_variable):
            self.step(runtime, 1)
            self.step(runtime, 2)
        assert chunk_sizes == [HEURISTIC.torch_chunk_size] * 2 + [32, 128, 32, 128]

    @pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
    def test_the_fused_kernels_are_given_theirs(self, places):
        """One row, then two; and the logits are the same with all of them."""
        entries = {8: LaunchParameters(32, 16, 64), 16: LaunchParameters(128, 1, 64)}
        write_table(places[0], LaunchTable(entries))
        runtime = CPURuntime(
            random_model(small_config()), GenerationConfig(), kernels="fused", tuned_configs=places[0].parent
        )
        decoder, given = runtime.model.model, []
        fused_layers = decoder.fused_layers

        def record(*arguments):
            given.append((arguments[-2].chunk_size, arguments[-2].heads_per_task))
            return fused_layers(*arguments)

        decoder.fused_layers = record
        self.step(runtime, 1)
        self.step(runtime, 2)
        assert given == [(32, 16), (128, 1)]
        rows = [Row(1, 0, range(140)), Row(2, 0, range(97))]
        logits = []
        for chunk_size in CHOICES["chunk_size"]:
            state = runtime.allocate(2, 150)
            runtime._launch_table = LaunchTable({1: LaunchParameters(chunk_size, 2, 64)})
            logits.append(torch.stack([runtime.step(state, rows), *self.decode(runtime, state, rows)]))
        assert {chunk_size for chunk_size, _ in given} == set(CHOICES["chunk_size"])
        for other in logits[1:]:
            assert torch.allclose(logits[0], other, atol=1e-4)

    def decode(self, runtime, state, rows):
        return [runtime.step(state, [Row(row.slot, len(row.tokens) + t, [5]) for row in rows]) for t in range(3)]

    def test_a_model_that_is_called_without_a_runtime_depends_on_no_table(self, places, chunk_sizes, monkeypatch):
        """It is what graphs are traced from."""
        monkeypatch.setenv(FOLDER_VARIABLE, str(places[0].parent))
        write_table(places[0], LaunchTable({1: LaunchParameters(128, 1, 256)}))
        runtime = CPURuntime(random_model(small_config(layer_types=("mamba",))), GenerationConfig(), kernels="torch")
        self.step(runtime, 1)
        inputs = torch.ones(1, 3, dtype=torch.int64), torch.arange(3)[None], torch.tensor([3]), torch.tensor([1])
        runtime.model(*inputs, runtime.allocate(1, 10))
        assert chunk_sizes == [256, HEURISTIC.torch_chunk_size]

    def test_a_broken_file_or_folder_is_refused_when_the_model_is_loaded(self, places, tmp_path):
        model = random_model(small_config(layer_types=("mamba",)))
        with pytest.raises(UserError, match="which is not a folder"):
            CPURuntime(model, GenerationConfig(), kernels="torch", tuned_configs=tmp_path / "none")
        places[0].write_text("")
        with pytest.raises(UserError, match=places[0].name):
            CPURuntime(model, GenerationConfig(), kernels="torch", tuned_configs=places[0].parent)

    def test_a_model_without_mamba_layers_has_no_table(self, places, caplog):
        places[0].write_text("")
        model = random_model(small_config(layer_types=("attention",)))
        self.step(CPURuntime(model, GenerationConfig(), kernels="torch", tuned_configs=places[0].parent), 1)
        assert not caplog.records
