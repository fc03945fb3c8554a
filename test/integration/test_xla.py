"""The XLA runtime: the CPU runtime's logits, a fixed set of graphs, and state that is donated from step to step."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron import load, stream_generate
from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.sharding import rank_slice
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs import operators as xla
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.ops import cached_attention
from granite4_neuron.runtime.interface import Row
from test.support.checkpoints import DENSE, small_config
from test.support.graph_contract import (
    BUCKETS,
    FEW_LAYERS,
    STEPS,
    Backend,
    EngineContract,
    OneTextContract,
    SlotContract,
    StepContract,
    VerifyContract,
    run_steps,
)
from test.support.stepping import random_tokens

pytest.importorskip("torch_xla", reason="torch_xla is not installed; the xla backend runs with torch 2.9")
import torch_xla
import torch_xla.debug.metrics as metrics

from granite4_neuron.devices.graphs.runtime import cache_buckets
from granite4_neuron.devices.xla.runtime import XLARuntime

pytestmark = pytest.mark.versions


def compilations(runtime=None) -> int:
    return metrics.counter_value("UncachedCompile") or 0


@pytest.fixture(scope="module")
def backend():
    return Backend(
        make=lambda model, buckets: XLARuntime(model, GenerationConfig(), buckets),
        compilations=compilations,
        sync=torch_xla.sync,
    )


class TestSteps(StepContract):
    pass


class TestSlots(SlotContract):
    pass


class TestVerify(VerifyContract):
    pass


class TestEngine(EngineContract):
    pass


class TestOneText(OneTextContract):
    pass


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_alone_gives_its_cpu_logits(degree):
    """One rank's graphs run with its own shapes. Communication between ranks is left out on both sides."""
    config = small_config(**FEW_LAYERS, num_key_value_heads=2)
    model = random_model(config)
    parts = []
    for runtime_class in (CPURuntime, XLARuntime):
        with torch.device("meta"):
            rank = model_of(config, parallel=Parallel(1, degree))
        for name, weight in model.named_parameters():
            set_parameter(rank, name, rank_slice(name, weight, config, 1, degree).clone())
        rank.tie_weights()
        parts.append(runtime_class(rank.eval(), GenerationConfig()))
    expected, logits = (run_steps(runtime, STEPS[:4], 4, 200) for runtime in parts)
    for ours, theirs in zip(logits, expected, strict=True):
        assert ours.shape[-1] == config.vocab_size // degree
        assert (ours - theirs).abs().max() <= 1e-5


def test_a_row_of_nan_spoils_no_other_rows_attention():
    """Attention runs over the cache in blocks, and later blocks use the sums of earlier ones."""
    query, key, value = (torch.randn(3, *shape) for shape in ((1, 4, 8), (2, 64, 8), (2, 64, 8)))
    query[1] = math.nan
    positions, lengths, slots = torch.full((3, 1), 63), torch.ones(3, dtype=torch.int64), torch.tensor([2, 1, 0])
    inputs = (query, key, value, positions, lengths, slots)
    device = torch_xla.device()
    expected = cached_attention(*inputs, 0.3, 64, block_size=16)
    output = xla.cached_attention(*(tensor.to(device) for tensor in inputs), 0.3, 64, block_size=16).cpu()
    assert output[1].isnan().all()
    assert (output - expected)[[0, 2]].abs().max() <= 1e-5


def test_the_bundled_model_prints_the_same_text():
    prompts = ["An assignment statement", "The import statement is used to find a module and"]
    tokens = {}
    for backend in ("cpu", "xla"):
        runtime, tokenizer = load(dtype=torch.float32, backend=backend)
        tokens[backend] = [
            (response.index, response.token)
            for response in stream_generate(runtime, tokenizer, prompts, max_tokens=24, temperature=0)
        ]
    assert tokens["xla"] == tokens["cpu"]


def test_the_set_of_graphs_is_fixed():
    """The graphs are the prefill buckets and decode, for any prompts, positions, slots and numbers of steps."""
    runtime = XLARuntime(random_model(small_config(**FEW_LAYERS, vocab_size=161)), GenerationConfig(), BUCKETS)
    runtime.allocate(5, 200)  # the graph that makes the zeros
    before = compilations()
    run_steps(runtime, STEPS, 5, 200)
    assert compilations() - before == len(BUCKETS) + 1
    run_steps(runtime, [[(3, 40), (1, 3)], [(1, 1)], [(2, 64), (4, 1), (1, 17)], [(4, 1), (1, 1)]], 5, 200)
    assert compilations() - before == len(BUCKETS) + 1


def test_verification_has_few_graphs_and_the_state_does_not_move():
    """Each bucket has one graph that verifies and one that commits, and the state's memory stays in place."""
    model = random_model(small_config(**DENSE, **FEW_LAYERS, vocab_size=164))
    runtime = XLARuntime(model, GenerationConfig(), BUCKETS)
    state = runtime.allocate(5, 60)  # sizes of no other test, whose graphs would be shared
    runtime.step(state, [Row(1, 0, [3] * 9), Row(2, 0, [4] * 5)])
    before = compilations()
    for counts, accepted in (((4, 2), (3, 0)), ((1, 4), (1, 4)), ((3, 3), (0, 3))):
        rows = [Row(slot, 20, [5] * count) for slot, count in zip((1, 2), counts, strict=True)]
        runtime.commit(state, runtime.verify(state, rows), accepted)
    assert compilations() - before == 2
    runtime.commit(state, runtime.verify(state, [Row(2, 30, [5] * 7)]), [5])
    assert compilations() - before == 4


def test_a_verification_outlives_the_state_that_it_read():
    """A held verification does not read state that a later graph has overwritten."""
    logits = []
    for runtime_class in (CPURuntime, XLARuntime):
        options = () if runtime_class is CPURuntime else (BUCKETS,)
        runtime = runtime_class(random_model(small_config(**DENSE, **FEW_LAYERS)), GenerationConfig(), *options)
        state = runtime.allocate(2, 60)
        runtime.step(state, [Row(1, 0, [3] * 9)])
        rejected = runtime.verify(state, [Row(1, 9, [4, 5, 6])])
        verification = runtime.verify(state, [Row(1, 9, [4, 5, 6])])
        runtime.commit(state, verification, [2])
        runtime.step(state, [Row(1, 11, [7])])
        torch_xla.sync()
        runtime.allocate(2, 60)  # this syncs too
        logits.append(runtime.step(state, [Row(1, 12, [8])]))
    assert (logits[1] - logits[0]).abs().max() <= 1e-5
    assert all(each.cpu().isfinite().all() for each in (*rejected.kept_inputs, *verification.kept_inputs))


def test_longer_caches_add_graphs_per_bucket_of_the_cache_only():
    assert cache_buckets(200) == [200]
    assert cache_buckets(5000) == [1024, 4096, 5000]
    runtime = XLARuntime(random_model(small_config(**FEW_LAYERS, vocab_size=162)), GenerationConfig(), (64, 512))
    state = runtime.allocate(1, 2000)
    assert state.max_length == 4096
    before = compilations()
    tokens = random_tokens(162, 1900).tolist()
    for start in range(0, 1536, 512):
        runtime.step(state, [Row(1, start, tokens[start : start + 512])])
    for start in range(1536, 1545):
        runtime.step(state, [Row(1, start, tokens[start : start + 1])])
    assert compilations() - before == 3  # prefill with caches of 1024 and 4096, decode with 4096
    longer = runtime.allocate(1, 3000)
    runtime.step(longer, [Row(1, 0, tokens[:512])])
    assert compilations() - before == 3


def long_runtimes(length, chunk):
    """Load a small model of that context on both runtimes, and make tokens."""
    config = small_config(
        **DENSE,
        layer_types=("mamba", "attention"),
        max_position_embeddings=length,
        hidden_size=16,
        shared_intermediate_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        mamba_n_heads=4,
        mamba_d_head=8,
    )
    cpu = CPURuntime(random_model(config), GenerationConfig())
    return cpu, XLARuntime(random_model(config), GenerationConfig(), (chunk,)), random_tokens(160, length).tolist()


def test_a_prompt_may_be_far_longer_than_any_graph():
    """The prompt runs in chunks. New graphs are made for longer caches only, and logits are the CPU runtime's."""
    length, chunk = 16384, 2048
    *runtimes, tokens = long_runtimes(length, chunk)
    rows = [Row(1, start, tokens[start : start + chunk]) for start in range(0, length - chunk, chunk)]
    rows += [Row(1, length - chunk, tokens[-chunk:-1]), Row(1, length - 1, tokens[-1:])]
    states = [runtime.allocate(1, length) for runtime in runtimes]
    before = compilations()
    expected, logits = (
        torch.cat([runtime.step(state, [row]) for row in rows]) for runtime, state in zip(runtimes, states, strict=True)
    )
    assert (logits - expected).abs().max() <= 1e-5
    caches = [bucket for bucket in cache_buckets(length) if bucket >= chunk]
    assert compilations() - before == len(caches) + 1  # one more for decode


@pytest.mark.exhaustive
def test_the_end_of_a_context_of_131072_tokens():
    """The state holds random numbers, because running all the tokens before would take a minute."""
    length, chunk = 131072, 512
    start = length - chunk - 1
    cpu, xla, tokens = long_runtimes(length, chunk)
    states = [runtime.allocate(1, length) for runtime in (cpu, xla)]
    generator = torch.Generator().manual_seed(0)
    for tensor in states[0].tensors():
        tensor[1] = torch.randn(tensor[1].shape, generator=generator)
    xla.restore(states[1], [replace(cpu.snapshot(states[0], 1, start), fingerprint=xla.fingerprint)], 1)
    for row in (Row(1, start, tokens[start:-1]), Row(1, length - 1, tokens[-1:])):
        expected, logits = (runtime.step(state, [row]) for runtime, state in zip((cpu, xla), states, strict=True))
        assert (logits - expected).abs().max() <= 1e-5


def test_200_steps_of_decode_add_no_memory_and_no_graph():
    runtime = XLARuntime(random_model(small_config(**FEW_LAYERS, vocab_size=163)), GenerationConfig(), BUCKETS)
    state = runtime.allocate(2, 300)

    def decode(first, count):
        for position in range(first, first + count):
            runtime.step(state, [Row(1, position, [5]), Row(2, position, [7])])

    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    decode(0, 20)
    graphs, memory = compilations(), resident_bytes()
    decode(20, 200)
    assert compilations() == graphs
    state_bytes = sum(tensor.numel() * tensor.itemsize for tensor in state.tensors())
    assert resident_bytes() - memory < 20 * state_bytes  # 200 copies would be ten times that


GRAPHS = ("prefill", "decode", "verify", "commit", "copy", "snapshot", "restore")
# Indices into `HybridState.tensors` of four layers: mamba, attention, mamba, attention.
RECURRENT, KEYS_AND_VALUES = [0, 1, 4, 5], [2, 3, 6, 7]
ALL = list(range(8))
WRITTEN = dict(zip(GRAPHS, (ALL, ALL, KEYS_AND_VALUES, RECURRENT, ALL, [], ALL), strict=True))


def alias_tables(folder, variant):
    """Return (stated, compiled), each by the names of `GRAPHS`: `xla_aliases`' triples, and {output: parameter}."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "test.support.xla_aliases", variant]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    compiled = []
    for file in sorted(folder.glob("*after_optimizations.txt")):
        aliases, layout = file.read_text().splitlines()[0].split("entry_computation_layout=")
        if not layout.startswith("{()"):  # not the graph that makes the zeros
            pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}, \w+-alias\)", aliases)
            compiled.append({int(output): int(parameter) for output, parameter in pairs})
    stated = json.loads(done.stdout.splitlines()[-1])
    graphs = GRAPHS if variant == "right" else GRAPHS[:1]
    return dict(zip(graphs, stated, strict=True)), dict(zip(graphs, compiled, strict=True))


def wrong_aliases(folder, variant):
    """Return the names of graphs that write a state tensor which is not aliased with its new value."""
    stated, compiled = alias_tables(folder, variant)
    return {
        name
        for name in stated
        if sorted(state for state, _, _ in stated[name]) != WRITTEN[name]
        or {output: parameter for _, output, parameter in stated[name]} != compiled[name]
    }


def test_the_alias_tables_of_compiled_graphs_are_the_stated_ones(tmp_path):
    """XLA pairs donated buffers with outputs by their sizes; each state tensor must get its own old memory."""
    assert wrong_aliases(tmp_path, "right") == set()


@pytest.mark.parametrize("variant", [pytest.param("one is dropped", marks=pytest.mark.exhaustive), "another order"])
def test_wrong_aliases_are_seen(variant, tmp_path):
    assert wrong_aliases(tmp_path, variant) == {"prefill"}
