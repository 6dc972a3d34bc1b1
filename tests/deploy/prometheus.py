"""A real Prometheus with the project's own configuration and rules, over a cluster of the test."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from tests.cluster.processes import PATIENCE_S, ProcessCluster
from tests.deploy.tools import ROOT, tool

FOLDER = ROOT / "deploy" / "observability" / "prometheus"
SCRAPE = "500ms"
RATE_INTERVAL = "4s"
"""Some scrapes long, as Grafana's own is."""


@dataclass(frozen=True)
class Prometheus:
    client: httpx.AsyncClient

    async def ask(self, query: str) -> list[float]:
        """The numbers that it has for a query now, NaN left out. Raises where it cannot read it."""
        answer = await self.client.get("/api/v1/query", params={"query": query})
        said = answer.json()
        assert said["status"] == "success", f"{query}: {said}"
        values = [float(series["value"][1]) for series in said["data"]["result"]]
        return [value for value in values if not math.isnan(value)]


@asynccontextmanager
async def scraping(cluster: ProcessCluster, folder: Path) -> AsyncIterator[Prometheus]:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    targets = {
        "twostroke-router": [cluster.routers[0].http],
        "twostroke-worker": [str(worker.info["metrics_address"]) for worker in cluster.workers.values()],
    }
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{_free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            tool("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            stderr=log,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            await _until_ready(client)
            yield Prometheus(client)
    finally:
        process.terminate()
        await process.wait()


async def _until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if (await client.get("/-/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
