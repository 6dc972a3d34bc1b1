"""Sends spans to a collector over OTLP/gRPC: one thread, so that no request ever waits for it.

What the collector does not take (it is down, or slow) is dropped and counted: serving continues. OpenTelemetry's own
exporter sends them; its batching is not used, as it does not count what it drops.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from twostroke.base.errors import ConfigError
from twostroke.tracing.span import Span

if TYPE_CHECKING:  # an extra of the package, and half a second of imports
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

MAX_PENDING = 20_000
"""Spans that wait for the collector: some seconds of a busy router."""
MAX_BATCH = 512
LINGER_S = 0.5
"""Seconds that a batch waits to fill."""
EXPORT_S = 5.0
"""Seconds for one batch, retries included."""
SERVER_SPANS = frozenset({"request", "attempt", "prefill"})
"""Names of spans that answer another process or the client."""
CLOSE_S = 2.0
"""Seconds to send what is pending when the process ends: a collector that hangs must not keep it."""


class OtlpExporter:
    def __init__(self, endpoint: str, resource: Mapping[str, str], dropped: Callable[[int], None]) -> None:
        """`dropped` is called with the number of lost spans, on any thread. Raises ConfigError where the extra is
        missing.
        """
        self._exporter, self._resource = _library(endpoint, resource)
        self._endpoint = endpoint
        self._dropped = dropped
        self._pending: queue.Queue[Span | None] = queue.Queue(MAX_PENDING)
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        try:
            self._pending.put_nowait(span)
        except queue.Full:
            self._dropped(1)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._pending.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # ends a call or a wait that is still under way

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = self._batch()
            is_open = batch[-1] is not None
            self._send([span for span in batch if span is not None])

    def _batch(self) -> list[Span | None]:
        """Returns what to send next. None at its end: nothing follows."""
        batch, full_s = [self._pending.get()], time.monotonic() + LINGER_S
        with contextlib.suppress(queue.Empty):
            while len(batch) < MAX_BATCH and batch[-1] is not None:
                batch.append(self._pending.get(timeout=max(0.0, full_s - time.monotonic())))
        return batch

    def _send(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        try:
            outcome = self._exporter.export([_readable(span, self._resource) for span in spans]).name
        except Exception as error:  # of the library, or of a span that it cannot encode: the next ones may fare better
            outcome = type(error).__name__  # its text may quote a client
        is_taken = outcome == "SUCCESS"
        if not is_taken:
            self._dropped(len(spans))
        if is_taken == self._is_failing:
            self._is_failing = not is_taken
            if is_taken:
                log.info("spans sent again endpoint=%s", self._endpoint)
            else:
                log.error(
                    "spans not sent endpoint=%s error=%s: serving continues without them", self._endpoint, outcome
                )


def _library(endpoint: str, resource: Mapping[str, str]) -> tuple[OTLPSpanExporter, Resource]:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry's exporter: pip install 'twostroke[tracing]'", field="otlp_endpoint"
        ) from error
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each batch; one is logged here instead
    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S), Resource.create(dict(resource))


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    context, flags, is_server = span.context, TraceFlags(TraceFlags.SAMPLED), span.name in SERVER_SPANS
    parent = None
    if span.parent_id is not None:
        parent = SpanContext(context.trace_id, span.parent_id, is_remote=is_server, trace_flags=flags)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(context.trace_id, context.span_id, is_remote=False, trace_flags=flags),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), _ns(event.at_s)) for event in span.events],
        kind=SpanKind.SERVER if is_server else SpanKind.INTERNAL,
        instrumentation_scope=InstrumentationScope("twostroke"),
        status=Status(StatusCode.ERROR, span.error) if span.error is not None else Status(),
        start_time=_ns(span.start_s),
        end_time=_ns(span.end_s),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
