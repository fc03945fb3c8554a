"""Log-probabilities of a stand-in for llama-server, and the message where it does not run the file."""

import pytest
import torch

pytest.importorskip("httpx", reason="httpx is not installed; benchmarks.accuracy.gguf needs it")

from benchmarks.accuracy.gguf import their_log_probabilities
from granite4_neuron import UserError
from test.support.llama_server import write_llama_server


def test_log_probabilities_of_llama_server(tmp_path):
    write_llama_server(tmp_path)
    found = their_log_probabilities(tmp_path, tmp_path / "model.gguf", [1, 2, 3, 4], [1, 3], vocab_size=9)
    expected = torch.full((2, 9), -torch.inf)
    expected[0, 7], expected[1, 7] = -1.0, -1.5  # the stand-in's; it has the first prompt in its cache
    torch.testing.assert_close(found, expected)


def test_a_server_that_ends(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho error: cannot read the file\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(UserError, match=r"llama-server does not run .*model.gguf: error: cannot read the file"):
        their_log_probabilities(tmp_path, tmp_path / "model.gguf", [1, 2], [1], vocab_size=9)
