"""The figures at /metrics, under the names that vLLM gives them, so that dashboards and routers find them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as Total
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The counters and histograms of a server, and the gauges of its batch."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", help, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model)

        self.first_token = histogram("time_to_first_token_seconds", "Time to the first token.", _LONG)
        self.between_tokens = histogram("inter_token_latency_seconds", "Time between pieces of text.", _SHORT)
        self.token = histogram("time_per_output_token_seconds", "Mean time of a token after the first.", _SHORT)
        self.whole = histogram("e2e_request_latency_seconds", "Time of a whole request.", _LONG)
        count = partial(Counter, registry=self._registry)
        reason, answer = ["model_name", "finished_reason"], ["endpoint", "status"]
        self._finished = count("vllm:request_success", "Answers by why they ended.", reason)
        self._answered = count("lce:http_requests", "Answered requests.", answer)

    def ended(self, reason: str) -> None:
        """Count an answer that ended."""
        self._finished.labels(self._model, reason).inc()

    def answered(self, endpoint: str, status: int) -> None:
        """Count a request that was answered."""
        self._answered.labels(endpoint, str(status)).inc()

    def watch(self, batch: Any) -> None:
        """Show the gauges of a batch in all later figures."""
        self._registry.register(_Gauges(batch, self._model))

    def text(self) -> bytes:
        """Return all figures in Prometheus' text form."""
        return bytes(generate_latest(self._registry))


class _Gauges(Collector):
    """The gauges of a batch, read when they are asked for."""

    _FIGURES = (
        (Gauge, "vllm:num_requests_running", "running", "Requests that are read or answered now."),
        (Gauge, "vllm:num_requests_waiting", "waiting", "Requests in the queue."),
        (Gauge, "vllm:kv_cache_usage_perc", "kv_usage", "The used share of the memory for keys and values; 1 is all."),
        (Total, "vllm:prompt_tokens", "prompt_tokens", "Tokens of prompts, cached ones included."),
        (Total, "vllm:generation_tokens", "decode_tokens", "Generated tokens."),
        (Total, "vllm:prefix_cache_queries", "prompt_tokens", "Tokens of prompts that were looked up in the cache."),
        (Total, "vllm:prefix_cache_hits", "cached_tokens", "Tokens of prompts that were found in the cache."),
        (Gauge, "lce:contexts", "contexts", "Contexts that are kept, in memory or as files."),
        (Gauge, "lce:kept_bytes", "kept_bytes", "The memory that kept contexts take."),
        (Gauge, "lce:kept_bytes_limit", "most_kept_bytes", "The memory that kept contexts may take."),
    )

    def __init__(self, batch: Any, model: str) -> None:
        self._batch, self._model = batch, model

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges and the counters of tokens."""
        found = self._batch.gauges()
        for kind, name, key, help in self._FIGURES:
            labels = {"model_name": self._model} if name.startswith("vllm:") else {}
            family = kind(name, help, labels=[*labels])
            family.add_metric([*labels.values()], float(found.get(key, 0)))
            yield family
