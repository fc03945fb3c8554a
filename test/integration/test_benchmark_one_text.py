"""benchmarks/one_text.py: what it counts, and that it counts nothing for this package."""

import re

import pytest
import torch
import transformers

from benchmarks import one_text, products
from benchmarks.one_text_engines import Row
from granite4_neuron.ops import cpu

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
SMALL = ("--sequences", "2", "--prompt-length", "40", "--output-length", "6")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Take no time for products, and leave the number of threads as it was."""
    monkeypatch.setattr(products, "_SECONDS", 0)
    # Threads of two tests would wait for each other; test_one_text.py runs this package on several.
    monkeypatch.setattr(one_text, "WAYS", [way for way in one_text.WAYS if way.threads == 1])
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_differences():
    alone = [[Row(1, -1.0), Row(2, -2.0), Row(3, -3.0)], [Row(1, -1.0), Row(2, -2.0), Row(3, -3.0)]]
    served = [[Row(1, -1.0), Row(2, -2.5), Row(3, -3.0)], [Row(1, -1.0), Row(4, -2.25), Row(5, -9.0)]]
    assert one_text.differences(alone, alone) == one_text.Difference(0, 6, 0.0, 0)
    assert one_text.differences(alone, served) == one_text.Difference(2, 5, 0.5, 1)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has no chunks of prompts")
def test_tables(capsys):
    assert one_text.main([*SMALL, "--numbers", "float32", "int8", "--compare", "transformers"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    ours = re.findall(r"this package │ (.+?) +│ (\d+) of (\d+) +│ (\S+) +│ (\d+) of 2 ", said)
    assert ours == [(way.name, "0", "12", "0", "0") for way in one_text.WAYS] * 2
    theirs = re.findall(r"transformers │ .+?│ (\d+) of \d+ ", said)
    assert len(theirs) == len(one_text.WAYS) - 1 and any(map(int, theirs)), "the sums of a batch are in another order"
    assert "transformers, with drafts: it refuses drafts" in said and "transformers: it has no int8 weights" in said
    assert said.count("MLP out") == 6
