"""What a doctor says of speculation, from the metrics page that a decode worker has."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decode_worker.speculations import SpeculationMetrics
from tools.doctor.facts import Samples
from tools.doctor.speculation import SpeculationFacts, speculation_in
from twostroke.speculation.speculation import Outcome


def samples_of(registry: CollectorRegistry) -> Samples:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def test_drafters_are_read_from_a_workers_own_metrics() -> None:
    registry = CollectorRegistry()
    metrics = SpeculationMetrics(registry, "decode")
    metrics.ran("lookup", Outcome(run=20, kept=9, saved_s=1.5, spent_s=0.25))
    metrics.ran("lookup", Outcome(run=3, kept=0, saved_s=0.0, spent_s=0.25))
    metrics.ran("model", Outcome(run=4, kept=1, saved_s=0.5, spent_s=0.25))
    metrics.ran("model", Outcome(draft_s=1.0))
    metrics.ran("suffix", Outcome())
    facts = speculation_in(samples_of(registry))
    assert facts.lines("decode-0") == [
        "decode-0: lookup drafted 23 tokens, 9 kept; saved 1.50 s, spent 0.50 s: worth it (+1.00 s)",
        "decode-0: model drafted 4 tokens, 1 kept; saved 0.50 s, spent 1.25 s: not worth it (-0.75 s)",
    ]


def test_a_worker_that_drafted_nothing_says_why_where_that_is_known() -> None:
    assert speculation_in({}).lines("decode-1") == ["decode-1: speculation has drafted nothing"]
    (line,) = speculation_in({"twostroke_deterministic": [({}, 0.0)]}).lines("decode-1")
    assert "--deterministic" in line
    assert speculation_in({"twostroke_deterministic": [({}, 1.0)]}) == SpeculationFacts()
