"""Logs and metrics, set up once per process.

Logs: one line per event, constant message, facts as key=value. Metrics: Prometheus, base units, a `role` label.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from twostroke import __version__
from twostroke.base.errors import ConfigError
from twostroke.observability.event_log import EventHandler, OwnFile
from twostroke.security.tls import Certificates

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment  # it is there for type checkers only

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Time to first token: from a warm prefix on a GPU to a long queue on a CPU."""
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Inter-token latency."""
PULL_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
"""Seconds on the wire of one transfer."""


OUTPUTS = (1, 2)
"""Descriptors of standard output and standard error."""


def configure_logging(identity: str, *, owns_files: bool = False) -> None:
    """Logs to standard error; `identity` (worker or router id) stands on every line.

    `owns_files`: where standard output or error is a file, it is this process's, which begins it anew when it is large.
    """
    root = logging.getLogger()
    for earlier in root.handlers:
        if isinstance(earlier, EventHandler):
            earlier.close()
    root.handlers[:] = [EventHandler(identity, OwnFile.behind(OUTPUTS) if owns_files else ())]
    root.setLevel(logging.INFO)
    # What lines do not say is not looked up for each of them (CPython's logging documentation, "Optimization").
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for noisy in ("httpx", "uvicorn.access", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Expiries(Collector):
    """When the certificates in use end. Looked up at every scrape: they may be renewed at any time."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._of: dict[str, Certificates] = {}

    def watch(self, use: str, certificates: Certificates | None) -> None:
        """Watches certificates. `use`: "clients" or "cluster". None: there are none to watch."""
        if certificates is not None:
            self._of[use] = certificates

    def collect(self) -> Iterable[GaugeMetricFamily]:
        gauge = GaugeMetricFamily(
            "twostroke_certificate_expiry_timestamp_seconds",
            "When the certificate in use ends, in Unix seconds; none without TLS.",
            labels=("role", "use"),
        )
        for use, certificates in self._of.items():
            gauge.add_metric((self._role, use), certificates.expires_s)
        yield gauge


def introduce(registry: CollectorRegistry, role: str) -> Expiries:
    """Adds the metrics of every process: its build, clock, CPU time and memory (`process_*`, without a role, as usual),
    and the ends of its certificates.
    """
    # When a counter began to count is not a time series.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library does not say that it returns nothing
    expiries = Expiries(role)
    registry.register(expiries)
    ProcessCollector(registry=registry)
    build = Gauge("twostroke_build_info", "Always 1.", ("role", "version", "python"), registry=registry)
    build.labels(role, __version__, platform.python_version()).set(1)
    clock = Gauge(
        "twostroke_clock_seconds", "The wall clock of this process, Unix seconds.", ("role",), registry=registry
    )
    clock.labels(role).set_function(time.time)
    return expiries


Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def family_of(
    kind: type[Family], role: str, name: str, text: str, values: float | Mapping[str, float], label: str = "state"
) -> Family:
    """Returns a metric of a process of this role, as a collector yields it: one value, or one for each `label`."""
    if isinstance(values, Mapping):
        family = kind(f"twostroke_{name}", text, labels=("role", label))
        for each, value in values.items():
            family.add_metric((role, each), value)
        return family
    family = kind(f"twostroke_{name}", text, labels=("role",))
    family.add_metric((role,), values)
    return family


MOST_SCRAPERS = 64
SCRAPE_S = 10.0
"""Seconds of silence after which a scraper is gone."""
SHUTDOWN_POLL_S = 0.05
"""How often the metrics server looks whether it is to end."""


RENDERING_SHARE = 0.1
"""Part of the time in which the page may be rendered, which holds Python's lock: tokens need that as well."""


class RenderingShare:
    """Says when the metrics page may be rendered again, so that rendering takes its share of the time and no more."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def wait_s(self) -> float:
        """Returns the seconds until the next rendering may begin."""
        return max(0.0, self._free_s - time.monotonic())

    @contextlib.contextmanager
    def rendering(self) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        ended_s = time.monotonic()
        self._free_s = ended_s + (1 / RENDERING_SHARE - 1) * (ended_s - begun_s)


class Scrapes:
    """A WSGI application. It makes pages one at a time, in a share of the time."""

    def __init__(self, page: WSGIApplication) -> None:
        self._page = page
        self._turn = threading.Lock()
        self._share = RenderingShare()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._turn:
            time.sleep(self._share.wait_s())
            with self._share.rendering():
                return self._page(environ, start_response)


class MetricsServer:
    """Prometheus exposition of one registry on its own port and thread."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int = 0) -> None:
        """Raises ConfigError where it cannot listen."""
        try:
            self._server = make_server(host, port, Scrapes(make_wsgi_app(registry)), _PatientServer, _SilentHandler)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {host}:{port}: {error.strerror}", field="port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(SHUTDOWN_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PatientServer(ThreadingWSGIServer):
    """A thread for each connection, for a time, and not for any number of them."""

    request_queue_size = 128

    def __init__(self, *made_of: Any, **options: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST_SCRAPERS)
        super().__init__(*made_of, **options)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: a client that disconnects, or sends nothing in time, is not an event either."""


class _SilentHandler(WSGIRequestHandler):
    timeout = SCRAPE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Logs nothing: a scrape is not an event."""
