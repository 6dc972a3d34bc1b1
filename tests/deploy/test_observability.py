"""Rules, alerts and dashboards, against promtool and against a real Prometheus that scraped a real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.deploy.prometheus import FOLDER, RATE_INTERVAL, Prometheus, scraping
from tests.deploy.tools import ROOT, tool
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.engine.backends.paced.runner import PAGE_BYTES

GRAFANA = ROOT / "deploy" / "observability" / "grafana"
RUNBOOK = ROOT / "docs" / "observability.md"
PACED = ModelConfig(model="paced:step_ms=1,max_model_len=2048", served_model_name="tiny")
PATIENCE_S = 120.0
AT_ONCE = "Twostroke(IndexDiverged|PagesDamaged|TransportFellBack|RequestLogDropped|CertificateExpires)"
"""Alerts that wait for nothing: a cluster that is well has none of them."""


def alerts() -> list[dict[str, dict[str, str]]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_promtool_finds_every_alert_once_quiet_and_once_firing() -> None:
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "rules_test.yml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_both_cases_says_what_to_do_and_is_in_the_runbook() -> None:
    cases = {case["name"]: case for case in yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]}
    runbook = RUNBOOK.read_text()
    assert {alert["alert"] for alert in alerts()} == set(cases)
    for alert in alerts():
        name, notes = str(alert["alert"]), alert["annotations"]
        seen = [sample["exp_samples"] for sample in cases[name]["promql_expr_test"]]
        assert [] in seen, f"{name} is never quiet"
        assert any(f'"{name}"' in sample["labels"] for samples in seen for sample in samples), f"{name} never fires"
        assert notes["summary"]
        assert len(notes["action"]) > 30, f"{name} does not say what to do"
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert f"`{name}`" in runbook, f"{name} is not in {RUNBOOK.name}"


def test_dashboards_are_what_their_generator_writes_and_are_well_formed() -> None:
    done = subprocess.run(
        [sys.executable, GRAFANA / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in GRAFANA.glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken = [cell for panel in panels for cell in cells(panel["gridPos"])]
        assert len(set(taken)) == len(taken), f"panels of {path.name} lie upon each other"


@pytest.mark.slow
async def test_every_query_of_dashboards_and_rules_has_numbers_while_a_cluster_works(tmp_path: Path) -> None:
    tool("prometheus")
    asked = {*dashboard_queries(), *recorded()}
    assert len(asked) > 80
    always_pulls = {"policy": "round-robin", "schedule": ScheduleConfig(local_prefill=False)}
    little = CacheConfig(
        kv_cache_memory_bytes=48 * PAGE_BYTES,
        host_cache_bytes=16 * PAGE_BYTES,
        disk_cache_bytes=64 * PAGE_BYTES,
        disk_cache_dir=str(tmp_path / "pages"),
    )
    async with (
        running_cluster(prefill=1, decode=1, model=PACED, cache=little, **always_pulls) as cluster,
        scraping(cluster, tmp_path) as prometheus,
    ):
        load = asyncio.create_task(keep_asking(cluster))
        try:
            left = await without_numbers(prometheus, {*asked, "count(up == 1) == 3"}, load)
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
        assert left == set()
        assert await prometheus.ask(f'ALERTS{{alertstate="firing",alertname=~"{AT_ONCE}"}}') == []


async def without_numbers(prometheus: Prometheus, asked: set[str], load: asyncio.Task[None]) -> set[str]:
    """Those that never had any within the time."""
    left = set(asked)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while left and not load.done():
                left = {query for query in left if not await prometheus.ask(query)}
                await asyncio.sleep(0.3)
    return left


async def keep_asking(cluster: ProcessCluster) -> None:
    """Sends prompts that nobody has sent, each twice, and earlier ones, whose pages have left the pool."""
    client = Client(cluster.grpc)
    try:
        for number in itertools.count(1):
            for which in (number, number, max(1, number - 9)):
                prompt = [which % 250, which // 250 % 250, *range(100)]
                await client.tokens(prompt, max_tokens=5)
            await asyncio.sleep(0.05)  # rates are as good of few requests, and most of the time is Prometheus's
    finally:
        await client.close()


def dashboard_queries() -> set[str]:
    models = [json.loads(path.read_text()) for path in sorted(GRAFANA.glob("*.json"))]
    assert len(models) == 3
    queries = {target["expr"] for model in models for panel in model["panels"] for target in panel.get("targets", ())}
    return {query.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", ".*") for query in queries}


def recorded() -> set[str]:
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())
    return {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}


def cells(at: dict[str, int]) -> list[tuple[int, int]]:
    assert at["x"] + at["w"] <= 24
    return [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]


def test_recorded_names_follow_the_convention() -> None:
    for name in recorded():
        assert re.fullmatch(r"twostroke:\w+:\w+", name), name
