"""The server's metrics for Prometheus: those of vLLM that it has, by vLLM's names, labels and buckets, and its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from granite4_neuron.serving.engine_loop import EngineFacts
from granite4_neuron.serving.text_times import TextTimes
from granite4_neuron.serving.work_queue import WorkQueues

_OWN, _VLLM = "granite4_neuron", "vllm:"
_LABELS = ("model_name", "engine")
_ENGINE = "0"  # there is one
_FOR_OPERATORS = {"/health", "/metrics", "/load", "/ping", "/version"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"}
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

# vLLM's buckets, in seconds, tokens and texts.
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
_BETWEEN_TOKENS = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)


class Metrics:
    """A separate registry.

    Args:
        facts: of the engine.
        num_sequences, max_length: of the engine.
        queues: those before the engine.
        model: the name that clients use, a label of vLLM's metrics.
    """

    def __init__(
        self,
        facts: EngineFacts,
        num_sequences: int,
        max_length: int,
        queues: WorkQueues,
        model: str,
    ):
        self._engine = _EngineCollector(facts, num_sequences, (model, _ENGINE))
        self._registry = CollectorRegistry()
        self._labels = (model, _ENGINE)
        self._registry.register(self._engine)
        self._registry.register(_WaitingCollector(queues))
        self._answers = Counter(
            f"{_OWN}_http_requests", "Requests answered.", ("path", "status"), registry=self._registry
        )
        self._answers_by_kind = Counter(
            "http_requests",
            "Requests answered, without those of operators.",
            ("handler", "method", "status"),
            registry=self._registry,
        )
        self._ends = Counter(
            f"{_VLLM}request_success",
            "Texts that have ended.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in FINISH_REASONS:
            self._ends.labels(*self._labels, reason)
        self._preparation_time = Histogram(
            f"{_OWN}_request_preparation_time_seconds",
            "From a request's arrival until the engine gets it: parsing, tokenizing and its grammar.",
            buckets=_FIRST_TOKEN,
            registry=self._registry,
        )
        tokens = _one_two_five(max_length)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt that the prefix cache did not have.", tokens
        )
        self._generated_tokens = self._histogram("request_generation_tokens", "New tokens of a text.", tokens)
        self._most_tokens = self._histogram(
            "request_max_num_generation_tokens", "New tokens of the longest text of a prompt.", tokens
        )
        self._asked_tokens = self._histogram(
            "request_params_max_tokens", "Most new tokens of a text, as requested.", tokens
        )
        self._choices = self._histogram("request_params_n", "Texts for a prompt.", _CHOICES)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens of a step of the engine.", _STEP)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between two steps that give tokens of a text.", _BETWEEN_TOKENS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a text's tokens after the first.", _BETWEEN_TOKENS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of a text.", _LATENCY
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From the arrival of a text at the engine to its start.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the start of a text to its first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token of a text to its last.", _LATENCY
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the start of a text to its end.", _LATENCY
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, path: str, method: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()
        if path not in _FOR_OPERATORS:
            method = method if method in _METHODS else "other"
            self._answers_by_kind.labels(path, method, f"{status // 100}xx").inc()

    def prepared(self, seconds: float) -> None:
        """Record how long a request was prepared."""
        self._preparation_time.observe(seconds)

    def stepped(self, tokens: int | None, facts: EngineFacts) -> None:
        """Record the engine's facts, and a step with its tokens of prompts and texts, if there was one."""
        self._engine.facts = facts
        if tokens is not None:
            self._step_tokens.observe(tokens)

    def first_token(self, times: TextTimes) -> None:
        """Record a text's first token."""
        self._first_token.observe(times.first - times.arrived)

    def next_tokens(self, seconds: float) -> None:
        """Record further tokens of a text, so long after the ones before."""
        self._between_tokens.observe(seconds)

    def ended(self, reason: str, times: TextTimes | None) -> None:
        """Record the end of a text; without times if it had no token, or did not come to its end."""
        self._ends.labels(*self._labels, reason).inc()
        if times is None:
            return
        self._prompt_tokens.observe(times.prompt_tokens)
        self._computed_tokens.observe(times.prompt_tokens - times.cached_tokens)
        self._generated_tokens.observe(times.tokens)
        self._asked_tokens.observe(times.max_tokens)
        self._latency.observe(times.latest - times.arrived)
        self._queue.observe(times.started - times.queued)
        self._prefill.observe(times.first - times.started)
        self._decode.observe(times.latest - times.first)
        self._inference.observe(times.latest - times.started)
        self._per_token.observe((times.latest - times.first) / max(1, times.tokens - 1))

    def answered_prompt(self, texts: Sequence[int]) -> None:
        """Record that all texts of a prompt have ended, with so many tokens each."""
        self._choices.observe(len(texts))
        self._most_tokens.observe(max(texts))

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"{_VLLM}{name}", what, _LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self._labels)


class _EngineCollector(Collector):
    """Tells the latest counts of engine and prefix cache at each scrape."""

    def __init__(self, facts: EngineFacts, num_sequences: int, labels: Sequence[str]):
        self.facts = facts
        self._num_sequences = num_sequences
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        facts, stats, kept = self.facts, self.facts.stats, self.facts.cache_stats
        yield self._gauge("num_requests_running", "Texts being generated.", facts.num_running)
        yield self._gauge("num_requests_waiting", "Texts waiting for a slot.", facts.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of slots in use.", facts.num_running / self._num_sequences)
        yield self._counter(
            "prompt_tokens", "Prompt tokens, run or from the prefix cache.", stats.prompt_tokens + stats.cached_tokens
        )
        yield self._counter("prompt_tokens_cached", "Prompt tokens from the prefix cache.", stats.cached_tokens)
        by_source = CounterMetricFamily(
            f"{_VLLM}prompt_tokens_by_source", "Prompt tokens by source.", labels=(*_LABELS, "source")
        )
        by_source.add_metric((*self._labels, "local_compute"), stats.prompt_tokens)
        by_source.add_metric((*self._labels, "local_cache_hit"), stats.cached_tokens)
        yield by_source
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("num_preemptions", "There are none.", 0)
        yield self._counter("spec_decode_num_drafts", "Steps of a text with drafts.", stats.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted_tokens)
        if kept is not None:
            yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", kept.query_tokens)
            yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", kept.hit_tokens)
            yield _own_counter("prefix_cache_evictions", "Snapshots evicted from the prefix cache.", kept.evictions)
            yield _own_gauge("prefix_cache_snapshots", "Snapshots in the prefix cache.", kept.snapshots)
            yield _own_gauge(
                "prefix_cache_snapshots_in_use", "Running texts that started from a snapshot.", kept.in_use
            )
            yield _own_gauge("prefix_cache_bytes", "Memory of the prefix cache.", kept.num_bytes)
        if kept is not None and facts.folder_bytes is not None:
            yield _own_counter(
                "prefix_cache_dir_hit_tokens", "Tokens found that only files had.", kept.folder_hit_tokens
            )
            yield _own_gauge(
                "prefix_cache_dir_bytes", "Bytes of files in the folder of the prefix cache.", facts.folder_bytes
            )

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{_VLLM}{name}", what, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{_VLLM}{name}", what, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


class _WaitingCollector(Collector):
    """Reads at each scrape how many requests the engine does not have yet."""

    def __init__(self, queues: WorkQueues):
        self._queues = queues

    def collect(self) -> Iterator[Metric]:
        tokenizing = self._queues.prompts.num_requests + self._queues.tokenize.num_requests
        yield _own_gauge("num_requests_waiting_for_tokenizing", "Requests being parsed and tokenized.", tokenizing)
        grammars = self._queues.grammars.num_requests
        yield _own_gauge(
            "num_requests_waiting_for_grammar", "Requests whose grammar waits or is being compiled.", grammars
        )


def _own_gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_OWN}_{name}", what, value)


def _own_counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"{_OWN}_{name}", what, value)


def _one_two_five(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20 and so on, up to `most`."""
    numbers = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return [number for number in numbers if number <= most]
