"""What docs/operations.md says of metrics is what a scrape of a live router and live workers shows."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from twostroke.config import ModelConfig

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
PACED = ModelConfig(model="paced:step_ms=1,max_model_len=2048", served_model_name="tiny")
OTHER_UNITS = re.compile(r"_(ms|millis\w*|us|minutes|kb|mb|gb|kib|mib|gib|percent)(_|$)")


async def test_every_metric_that_the_documentation_names_is_scraped_with_its_labels() -> None:
    documented = re.findall(r"`(twostroke_\w+)(\{[^}]*\})?`", OPERATIONS.read_text())
    assert len(documented) > 10
    async with running_cluster(prefill=1, decode=1, model=PACED) as cluster:
        await answer_something(cluster)
        families = {name: family for scrape in scrapes(cluster) for name, family in named(scrape).items()}
    for name, labels in documented:
        assert name in families, f"{name} is documented, but nobody exports it"
        for label, values in re.findall(r'(\w+)(?:="([^"]*)")?', labels):
            seen = {sample.labels.get(label) for sample in families[name].samples}
            assert not values or seen <= set(values.split("|")), f"{name}: {label} is {seen}"


async def test_all_metrics_are_ours_in_base_units_and_say_whose_they_are() -> None:
    async with running_cluster(prefill=1, decode=1, model=PACED) as cluster:
        await answer_something(cluster)
        families = [family for scrape in scrapes(cluster) for family in scrape]
    assert len(families) > 30
    for family in families:
        assert family.name.startswith("twostroke_")
        assert not OTHER_UNITS.search(family.name), family.name
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_bytes", "_tokens", "_ratio")), (
            family.name
        )
        for sample in family.samples:
            assert sample.labels.get("role") in ("router", "prefill", "decode"), sample


async def answer_something(cluster: ProcessCluster) -> None:
    client = Client(cluster.grpc)
    assert len(await client.tokens(range(100), max_tokens=5)) == 5
    await client.close()


def scrapes(cluster: ProcessCluster) -> list[list[Metric]]:
    """Of the router and of every worker."""
    addresses = [cluster.http, *(f"http://{worker.info['metrics_address']}" for worker in cluster.workers.values())]
    return [list(scrape(f"{address}/metrics")) for address in addresses]


def scrape(url: str) -> Iterable[Metric]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return text_string_to_metric_families(answer.read().decode())


def named(families: Iterable[Metric]) -> dict[str, Metric]:
    """By the names that people query: a histogram by its own, a counter with its suffix."""
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


async def test_usage_of_several_choices_counts_the_prompt_and_its_reuse_once() -> None:
    async with running_cluster(prefill=1, decode=1, model=PACED) as cluster:
        client = Client(cluster.grpc)
        for cached_tokens in (0, 96):
            last = [response async for response in client.stream(range(100), max_tokens=5, n=3)][-1]
            usage = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens)
            assert usage == (100, 15, cached_tokens)
        await client.close()
