"""What docs/operations.md says of metrics is what a scrape of a live router and live workers shows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.processes import Client, running_cluster
from tests.cluster.served import CHECKOUT
from tests.deploy.scrape import PACED, exposed, noted, scraped, series_of
from tests.deploy.tools import tool

OPERATIONS = CHECKOUT / "docs" / "operations.md"
OF_SOME_MODELS = {
    "twostroke_draft_pages",
    "twostroke_expert_imbalance_ratio",
    "twostroke_expert_tokens_total",
    "twostroke_further_pages",
}
"""Metrics that only some workers have: those with a draft model, with experts, and with window parts apart."""
OTHER_UNITS = re.compile(r"_(ms|millis\w*|us|minutes|kb|mb|gb|kib|mib|gib|percent)(_|$)")


def test_every_metric_that_the_documentation_names_is_scraped_with_its_labels() -> None:
    documented = re.findall(r"`(twostroke_\w+)(\{[^}]*\})?`", OPERATIONS.read_text().replace(r"\|", "|"))
    assert len(documented) > 10
    families = {name: family for process in scraped() for name, family in named(process).items()}
    for name, labels in documented:
        if name in OF_SOME_MODELS:
            continue
        assert name in families, f"{name} is documented, but nobody exports it"
        for label, values in re.findall(r'(\w+)(?:="([^"]*)")?', labels):
            seen = {sample.labels.get(label) for sample in families[name].samples}
            assert not values or seen <= set(values.split("|")), f"{name}: {label} is {seen}"


def test_all_metrics_are_ours_in_base_units_and_say_whose_they_are() -> None:
    families = [family for process in scraped() for family in process]
    assert len(families) > 30
    for family in families:
        assert not family.name.endswith("_created")
        if family.name.startswith("process_"):
            continue
        assert family.name.startswith("twostroke_")
        assert not OTHER_UNITS.search(family.name), family.name
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_bytes", "_tokens", "_ratio")), (
            family.name
        )
        for sample in family.samples:
            assert sample.labels.get("role") in ("router", "prefill", "decode"), sample
            for label in ("status", "reason", "state", "worker_role"):
                assert sample.labels.get(label, "").islower() or label not in sample.labels, sample
    for process in scraped():
        roles = {sample.labels["role"] for family in process for sample in family.samples if "role" in sample.labels}
        assert len(roles) == 1, "a role is that of the process that says it"
        assert "process_resident_memory_bytes" in {family.name for family in process}


def test_the_series_that_queries_are_held_against_are_those_of_a_scrape() -> None:
    told, seen = (dict(parted(line) for line in lines) for lines in (noted(), series_of(scraped())))
    assert told.keys() == seen.keys(), "run `python -m tests.deploy.scrape --write`"
    for name, labels in seen.items():  # which of them have begun by now is a matter of chance
        assert labels <= told[name] or not told[name], name


def parted(line: str) -> tuple[str, set[str]]:
    name, _, labels = line.rstrip("}").partition("{")
    return name, set(filter(None, labels.split(",")))


def named(families: Iterable[Metric]) -> dict[str, Metric]:
    """Returns the metrics by the names that people query: a histogram by its own, a counter with its suffix."""
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


async def test_usage_of_several_choices_counts_the_prompt_and_its_reuse_once() -> None:
    async with running_cluster(prefill=1, decode=1, model=PACED) as cluster:
        client = Client(cluster.grpc)
        for cached_tokens in (0, 96):
            last = [response async for response in client.stream(range(100), max_tokens=5, n=3)][-1]
            usage = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens)
            assert usage == (100, 15, cached_tokens)
        await client.close()


def test_promtool_and_a_parser_of_openmetrics_find_nothing_wrong() -> None:
    for text, openmetrics in exposed():
        done = subprocess.run(
            [tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        assert openmetrics.rstrip().endswith("# EOF")
        names = {family.name for family in openmetrics_families(openmetrics)}
        assert names >= {family.name for family in text_string_to_metric_families(text)}
