"""What the server tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from granite4_neuron.engine import Engine, PrefixCache

_PREFIX = "granite4_neuron"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


class Metrics:
    """A registry of its own, with the names of vLLM's metrics after the prefix where vLLM has them."""

    def __init__(self, engine: Engine, cache: PrefixCache | None):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, cache))
        self._answers = Counter(
            f"{_PREFIX}_http_requests", "Requests that were answered.", ("path", "status"), registry=self._registry
        )
        self._first_token = self._histogram("time_to_first_token", "From a request's arrival to its first token.")
        self._between_tokens = self._histogram("inter_token_latency", "Between two steps that bring tokens of a text.")

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, path: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()

    def observe(self, started: float, last_times: dict[int, float], sequences: Sequence[int], now: float) -> None:
        """Tokens have come.

        Args:
            started: when the request came, in seconds.
            last_times: when each sequence's latest tokens came, which is brought up to date.
            sequences: the sequence of each token.
            now: in seconds.
        """
        for sequence in set(sequences):
            if sequence in last_times:
                self._between_tokens.observe(now - last_times[sequence])
            else:
                self._first_token.observe(now - started)
            last_times[sequence] = now

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}_seconds", what, buckets=_SECONDS, registry=self._registry)


class _EngineCollector(Collector):
    """Reads what engine and prefix cache count by themselves, whenever somebody asks."""

    def __init__(self, engine: Engine, cache: PrefixCache | None):
        self._engine = engine
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield _gauge("num_requests_running", "Texts that are being generated.", self._engine.num_running)
        yield _gauge("num_requests_waiting", "Texts that wait for a slot.", self._engine.num_waiting)
        yield _counter("prompt_tokens", "Tokens of prompts that were run.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens that were generated.", stats.generated_tokens)
        yield _counter("spec_decode_num_draft_tokens", "Tokens that were drafted.", stats.drafted_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens that held.", stats.accepted_tokens)
        if self._cache is not None:
            kept = self._cache.stats
            yield _counter("prefix_cache_queries", "Prompts that the prefix cache was asked for.", kept.queries)
            yield _counter("prefix_cache_hit_tokens", "Tokens of prompts that it had.", kept.hit_tokens)
            yield _counter("prefix_cache_evictions", "Snapshots that made room for others.", kept.evictions)
            yield _gauge("prefix_cache_snapshots", "Snapshots that it holds.", kept.snapshots)
            yield _gauge("prefix_cache_snapshots_in_use", "Running texts that go on from one.", kept.in_use)
            yield _gauge("prefix_cache_bytes", "Memory of all it holds.", kept.num_bytes)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", what, value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", what, value)
