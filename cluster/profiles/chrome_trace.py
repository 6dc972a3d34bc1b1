"""Profiles as events of Chrome's trace format, which ui.perfetto.dev and chrome://tracing open. Pure.

A process of the trace is a router or worker. Its threads are the tracks "engine" and "work loop", and as many
"requests" as were served at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.profiles.collecting import ProcessProfile, kernels_of
from twostroke.observability.profiler import ENGINE, WORK_LOOP
from twostroke.rpc.traces import attributes_of
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.span import Value

Event = dict[str, Any]

TRACKS: Final = {ENGINE: 1, WORK_LOOP: 2}
"""Thread ids of a process's tracks; those of requests follow."""
FIRST_REQUESTS: Final = 10
ROLES: Final = ("router", "prefill", "decode")


def events_of(profiles: Sequence[ProcessProfile]) -> Iterator[Event]:
    """Yields the events of all processes; time 0 is when the first of them began to record."""
    recorded = [profile for profile in profiles if profile.about.end_ns]
    zero_ns = min((profile.about.begin_ns + profile.about.clock_offset_ns for profile in recorded), default=0)
    in_order = sorted(recorded, key=lambda profile: (ROLES.index(profile.about.role), profile.name))
    for pid, profile in enumerate(in_order, start=1):
        yield from _Process(pid, profile, profile.about.clock_offset_ns - zero_ns).events()


@dataclass(slots=True)
class _Lane:
    """A track on which requests follow one another; parts of one lie within it."""

    open: list[control_pb2.TraceSpan] = field(default_factory=list)
    """The spans that have not ended at the latest start, outermost first."""

    def begin(self, span: control_pb2.TraceSpan) -> bool:
        """Closes what has ended by the span's start. Returns whether the span can lie on this track."""
        while self.open and self.open[-1].end_s <= span.start_s:
            self.open.pop()
        return not self.open or (self.open[-1].trace_id == span.trace_id and span.end_s <= self.open[-1].end_s)


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    profile: ProcessProfile
    shift_ns: int
    """Nanoseconds to add to a time by the process's monotonic clock."""

    def events(self) -> Iterator[Event]:
        about = self.profile.about
        yield self._named("process_name", 0, name=f"{self.profile.name} ({about.machine}, pid {about.pid})")
        yield self._named("process_sort_index", 0, sort_index=self.pid)
        tracks = {piece.track for piece in self.profile.slices}
        for track in TRACKS:
            if track in tracks:
                yield self._named("thread_name", TRACKS[track], name=track)
        for piece in sorted(self.profile.slices, key=lambda piece: (piece.start_ns, -piece.end_ns)):
            yield self._slice(TRACKS[piece.track], piece.name, "worker", piece.start_ns, piece.end_ns, piece.facts)
            yield from self._kernels(piece)
        yield from self._requests()

    def _kernels(self, piece: control_pb2.ProfileSlice) -> Iterator[Event]:
        for kernel in kernels_of(piece):
            share = self.profile.share_of_limit(kernel)
            facts = {
                "layer": kernel.layer,
                "rows": kernel.rows,
                "threads": kernel.threads,
                "bytes": kernel.bytes,
                "flops": kernel.operations,
            }
            if share is not None:
                facts["share_of_limit"] = round(share, 4)
            yield self._slice(TRACKS[piece.track], kernel.name, "kernel", kernel.start_ns, kernel.end_ns, facts)

    def _requests(self) -> Iterator[Event]:
        lanes: list[_Lane] = []
        for span in sorted(self.profile.spans, key=lambda span: (span.start_s, -span.end_s)):
            lane = next((lane for lane in lanes if lane.begin(span)), None)
            if lane is None:
                lanes.append(lane := _Lane())
                yield self._named("thread_name", FIRST_REQUESTS + len(lanes) - 1, name=f"requests {len(lanes)}")
            lane.open.append(span)
            yield from self._span(FIRST_REQUESTS + lanes.index(lane), span)

    def _span(self, tid: int, span: control_pb2.TraceSpan) -> Iterator[Event]:
        """Yields the events of a span. One that began before the recording is shown from the recording's start."""
        start_ns = max(self._monotonic_ns(span.start_s), self.profile.about.begin_ns)
        facts: dict[str, Value] = {"trace": span.trace_id, **attributes_of(span.attributes)}
        facts["seconds"] = span.end_s - span.start_s
        if span.HasField("error"):
            facts["error"] = span.error
        yield self._slice(tid, span.name, "request", start_ns, max(start_ns, self._monotonic_ns(span.end_s)), facts)
        for event in span.events:
            at_ns = self._monotonic_ns(event.at_s)
            if at_ns >= start_ns:
                yield {
                    **self._event("i", tid, event.name, at_ns, attributes_of(event.attributes)),
                    "cat": "request",
                    "s": "t",
                }

    def _monotonic_ns(self, unix_s: float) -> int:
        return round(unix_s * 1e9) - self.profile.about.wall_offset_ns

    def _slice(
        self, tid: int, name: str, category: str, start_ns: int, end_ns: int, facts: Mapping[str, Value]
    ) -> Event:
        event = self._event("X", tid, name, start_ns, facts)
        return {**event, "cat": category, "dur": (end_ns - start_ns) / 1e3}

    def _event(self, phase: str, tid: int, name: str, at_ns: int, facts: Mapping[str, Value]) -> Event:
        """Times are in microseconds, exact to the nanosecond."""
        ts = (at_ns + self.shift_ns) / 1e3
        return {"ph": phase, "name": name, "pid": self.pid, "tid": tid, "ts": ts, "args": dict(facts)}

    def _named(self, what: str, tid: int, **names: Value) -> Event:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": names}
