"""Pages for operators: /live, /ready and /health for probes, /metrics for Prometheus, /version, and / that lists them.

They are served on the clients' port, or on a port of their own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from router.requests.request_handler import RequestHandler
from twostroke import __version__
from twostroke.observability.telemetry import RenderingShare

HEALTH_PATHS = frozenset({"/health", "/ready", "/live"})
INDEX = "/"


class HealthPages:
    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._metrics_page = MetricsPage(handler.metrics.registry)

    def routes(self, *, with_metrics: bool) -> list[Route]:
        routes = [
            Route("/health", self._ready, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/live", PlainTextResponse("live\n"), methods=["GET"]),
            Route("/version", JSONResponse({"version": __version__}), methods=["GET"]),
        ]
        return [*routes, Route("/metrics", self._metrics, methods=["GET"])] if with_metrics else routes

    def app(self) -> Starlette:
        """Returns an application with nothing but these pages."""
        return Starlette(routes=with_index(self.routes(with_metrics=True)))

    async def _ready(self, _: Request) -> Response:
        dispatcher = self._handler.dispatcher
        if dispatcher.is_draining:
            return PlainTextResponse("draining\n", status_code=503)
        if not dispatcher.is_ready:
            return PlainTextResponse("no decode worker is ready\n", status_code=503)
        return PlainTextResponse("ready\n")

    async def _metrics(self, request: Request) -> Response:
        """Responds in Prometheus' text format, or in OpenMetrics to a scraper that asks for it."""
        page, content_type = await self._metrics_page.rendered(request.headers.get("accept", ""))
        return Response(page, media_type=content_type)


class MetricsPage:
    """The page that scrapers read, rendered on the event loop.

    Scrapers that ask during a rendering wait, and share the next one: every page is rendered after it was asked for.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()
        self._share = RenderingShare()
        self._content_type = ""
        self._page = b""
        self._rendered_s = -math.inf

    async def rendered(self, accept: str) -> tuple[bytes, str]:
        """Returns the page and its content type. `accept` is the header of that name."""
        asked_s = time.monotonic()
        encode, content_type = choose_encoder(accept)
        async with self._turn:
            if self._rendered_s < asked_s or self._content_type != content_type:
                await asyncio.sleep(self._share.wait_s())
                self._rendered_s = time.monotonic()
                with self._share.rendering():
                    self._page, self._content_type = encode(self._registry), content_type
            return self._page, self._content_type


def with_index(routes: Sequence[Route]) -> list[Route]:
    """Adds a page that lists the routes."""
    paths = "\n".join(sorted(f"{' '.join(sorted(route.methods or ()))} {route.path}" for route in routes))
    text = f"twostroke serves a language model: the OpenAI API is below /v1.\n\n{paths}\n"
    return [*routes, Route(INDEX, PlainTextResponse(text), methods=["GET"])]
