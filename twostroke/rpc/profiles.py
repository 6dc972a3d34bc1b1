"""Profiles <-> messages, and the profile of the process that is asked."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from twostroke.base.errors import InvalidRequest
from twostroke.observability.profiler import Profile, Profiler, Slice, size_bytes_of
from twostroke.rpc.traces import span_to_message
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import Span

MOST_SECONDS = 60.0
ANSWER_S = 30.0
"""Seconds for an answer after the recording: the first one measures the machine's limits."""
PART_BYTES = 256 << 10
"""Most of a profile in one message. Serving continues between two messages."""


async def _now_ns() -> int:
    return time.monotonic_ns()


async def _no_limits() -> None:
    return None


@dataclass(frozen=True, slots=True)
class ProfiledParts:
    """The parts of a process that take part in a profile."""

    role: str
    recorder: Recorder
    profiler: Profiler
    pause_ns: Callable[[], Awaitable[int]] = _now_ns
    """Waits until no step runs, and returns the time of that moment."""
    limits: Callable[[], Awaitable[control_pb2.MachineLimits | None]] = _no_limits


async def profile_here(parts: ProfiledParts, seconds: float) -> AsyncGenerator[control_pb2.ProfilePart, None]:
    """Records whole steps for some seconds, then yields what was recorded. Raises Overloaded during another profile."""
    if not 0 < seconds <= MOST_SECONDS:
        raise InvalidRequest(f"seconds must be above 0 and at most {MOST_SECONDS:.0f}, got {seconds}", field="seconds")
    with parts.profiler.recording() as profile, parts.recorder.watched(profile.add):
        begin_ns = await parts.pause_ns()
        await asyncio.sleep(seconds)
        end_ns = await parts.pause_ns()
    process = parts.recorder.process
    about = control_pb2.ProfiledProcess(
        role=parts.role,
        machine=socket.gethostname(),
        pid=os.getpid(),
        wall_offset_ns=time.time_ns() - time.monotonic_ns(),
        begin_ns=begin_ns,
        end_ns=end_ns,
        dropped=profile.dropped,
        limits=await parts.limits(),
    )
    yield control_pb2.ProfilePart(process=process, about=about)
    for items in _batches(profile, begin_ns, end_ns):
        yield _part(process, items)
        await asyncio.sleep(0)  # other calls first


def _batches(profile: Profile, begin_ns: int, end_ns: int) -> Iterator[Sequence[Slice | Span]]:
    """Yields what was recorded, without the parts of steps that are not in it as a whole."""
    items: list[Slice | Span] = []
    size_bytes = 0
    while profile.items:
        item = profile.items.popleft()
        if isinstance(item, Slice) and not begin_ns <= item.start_ns < end_ns:
            continue
        items.append(item)
        size_bytes += size_bytes_of(item)
        if size_bytes > PART_BYTES:
            yield items
            items, size_bytes = [], 0
    yield items


def _part(process: str, items: Sequence[Slice | Span]) -> control_pb2.ProfilePart:
    return control_pb2.ProfilePart(
        process=process,
        slices=[control_pb2.ProfileSlice(**item._asdict()) for item in items if isinstance(item, Slice)],
        spans=[span_to_message(item) for item in items if isinstance(item, Span)],
    )
