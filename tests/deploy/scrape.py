"""What a real router, prefill worker and decode worker export after some requests; `--write` notes the series' names.

`python -m tests.deploy.scrape --write` after a metric was added or renamed: queries of rules, dashboards, triggers are
held against tests/deploy/metric_names.txt, and a test holds that against this.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from twostroke.config import CacheConfig, ModelConfig

NAMES = Path(__file__).with_name("metric_names.txt")
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
PACED = ModelConfig(model="paced:step_ms=1,max_model_len=2048", served_model_name="tiny")


@functools.cache
def scraped() -> list[list[Metric]]:
    """Families by process, the router's first."""
    return [list(text_string_to_metric_families(text)) for text, _ in exposed()]


@functools.cache
def exposed() -> list[tuple[str, str]]:
    """What each process says as Prometheus' text, and as OpenMetrics. One cluster for tests that are not coroutines."""
    return asyncio.run(_exposed())


def series_of(processes: Iterable[Iterable[Metric]]) -> set[str]:
    """What queries can select, as `name{label,label}`; only `name` where no series has been begun yet."""
    labels: dict[str, set[str]] = {}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}
    for families in processes:
        for family in families:
            for suffix in suffixes.get(family.type, ("",)):
                labels.setdefault(family.name + suffix, set())
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    return {f"{name}{{{','.join(sorted(found))}}}" if found else name for name, found in labels.items()}


def noted() -> set[str]:
    return set(NAMES.read_text().split())


async def _exposed() -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheConfig(
            kv_cache_memory_bytes=64 << 20, host_cache_bytes=1 << 20, disk_cache_bytes=1 << 20, disk_cache_dir=folder
        )
        async with running_cluster(prefill=1, decode=1, model=PACED, cache=cache) as cluster:
            client = Client(cluster.grpc)
            assert len(await client.tokens(range(100), max_tokens=5)) == 5
            await client.close()
            return await asyncio.to_thread(scrapes, cluster)


def scrapes(cluster: ProcessCluster) -> list[tuple[str, str]]:
    addresses = [cluster.http, *(f"http://{worker.info['metrics_address']}" for worker in cluster.workers.values())]
    return [(_scrape(address, "*/*"), _scrape(address, OPENMETRICS)) for address in addresses]


def _scrape(address: str, accept: str) -> str:
    request = urllib.request.Request(f"{address}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        told: str = answer.read().decode()
        return told


if __name__ == "__main__":
    names = series_of(scraped())
    if "--write" in sys.argv:
        NAMES.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(*sorted(names), sep="\n")
