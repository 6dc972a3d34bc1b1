"""A span: something that began and ended, with what is worth knowing of it, its parts, and the trace it belongs to.

The trace is named by W3C Trace Context, as the header `traceparent` carries it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

HEADER = "traceparent"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_RATIO_BITS = 56
"""The bits of a trace id that decide about sampling. The standard asks them to be random."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits."""
    is_sampled: bool

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """Returns None for an invalid header: the standard asks to ignore it."""
        matched = _FORM.fullmatch(header.strip())
        if matched is None or matched[1] == "ff" or (matched[1] == "00" and matched[5]):
            return None
        trace_id, span_id = int(matched[2], 16), int(matched[3], 16)
        return cls(trace_id, span_id, bool(int(matched[4], 16) & _SAMPLED)) if trace_id and span_id else None

    @classmethod
    def begin(cls, seed: str, ratio: float) -> TraceContext:
        """Begins a trace here. Equal seeds make equal traces, whichever process begins them, and the share `ratio` of
        all seeds is sampled."""
        trace_id = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest(), "big") or 1
        is_sampled = trace_id % (1 << _RATIO_BITS) < ratio * (1 << _RATIO_BITS)
        return cls(trace_id, new_span_id(), is_sampled)

    def child(self) -> TraceContext:
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def header_of(context: TraceContext | None) -> str:
    return "" if context is None else context.header


def new_span_id() -> int:
    return random.getrandbits(64) or 1  # no secret, so that it needs no call of the system


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


@dataclass(slots=True, kw_only=True)
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
    events: Sequence[SpanEvent]
    error: str | None


class OpenSpan(Span):
    """One that has not ended. `end` is to be called once, and nothing is set after it: the span is kept as it is."""

    __slots__ = ("_known", "_take", "has_ended")

    events: list[SpanEvent]

    def __init__(
        self, name: str, process: str, context: TraceContext, parent_id: int | None, take: Callable[[Span], None]
    ) -> None:
        self._known: dict[str, Value] = {}
        now_s = time.time()
        super().__init__(
            name=name, process=process, context=context, parent_id=parent_id, start_s=now_s, end_s=now_s,
            attributes=self._known, events=[], error=None,
        )  # fmt: skip
        self._take = take
        self.has_ended = False

    def begin(self, name: str) -> OpenSpan:
        """Returns a part of it, in the same process."""
        return OpenSpan(name, self.process, self.context.child(), self.context.span_id, self._take)

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
        self._known.update({name: value for name, value in attributes.items() if value is not None})

    def explain(self, make: Callable[[], Mapping[str, Value]]) -> None:
        """Adds attributes that are made when someone reads the span."""
        known = self._known
        self.attributes = LateAttributes(lambda: {**known, **make()})

    def event(self, name: str, **attributes: Value) -> None:
        """Adds an event. One that comes after the span has ended is left out: the span is kept as it is."""
        if not self.has_ended:
            self.events.append(SpanEvent(name, time.time(), attributes))

    def late_event(self, name: str, make: Callable[[], Mapping[str, Value]]) -> None:
        """Adds an event, as `event` does, whose attributes are made when someone reads them."""
        if not self.has_ended:
            self.events.append(SpanEvent(name, time.time(), LateAttributes(make)))

    def end(self, error: str | None = None, at_s: float | None = None) -> None:
        if not self.has_ended:
            self.has_ended, self.error = True, error
            self.end_s = max(self.start_s, time.time() if at_s is None else at_s)
            self._take(self)


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
