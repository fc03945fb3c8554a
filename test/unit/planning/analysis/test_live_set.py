"""The estimate of the data that a prompt's graph keeps in SBUF: by hand, and against published figures."""

import pytest
import torch

from granite4_neuron.config import published_config
from granite4_neuron.devices.graphs.runtime import PREFILL_BUCKETS
from granite4_neuron.devices.neuron.sdk import TRAINIUM2
from granite4_neuron.planning import latency
from granite4_neuron.planning import published_latency as published
from granite4_neuron.planning.analysis.live_set import live_set, products, sbuf_bytes
from granite4_neuron.planning.analysis.roofline import minimum
from test.support.checkpoints import nemotron_config

CONFIG = published_config("h-small")


@pytest.mark.parametrize(
    ("model", "tokens", "read_again"),
    [
        (published.QWEN35_27B, 2048, 108.7e9),
        (published.QWEN35_27B, 1024, 0),
        (published.QWEN35_27B, 512, 0),
        (published.QWEN35_35B, 2048, 0),
    ],
)
def test_the_published_graphs(model, tokens, read_again):
    """The estimate says for each graph of `published.PLUGIN` whether it spills, and nearly how much it reads again.

    A profile shows the bytes that the first graph reads again. The next two follow from their times, which are in
    proportion to their tokens. The source says that spilled tiles do not limit the last one.
    """
    estimate = model.live_set(4, tokens)
    assert estimate.fits == (read_again == 0)
    assert estimate.read == pytest.approx(read_again, rel=0.2)


def test_the_published_graph_by_hand():
    """With Qwen3.5-27B 2,048 tokens are live before and after the MLP's first product, which has 17,408 / 4 gates."""
    estimate = published.QWEN35_27B.live_set(4, 2048)
    assert estimate.live == 2048 * 2 * (2 * 5120 + 2 * 17408 // 4) == 74 * 2**20
    assert estimate.largest == "MLP's first"
    first = 64 * 34 * 5120 + 64 * 20 * 4352  # 256 columns at a time, of 8,704 and of 5,120
    mixers = 48 * 16 * 5120 + 16 * 14 * 5120  # of 4,096 and of 3,584
    assert estimate.read == 2048 * 2 * (first + mixers)


def test_h_small_by_hand():
    """The residual stream, the operand and a rank's z, x, B, C, dt are live; or one expert and the sum over experts."""
    mamba, experts = 2 * 2048 + 2 * 128 + 32, 4096 + 2 * 192
    estimate = live_set(CONFIG, 4, torch.bfloat16, 512)
    assert estimate.live == 512 * 2 * (2 * 4096 + max(mamba, experts)) and estimate.largest == "experts' first"
    assert estimate.fits and estimate.moved == 0 and estimate.spill() is None
    estimate = live_set(CONFIG, 4, torch.bfloat16, 2048)
    assert estimate.live == 4 * live_set(CONFIG, 4, torch.bfloat16, 512).live > sbuf_bytes(TRAINIUM2) == 2 * 24 * 2**20
    columns = 36 * -(-mamba // 256) + 40 * -(-10 * 2 * 192 // 256)
    assert estimate.read == 2048 * 2 * 4096 * columns
    assert estimate.written == 2048 * 2 * 4096 * (36 + 40)
    assert (
        "it spills by estimate: 49.5 MiB are live during experts' first product, and SBUF has 48.0;" in estimate.spill()
    )
    assert live_set(CONFIG, 4, torch.float32, 512).live == 2 * live_set(CONFIG, 4, torch.bfloat16, 512).live


def test_layers_of_one_part_by_hand():
    """Experts and MLP have no gate. Each kind of layer has its own MLP, and only those with experts have these."""
    config = published_config("nemotron-3-nano-30b-a3b")
    estimate = live_set(config, 4, torch.bfloat16, 512)
    assert (estimate.live, estimate.largest) == (512 * 2 * (3 * 2688 + 464), "experts' first")
    small = nemotron_config()  # 2 Mamba layers, 1 of attention, 1 MLP of 72, 2 with experts of 48 and an MLP of 80
    found = {(each.name, each.operand, each.result, each.columns, each.layers) for each in products(small, 2)}
    assert {each for each in found if each[0][0] in "eM" and "Mamba" not in each[0]} == {
        ("MLP's first", 64, 36, 36, 1),
        ("MLP's last", 36, 64, 64, 1),
        ("MLP's first", 64, 40, 40, 2),
        ("MLP's last", 40, 64, 64, 2),
        ("experts' first", 64, 24 + 64, 3 * 24, 2),
    }
    latent = {tuple(vars(each).values()) for each in products(nemotron_config(moe_latent_size=40), 2)}
    assert {each for each in latent if each[0].startswith(("exp", "lat"))} == {
        ("latent space's first", 64, 40, 40, 2),
        ("experts' first", 40, 24 + 40, 3 * 24, 2),
        ("latent space's last", 40, 64, 64, 2),
    }


@pytest.mark.parametrize("name", ["h-small", "h-tiny", "h-micro", "micro"])
@pytest.mark.parametrize("tp_degree", [1, 4])
def test_the_default_graphs_of_prompts_fit(name, tp_degree):
    config = published_config(name)
    assert live_set(config, tp_degree, torch.bfloat16, PREFILL_BUCKETS[-1]).fits


def test_the_prediction_counts_the_spill_as_traffic():
    fitting, spilling = (latency.step_work(CONFIG, 4, torch.bfloat16, 1, tokens, 0) for tokens in (1024, 2048))
    assert fitting.bytes_accessed == minimum(CONFIG, 4, torch.bfloat16, 1, 1024, 0).bytes_accessed
    more = spilling.bytes_accessed - minimum(CONFIG, 4, torch.bfloat16, 1, 2048, 0).bytes_accessed
    assert more == live_set(CONFIG, 4, torch.bfloat16, 2048).moved > 20e9


def test_a_prompt_is_the_sum_of_its_pieces():
    whole = latency.prompt_work(CONFIG, 4, torch.bfloat16, (512, 128))
    first = latency.step_work(CONFIG, 4, torch.bfloat16, 1, 512, 0)
    assert whole == first + latency.step_work(CONFIG, 4, torch.bfloat16, 1, 128, 512)
    lines = latency.predictions(CONFIG, 4, torch.bfloat16, 600, 1000, [1], pieces=(512, 128))
    assert lines[0].latency == latency.latency(whole)
