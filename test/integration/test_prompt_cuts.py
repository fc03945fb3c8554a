"""On a GPU a prompt's logits are those of the CPU runtime in float32. They and the state have the same bits however the
prompt is cut at multiples of a scan's chunk, in whatever buckets its pieces and the cache are, and whichever prompts
share its graphs.
"""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import published_config
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.runtime.interface import Row
from test.support.oracles import relative_error
from test.support.quantizing import GPU_FORMATS, quantize_model
from test.support.stepping import random_tokens

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
VOCAB = 1024
LAYERS = ("mamba", "attention", "mamba")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TOKENS = random_tokens(VOCAB, 1, 1100)[0].tolist()


@pytest.fixture(
    scope="module",
    params=[
        *((name, dtype, None) for name in ("h-350m", "h-tiny") for dtype in TOLERANCES),
        *(("h-tiny", torch.bfloat16, format) for format in GPU_FORMATS),
    ],
    ids=str,
)
def model(request):
    name, dtype, format = request.param
    config = published_config(name)
    config = replace(config, vocab_size=VOCAB, num_hidden_layers=len(LAYERS), layer_types=LAYERS)
    model = random_model(config, dtype=dtype)
    if format is not None:
        quantize_model(model, format)
    return model


def run(model, cuts, max_length, buckets=None):
    """Return the logits of all tokens, the logits of the last one alone, and the slot's state after them."""
    runtime = TorchRuntime(model, GenerationConfig(), buckets, device="cuda")
    states = [runtime.allocate(1, max_length) for _ in range(2)]
    rows, start = [], 0
    for tokens in cuts:
        rows.append(Row(1, start, TOKENS[start : start + tokens]))
        start += tokens
    logits = torch.cat([runtime.step(states[0], [row], all_logits=True)[0] for row in rows])
    last = [runtime.step(states[1], [row])[0] for row in rows][-1]
    held = [{name: tensor.cpu() for name, tensor in state.slot_views(1).items()} for state in states]
    for each in held:
        for name in each:
            if name.endswith(("key", "value")):
                each[name] = each[name][:, :start]
    return logits, last, *held


def test_numbers(model):
    runtime = CPURuntime(copy.deepcopy(model).float(), GenerationConfig(), cpu_kernels="torch")
    [expected] = runtime.step(runtime.allocate(1, 1024), [Row(1, 0, TOKENS[:600])], all_logits=True)
    assert relative_error(run(model, [600], 1024)[0], expected.double()) <= TOLERANCES[model.dtype]


@pytest.mark.parametrize(("tokens", "lengths"), [(600, (1024, 4096)), (1100, (2048, 8192))], ids=str)
def test_cuts_and_buckets_change_no_bits(model, tokens, lengths):
    """A prompt runs in pieces of its buckets, in pieces of 128, and whole. The longer one outgrows a cache bucket."""
    expected = run(model, [tokens], lengths[0])
    pieces = [128] * (tokens // 128) + [tokens % 128]
    for cuts, length in (([512, tokens - 512], lengths[0]), (pieces, lengths[1])):
        torch.testing.assert_close(run(model, cuts, length), expected, rtol=0, atol=0)
    for longest in (2048, 8192):
        in_one = run(model, [tokens], lengths[0], buckets=(longest,))
        # The head's block of tokens divides all buckets, so logits of all tokens may differ in bits.
        torch.testing.assert_close(in_one[1:], expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize(("state_dtype", "steps"), [(None, (2048, 8192)), (torch.bfloat16, (2048, 2048))], ids=str)
def test_steps_are_long_where_cuts_change_no_bits(model, state_dtype, steps):
    runtime = TorchRuntime(model, GenerationConfig(), device="cuda", state_dtype=state_dtype)
    assert (runtime.tokens_per_step, runtime.tokens_per_long_step) == steps
    assert runtime.prefill_buckets[-1] == steps[1]


def test_prompts_that_share_graphs_change_no_bits(model):
    """Four share a graph of 512 tokens each, one of which goes on, and two one of 128. Two slots have no prompt."""
    rows = [(3, 0, 500), (1, 0, 100), (4, 1024, 512), (2, 0, 130), (5, 128, 90), (6, 0, 300)]
    rows = [Row(slot, start, TOKENS[slot : slot + count]) for slot, start, count in rows]
    steps = [[row] for row in rows], [rows]
    expected, together = (logits_and_states(model, *each) for each in zip(steps, (1, 4), strict=True))
    torch.testing.assert_close(together, expected, rtol=0, atol=0)


def logits_and_states(model, steps, prompts_together):
    """Return the logits of all rows of some steps, and all slots after them."""
    runtime = TorchRuntime(model, GenerationConfig(), device="cuda")
    runtime.rows_per_step = prompts_together  # as after `warm_up`, which would compile decode too
    state = runtime.allocate(8, 4096)
    for slot in range(1, 9):
        generator = torch.Generator().manual_seed(slot)
        for view in state.slot_views(slot).values():
            view.copy_(0.3 * torch.randn(view.shape, generator=generator))
    logits = torch.cat([runtime.step(state, rows) for rows in steps])
    return logits, [{name: view.cpu() for name, view in state.slot_views(slot).items()} for slot in range(1, 9)]
