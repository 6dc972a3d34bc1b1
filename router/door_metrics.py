"""What a doorman counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

REASONS = ("missing", "malformed", "wrong", "revoked", "expired", "requests", "tokens", "concurrency")


class DoorMetrics:
    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        labels = {"role": role}
        self.keys = Gauge("twostroke_api_keys", "API keys in the file.", labels, registry=registry).labels(**labels)
        self.stale = Gauge(
            "twostroke_api_keys_stale",
            "1: the file of API keys cannot be used; those before stay in force.",
            labels,
            registry=registry,
        ).labels(**labels)
        refusals = Counter(
            "twostroke_api_key_refusals", "Calls refused for their API key.", (*labels, "reason"), registry=registry
        )
        self._refusals = {reason: refusals.labels(reason=reason, **labels) for reason in REASONS}

    def count_refusal(self, reason: str) -> None:
        self._refusals[reason].inc()
