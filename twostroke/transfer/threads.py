"""Threads of the transports: all of them are daemons, cost nothing while idle, and end when their owner closes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from twostroke.errors import InvalidRequest, ServeError

log = logging.getLogger(__name__)

State = TypeVar("State")
Result = TypeVar("Result")

MAX_CONNECTIONS = 1024
"""Served at once by one listener; one more is closed unheard."""
_ACCEPT_RETRY_S = 0.1
"""Pause after accept has failed for lack of descriptors or memory."""


async def off_loop(function: Callable[[], Result]) -> Result:
    """Run a function that blocks on a thread of its own, so that the event loop does not."""
    future: Future[Result] = Future()
    thread = threading.Thread(target=_settle, args=(future, function), name="pages-off-loop", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    finally:
        if future.done():
            thread.join()


class Lanes(Generic[State]):
    """Jobs in order of arrival over a few threads, each of which has a state of its own."""

    def __init__(self, name: str, states: Sequence[State]) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[State], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(state,), name=f"{name}-{index}", daemon=True)
            for index, state in enumerate(states)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[State], Result], future: Future[Result]) -> None:
        """`future` gets what the job returns or raises, ConnectionAbortedError if the lanes are closed.

        Cancelling it before the job's turn drops the job.
        """
        with self._lock:
            if self._closed:
                future.set_exception(ConnectionAbortedError("the peer or the transport was closed"))
            else:
                self._jobs.put((future, job))

    def close(self) -> None:
        """Let the threads end after the jobs that they have; blocks until then."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, state: State) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if future.set_running_or_notify_cancel():
                _finish(future, functools.partial(job, state))
            del entry, future, job


class Listener:
    """Accepts connections and serves each on a thread of its own, until closed."""

    def __init__(self, name: str, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._name = name
        self._sock = sock
        self._serve = serve
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._served: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Hang up on everybody; blocks until all threads have ended."""
        self._closing.set()
        hang_up(self._sock)
        self._acceptor.join()
        self._sock.close()
        with self._lock:
            served = dict(self._served)
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
            with self._lock:
                if len(self._served) >= MAX_CONNECTIONS or self._closing.is_set():
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._handle, args=(connection,), name=f"{self._name}-serve", daemon=True
                )
                self._served[thread] = connection
            thread.start()

    def _handle(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except (OSError, EOFError) as error:
            log.debug("page connection ended transport=%s reason=%s", self._name, error)
        except InvalidRequest as error:
            log.warning("page connection dropped transport=%s garbage=%s", self._name, error.message)
        except ServeError as error:
            log.warning(
                "page reader refused transport=%s error=%s reason=%s", self._name, type(error).__name__, error.message
            )
        finally:
            with self._lock:
                del self._served[threading.current_thread()]
                connection.close()


def hang_up(sock: socket.socket) -> None:
    """Wake every thread that blocks on this socket; its owner closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other end of an idle connection is gone, or speaks out of turn."""
    try:
        sock.setblocking(False)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _settle(future: Future[Result], function: Callable[[], Result]) -> None:
    if future.set_running_or_notify_cancel():
        _finish(future, function)


def _finish(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        result = function()
    except BaseException as error:  # whoever waits gets it
        future.set_exception(error)
    else:
        future.set_result(result)
