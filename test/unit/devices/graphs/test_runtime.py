"""How a prompt is cut into pieces for compiled graphs."""

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.graphs.runtime import PREFILL_BUCKETS, TOKENS
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.devices.torch.runtime import TorchRuntime, default_buckets
from granite4_neuron.engine.slots import slots_that_fit
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.prompt_cuts import pieces, used_buckets
from test.support.checkpoints import small_config
from test.support.engines import engine_model
from test.support.graph_contract import FEW_LAYERS
from test.support.stepping import random_tokens

MANY = (128, 512, 1024, 2048)


@pytest.mark.parametrize(
    "tokens, buckets, expected",
    [
        (1, PREFILL_BUCKETS, [128]),
        (128, PREFILL_BUCKETS, [128]),
        (130, PREFILL_BUCKETS, [512]),
        (600, PREFILL_BUCKETS, [512, 128]),
        (600, MANY, [512, 128]),
        (600, (128, 512, 2048), [512, 128]),
        (700, PREFILL_BUCKETS, [512, 512]),
        (1024, PREFILL_BUCKETS, [512, 512]),
        (1000, MANY, [1024]),
        (1700, MANY, [2048]),
        (2048 + 600, MANY, [2048, 512, 128]),
        (5, (2,), [2, 2, 2]),
    ],
)
def test_a_prompt_is_cut_if_padding_would_cost_more(tokens, buckets, expected):
    assert pieces(tokens, buckets) == expected


def test_only_the_last_piece_is_padded_and_by_less_than_its_bucket():
    for buckets in (PREFILL_BUCKETS, MANY, (16, 64), (7,)):
        for tokens in range(1, 2 * buckets[-1] + 2):
            cut = pieces(tokens, buckets)
            assert 0 <= sum(cut) - tokens < cut[-1] and set(cut) <= set(buckets)
            assert cut == sorted(cut, reverse=True)


def test_a_step_runs_the_pieces(monkeypatch):
    """Positions and logits go on from piece to piece. For 600 tokens the graph of 2,048 tokens is not used. The last
    logits are not copied.
    """
    model = random_model(small_config(layer_types=("mamba",)))
    tokens = random_tokens(model.config.vocab_size, 600).tolist()
    ours = TorchRuntime(model, GenerationConfig(), (128, 512, 2048), compiler="eager")
    run, sizes, outputs = ours._run_prefill, [], []

    def recorded(state, inputs, *rest):
        sizes.append(inputs.shape[1] - TOKENS)
        outputs.append(run(state, inputs, *rest))
        return outputs[-1]

    monkeypatch.setattr(ours, "_run_prefill", recorded)
    logits, expected = (
        runtime.step(runtime.allocate(1, 700), [Row(1, 0, tokens)], all_logits=True)
        for runtime in (ours, CPURuntime(model, GenerationConfig()))
    )
    assert sizes == [512, 128]
    assert (logits - expected).abs().max() <= 1e-5
    last = ours.step(ours.allocate(1, 700), [Row(1, 0, tokens)])
    assert last.shape == (1, model.config.vocab_size) and (last - expected[:, -1]).abs().max() <= 1e-5
    assert last.data_ptr() == outputs[-1].data_ptr()


def test_default_buckets():
    """On a Neuron device a graph of 2,048 tokens would not fit into SBUF."""
    model = random_model(small_config(**FEW_LAYERS))
    assert TorchRuntime(model, GenerationConfig(), compiler="eager").prefill_buckets == [128, 512, 2048]
    assert TorchRuntime(model, GenerationConfig(), [64, 16, 64], compiler="eager").prefill_buckets == [16, 64]
    assert DEVICES["neuron"].long_prompts == () and PREFILL_BUCKETS == (128, 512)
    assert default_buckets("cuda", is_rounded=False) == [128, 512, 2048, 8192]
    assert default_buckets("cuda", is_rounded=True) == [128, 512, 2048], "all prompts have a cut at its multiples"


@pytest.mark.parametrize(
    ("layer_types", "state_dtype"),
    [(("mamba", "attention"), torch.float32), (("mamba",), torch.bfloat16), (("attention",), torch.float32)],
)
def test_sequences_that_fit_into_a_gpus_memory(monkeypatch, layer_types, state_dtype):
    """Half of what is free, or kept for the next state, holds the whole state of so many, and of no more."""
    monkeypatch.setattr("granite4_neuron.runtime.bound_model.available_bytes", lambda: 2**50)
    model = engine_model(layer_types=layer_types, max_position_embeddings=5000)
    runtime = TorchRuntime(model, GenerationConfig(), compiler="eager", state_dtype=state_dtype)
    for length in (9, 1500):
        state = runtime.allocate(5, length)
        needed = sum(each.nbytes for each in state.tensors())
        assert slots_that_fit(runtime, 64, length) == 64, "a CPU has enough"
        with monkeypatch.context() as gpu:
            gpu.setattr(runtime, "device", torch.device("cuda"))
            gpu.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
            gpu.setattr(torch.cuda, "memory_allocated", lambda device: 300)
            for free, fitting in ((700, 1), (2 * needed - 1, 4), (2 * needed, 5)):
                gpu.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free - 700, 2**50))
                assert slots_that_fit(runtime, 64, length) == fitting
                assert slots_that_fit(runtime, 3, length) == min(fitting, 3)
            del state
            gpu.setattr(torch.cuda, "mem_get_info", lambda device, free=needed: (free - 700, 2**50))
            assert slots_that_fit(runtime, 64, length) == 5, "with the memory of the state that has ended"


@pytest.mark.parametrize("longest, used", [(100, [16, 64]), (16, [16]), (200, [16, 64, 512])])
def test_a_warm_up_compiles_the_graphs_that_prompts_of_a_state_can_have(monkeypatch, longest, used):
    buckets = (16, 64, 512)
    assert used_buckets(longest, buckets) == used == sorted({n for i in range(longest) for n in pieces(i + 1, buckets)})
    model = engine_model(layer_types=("mamba",), max_position_embeddings=longest)
    runtime = TorchRuntime(model, GenerationConfig(), buckets, compiler="eager")
    run, sizes = runtime._run_prefill, []

    def recorded(state, inputs, *rest, **options):
        sizes.append(inputs.shape[1] - TOKENS)
        return run(state, inputs, *rest, **options)

    monkeypatch.setattr(runtime, "_run_prefill", recorded)
    runtime.warm_up(runtime.allocate(1, longest))
    assert sizes == [16, *used[::-1]], "the first has all logits, and of the others the largest reserves the memory"
