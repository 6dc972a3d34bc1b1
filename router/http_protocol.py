"""One HTTP connection, held to time: who is slow to ask or to listen, or one too many, does not keep others out."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
"""For the headers of a request, from the connection or from their first byte on."""
STALL_S = 60.0
"""A client that takes nothing of its answer for so long is gone."""
MOST_HEADER_BYTES = 64 << 10
"""Of one request; a token to resume after may have 16 KiB."""


class TimedProtocol(H11Protocol):
    most_connections: ClassVar[int]
    arriving: ClassVar[weakref.WeakSet[TimedProtocol]]
    """Those that are accepted, and shake hands still. Where that fails nobody tells; then asyncio just drops them."""

    def __init__(self, *made_of: Any, **options: Any) -> None:
        super().__init__(*made_of, **options)
        self.arriving.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.arriving.discard(self)
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        self._headers_due: asyncio.TimerHandle | None = self.loop.call_later(HEADERS_S, self._end_unless_served)
        self._reading_due: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_served:
            self._headers_due = _stop(self._headers_due)
        elif self._headers_due is None:
            self._waits_since_s = self.loop.time()
            self._headers_due = self.loop.call_later(HEADERS_S, self._end_unless_served)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading_due = _stop(self._reading_due)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_due = _stop(self._headers_due)
        self._reading_due = _stop(self._reading_due)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it where a connection was cut off, and with it all of this

    @property
    def is_served(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_unless_served(self) -> None:
        if not self.is_served:
            self.transport.abort()

    def _make_room(self) -> None:
        """Of those that ask nothing the one that waits longest goes: silence keeps nobody out."""
        waiting = [each for each in self.connections if isinstance(each, TimedProtocol) and not each.is_served]
        min(waiting, key=lambda each: each._waits_since_s).transport.abort()


def timed_protocol(most_connections: int) -> type[TimedProtocol]:
    facts = {"most_connections": most_connections, "arriving": weakref.WeakSet()}
    return type("TimedProtocol", (TimedProtocol,), facts)


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """None, for its place."""
    if timer is not None:
        timer.cancel()
    return None
