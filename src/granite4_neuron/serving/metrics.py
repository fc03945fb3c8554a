"""The server's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from granite4_neuron.engine import Engine, PrefixCache, SlotPrefixCache
from granite4_neuron.serving.work_queue import Preparation

_PREFIX = "granite4_neuron"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


class Metrics:
    """A separate registry. After the prefix, metrics have vLLM's names where vLLM has them."""

    def __init__(self, engine: Engine, cache: PrefixCache | SlotPrefixCache | None, preparation: Preparation):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, cache))
        self._registry.register(_PreparationCollector(preparation))
        self._answers = Counter(
            f"{_PREFIX}_http_requests", "Requests answered.", ("path", "status"), registry=self._registry
        )
        self._first_token = self._histogram("time_to_first_token", "From a request's arrival to its first token.")
        self._between_tokens = self._histogram("inter_token_latency", "Between two steps that give tokens of a text.")

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, path: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()

    def observe(self, started: float, last_times: dict[int, float], sequences: Sequence[int], now: float) -> None:
        """Record the times of new tokens.

        Args:
            started: when the request arrived, in seconds.
            last_times: when each sequence's latest tokens came, in seconds; updated.
            sequences: the sequence of each new token.
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
    """Reads the counts of engine and prefix cache at each scrape."""

    def __init__(self, engine: Engine, cache: PrefixCache | SlotPrefixCache | None):
        self._engine = engine
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield _gauge("num_requests_running", "Texts being generated.", self._engine.num_running)
        yield _gauge("num_requests_waiting", "Texts waiting for a slot.", self._engine.num_waiting)
        yield _counter("prompt_tokens", "Prompt tokens run.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield _counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted_tokens)
        if self._cache is not None:
            kept = self._cache.stats
            yield _counter("prefix_cache_queries", "Prompts looked up in the prefix cache.", kept.queries)
            yield _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", kept.hit_tokens)
            yield _counter("prefix_cache_evictions", "Snapshots evicted from the prefix cache.", kept.evictions)
            yield _gauge("prefix_cache_snapshots", "Snapshots in the prefix cache.", kept.snapshots)
            yield _gauge("prefix_cache_snapshots_in_use", "Running texts that started from a snapshot.", kept.in_use)
            yield _gauge("prefix_cache_bytes", "Memory of the prefix cache.", kept.num_bytes)
        if isinstance(self._cache, PrefixCache) and self._cache.folder_bytes is not None:
            hits = self._cache.stats.folder_hit_tokens
            yield _counter("prefix_cache_dir_hit_tokens", "Of the tokens found, those that only files had.", hits)
            yield _gauge("prefix_cache_dir_bytes", "Files in the folder of the prefix cache.", self._cache.folder_bytes)


class _PreparationCollector(Collector):
    """Reads at each scrape how many requests the engine does not have yet."""

    def __init__(self, preparation: Preparation):
        self._preparation = preparation

    def collect(self) -> Iterator[Metric]:
        tokenizing = self._preparation.prompts.num_requests + self._preparation.tokenize.num_requests
        yield _gauge("num_requests_waiting_for_tokenizing", "Requests being parsed and tokenized.", tokenizing)
        grammars = self._preparation.grammars.num_requests
        yield _gauge("num_requests_waiting_for_grammar", "Requests whose grammar waits or is being compiled.", grammars)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", what, value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", what, value)
