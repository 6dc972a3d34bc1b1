"""Scrapers cannot keep the event loop busy, and never read what was true before they asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from router.endpoints.health_pages import MetricsPage
from twostroke.observability.telemetry import RENDERING_SHARE


class Slow:
    """A collector that takes a while, and counts how often it was asked."""

    RENDERING_S = 0.01

    def __init__(self) -> None:
        self.renderings = 0
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        self.renderings += 1
        time.sleep(self.RENDERING_S)
        metric = Metric("seen", "How much was seen.", "gauge")
        metric.add_sample("seen", {}, self.value)
        yield metric


def slow_page() -> tuple[Slow, MetricsPage]:
    slow, registry = Slow(), CollectorRegistry()
    registry.register(slow)
    slow.renderings = 0  # registering asks for names
    return slow, MetricsPage(registry)


async def test_who_scrapes_in_a_loop_gets_a_share_of_the_loops_time():
    slow, page = slow_page()
    begun_s = time.monotonic()

    async def scrape() -> None:
        for _ in range(5):
            await page.rendered("")

    await asyncio.gather(*(scrape() for _ in range(8)))
    took_s = time.monotonic() - begun_s
    assert slow.renderings <= 10  # five each, together
    assert (slow.renderings - 1) * slow.RENDERING_S <= 1.5 * RENDERING_SHARE * took_s


async def test_a_page_says_what_was_true_when_it_was_asked_for():
    slow, page = slow_page()
    for value in range(4):
        slow.value = value
        said, content_type = await page.rendered("")
        assert f"seen {float(value)}" in said.decode()
        assert content_type.startswith("text/plain")
    said, content_type = await page.rendered("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert said.endswith(b"# EOF\n")
