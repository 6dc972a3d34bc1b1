"""Over HTTP: /live, /ready and /health for probes, /metrics for Prometheus; on clients' port or on one of their own."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from router.front import Front

HEALTH_PATHS = frozenset({"/health", "/ready", "/live"})


class HealthPages:
    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self, *, with_metrics: bool) -> list[Route]:
        routes = [
            Route("/health", self._ready, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/live", self._live, methods=["GET"]),
        ]
        return [*routes, Route("/metrics", self._metrics, methods=["GET"])] if with_metrics else routes

    def app(self) -> Starlette:
        """Nothing but these."""
        return Starlette(routes=self.routes(with_metrics=True))

    async def _live(self, request: Request) -> Response:
        del request
        return PlainTextResponse("live\n")

    async def _ready(self, request: Request) -> Response:
        del request
        dispatcher = self._front.dispatcher
        if dispatcher.is_draining:
            return PlainTextResponse("draining\n", status_code=503)
        if not dispatcher.is_ready:
            return PlainTextResponse("no decode worker is ready\n", status_code=503)
        return PlainTextResponse("ready\n")

    async def _metrics(self, request: Request) -> Response:
        del request
        return Response(generate_latest(self._front.metrics.registry), media_type=CONTENT_TYPE_LATEST)
