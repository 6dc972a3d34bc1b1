"""Keeps the spans of the latest requests of a process, measures them, and hands the sampled ones to an exporter."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.tracing.context import TraceContext
from twostroke.tracing.slowest import SlowestRequests
from twostroke.tracing.span import OpenSpan, Span

MOST_REQUESTS = 1000
"""Requests whose spans are kept: some ten kilobytes each."""
MOST_SPANS = 256
"""Spans of one request. A prompt of many chunks, or a stream that is moved again and again, has more."""
MOST_NAMES = 20_000
"""Names of requests whose spans are kept no longer: it can be said that they were here."""

_STREAM = re.compile(r"(?P<stream>.+~[0-9a-f]{16}(\.[0-9a-f]{16})?)(/\d+)?(#\d+)?")
"""Requests of one stream are named after it: STREAM, STREAM/PROMPT#CHOICE. A stream may end in its owner's mark."""
_ANSWER_ID = re.compile(r"(chatcmpl|cmpl)-(?P<request>.+)")
"""The `id` of an answer of OpenAI's API is made of the request's id."""


class Exporter(Protocol):
    def put(self, span: Span) -> None:
        """Send it some time later. Never blocks, never fails."""

    def close(self) -> None:
        """What is pending is sent, or given up soon."""


class NoExporter:
    def put(self, span: Span) -> None:
        """Nobody wants it."""

    def close(self) -> None:
        """Nothing is pending."""


@dataclass(frozen=True, slots=True)
class Kept:
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
        measure: Callable[[str, float], None] | None = None,
    ) -> None:
        """`measure` is told of every span's name and seconds."""
        self.process = process
        self._ratio = ratio
        self._exporter = exporter or NoExporter()
        self._measure = measure
        self._kept: OrderedDict[str, list[Span]] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._slowest = SlowestRequests()
        """The slowest of the requests that came in here."""
        self._watcher: Callable[[Span], None] | None = None

    def root(self, name: str, request_id: str, header: str) -> OpenSpan:
        """Begin the span in which a request comes in; `header` is what the client says of its own trace, if
        anything."""
        parent = TraceContext.parse(header) if header else None
        stream = stream_of(request_id)
        context = TraceContext.begin(stream, self._ratio) if parent is None else parent.child()
        return self._open(name, stream, context, None if parent is None else parent.span_id, is_root=True)

    def begin(self, name: str, request_id: str, parent: TraceContext | None) -> OpenSpan:
        """Inside of another process's span (or another part's of this one). Without a parent it is measured only."""
        if parent is None:
            return OpenSpan(name, self.process, TraceContext.begin(request_id, 0.0), None, self._count)
        return self._open(name, stream_of(request_id), parent.child(), parent.span_id)

    def find(self, name: str) -> Kept | None:
        """The latest stream that `name` may mean; None where nothing is kept of any.

        It may be the stream's name or that of one of its requests, the id of the client's request, or an answer's id.
        """
        for meaning in _meanings(name):
            stream = next((stream for stream in reversed(self._kept) if _is_meant(stream, meaning)), None)
            if stream is not None:
                return Kept(stream, tuple(self._kept[stream]))
        for meaning in _meanings(name):
            slow = self._slowest.find(functools.partial(_is_meant, name=meaning))
            if slow is not None:
                return Kept(slow[0], tuple(slow[1]))
        return None

    def latest(self, most: int) -> list[Kept]:
        """The streams that came last, the latest first. One without a root span is still open."""
        return [Kept(stream, tuple(self._kept[stream])) for stream in itertools.islice(reversed(self._kept), most)]

    def slowest(self) -> list[Kept]:
        """The slowest of those that came in here and ended within the last minute, in no order."""
        return [Kept(stream, tuple(spans)) for stream, spans in self._slowest.of_the_last_minute(time.time())]

    def has_forgotten(self, name: str) -> bool:
        """It was here, too long ago."""
        return any(_is_meant(stream, meaning) for meaning in _meanings(name) for stream in self._gone)

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[Span], None]) -> Iterator[None]:
        """Pass every span that ends within the block to `watcher`, too."""
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def close(self) -> None:
        """May take a moment: not on an event loop."""
        self._exporter.close()

    def _open(
        self, name: str, stream: str, context: TraceContext, parent_id: int | None, *, is_root: bool = False
    ) -> OpenSpan:
        if stream not in self._kept:
            self._kept[stream] = []
            self._gone.pop(stream, None)
            self._forget_some()
        take = functools.partial(self._take, stream)
        if is_root:
            take = functools.partial(self._take_of_root, stream, context.span_id)
        return OpenSpan(name, self.process, context, parent_id, take)

    def _take_of_root(self, stream: str, root_id: int, span: Span) -> None:
        """Take the root span, or a part of it."""
        self._take(stream, span)
        spans = self._kept.get(stream)
        if span.context.span_id == root_id and spans is not None:
            self._slowest.ended(stream, spans, span.end_s - span.start_s, span.end_s)

    def _take(self, stream: str, span: Span) -> None:
        spans = self._kept.get(stream)
        if spans is not None and len(spans) < MOST_SPANS:
            spans.append(span)
        if span.context.is_sampled:
            self._exporter.put(span)
        self._count(span)

    def _count(self, span: Span) -> None:
        if self._measure is not None:
            self._measure(span.name, span.end_s - span.start_s)
        if self._watcher is not None:
            self._watcher(span)

    def _forget_some(self) -> None:
        while len(self._kept) > MOST_REQUESTS:
            self._gone[self._kept.popitem(last=False)[0]] = None
        while len(self._gone) > MOST_NAMES:
            self._gone.popitem(last=False)


def stream_of(request_id: str) -> str:
    matched = _STREAM.fullmatch(request_id)
    return request_id if matched is None else matched["stream"]


def _meanings(name: str) -> list[str]:
    """The ids that `name` may stand for, the literal one first: a client may call its own request "cmpl-1"."""
    answer = _ANSWER_ID.fullmatch(name)
    names = [name] if answer is None else [name, answer["request"]]
    return list(dict.fromkeys([*names, *map(stream_of, names)]))


def _is_meant(stream: str, name: str) -> bool:
    return stream == name or stream.rpartition("~")[0] == name
