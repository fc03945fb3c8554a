"""The least work of a rank: figures calculated by hand for published models."""

import pytest
import torch

from granite4_neuron.config import published_config
from granite4_neuron.planning.analysis.roofline import minimum, minimum_of_commit, minimum_of_copy
from test.support.checkpoints import DENSE, small_config

CONFIG = published_config("h-small")
MAMBA = 4096 * (2 * 2048 + 256 + 32) + 2048 * 4096
ATTENTION = 4096 * (1024 + 512) + 1024 * 4096
EXPERT, ROUTER, SHARED = 3 * 4096 * 192, 72 * 4096, 3 * 4096 * 384
HEAD = 100352 // 4 * 4096


def test_a_token_of_a_rank():
    """h-small has 36 Mamba layers and 4 attention layers, and each uses 10 experts of 72."""
    least = minimum(CONFIG, 4, torch.bfloat16, batch_size=1, tokens=1, context=1000)
    matrices = 36 * MAMBA + 4 * ATTENTION + 40 * (10 * EXPERT + ROUTER + SHARED) + HEAD
    assert least.weights == pytest.approx(2 * matrices)
    assert least.flops == 2 * matrices + 4 * 4 * 1001 * 8 * 128 + 36 * 6 * 32 * 64 * 128
    assert least.state == 2 * 36 * ((2048 + 256) * 3 * 2 + 32 * 64 * 128 * 4)
    assert least.key_values == 4 * 2 * 2 * 128 * 2 * (1000 + 1)
    assert least.activations == 40 * 3 * 2 * 4096 * 4
    assert least.bytes_accessed == least.weights + least.state + least.key_values + least.activations


def test_a_token_of_a_model_whose_layers_have_one_part():
    """Nemotron 3 Nano has 23 Mamba layers, 6 of attention and 23 with experts, which have no gate."""
    config = published_config("nemotron-3-nano-30b-a3b")
    least = minimum(config, 4, torch.bfloat16, batch_size=1, tokens=1, context=1000)
    mamba = 2688 * (2 * 1024 + 2 * 2 * 128 + 16) + 1024 * 2688  # 16 heads of 64, and 2 groups
    attention = 2688 * (1024 + 2 * 128) + 1024 * 2688
    experts = 2688 * (6 * 2 * 464 + 128 + 2 * 928)
    matrices = 23 * (mamba + experts) + 6 * attention + 131072 // 4 * 2688
    assert least.weights == pytest.approx(2 * matrices)
    assert least.flops == pytest.approx(2 * matrices + 6 * 4 * 1001 * 8 * 128 + 23 * 6 * 16 * 64 * 128)
    assert least.state == 2 * 23 * ((1024 + 512) * 3 * 2 + 16 * 64 * 128 * 4)
    assert least.key_values == 6 * 2 * 128 * 2 * (1000 + 1)
    assert least.activations == 52 * 3 * 2688 * 4


def test_tokens_that_share_weights():
    """Four sequences choose 31.3 distinct experts on average, and a whole prompt chooses all of them."""
    one, four, prompt = (minimum(CONFIG, 4, torch.bfloat16, *step) for step in ((1, 1, 0), (4, 1, 0), (1, 2048, 0)))
    assert (four.weights - one.weights) / (40 * 2 * EXPERT) == pytest.approx(72 * (1 - (62 / 72) ** 4) - 10)
    assert (prompt.weights - one.weights) / (40 * 2 * EXPERT) == pytest.approx(62)
    assert four.flops == 4 * one.flops
    assert four.state == 4 * one.state == 4 * prompt.state


def test_a_token_sees_those_before_it():
    config = small_config(layer_types=("attention",), **DENSE)
    none, whole = (minimum(config, 1, torch.float32, 1, 8, context) for context in (0, 100))
    assert whole.flops - none.flops == 4 * 8 * 100 * config.num_attention_heads * config.head_dim
    assert minimum(config, 2, torch.float32, 1, 8, 0).flops == none.flops / 2
    assert none.state == 0


def test_a_token_of_a_prompt_sees_itself_and_those_before_it():
    """Tokens are counted one by one in both sequences. Nothing is counted twice or for tokens to come."""
    config = small_config(layer_types=("attention",), **DENSE)
    query, key = 64 * 64, 64 * 32  # 4 heads, 2 key heads, of 16
    matrices = 2 * query + 2 * key + 3 * 64 * 80
    for tokens, context in ((1, 0), (2, 0), (7, 0), (7, 30)):
        seen = sum(context + position + 1 for _ in range(2) for position in range(tokens))
        flops = minimum(config, 1, torch.float32, 2, tokens, context).flops
        assert flops == 2 * 2 * tokens * matrices + 2 * 2 * 160 * 64 + 4 * 4 * 16 * seen


def test_a_copy_reads_and_writes_a_slot_once():
    """A rank of four has 36 Mamba layers, and 2 of the 8 key heads in each of the 4 attention layers."""
    least = minimum_of_copy(CONFIG, 4, torch.bfloat16, 1000, state_dtype=torch.float16)
    assert least.state == 2 * 36 * ((2048 + 256) * 3 * 2 + 32 * 64 * 128 * 2)
    assert least.key_values == 2 * 1000 * 4 * 2 * 2 * 128 * 2
    assert least.bytes_accessed == least.state + least.key_values and least.flops == 0


def test_a_verification_and_its_commit():
    """The verification reads states and has all tokens' logits. The commit reads and writes states, no weights."""
    plain, verified = (minimum(CONFIG, 4, torch.bfloat16, 2, 4, 100, verifies=verifies) for verifies in (False, True))
    assert verified.flops - plain.flops == 2 * 2 * 3 * HEAD
    assert 2 * verified.state == plain.state
    commit = minimum_of_commit(CONFIG, 4, torch.bfloat16, 2, 4)
    assert commit.flops == 36 * 2 * (2 + 2 * 4) * 32 * 64 * 128
    assert (commit.state, commit.weights) == (plain.state, 0)
    assert commit.activations == 36 * 2 * 4 * (2048 + 256 + 32) * 2
