"""The loop of the gRPC port's process: it accepts clients, keeps them within limits, and drives their connections."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

from router.grpc_listener.call_window import CallWindow
from router.grpc_listener.connection import PIECE_BYTES, READ, ClientConnection, ConnectionStage, has_hung_up
from router.grpc_listener.connection_cost import CREDIT_PER_S, FRAMES, UNREACHED
from twostroke.security.connection_room import ConnectionRoom

ARRIVAL_S = 20.0
"""Seconds for the handshake of TLS and the preface, and for the header fields of a call."""
LINGER_S = 2.0
"""Seconds for which nobody reads from or closes a client that was cut and told so: a flood costs who sends it."""
MOST_LINGERING = 1024
"""Sockets of clients that were cut and are not closed yet."""
ACCEPTS = 32
"""Clients that are accepted at once, before the others have their turn."""
TRY_AGAIN_S = 0.1
"""Pause in seconds after no descriptor was left for a client."""
LOOK_S = 0.5
"""Seconds between two looks for clients that did not arrive in time."""
STALL_S = 60.0
"""Seconds after which a client that takes nothing of what waits for it is closed, as over HTTP."""
STUCK_S = 5.0
"""Seconds after which such a client makes room for newcomers, and is closed if the router has ended its side."""
PACE_S = 0.2
"""Seconds whose credit is given at once to a connection that waits for credit."""
MOST_PACED_S = 600.0
"""Seconds after which a connection that waits for credit, and never has a second's worth, is cut as a flood."""
STOP_S = 2.0
"""Seconds for clients to take the rest when the router has ended."""
SEEN, LEAVE = b".", b"l"
"""Bytes that the router writes: it has seen one more call; accept no more clients. End of file: it has ended."""

OWN, SHARED = "own", "shared"
"""Whether the queue of the listening socket ends with the router, or is kept by the process that started it."""

Context = Callable[[], ssl.SSLContext]
Handler = Callable[[int], None]


class GrpcListener:
    def __init__(
        self,
        listening: socket.socket,
        control: int,
        backend: str,
        most: int,
        context: Context | None,
        told: int,
        *,
        is_shared: bool = False,
    ) -> None:
        """`control`: what the router writes. `told`: where it reads why connections were cut. `most` connections.

        is_shared: other processes hold the listening socket too, so clients in its queue outlive this process.
        """
        self.backend = backend
        self._listening = listening
        self._is_shared = is_shared
        self._control = control
        self._told = told
        self._most = most
        self._context = context
        self._selector = selectors.DefaultSelector()
        self._now_s = time.monotonic()
        self._connections: dict[ClientConnection, None] = {}
        """All connections, the oldest first."""
        self._room = ConnectionRoom[ClientConnection]()
        self._searched_s = self._now_s
        """When those that may make room were looked for."""
        self._lingering: deque[tuple[float, socket.socket]] = deque()
        self._window = CallWindow()
        self._turns: dict[ClientConnection, None] = {}
        """Connections whose next call waits for its turn, in the order of their turns."""
        self._paced: dict[ClientConnection, None] = {}
        """Connections that wait for credit."""
        self._pays_at_s = self._now_s
        """When the connections that wait for credit are looked at again, in seconds."""
        self._has_failed_to_dial = False
        self._accepts_at_s: float | None = None
        """When clients are accepted again, in seconds. None: accepting has not been paused."""
        self._looks_at_s = self._now_s + LOOK_S
        self._ends_at_s: float | None = None

    def run(self) -> None:
        """Returns when the router has ended and clients have taken the rest, or some seconds later."""
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        self.watch(self._listening, READ, self._on_listening)
        while self._ends_at_s is None or (self._connections and self._now_s < self._ends_at_s):
            ready = self._selector.select(self._wait_s())
            self._now_s = time.monotonic()
            for key, events in ready:
                key.data(events)
            self._grant()
            self._pay()
            self._do_timed_work()
        for _, client in self._lingering:
            client.close()

    # For connections

    def watch(self, sock: socket.socket, events: int, call: Handler) -> None:
        if sock.fileno() < 0:
            return
        if not events:
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            return
        try:
            self._selector.modify(sock, events, call)
        except KeyError:
            self._selector.register(sock, events, call)

    def now_s(self) -> float:
        return self._now_s

    def try_begin_call(self, connection: ClientConnection, stream: int) -> bool:
        if not self._turns and self._window.take((connection, stream), self._now_s):
            return True
        self._turns[connection] = None
        return False

    def pace(self, connection: ClientConnection) -> None:
        self._paced[connection] = None

    def call_ended(self, connection: ClientConnection, stream: int) -> None:
        self._window.ended((connection, stream))

    def cut(self, connection: ClientConnection, why: str) -> None:
        self._forget(connection)
        self._lingering.append((self._now_s + LINGER_S, connection.client))
        if len(self._lingering) > MOST_LINGERING:
            self._lingering.popleft()[1].close()
        address = ""
        with contextlib.suppress(OSError):
            address = connection.client.getpeername()[0]
        self._tell(why, address)

    def failed_to_dial(self, error: OSError) -> None:
        if not self._has_failed_to_dial:
            self._has_failed_to_dial = True
            self._tell(UNREACHED, str(error))

    def _tell(self, what: str, detail: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._told, f"{what} {detail}\n".encode())

    def closed(self, connection: ClientConnection) -> None:
        self._forget(connection)

    def _forget(self, connection: ClientConnection) -> None:
        self._connections.pop(connection, None)
        self._turns.pop(connection, None)
        self._paced.pop(connection, None)

    # Its own events

    def _on_listening(self, _: int) -> None:
        for _ in range(ACCEPTS):
            try:
                client, _ = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor is left
                self.watch(self._listening, 0, self._on_listening)
                self._accepts_at_s = self._now_s + TRY_AGAIN_S
                return
            self._take(client)

    def _take(self, client: socket.socket) -> None:
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            try:
                client = self._context().wrap_socket(client, server_side=True, do_handshake_on_connect=False)
            except OSError:
                client.close()
                return
        self._connections[ClientConnection(self, client)] = None
        if len(self._connections) > self._most:
            self._make_room()

    def _make_room(self) -> None:
        """Closes one connection, the first that exists of these:

        the one whose client has taken nothing for longest; the oldest idle one without a useful call; the one that
        is idle for longest; the newest one.
        """
        going = self._room.next(len(self._connections), self._in_order_of_going, self._may_go, self._now_s)
        (next(reversed(self._connections)) if going is None else going).close()

    def _may_go(self, connection: ClientConnection) -> bool:
        """Returns whether one that was found still may: it has not called since."""
        if connection not in self._connections:
            return False
        is_idle = not connection.has_calls and connection.idle_since_s <= self._searched_s
        return is_idle or connection.stuck_s() >= STUCK_S

    def _in_order_of_going(self) -> list[ClientConnection]:
        self._searched_s = self._now_s
        stuck = [each for each in self._connections if each.stuck_s() >= STUCK_S]
        idle = [each for each in self._connections if not each.has_calls and each.stuck_s() < STUCK_S]
        stuck.sort(key=lambda each: -each.stuck_s())
        unused = [each for each in idle if not each.cost.useful_calls]
        return [*stuck, *(unused or sorted(idle, key=lambda each: each.idle_since_s))]

    def _on_control(self, _: int) -> None:
        said = os.read(self._control, PIECE_BYTES)
        if not said:
            self._selector.unregister(self._control)
            self._leave()
            self._ends_at_s = self._now_s + STOP_S
            return
        self._window.seen(said.count(SEEN))
        if LEAVE in said:
            self._leave()

    def _leave(self) -> None:
        """Closes the listening socket. Clients in its queue are taken first, unless another process may take them."""
        with contextlib.suppress(OSError):
            while not self._is_shared:
                self._take(self._listening.accept()[0])
        self.watch(self._listening, 0, self._on_listening)
        self._accepts_at_s = None
        self._listening.close()

    # What is due at certain times

    def _grant(self) -> None:
        """Resumes connections whose next call may be passed on now."""
        while self._turns:
            connection = next(iter(self._turns))
            if has_hung_up(connection.client):
                connection.close()
            elif self._window.take((connection, connection.next_stream), self._now_s):
                del self._turns[connection]
                connection.resume()
            else:
                break

    def _pay(self) -> None:
        """Resumes connections to which time has given credit, and cuts those that have waited for too long."""
        if self._now_s < self._pays_at_s:
            return
        self._pays_at_s = self._now_s + PACE_S
        for each in list(self._paced):
            if has_hung_up(each.client):
                each.close()
            elif each.paced_since_s is not None and each.paced_since_s + MOST_PACED_S <= self._now_s:
                each.cut(FRAMES)
            elif each.cost.credit(self._now_s) >= CREDIT_PER_S * PACE_S:
                del self._paced[each]
                each.resume()

    def _do_timed_work(self) -> None:
        """Closes sockets that have lingered, accepts again after a pause, and closes clients that are too slow."""
        while self._lingering and self._lingering[0][0] <= self._now_s:
            self._lingering.popleft()[1].close()
        if self._accepts_at_s is not None and self._now_s >= self._accepts_at_s:
            self._accepts_at_s = None
            self.watch(self._listening, READ, self._on_listening)
        if self._now_s >= self._looks_at_s:
            self._looks_at_s = self._now_s + LOOK_S
            for each in [each for each in self._connections if self._is_late(each)]:
                each.close()

    def _is_late(self, connection: ClientConnection) -> bool:
        if connection.stage is ConnectionStage.ARRIVING:
            return connection.idle_since_s + ARRIVAL_S < self._now_s
        since_s = connection.headers_since_s
        if since_s is not None and since_s + ARRIVAL_S < self._now_s and not connection.is_paced:
            return True
        stuck_s = connection.stuck_s()
        return stuck_s >= STALL_S or (stuck_s >= STUCK_S and connection.is_left)

    def _wait_s(self) -> float:
        """Returns for how many seconds only events have to be looked after."""
        until_s = [self._looks_at_s]
        if self._turns and (expires_s := self._window.expires_s()) is not None:
            until_s.append(expires_s)
        if self._paced:
            until_s.append(self._pays_at_s)
        if self._lingering:
            until_s.append(self._lingering[0][0])
        if self._accepts_at_s is not None:
            until_s.append(self._accepts_at_s)
        return max(0.0, min(until_s) - time.monotonic())
