"""Profiles <-> messages, and the profile of the process that is asked."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

from twostroke.errors import InvalidRequest
from twostroke.profiler import Profile, Profiler, Slice, size_bytes_of
from twostroke.rpc.traces import span_to_message
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import Span

MOST_SECONDS = 60.0
ANSWER_S = 30.0
"""Seconds for an answer after the recording: the first one measures the machine's limits."""
PART_BYTES = 256 << 10
"""A message holds so much, so that serving goes on between two of them."""


async def profile_here(
    profiler: Profiler,
    recorder: Recorder,
    seconds: float,
    role: str,
    limits_of: Callable[[], Awaitable[control_pb2.MachineLimits | None]] | None = None,
) -> AsyncGenerator[control_pb2.ProfilePart, None]:
    """Record for some seconds, then yield what was recorded. `limits_of` is called in between.

    Raises Overloaded while another profile runs.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise InvalidRequest(f"seconds must be above 0 and at most {MOST_SECONDS:.0f}, got {seconds}", field="seconds")
    with profiler.recording() as profile, recorder.watched(profile.add):
        begin_ns = time.monotonic_ns()
        await asyncio.sleep(seconds)
        end_ns = time.monotonic_ns()
    about = control_pb2.ProfiledProcess(
        role=role,
        machine=socket.gethostname(),
        pid=os.getpid(),
        wall_offset_ns=time.time_ns() - time.monotonic_ns(),
        begin_ns=begin_ns,
        end_ns=end_ns,
        dropped=profile.dropped,
        limits=None if limits_of is None else await limits_of(),
    )
    yield control_pb2.ProfilePart(process=recorder.process, about=about)
    for items in _parts(profile):
        yield _part(recorder.process, items)
        await asyncio.sleep(0)  # other calls first


def _parts(profile: Profile) -> Iterator[Sequence[Slice | Span]]:
    items: list[Slice | Span] = []
    size_bytes = 0
    while profile.items:
        item = profile.items.popleft()
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
