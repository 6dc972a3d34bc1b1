"""Single values of a process's /metrics page; None wherever it cannot be had, for a doctor asks more than others do."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_S = 3.0
HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "[::1]", "::", "[::]")

Samples = Mapping[str, list[tuple[dict[str, str], float]]]
"""Labels and values of all samples of a name."""


def scrape(address: str) -> Samples:
    """Empty where nobody answers, or with something else."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return next((found for its, found in samples.get(name, ()) if labels.items() <= its.items()), None)


def seen_from(server: str, address: str) -> str:
    """An `address` that a process beside `server` gave of itself: what it calls "here" is there."""
    host, _, port = address.rpartition(":")
    return f"{server.rpartition(':')[0]}:{port}" if host in HERE else address
