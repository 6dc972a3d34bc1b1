"""Accepts from a listening socket that several routers share, so that each gets about as many connections.

A new connection wakes all of them. A router accepts it at once if none has fewer connections. Otherwise it leaves it to
the others for a moment, and then accepts it if it is still there: a router with fewer may be busy or frozen. A router
that cannot serve, because it drains or knows no worker, counts as having more connections than any other.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from array import array
from collections.abc import Callable

from router.shared_memory import MOST_PROCESSES, PROCESS_BYTES, RouterMemory

log = logging.getLogger(__name__)

TURN_S = 0.002
"""Seconds for which a new connection is left to routers that have fewer."""
IDLE_TURN_S = 0.25
"""Seconds for which a router that serves nothing leaves a new connection to others."""
IDLE_COUNT = 1 << 30
"""Number that a router that serves nothing adds to its connections, so that others have fewer."""
MOST_AT_ONCE = 128
"""Connections that are accepted before the event loop does something else."""
TOLERANCE = 8
"""A router with n connections leaves turns only to routers with more than n / TOLERANCE fewer. So routers do not wait
for each other at each connection of a burst."""
NO_ROOM_S = 1.0
"""Seconds until the next try when no descriptor or memory is left for a connection."""

_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_COUNT = struct.Struct("=I")
_STRIDE = PROCESS_BYTES // _COUNT.size


class FairAcceptor:
    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        count_served: Callable[[], int],
        shared: RouterMemory,
        serves: Callable[[], bool] = lambda: True,
    ) -> None:
        """`count_served` returns how many connections of this process have a protocol. `serves` returns whether this
        router can serve requests."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._count_served = count_served
        self._shared = shared
        self._serves = serves
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        """Tasks of accepted connections that have no protocol yet."""
        self._waiting: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._publish(self._count())
        self._listen()

    def stop(self) -> None:
        """Leaves the listening socket, which stays open, to other processes."""
        self._loop.remove_reader(self._listener)
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        self._shared.bytes[self._place(self._shared.number)] = bytes(_COUNT.size)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._take_turn)

    def _pause(self, pause_s: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener)
        self._waiting = self._loop.call_later(pause_s, then)

    def _take_turn(self) -> None:
        """Accepts connections until another router has fewer. Called when the listening socket is readable."""
        for _ in range(MOST_AT_ONCE):
            count = self._count()
            self._publish(count)
            if self._is_anothers_turn(count):
                self._pause(TURN_S if count < IDLE_COUNT else IDLE_TURN_S, self._take_what_is_left)
                return
            if not self._accept():
                return

    def _take_what_is_left(self) -> None:
        """Accepts some of the connections that routers with fewer have not accepted meanwhile."""
        self._waiting = None
        self._listen()
        for _ in range(min(MOST_AT_ONCE, 1 + self._count() // TOLERANCE)):
            if not self._accept():
                break
        self._publish(self._count())

    def _accept(self) -> bool:
        """Accepts a connection. Returns False where none waits, or no descriptor or memory is left for it."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.error("no room for a connection error=%s", error)
            self._pause(NO_ROOM_S, self._take_what_is_left)
            return False
        connection.setblocking(False)
        arriving = self._loop.create_task(self._begin(connection), name="connection arrives")
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arriving.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:  # its client is gone already
            log.debug("connection ended while it was accepted error=%s", error)
            connection.close()

    def _count(self) -> int:
        count = self._count_served() + len(self._arriving)
        return count if self._serves() else count + IDLE_COUNT

    def _publish(self, count: int) -> None:
        """Writes the count plus 1 where other routers read it. 0 stands for a process that accepts nothing."""
        self._shared.bytes[self._place(self._shared.number)] = _COUNT.pack(count + 1)

    def _is_anothers_turn(self, count: int) -> bool:
        """Returns whether a router with fewer connections is there. Clears the counts of routers that have ended."""
        least = count - count // TOLERANCE
        published = array("I", self._shared.bytes[: MOST_PROCESSES * PROCESS_BYTES])[::_STRIDE]
        for number in self._shared.others:
            if 0 < published[number] <= least:
                if not self._shared.has_ended(number):
                    return True
                self._shared.bytes[self._place(number)] = bytes(_COUNT.size)
        return False

    @staticmethod
    def _place(number: int) -> slice:
        return slice(PROCESS_BYTES * number, PROCESS_BYTES * number + _COUNT.size)
