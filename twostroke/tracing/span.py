"""A span: something that began and ended, with what is worth knowing of it, and its parts."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from twostroke.tracing.context import TraceContext

Value = str | int | float | bool

MOST_CHUNKS = 64
"""Spans of a prompt's chunks. The rest is one span: 64 hold ten thousand tokens in steps of a CPU's size, a quarter
million on a GPU."""


class LateAttributes(Mapping[str, Value]):
    """Attributes that are made when someone reads them: most spans are forgotten unread."""

    def __init__(self, make: Callable[[], Mapping[str, Value]]) -> None:
        self._make = make

    @functools.cached_property
    def _made(self) -> Mapping[str, Value]:
        return self._make()

    def __getitem__(self, name: str) -> Value:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_s: float
    """Seconds since the Unix epoch, as all times of spans."""
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    name: str
    process: str
    """Worker or router id."""
    context: TraceContext
    parent_id: int | None
    """None: the trace begins with it."""
    start_s: float
    end_s: float
    attributes: Mapping[str, Value]
    events: tuple[SpanEvent, ...]
    error: str | None


class OpenSpan:
    """One that has not ended. `end` is to be called once; what is set later is lost."""

    __slots__ = (
        "_attributes",
        "_events",
        "_late",
        "_parent_id",
        "_process",
        "_take",
        "context",
        "has_ended",
        "name",
        "start_s",
    )

    def __init__(
        self,
        name: str,
        process: str,
        context: TraceContext,
        parent_id: int | None,
        take: Callable[[Span], None],
    ) -> None:
        self.name = name
        self.context = context
        self.start_s = time.time()
        self.has_ended = False
        self._process = process
        self._parent_id = parent_id
        self._take = take
        self._attributes: dict[str, Value] = {}
        self._late: Callable[[], Mapping[str, Value]] | None = None
        self._events: list[SpanEvent] = []

    def begin(self, name: str) -> OpenSpan:
        """Returns a part of it, in the same process."""
        return OpenSpan(name, self._process, self.context.child(), self.context.span_id, self._take)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[OpenSpan]:
        """Begins a part of it that ends with the block, and with the block's error if it raises one."""
        part = self.begin(name)
        try:
            yield part
        except BaseException as error:
            part.end(error=repr(error))
            raise
        part.end()

    def record(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        """Adds a part that is over already."""
        part = self.begin(name)
        part.start_s = start_s
        part.set(**attributes)
        part.end(at_s=end_s)

    def set(self, **attributes: Value | None) -> None:
        """Sets attributes. A value of None is not known and is left out."""
        for name, value in attributes.items():
            if value is not None:
                self._attributes[name] = value

    def explain(self, make: Callable[[], Mapping[str, Value]]) -> None:
        """Adds attributes that are made when someone reads the span."""
        known = self._attributes
        self._late = lambda: {**known, **make()}

    def event(self, name: str, **attributes: Value) -> None:
        self._events.append(SpanEvent(name, time.time(), attributes))

    def late_event(self, name: str, make: Callable[[], Mapping[str, Value]]) -> None:
        """Adds an event whose attributes are made when someone reads them."""
        self._events.append(SpanEvent(name, time.time(), LateAttributes(make)))

    def end(self, error: str | None = None, at_s: float | None = None) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._take(
            Span(
                name=self.name,
                process=self._process,
                context=self.context,
                parent_id=self._parent_id,
                start_s=self.start_s,
                end_s=max(self.start_s, time.time() if at_s is None else at_s),
                attributes=self._attributes if self._late is None else LateAttributes(self._late),
                events=tuple(self._events),
                error=error,
            )
        )


class Chunks:
    """The chunks of one prompt as parts of its span: each its own, until there are many."""

    def __init__(self, span: OpenSpan) -> None:
        self._span = span
        self._rest: OpenSpan | None = None
        self._rest_begins = 0
        self._rest_end = 0
        self.count = 0
        self.tokens = 0
        self.ended_s: float | None = None
        """When the last one had been run."""

    def ran(self, start: int, end: int, seconds: float) -> None:
        """Tokens [start, end), in a step that has just ended."""
        self.ended_s = time.time()
        self.count += 1
        self.tokens += end - start
        if self.count <= MOST_CHUNKS:
            self._span.record("chunk", self.ended_s - seconds, self.ended_s, first_token=start, tokens=end - start)
            return
        if self._rest is None:
            self._rest = self._span.begin("chunk")
            self._rest.start_s, self._rest_begins = self.ended_s - seconds, start
        self._rest_end = end

    def end(self) -> None:
        if self._rest is not None:
            tokens = self._rest_end - self._rest_begins
            self._rest.set(first_token=self._rest_begins, tokens=tokens, chunks=self.count - MOST_CHUNKS)
            self._rest.end(at_s=self.ended_s)
