"""A span: something that began and ended, with what is worth knowing of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from twostroke.tracing.context import TraceContext

Value = str | int | float | bool


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
    """One that has not ended. `end` is to be called once; what is said later is lost."""

    __slots__ = ("_attributes", "_events", "_parent_id", "_process", "_take", "context", "has_ended", "name", "start_s")

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
        self._events: list[SpanEvent] = []

    def begin(self, name: str) -> OpenSpan:
        """A part of it, in the same process."""
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
        """A part of it that is over already."""
        part = self.begin(name)
        part.start_s = start_s
        part.set(**attributes)
        part.end(at_s=end_s)

    def set(self, **attributes: Value | None) -> None:
        """None: nothing is known."""
        for name, value in attributes.items():
            if value is not None:
                self._attributes[name] = value

    def event(self, name: str, **attributes: Value) -> None:
        self._events.append(SpanEvent(name, time.time(), attributes))

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
                attributes=self._attributes,
                events=tuple(self._events),
                error=error,
            )
        )
