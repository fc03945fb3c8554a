"""On a GPU a prompt's logits and state are the same, bit by bit, however it is cut at multiples of a scan's chunk,
whatever the buckets of its pieces and of the cache.
"""

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.torch_device import TorchRuntime
from test.support.stepping import random_tokens

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
VOCAB = 1024
LAYERS = ("mamba", "attention", "mamba")
TOKENS = random_tokens(VOCAB, 1, 1100)[0].tolist()


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32, torch.float16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=["h-350m", "h-tiny"])
def model(request, dtype):
    config = GraniteMoeHybridConfig.from_family(request.param)
    config = replace(config, vocab_size=VOCAB, num_hidden_layers=len(LAYERS), layer_types=LAYERS)
    return random_model(config, dtype=dtype)


def run(model, cuts, max_length, buckets=None):
    """Return the logits of all tokens, of the last one alone, and what a slot holds after them."""
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


@pytest.mark.parametrize(("tokens", "lengths"), [(600, (1024, 4096)), (1100, (2048, 8192))], ids=str)
def test_cuts(model, tokens, lengths):
    """In pieces of its buckets, of 128, and in one; the longer one passes from one bucket of the cache to the next."""
    expected = run(model, [tokens], lengths[0])
    pieces = [128] * (tokens // 128) + [tokens % 128]
    for cuts, length in (([512, tokens - 512], lengths[0]), (pieces, lengths[1])):
        torch.testing.assert_close(run(model, cuts, length), expected, rtol=0, atol=0)
    in_one = run(model, [tokens], lengths[0], buckets=(2048,))
    # The head takes tokens by a divisor of all buckets, and so all logits are not to be compared.
    torch.testing.assert_close(in_one[1:], expected[1:], rtol=0, atol=0)
