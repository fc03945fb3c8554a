"""Predicted times: the roofline by hand, the gain of speculation, and other models' published figures."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.planning import predicted_latency
from granite4_neuron import UserError
from granite4_neuron.commands.cli import main
from granite4_neuron.config import published_config
from granite4_neuron.config.choices import EXPERTS_DECODE
from granite4_neuron.devices.neuron.sdk import TRAINIUM2, TRAINIUM3
from granite4_neuron.planning import latency
from granite4_neuron.planning import published_latency as published
from granite4_neuron.planning.analysis.hlo_cost import Cost
from granite4_neuron.planning.analysis.roofline import minimum, minimum_of_commit

CONFIG = published_config("h-small")
DENSE = published_config("h-1b")


UNITS = ("HBM", "TensorE", "VectorE", "links")


def work(**changes):
    values = dict(flops=0.0, bytes_accessed=0.0, vector_elements=0.0, link_bytes=0.0, collectives=0, layers=0)
    return latency.Work(**values | changes)


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        (dict(bytes_accessed=725e9), "HBM"),
        (dict(flops=166.75e12), "TensorE"),
        (dict(vector_elements=2 * 256 * 0.96e9), "VectorE"),
        (dict(link_bytes=1.28e12), "links"),
    ],
)
def test_rates(changes, unit):
    """A second's work of one unit of a logical core takes a second, and the busiest unit decides."""
    step = latency.latency(work(**changes))
    assert step.bound == step.predicted == pytest.approx(1.0) and step.limit == unit
    half = {name: value / 2 for name, value in changes.items()}
    other = "flops" if unit == "HBM" else "bytes_accessed"
    step = latency.latency(work(**half, **{other: 725e9 if other == "bytes_accessed" else 166.75e12}))
    assert step.bound == pytest.approx(1.0) and step.limit != unit


def test_a_trainium3():
    """Its rates are those of the documentation, and a prediction is for them; only the losses are the same."""
    whole = dict(bytes_accessed=1.225e12, flops=167.75e12, vector_elements=2 * 256 * 1.2e9, link_bytes=2.56e12)
    assert latency.latency(work(**whole), TRAINIUM3).units == pytest.approx(dict.fromkeys(UNITS, 1.0))
    chips = TRAINIUM2, TRAINIUM3
    of_chips = (latency.predictions(DENSE, 4, torch.bfloat16, 128, 1000, [1], chip=chip) for chip in chips)
    before, after = (lines[1].latency for lines in of_chips)
    assert after.bound == pytest.approx(before.bound * 2.9 / 4.9) and after.losses == before.losses


def test_a_token_of_layers_of_one_part():
    """Such a layer is half of an ordinary one, with one all-reduce. No kernel computes experts without a gate."""
    config = published_config("nemotron-3-nano-30b-a3b")
    step = latency.step_work(config, 4, torch.bfloat16, batch_size=2, tokens=1, context=100)
    assert (step.layers, step.collectives) == (26, 52)
    assert step.vector_elements == 23 * 2 * (2 + 1) * 16 * 64 * 128
    every = latency.step_work(config, 4, torch.bfloat16, 2, 1, 100, experts_decode="all")
    distinct = 128 * (1 - (122 / 128) ** 2)
    assert every.bytes_accessed - step.bytes_accessed == pytest.approx(23 * 2 * 2688 * 464 * 2 * (128 - distinct))
    lines = latency.predictions(config, 4, torch.bfloat16, 128, 1000, [1])
    assert [line.step for line in lines[1:]] == ["token, experts: all", "token, experts: gather (default)"]


def test_losses_add_to_the_bound():
    step = latency.latency(work(bytes_accessed=725e6, layers=40, collectives=80))
    lost = 40 * latency.LAUNCH_SECONDS + 80 * latency.COLLECTIVE_SECONDS
    assert step.predicted == pytest.approx(1e-3 + lost)
    assert step.limit == "launches" and step.bound == pytest.approx(1e-3)
    assert latency.latency(work(collectives=80)).limit == "collectives"
    twice = work(bytes_accessed=725e6, layers=40) + work(bytes_accessed=725e6, flops=1.0, layers=1)
    assert twice == work(bytes_accessed=2 * 725e6, flops=1.0, layers=41)


def test_a_token_of_h_small():
    """One rank of four reads its weights, states, keys and values once, and makes three passes on VectorE."""
    step = latency.step_work(CONFIG, 4, torch.bfloat16, batch_size=2, tokens=1, context=100)
    least = minimum(CONFIG, 4, torch.bfloat16, 2, 1, 100)
    assert (step.flops, step.bytes_accessed, step.layers) == (least.flops, least.bytes_accessed, 40)
    assert step.vector_elements == 36 * 2 * (2 + 1) * 32 * 64 * 128
    assert (step.link_bytes, step.collectives) == (0, 80)  # four ranks are one chip
    alone = latency.step_work(CONFIG, 1, torch.bfloat16, 1, 1, 0)
    assert alone.link_bytes == alone.collectives == 0


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (4, 0), (8, 1), (16, 1.5), (64, 1.875)])
def test_only_data_for_another_chip_uses_a_link(ranks, sent):
    """In a ring of chips each chip sends all but one of its parts twice: to add them up, and to pass on the sums."""
    assert latency.link_bytes(6, 5, 7, ranks, 2) == 6 * 5 * 7 * 2 * sent


def test_a_verification_and_its_commit():
    """The kernel reads a state in the verification. The commit reads, advances and writes it, without collectives."""
    step = latency.step_work(CONFIG, 4, torch.bfloat16, 2, 4, 100, verifies=True)
    least = minimum(CONFIG, 4, torch.bfloat16, 2, 4, 100, verifies=True)
    assert (step.bytes_accessed, step.collectives) == (least.bytes_accessed, 80)
    assert step.vector_elements == 36 * 2 * (128 + 2 * 4 * 4) * 32 * 64
    commit = latency.commit_work(CONFIG, 4, torch.bfloat16, 2, 4)
    assert commit.bytes_accessed == minimum_of_commit(CONFIG, 4, torch.bfloat16, 2, 4).bytes_accessed
    assert commit.vector_elements == 36 * 2 * 2 * 32 * 64 * 128
    assert (commit.collectives, commit.layers) == (0, 18)
    drafted = latency.predictions(CONFIG, 4, torch.bfloat16, 128, 100, [2], drafted=3, acceptance=0.5)[-1]
    assert drafted.latency == latency.latency(step + commit)


def test_prefill_grows_by_chunks_on_the_vector_engine():
    one, two = (latency.step_work(CONFIG, 4, torch.bfloat16, 1, tokens, 0) for tokens in (128, 129))
    assert two.vector_elements == 2 * one.vector_elements == 2 * 36 * 32 * 128 * (128 + 3 * 64)


def test_the_gain_of_speculation():
    assert latency.tokens_per_verification(3, 0.0) == 1
    assert latency.tokens_per_verification(3, 1.0) == 4
    assert latency.tokens_per_verification(2, 0.5) == 1.75
    first, *tokens = latency.predictions(CONFIG, 4, torch.bfloat16, 128, 1000, [1, 4], drafted=3, acceptance=0.8)
    assert first.step == "first token, prompt of 128" and [line.batch_size for line in tokens] == [
        1,
        1,
        1,
        4,
        4,
        4,
        1,
        4,
    ]
    plain, verified = tokens[0], tokens[6]
    assert verified.latency.predicted > plain.latency.predicted
    assert verified.seconds_per_token == verified.latency.predicted / latency.tokens_per_verification(3, 0.8)
    assert verified.tokens_per_second == 1 / verified.seconds_per_token
    assert len(latency.predictions(DENSE, 4, torch.bfloat16, 128, 1000, [1])) == 2
    with pytest.raises(UserError, match="from 0 to 1"):
        latency.predictions(CONFIG, 4, torch.bfloat16, 128, 1000, [1], 3, 1.5)


def test_forms_of_experts():
    """ "all" moves every expert, a gather moves each choice three times, and the kernel moves each expert once."""
    weights = 40 * 3 * 4096 * 192 * 2  # bytes of one expert in all layers, on a rank of four
    moved = {
        form: [latency.step_work(CONFIG, 4, torch.bfloat16, n, 1, 100, experts_decode=form) for n in (1, 4)]
        for form in EXPERTS_DECODE
    }
    kernel, whole, gather = moved.values()
    assert whole[0].bytes_accessed - kernel[0].bytes_accessed == pytest.approx(62 * weights)
    assert gather[0].bytes_accessed - kernel[0].bytes_accessed == pytest.approx(20 * weights)
    distinct = 72 * (1 - (62 / 72) ** 4)
    assert gather[1].bytes_accessed - whole[1].bytes_accessed == pytest.approx((3 * 40 - 72) * weights)
    assert whole[1].bytes_accessed - kernel[1].bytes_accessed == pytest.approx((72 - distinct) * weights)
    assert whole[0].flops - kernel[0].flops == pytest.approx(62 * weights)  # two operations per two-byte weight
    lines = latency.predictions(CONFIG, 4, torch.bfloat16, 128, 1000, [2, 8])
    forms = [line.step.removeprefix("token, experts: ") for line in lines[1:]]
    assert forms == ["kernel", "all", "gather (default)", "kernel", "all (default)", "gather"]


def test_the_fitted_constants_are_those_in_use():
    per_layer, per_step = predicted_latency.fit()
    assert per_layer == pytest.approx(latency.LAUNCH_SECONDS, abs=1.5e-6) and per_step == 0


@pytest.mark.parametrize("figure", published.FIGURES, ids=lambda f: f"{f.name}, {f.tokens}")
def test_no_published_figure_is_below_the_bound(figure):
    assert figure.step().bound * 1000 < figure.milliseconds


DECODE = [*predicted_latency.FITTED, *(figure for figure in published.TOKENS if figure.tp_degree == 64)]


@pytest.mark.parametrize("figure", DECODE, ids=lambda f: f.name)
def test_published_tokens_are_near_the_prediction(figure):
    """The constants are fitted to some of the figures, but not to AWS's."""
    assert 0.6 < figure.ratio < 1.35


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (published.LLAMA_70B, 70.6),
        (published.LLAMA_405B, 405.9),
        (published.QWEN3_32B, 32.8),
        (published.QWEN35_27B, 27),
        (published.QWEN35_35B, 35),
        (published.CODER_NEXT, 80),
        (published.H_SMALL, 32),
    ],
)
def test_models_have_the_parameters_of_their_names(model, billions):
    """All experts are read, as for a long prompt. Embedding and head count too."""
    _, read = model.weights(10**6)
    assert (read + 2 * model.hidden * model.vocabulary) / 1e9 == pytest.approx(billions, rel=0.06)


def test_command(capsys):
    assert main(["plan", "--latency", "--model", "h-small", "--batch-size", "2"]) == 0
    output = capsys.readouterr().out
    first, second = output.splitlines()[:2]
    assert first.startswith(
        "Published, of other ports: a token in 50.3 ms, the first token of a prompt of 128 in 717 ms"
    )
    assert "/pull/69, SDK 2.28, 2026-04-14" in first
    assert second.startswith("Predicted, not measured: a token of one sequence every 18.4 ms") and "drafted" in output
    assert "17 to 74 by the range" in second and "30 ms, 241 to 2,920 by that range" in second
    assert "8.0 to 97 times the prediction to the first token and 0.9 to 4.0 times per token" in output
    assert "spills" not in output
    sizes = ["--prompt", "1800", "--max-context-length", "2048", "--backend", "nxdi"]
    assert main(["plan", "--latency", "--model", "h-small", *sizes]) == 0
    assert "A graph for 2,048 tokens of a prompt: it spills by estimate: 49.5 MiB" in capsys.readouterr().out
    pieces = {"nxdi": [1024, 512, 512], "torch": [1024, 1024]}  # NxD Inference continues prompts by 512 tokens
    for backend, tokens in pieces.items():
        sizes = ["--prompt", "2048", "--context-buckets", "128", "512", "1024", "--backend", backend]
        assert main(["plan", "--latency", "--model", "h-small", *sizes]) == 0
        seconds = latency.latency(latency.prompt_work(CONFIG, 4, torch.bfloat16, tokens)).predicted
        assert f"the first token after {1e3 * seconds:.0f} ms" in capsys.readouterr().out
    assert main(["plan", "--latency"]) == 2
    assert "--latency needs --model" in capsys.readouterr().err
    assert main(["plan", "--latency", "--model", "h-small", "--tp-degree", "8"]) == 2
    assert "has 4 logical cores" in capsys.readouterr().err
    assert main(["plan", "--latency", "--model", "h-small", "--acceptance", "2"]) == 2
    assert "2 is not a number at least 0 and at most 1" in capsys.readouterr().err
    for option in ("--prompt", "--context"):
        assert main(["plan", "--latency", "--model", "h-small", option, "131073"]) == 2
        assert "the model's longest sequence is 131,072 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--prompt", "9"], ["--drafted", "0"], ["--acceptance", "0.5"], ["--count-graphs"]])
def test_options_of_the_latency_need_it(option, capsys):
    assert main(["plan", "--model", "h-small", *option]) == 2
    assert f"{option[0]} belongs to --latency" in capsys.readouterr().err


def test_counted_graphs(monkeypatch):
    """The graphs of a batch size come as prompt, token, verification and commit; the last two share one line."""
    asked = []

    def report(config, dtype, tp_degree, batch_size, buckets, max_length, verified_tokens):
        asked.append((batch_size, buckets, max_length, verified_tokens))
        number = len(buckets) + 3
        return [SimpleNamespace(cost=Cost(bytes_accessed=725e9 * (i + batch_size))) for i in range(number)]

    monkeypatch.setattr(latency.graphs, "report", report)
    lines = latency.predictions(CONFIG, 4, torch.bfloat16, 128, 1000, [1, 4], drafted=3, acceptance=0.5)
    counted = latency.with_counted_graphs(lines, CONFIG, 4, torch.bfloat16, 128, 1000, 3)
    assert asked == [(1, (128,), 1001, 4), (4, (), 1001, 4)]
    uncounted = [line.step for line in counted if line.counted is None]
    kernel, whole, gather = (f"token, experts: {form}" for form in EXPERTS_DECODE)
    assert uncounted == [kernel, whole, kernel, gather]  # the graph has the default form
    seconds = {
        (line.step.split(",")[0] + str(line.step.count("drafted")), line.batch_size): line.counted
        for line in counted
        if line.counted is not None
    }
    assert seconds == pytest.approx(
        {("first token0", 1): 1, ("token0", 1): 2, ("token1", 1): 3 + 4, ("token0", 4): 4, ("token1", 4): 5 + 6}
    )
    in_pieces = latency.with_counted_graphs(lines, CONFIG, 4, torch.bfloat16, 1100, 1000, 3, pieces=(512, 512, 128))
    assert asked[-2:] == [(1, (128, 512), 1153, 4), (4, (), 1153, 4)]
    of_one = [line.counted for line in in_pieces if line.batch_size == 1 and line.counted is not None]
    assert of_one == pytest.approx([1 + 2 * 2, 3, 4 + 5])
    assert latency.counted_bound(Cost(flops=166.75e12 * 2, bytes_accessed=725e9)) == pytest.approx(2)


def test_the_range_has_held():
    """It ends with the published times of its kind that are nearest and farthest. Each has a source and a date."""
    for figures in (published.TOKENS, published.FIRST_TOKENS):
        for config in (CONFIG, DENSE):
            held = published.held(config, figures)
            has_experts = config is CONFIG
            multiples = [
                figure.milliseconds / (1e3 * figure.step().predicted)
                for figure in figures
                if bool(figure.model.experts) == has_experts
            ]
            assert len(multiples) > 4
            assert (held.least, held.most) == pytest.approx((min(multiples), max(multiples)))
    assert all("https://" in each.source.where and "2026-" in each.source.date for each in published.FIGURES)
    names = {figure.name for figure in published.of_model(published_config("nemotron-3-nano-30b-a3b"))}
    assert names == {"nemotron-3-nano-30b-a3b", "nemotron-3-nano-30b-a3b, all experts"}
    assert not published.of_model(DENSE)


def test_report(capsys):
    assert predicted_latency.main() == 0
    assert "predicted / published" in capsys.readouterr().out
