"""The server's metrics: by vLLM's names, so that dashboards made for vLLM show them, and with the right numbers."""
# ruff: noqa: E402 (importorskip comes first)

import pytest
import torch

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from prometheus_client.parser import text_string_to_metric_families

from granite4_neuron import load
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from test.support.serving import MODEL, serving

LENGTH = 512
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
BETWEEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500]  # the longest text has 512
# Of vLLM 0.32: types, labels beside model_name and engine, and buckets of histograms.
VLLMS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "prompt_tokens_by_source": ("counter", "source"),
    "generation_tokens": "counter",
    "request_success": ("counter", "finished_reason"),
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": [1, 2, 5, 10, 20],
    "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
}


@pytest.fixture(scope="module")
def server():
    with serving(*load(dtype=torch.float32), max_length=LENGTH, drafter=NgramDrafter()) as server:
        yield server


def families(server):
    return list(text_string_to_metric_families(httpx.get(f"{server.address}/metrics").text))


def values(server):
    """Return all numbers by name and the labels beside the model and the engine."""
    found = {}
    for sample in (sample for family in families(server) for sample in family.samples):
        labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine", "le")}
        if "le" not in sample.labels:
            found[" ".join([sample.name.removeprefix("vllm:"), *labels.values()])] = sample.value
    return found


def post(server, stream=False, **body):
    with httpx.stream(
        "POST", f"{server.address}/v1/completions", json={**body, "stream": stream}, timeout=60
    ) as answer:
        return answer.read() if not stream else next(answer.iter_lines())


def test_names_types_labels_and_buckets_are_vllms(server):
    post(server, prompt="x", max_tokens=2)
    found = {
        family.name.removeprefix("vllm:"): family for family in families(server) if family.name.startswith("vllm:")
    }
    assert found.keys() - VLLMS.keys() <= {f"{name}_created" for name in VLLMS}, "a name that vLLM does not have"
    for name, rule in VLLMS.items():
        kind, *more = ("histogram",) if isinstance(rule, list) else (rule,) if isinstance(rule, str) else rule
        family = found[name]
        assert family.type == kind, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {"model_name", "engine", *more}
            assert sample.labels["model_name"] == MODEL and sample.labels["engine"] == "0"
        if isinstance(rule, list):
            buckets = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
            assert buckets == [*rule, float("inf")], name


def test_numbers_are_right(server):
    before = values(server)
    body = dict(prompt=[[5, 6, 7, 8] * 5, [9] * 30], max_tokens=8, ignore_eos=True)
    post(server, **body, n=2)
    post(server, prompt=[[5, 6, 7, 8] * 5], max_tokens=1)
    assert httpx.get(f"{server.address}/v1/nothing").status_code == 404
    more = {name: value - before.get(name, 0) for name, value in values(server).items()}
    lengths = 2 * 20 + 2 * 30 + 20
    expected = {
        "request_success_total length": 5,
        "request_success_total stop": 0,
        "request_prompt_tokens_sum": lengths,
        "request_prompt_tokens_count": 5,
        "request_generation_tokens_sum": 4 * 8 + 1,
        "generation_tokens_total": 4 * 8 + 1,
        "prompt_tokens_total": lengths,
        "prefix_cache_queries_total": lengths,
        "request_params_n_sum": 2 + 2 + 1,
        "request_params_n_count": 3,
        "request_max_num_generation_tokens_sum": 8 + 8 + 1,
        "request_params_max_tokens_sum": 4 * 8 + 1,
        "time_to_first_token_seconds_count": 5,
        "e2e_request_latency_seconds_count": 5,
        "iteration_tokens_total_sum": lengths + 33 - more["prompt_tokens_cached_total"],
        "granite4_neuron_request_preparation_time_seconds_count": 2,
        "http_requests_total /v1/completions POST 2xx": 2,
        "http_requests_total other GET 4xx": 1,
    }
    assert {name: more[name] for name in expected} == expected
    assert more["prompt_tokens_cached_total"] == more["prefix_cache_hits_total"] >= 20 + 20 + 30
    assert more["request_prefill_kv_computed_tokens_sum"] == lengths - more["prompt_tokens_cached_total"]
    assert more["prompt_tokens_by_source_total local_compute"] == lengths - more["prompt_tokens_cached_total"]
    assert more["spec_decode_num_accepted_tokens_total"] <= more["spec_decode_num_draft_tokens_total"]
    phases = [more[f"request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode")]
    assert min(phases) >= 0 and sum(phases) <= more["e2e_request_latency_seconds_sum"]
    assert sum(phases[1:]) == pytest.approx(more["request_inference_time_seconds_sum"])


def test_the_time_to_the_first_token_is_the_sum_of_its_parts(server):
    before = values(server)
    post(server, prompt=[7, 8, 9] * 10, max_tokens=3)
    parts = ["request_queue_time", "request_prefill_time", "granite4_neuron_request_preparation_time"]
    first, *parts = (f"{name}_seconds_sum" for name in ("time_to_first_token", *parts))
    now = values(server)
    assert now[first] - before[first] == pytest.approx(sum(now[name] - before[name] for name in parts))


def test_abandoned_texts_are_counted(server):
    before = values(server)
    post(server, stream=True, prompt="An assignment", max_tokens=400, ignore_eos=True, n=2)
    while (now := values(server))["num_requests_running"]:
        pass
    ended = {name: now[name] - before[name] for name in now if name.startswith("request_success_total")}
    assert ended["request_success_total abort"] == 2 and sum(ended.values()) == 2
