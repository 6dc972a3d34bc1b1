"""Keeps the spans of the latest requests of a process, measures them, and hands the sampled ones to an exporter."""

from __future__ import annotations

import contextlib
import functools
import heapq
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

from twostroke.config import TracingConfig
from twostroke.tracing.otlp import OtlpExporter
from twostroke.tracing.span import OpenSpan, Span, TraceContext

MOST_REQUESTS = 1000
"""Requests with kept spans: some ten kilobytes each."""
MOST_SPANS = 256
"""Spans of one request. A prompt of many chunks, or a stream that is moved again and again, has more."""
MOST_KEPT_SPANS = 20_000
"""Spans of all requests: a thousand requests with the most spans would take some hundred megabytes."""
MOST_NAMES = 20_000
"""Names of requests with spans that are kept no longer: it can be said that they were here."""

KEPT_S = 60.0
PERIOD_S = 5.0
"""Time that shares one list. Lists are dropped one after the other."""
MOST_PER_PERIOD = 16
"""Requests that are kept of each period: some ten kilobytes each."""

_STREAM = re.compile(r"(?P<stream>.+~[0-9a-f]{16}(\.[0-9a-f]{16})?)(/\d+)?(#\d+)?")
"""Requests of one stream are named after it: STREAM, STREAM/PROMPT#CHOICE. A stream may end in its owner's mark."""
_ANSWER_ID = re.compile(r"(chatcmpl|cmpl)-(?P<request>.+)")
"""The `id` of an answer of OpenAI's API is made of the request's id."""


class Observer(Protocol):
    def observe(self, amount: float, /) -> None:
        """Takes the seconds of a span."""


class Exporter(Protocol):
    def put(self, span: Span) -> None:
        """Sends it some time later. Never blocks, never fails."""

    def close(self) -> None:
        """Sends what is pending, or gives it up soon."""


@dataclass(slots=True)
class _Period:
    begin_s: float
    kept: list[tuple[float, str, Sequence[Span]]] = field(default_factory=list)
    """A heap: the fastest comes first."""


class SlowestRequests:
    """The slowest requests of the last minute, so that a busy router still knows them when it forgets the others."""

    def __init__(self) -> None:
        self._periods: deque[_Period] = deque()

    def ended(self, stream: str, spans: Sequence[Span], seconds: float, now_s: float) -> None:
        """Takes a request that has ended at `now_s`, if it is among the slowest of its period."""
        if not self._periods or now_s >= self._periods[-1].begin_s + PERIOD_S:
            self._forget(now_s)
            self._periods.append(_Period(now_s))
        kept = self._periods[-1].kept
        if len(kept) < MOST_PER_PERIOD:
            heapq.heappush(kept, (seconds, stream, spans))
        elif seconds > kept[0][0]:
            heapq.heapreplace(kept, (seconds, stream, spans))

    def of_the_last_minute(self, now_s: float) -> Iterator[tuple[str, Sequence[Span]]]:
        """Yields names and spans, in no order."""
        self._forget(now_s)
        for period in self._periods:
            yield from ((stream, spans) for _, stream, spans in period.kept)

    def find(self, is_meant: Callable[[str], bool]) -> tuple[str, Sequence[Span]] | None:
        """Returns name and spans of one whose name is meant, of the latest period that has any."""
        kept = (each for period in reversed(self._periods) for each in period.kept)
        return next(((stream, spans) for _, stream, spans in kept if is_meant(stream)), None)

    def _forget(self, now_s: float) -> None:
        while self._periods and self._periods[0].begin_s + PERIOD_S + KEPT_S <= now_s:
            self._periods.popleft()


@dataclass(frozen=True, slots=True)
class StreamTrace:
    """What a process knows of one stream."""

    stream: str
    spans: Sequence[Span]


class Recorder:
    def __init__(
        self,
        process: str = "",
        *,
        ratio: float = 1.0,
        exporter: Exporter | None = None,
        lengths: Mapping[str, Observer] | None = None,
    ) -> None:
        """Spans of the names in `lengths` are measured there."""
        self.process = process
        self._ratio = ratio
        self._exporter = exporter
        self._lengths = lengths or {}
        self._kept: OrderedDict[str, list[Span]] = OrderedDict()
        self._spans = 0
        """Spans of all kept requests."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._slowest = SlowestRequests()
        """The slowest of the requests that came in here."""
        self._watcher: Callable[[Span], None] | None = None

    def root(self, name: str, request_id: str, header: str) -> OpenSpan:
        """Begins the span in which a request comes in; `header` is what the client says about its own trace, if
        anything."""
        parent = TraceContext.parse(header) if header else None
        stream = stream_of(request_id)
        context = TraceContext.begin(stream, self._ratio) if parent is None else parent.child()
        return self._open(name, stream, context, None if parent is None else parent.span_id, is_root=True)

    def begin(self, name: str, request_id: str, parent: TraceContext | None) -> OpenSpan:
        """Begins a span inside a span of another process, or of another part of this one. Without a parent it is only
        measured.
        """
        if parent is None:
            return OpenSpan(name, self.process, TraceContext.begin(request_id, 0.0), None, self._count)
        return self._open(name, stream_of(request_id), parent.child(), parent.span_id)

    def find(self, name: str) -> StreamTrace | None:
        """Returns the latest stream that `name` may mean; None where nothing is kept of any.

        It may be the stream's name or that of one of its requests, the id of the client's request, or an answer's id.
        """
        for meaning in _meanings(name):
            stream = next((stream for stream in reversed(self._kept) if _is_meant(stream, meaning)), None)
            if stream is not None:
                return StreamTrace(stream, tuple(self._kept[stream]))
        for meaning in _meanings(name):
            slow = self._slowest.find(functools.partial(_is_meant, name=meaning))
            if slow is not None:
                return StreamTrace(slow[0], tuple(slow[1]))
        return None

    def latest(self, most: int) -> list[StreamTrace]:
        """Returns the streams that came last, the latest first. One without a root span is still open."""
        return [StreamTrace(stream, tuple(self._kept[stream])) for stream in islice(reversed(self._kept), most)]

    def slowest(self) -> list[StreamTrace]:
        """Returns the slowest of those that came in here and ended within the last minute, in no order."""
        return [StreamTrace(stream, tuple(spans)) for stream, spans in self._slowest.of_the_last_minute(time.time())]

    def has_forgotten(self, name: str) -> bool:
        """Returns whether the spans of this name were here and are forgotten."""
        return any(_is_meant(stream, meaning) for meaning in _meanings(name) for stream in self._gone)

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[Span], None]) -> Iterator[None]:
        """Passes every span that ends within the block to `watcher`, too."""
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def close(self) -> None:
        """Closes the exporter. It may take a moment, so do not call it on an event loop."""
        if self._exporter is not None:
            self._exporter.close()

    def _open(
        self, name: str, stream: str, context: TraceContext, parent_id: int | None, *, is_root: bool = False
    ) -> OpenSpan:
        if stream not in self._kept:
            self._kept[stream] = []
            self._gone.pop(stream, None)
            self._forget_some()
        take = functools.partial(self._take, stream, context.span_id if is_root else None)
        return OpenSpan(name, self.process, context, parent_id, take)

    def _take(self, stream: str, root_id: int | None, span: Span) -> None:
        """Keeps a span that has ended. `root_id`: the id of the root, where the span is the root or a part of it."""
        spans = self._kept.get(stream)
        if spans is not None and len(spans) < MOST_SPANS:
            spans.append(span)
            self._spans += 1
            self._forget_some()
        if span.context.is_sampled and self._exporter is not None:
            self._exporter.put(span)
        self._count(span)
        if span.context.span_id == root_id and stream in self._kept:
            self._slowest.ended(stream, self._kept[stream], span.end_s - span.start_s, span.end_s)

    def _count(self, span: Span) -> None:
        length = self._lengths.get(span.name)
        if length is not None:
            length.observe(span.end_s - span.start_s)
        if self._watcher is not None:
            self._watcher(span)

    def _forget_some(self) -> None:
        while len(self._kept) > MOST_REQUESTS or (self._spans > MOST_KEPT_SPANS and len(self._kept) > 1):
            stream, spans = self._kept.popitem(last=False)
            self._spans -= len(spans)
            self._gone[stream] = None
        while len(self._gone) > MOST_NAMES:
            self._gone.popitem(last=False)


STAGE_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""From a decision to a long answer."""
STAGES = {
    "router": ("request", "prepare", "answer", "route"),
    "prefill": ("prefill", "queue", "pull"),
    "decode": ("attempt", "queue", "pull", "decode"),
}
"""Spans with counted lengths. Not those of single chunks: steps are."""


def recorder_of(process: str, role: str, config: TracingConfig, registry: CollectorRegistry) -> Recorder:
    """Raises ConfigError where spans cannot be sent as `config` says."""
    seconds = Histogram(
        "twostroke_stage_seconds",
        "Stages of requests: spans of this process, by name.",
        ("role", "stage"),
        registry=registry,
        buckets=STAGE_BUCKETS_S,
    )
    stages = {stage: seconds.labels(role=role, stage=stage) for stage in STAGES[role]}
    dropped = Counter(
        "twostroke_spans_dropped", "Spans that the collector did not take.", ("role",), registry=registry
    ).labels(role=role)

    exporter = None
    if config.otlp_endpoint is not None:
        resource = {"service.name": f"twostroke-{role}", "service.instance.id": process}
        exporter = OtlpExporter(config.otlp_endpoint, resource, dropped.inc)
    return Recorder(process, ratio=config.ratio, exporter=exporter, lengths=stages)


def stream_of(request_id: str) -> str:
    matched = _STREAM.fullmatch(request_id)
    return request_id if matched is None else matched["stream"]


def _meanings(name: str) -> list[str]:
    """Returns the ids that `name` may stand for, the literal one first: a client may call its own request "cmpl-1"."""
    answer = _ANSWER_ID.fullmatch(name)
    names = [name] if answer is None else [name, answer["request"]]
    return list(dict.fromkeys([*names, *map(stream_of, names)]))


def _is_meant(stream: str, name: str) -> bool:
    return stream == name or stream.rpartition("~")[0] == name
