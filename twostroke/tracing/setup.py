"""The recorder of one process, and what it counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from twostroke.config import TracingConfig
from twostroke.tracing.otlp import OtlpExporter
from twostroke.tracing.recorder import Recorder

STAGE_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""From a decision to a long answer."""
STAGES = {
    "router": ("request", "prepare", "answer", "route"),
    "prefill": ("prefill", "queue", "pull"),
    "decode": ("attempt", "queue", "pull", "decode"),
}
"""Spans with counted lengths. Not those of single chunks: steps are."""


def recorder_of(process: str, role: str, config: TracingConfig, registry: CollectorRegistry) -> Recorder:
    """Raises ConfigError where spans cannot be sent as `config` says."""
    seconds = Histogram(
        "twostroke_stage_seconds",
        "Stages of requests: spans of this process, by name.",
        ("role", "stage"),
        registry=registry,
        buckets=STAGE_BUCKETS_S,
    )
    stages = {stage: seconds.labels(role=role, stage=stage) for stage in STAGES[role]}
    dropped = Counter(
        "twostroke_spans_dropped", "Spans that the collector did not take.", ("role",), registry=registry
    ).labels(role=role)

    exporter = None
    if config.otlp_endpoint is not None:
        resource = {"service.name": f"twostroke-{role}", "service.instance.id": process}
        exporter = OtlpExporter(config.otlp_endpoint, resource, dropped.inc)
    return Recorder(process, ratio=config.ratio, exporter=exporter, lengths=stages)
