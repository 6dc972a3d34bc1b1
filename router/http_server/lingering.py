"""Ends connections whose clients have their response and may still be sending."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from router.http_server.loop_share import LoopShare

LINGER_BYTES = 64 << 20
"""Bytes of a refused body that are read and discarded: else a client that still sends would miss the response."""
LINGER_S = 10.0
"""Seconds for which the rest of a refused body is thrown away."""
LINGER_SILENCE_S = 2.0
"""Seconds after which a client that writes nothing more, and was sent all of its answer, is taken to have seen it."""
SLOW_S = 60.0
"""Further seconds for a client that is slow to take its answer."""


class ConnectionTimer:
    """The timer that ends a connection without a request in time, an idle one, or one that lingers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def restart(self, delay_s: float, end: Any) -> None:
        self.stop()
        self._due = self.loop.call_later(delay_s, end)


class Lingering:
    """Discards what a client sends until it is silent or its time is over, and then closes the connection."""

    def __init__(self, transport: asyncio.Transport, share: LoopShare, timer: ConnectionTimer) -> None:
        self._transport = transport
        self._share = share
        self._timer = timer
        self._dropped_bytes = 0
        self._until_s = timer.loop.time() + LINGER_S
        if transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client is gone, which reading will show
                transport.write_eof()
        self._wait(LINGER_SILENCE_S)

    def drop(self, count: int) -> None:
        self._dropped_bytes += count
        left_s = self._until_s - self._timer.loop.time()
        if self._dropped_bytes > LINGER_BYTES or left_s <= 0:
            self._transport.abort()
        else:
            self._wait(min(LINGER_SILENCE_S, left_s))

    def _wait(self, seconds: float) -> None:
        """Reads the next bytes when it is their turn. The connection may end if none come within `seconds`."""
        self._timer.restart(seconds, self._end_silent)
        self._transport.pause_reading()
        self._share.drain(self._read)

    def _read(self) -> bool:
        if self._transport.is_closing():
            return False
        self._transport.resume_reading()
        return True

    def _end_silent(self) -> None:
        """Ends a silent connection, unless the client still has to read its response and has time for that."""
        if self._transport.get_write_buffer_size() and self._timer.loop.time() < self._until_s + SLOW_S:
            self._timer.restart(LINGER_SILENCE_S, self._end_silent)
        else:
            self._transport.abort()
