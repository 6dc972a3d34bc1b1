"""Metrics of answers that have to match a grammar."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

MASK_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
COMPILE_BUCKETS_S = (1e-4, 1e-3, 1e-2, 1e-1, 5e-1, 1.0, 2.0, 5.0)


class GrammarMetrics:
    """What answers cost that have to match a grammar."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"twostroke_grammar_{name}", text, ("role",), registry=registry).labels(role)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"twostroke_grammar_{name}"
            return Histogram(name, text, ("role",), buckets=buckets, registry=registry).labels(role)

        self.compile_seconds = histogram(
            "compile_seconds",
            "Time to compile a grammar, and to replay an answer in it.",
            COMPILE_BUCKETS_S,
        )
        self.mask_seconds = histogram("mask_seconds", "Time to find which tokens may come next.", MASK_BUCKETS_S)
        self.tokens = counter("tokens_total", "Tokens of answers that have a grammar.")
        self.forced_tokens = counter("forced_tokens_total", "Those of them that took no step of their own.")
