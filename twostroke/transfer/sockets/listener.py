"""The listener accepts page connections, and serves each admitted reader on a thread of its own."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from twostroke.base.errors import InvalidRequest, ServeError
from twostroke.transfer.copy_threads import hang_up
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import HANDSHAKE_S, ReaderValidator
from twostroke.transfer.sockets.tls import PLAIN, SocketWrapper

log = logging.getLogger(__name__)

MAX_READERS = 1024
"""Readers served at once; further connections are closed."""
MAX_STRANGERS = 64
"""Connections in the handshake. Beyond that the oldest is closed, so that silent clients keep no reader out."""
_ACCEPT_RETRY_S = 0.1
"""Pause after accept has failed for lack of descriptors or memory."""


class Listener:
    """Listens until closed. `serve` is called with an admitted reader, and ends by an exception."""

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        validator: ReaderValidator,
        serve: Callable[[socket.socket], None],
        wrapper: SocketWrapper = PLAIN,
        path: Path | None = None,
    ) -> None:
        """`path`: the file of a Unix socket, which `close` removes."""
        self._path = path
        self._name = name
        self._wrapper = wrapper
        self._sock = sock
        self._validator = validator
        self._serve = serve
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._strangers: dict[threading.Thread, socket.socket] = {}
        """Connections in the handshake, the oldest first."""
        self._readers: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Disconnects all readers, and blocks until all threads have ended."""
        self._closing.set()
        hang_up(self._sock)
        self._acceptor.join()
        self._sock.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
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
                self._validator.refuse("full")
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._validator.refuse("crowded")
                hang_up(self._strangers.pop(next(iter(self._strangers))))
            thread = threading.Thread(target=self._handle, args=(connection,), name=f"{self._name}-serve", daemon=True)
            try:
                thread.start()  # it waits for the lock before it looks itself up
            except RuntimeError as error:
                log.warning("page connection not served transport=%s error=%s", self._name, error)
                self._validator.refuse("full")
                connection.close()
                return
            self._strangers[thread] = connection

    def _handle(self, connection: socket.socket) -> None:
        me = threading.current_thread()
        try:
            deadline = Deadline.after(HANDSHAKE_S)
            connection = self._wrapped(connection)
            self._wrapper.shake_hands(connection, deadline)
            self._validator.admit(connection, deadline)
            with self._lock:
                if self._strangers.pop(me, None) is None:
                    return
                self._readers[me] = connection
            self._serve(connection)
        except TimeoutError as error:
            self._validator.refuse("slow")
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLEOFError):
                self._validator.refuse("tls")
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except (OSError, EOFError) as error:
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except InvalidRequest as error:
            self._validator.refuse("garbage")
            log.warning("page connection dropped transport=%s garbage=%s", self._name, error.message)
        except ServeError as error:
            kind = error.label()
            self._validator.refuse(kind)
            log.warning("page reader refused transport=%s error=%s reason=%s", self._name, kind, error.message)
        finally:
            with self._lock:
                self._strangers.pop(me, None)
                self._readers.pop(me, None)
                connection.close()

    def _wrapped(self, connection: socket.socket) -> socket.socket:
        """Wraps the connection, and registers the result as this thread's connection to hang up on."""
        with self._lock:
            wrapped = self._wrapper.accepted(connection)
            me = threading.current_thread()
            if me in self._strangers:
                self._strangers[me] = wrapped
            return wrapped
