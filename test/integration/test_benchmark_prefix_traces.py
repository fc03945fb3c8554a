"""benchmarks/prefix_traces: its traces, its counts without a model, and the engine's equal counts."""

import re

import pytest
import torch

from benchmarks.prefix_traces import command as prefix_traces
from benchmarks.prefix_traces import engines as prefix_engines
from benchmarks.prefix_traces.policies import LRU, MARCONI, OURS, SizesOnly, savings
from benchmarks.prefix_traces.traces import TRACES, Sizes, replay, trace
from granite4_neuron.config import config_from_file, published_config
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.engine import Engine, PrefixCache
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.runtime.prompt_cuts import Multiples
from test.support.llama_server import write_llama_server

CONFIG = published_config("h-350m")


def small(name, sessions=12, lengths=0.25, seed=0):
    return trace(name, Sizes(sessions, lengths, 8, 1000), seed)


@pytest.mark.parametrize("name", TRACES)
def test_traces(name):
    """Traces are reproducible and in order, and their prompts have common beginnings."""
    turns = small(name)
    assert turns == small(name) != trace(name, Sizes(12, 0.25, 8, 1000), seed=1)
    assert [turn.time for turn in turns] == sorted(turn.time for turn in turns)
    prompts = []
    replay(turns, lambda prompt, length: prompts.append(tuple(prompt)) or [5] * length)
    assert len(prompts) == len(turns) > len({prompt[:20] for prompt in prompts})
    assert all(2 <= turn.answer_length <= 8 for turn in turns)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRACES)
def test_no_policy_finds_more_than_this_package(name, seed):
    turns = small(name, sessions=6, seed=seed)
    most = savings(turns, MARCONI, CONFIG, None)
    for percent in (10, 25, 50, 100):  # the least is room for two or three states
        found = {
            policy: savings(turns, policy, CONFIG, most.num_bytes * percent // 100) for policy in (LRU, MARCONI, OURS)
        }
        assert max(found.values(), key=lambda each: each.hit_rate).hit_rate == found[OURS].hit_rate
        assert 0 < found[OURS].saved < 1 and found[OURS].num_bytes <= most.num_bytes * percent // 100


def test_sizes_are_those_of_the_model():
    runtime, cache = SizesOnly(CONFIG), PrefixCache(SizesOnly(CONFIG), None, None)
    cache.insert(range(100), None, 0, runtime.logits)
    assert cache.stats.num_bytes == 22_321_152 + 401_408 + 100 * 4_096


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
def test_the_engine_finds_what_the_replay_counts(monkeypatch):
    turns, engines = small("shift", sessions=2, lengths=0.1), []
    config = config_from_file(bundled_checkpoint() / "config.json")
    monkeypatch.setattr(
        prefix_engines, "Engine", lambda *args, **options: engines.append(Engine(*args, **options)) or engines[-1]
    )
    times = prefix_engines.first_token_times(turns, bundled_checkpoint(), 300_000, repeats=1)
    assert {len(each) for each in times.values()} == {len(turns)} and min(map(min, times.values())) > 0
    found = [engine.stats.cached_tokens for engine in engines]
    assert found == [0, *(savings(turns, policy, config, 300_000).found_tokens for policy in (LRU, MARCONI, OURS))]


def test_llama_cpp(tmp_path, capsys, monkeypatch):
    """Hits are those that the server reports. The fake server finds earlier prompts that a prompt begins with."""
    monkeypatch.setattr(prefix_engines, "gguf_of", lambda *_: tmp_path / "model.gguf")
    write_llama_server(tmp_path)
    turns, prompts = small("conversations", sessions=2, lengths=0.1), {}
    replay(turns, lambda prompt, length: prompts.update({tuple(prompt): length}) or [7] * length)
    found = sum(
        max([len(one) for one in earlier if one == prompt[: len(one)]], default=0)
        for earlier, prompt in ((list(prompts)[:place], prompt) for place, prompt in enumerate(prompts))
    )
    options = ["--traces", "conversations", "--sessions", "2", "--lengths", "0.1", "--longest-answer", "8"]
    monkeypatch.setattr(prefix_traces, "trace", lambda *_: turns)
    assert (
        prefix_traces.main([*options, "--budgets", "100", "--compare", "llama.cpp", "--llama-cpp", str(tmp_path)]) == 0
    )
    [(percent, *times)] = re.findall(
        r"│ conversations │ 100 %, \d+ MiB │ ([\d.]+) +│ ([\d.]+) / ([\d.]+) ", capsys.readouterr().out
    )
    assert percent == f"{100 * found / sum(map(len, prompts)):.1f}" and 0 < float(times[0]) <= float(times[1])


@pytest.mark.parametrize("options", [["--compare", "llama.cpp"], ["--llama-cpp", "."]], ids=" ".join)
def test_bad_input_is_refused(options, capsys):
    assert prefix_traces.main(options) == 2
    assert "--compare llama.cpp needs --llama-cpp, the folder of llama-server" in capsys.readouterr().err


def test_table(capsys):
    before = torch.get_num_threads()
    assert prefix_traces.main(["--sessions", "6", "--lengths", "0.1", "--budgets", "5", "100", "--cuts"]) == 0
    assert torch.get_num_threads() == before
    rows = re.findall(r"│ (\S+) +│ (\d+) %, [\d,]+ MiB +(?:│ [\d.]+ / [\d.]+ +){3}│", capsys.readouterr().out)
    assert rows == 2 * [(name, percent) for name in TRACES for percent in ("5", "100")], "by policies and by steps"


def test_long_steps_cost_no_hits():
    """Conversations of up to 11,000 tokens, with memory for a tenth of what they need."""
    turns = trace("conversations", Sizes(20, 1.0, None, 1000), seed=0)
    most, cuts = savings(turns, MARCONI, CONFIG, None).num_bytes, Multiples(128)
    buckets, long = (128, 512, 2048), (128, 512, 2048, 8192)
    short, all_long, both = (
        savings(turns, OURS, CONFIG, most // 10, cuts, *each) for each in ((buckets,), (long,), (long, 2048))
    )
    assert max(short.hit_rate - 0.02, all_long.hit_rate + 0.1) < both.hit_rate
    assert both.work < 1.02 * short.work
