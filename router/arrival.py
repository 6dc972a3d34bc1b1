"""One connection that comes over TLS, until its handshake is over: it counts, is given little time, and makes room.

asyncio's own servers show a connection only after that: who says nothing would have a descriptor for a minute, unseen.
"""

from __future__ import annotations

import asyncio
import ssl
import traceback
import weakref
from typing import Any, ClassVar

from router.http_protocol import HEADERS_S, TimedProtocol


class SealedArrival(asyncio.Protocol):
    timed: ClassVar[type[TimedProtocol]]
    """What it becomes."""
    context: ClassVar[ssl.SSLContext]
    arriving: ClassVar[weakref.WeakSet[SealedArrival]]
    """Those that are accepted, and shake hands still."""
    waiting: ClassVar[dict[SealedArrival, asyncio.Transport]]
    """The oldest comes first."""

    def __init__(self, **made_of: Any) -> None:
        self._made_of = made_of
        self._early: list[bytes] = []
        """What came right behind the handshake."""
        self._inner: TimedProtocol | None = None
        self._is_lost = False
        self.arriving.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what comes is for the handshake
        self.waiting[self] = transport
        self._shaking = asyncio.get_running_loop().create_task(self._shake_hands(transport), name="TLS handshake")
        if len(self.waiting) > self.timed.most_connections:
            self.waiting.pop(next(iter(self.waiting))).abort()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._inner is not None:
            self._inner.connection_lost(exc)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            if transport.is_closing():
                return
            sealed = await asyncio.get_running_loop().start_tls(
                transport, self, self.context, server_side=True, ssl_handshake_timeout=HEADERS_S
            )
        except OSError as error:  # of TLS, too: whoever it was has been told what can be told
            # The error and its frames hold each other, and with them a quarter of a megabyte for the cipher.
            traceback.clear_frames(error.__traceback__)
            return
        finally:
            self.waiting.pop(self, None)
            self.arriving.discard(self)
        if sealed is None or self._is_lost:
            return
        self._inner = self.timed(**self._made_of)
        sealed.set_protocol(self._inner)
        self._inner.connection_made(sealed)
        if self._early:
            self._inner.data_received(b"".join(self._early))


def sealed_arrival(timed: type[TimedProtocol], context: ssl.SSLContext) -> type[SealedArrival]:
    facts = {"timed": timed, "context": context, "arriving": weakref.WeakSet(), "waiting": {}}
    return type("SealedArrival", (SealedArrival,), facts)
