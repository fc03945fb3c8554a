"""The tune command as users run it; no test depends on what it measures."""

import subprocess
import sys

import pytest
import torch

from granite4_neuron import generate, load
from granite4_neuron.cli import main
from granite4_neuron.ops import LaunchParameters, cpu
from granite4_neuron.ops.launch_parameters import LaunchTable, device_name, read_table, table_name, write_table


def run(*arguments):
    command = [sys.executable, "-m", "granite4_neuron", "tune", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--output", "/no/such/folder/x"), "cannot be written"),
        (("--output", __file__), "is not a folder"),
        (("--output", "x", "--model", "granite-4.0-350m"), "no Mamba layers"),
        (("--output", "x", "--batch-size", "0"), "0 is not a whole number of at least 1"),
        ((), "the following arguments are required: --output"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert main(["tune", *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == "" and message in error


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
class TestTune:
    """With the bundled model, which has 8 heads."""

    FILE = table_name(32, 32, torch.float32, device_name())

    def test_a_later_run_uses_what_an_earlier_one_wrote(self, tmp_path):
        folder = tmp_path / "new"
        done = run("--output", folder, "--batch-size", "1", "3", "--threads", "1")
        assert done.returncode == 0, done.stderr
        for part in ("heads_per_task", "chunk_size", "torch_chunk_size", "default", "chosen", "ratio"):
            assert part in done.stdout
        assert f"wrote {folder / self.FILE}" in done.stderr
        assert [file.name for file in folder.iterdir()] == [self.FILE]
        table = read_table(folder / self.FILE)
        assert sorted(table.entries) == [8, 24]
        runtime, tokenizer = load(tuned_configs=folder)
        assert runtime._launch_table == table
        assert generate(runtime, tokenizer, "An assignment", max_tokens=3) == generate(
            *load(), "An assignment", max_tokens=3
        )

    def test_entries_of_other_batches_stay(self, tmp_path):
        other = LaunchParameters(32, 1, 256)
        write_table(tmp_path / self.FILE, LaunchTable({8: other, 800: other}))
        done = run("--output", tmp_path, "--batch-size", "2", "--threads", "1")
        assert done.returncode == 0, done.stderr
        entries = read_table(tmp_path / self.FILE).entries
        assert sorted(entries) == [8, 16, 800] and entries[8] == entries[800] == other

    def test_a_broken_file_is_refused_and_stays(self, tmp_path, capsys):
        (tmp_path / self.FILE).write_text("{")
        assert main(["tune", "--output", str(tmp_path)]) == 2
        output, error = capsys.readouterr()
        assert output == "" and f"{self.FILE} is not a table" in error
        assert (tmp_path / self.FILE).read_text() == "{"
