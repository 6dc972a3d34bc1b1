"""The owner's door: accepts page connections, and serves each admitted reader on a thread of its own."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable

from twostroke.errors import InvalidRequest, ServeError
from twostroke.transfer.frames import Deadline
from twostroke.transfer.hello import HELLO_S, Gate
from twostroke.transfer.seal import PLAIN, Seal
from twostroke.transfer.threads import hang_up

log = logging.getLogger(__name__)

MAX_READERS = 1024
"""Served at once by one listener; one more is closed unheard."""
MAX_STRANGERS = 64
"""Connections that have not said who they are. One more, and the oldest is closed: those who say nothing keep nobody
out who has something to say."""
_ACCEPT_RETRY_S = 0.1
"""Pause after accept has failed for lack of descriptors or memory."""


class Listener:
    """Until closed. `serve` is called with a reader that was admitted, and ends by an exception."""

    def __init__(
        self, name: str, sock: socket.socket, gate: Gate, serve: Callable[[socket.socket], None], seal: Seal = PLAIN
    ) -> None:
        self._name = name
        self._seal = seal
        self._sock = sock
        self._gate = gate
        self._serve = serve
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._strangers: dict[threading.Thread, socket.socket] = {}
        """The oldest comes first."""
        self._readers: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Hang up on everybody; blocks until all threads have ended."""
        self._closing.set()
        hang_up(self._sock)
        self._acceptor.join()
        self._sock.close()
        with self._lock:
            served = self._strangers | self._readers
            for connection in served.values():
                hang_up(connection)
        for thread in served:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._sock.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("page connection not accepted transport=%s error=%s", self._name, error)
                    self._closing.wait(_ACCEPT_RETRY_S)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._readers) >= MAX_READERS or self._closing.is_set():
                self._gate.refuse("full")
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._gate.refuse("crowded")
                hang_up(self._strangers.pop(next(iter(self._strangers))))
            thread = threading.Thread(target=self._handle, args=(connection,), name=f"{self._name}-serve", daemon=True)
            try:
                thread.start()  # it waits for the lock before it looks itself up
            except RuntimeError as error:
                log.warning("page connection not served transport=%s error=%s", self._name, error)
                self._gate.refuse("full")
                connection.close()
                return
            self._strangers[thread] = connection

    def _handle(self, connection: socket.socket) -> None:
        me = threading.current_thread()
        try:
            deadline = Deadline.after(HELLO_S)
            connection = self._sealed(connection)
            self._seal.shake_hands(connection, deadline)
            self._gate.admit(connection, deadline)
            with self._lock:
                if self._strangers.pop(me, None) is None:
                    return
                self._readers[me] = connection
            self._serve(connection)
        except TimeoutError as error:
            self._gate.refuse("slow")
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLEOFError):
                self._gate.refuse("tls")
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except (OSError, EOFError) as error:
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except InvalidRequest as error:
            self._gate.refuse("garbage")
            log.warning("page connection dropped transport=%s garbage=%s", self._name, error.message)
        except ServeError as error:
            kind = error.label()
            self._gate.refuse(kind)
            log.warning("page reader refused transport=%s error=%s reason=%s", self._name, kind, error.message)
        finally:
            with self._lock:
                self._strangers.pop(me, None)
                self._readers.pop(me, None)
                connection.close()

    def _sealed(self, connection: socket.socket) -> socket.socket:
        """Whoever hangs up on this thread's connection reaches this one from here on."""
        with self._lock:
            sealed = self._seal.accepted(connection)
            me = threading.current_thread()
            if me in self._strangers:
                self._strangers[me] = sealed
            return sealed
