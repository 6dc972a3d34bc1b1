"""Threads of the transports: all are daemons, cost nothing while idle, and end when their owner closes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

State = TypeVar("State")
Result = TypeVar("Result")


async def off_loop(function: Callable[[], Result]) -> Result:
    """Runs a blocking function on a thread of its own."""
    future: Future[Result] = Future()
    thread = threading.Thread(target=_run_job, args=(future, function), name="pages-off-loop", daemon=True)
    thread.start()
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    finally:
        if future.done():
            thread.join()


class CopyThreads(Generic[State]):
    """A few threads that run jobs in order of arrival; each thread has a state of its own."""

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
        """Queues a job, unless `future` is cancelled. It gets the outcome, or ConnectionAbortedError once closed."""
        with self._lock:
            if self._closed:
                future.set_exception(ConnectionAbortedError("the peer or the transport was closed"))
            else:
                self._jobs.put((future, job))

    def close(self) -> None:
        """Lets the threads end after the jobs that they have; blocks until then."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, state: State) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            _run_job(future, functools.partial(job, state))
            del entry, future, job


def hang_up(sock: socket.socket) -> None:
    """Wakes every thread that blocks on this socket; its owner closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TlsSocket's own would end TLS under the reading thread


def has_hung_up(sock: socket.socket) -> bool:
    """Returns whether the other end of an idle connection is gone, or has sent something unasked."""
    try:
        sock.setblocking(False)
        socket.socket.recv(sock, 1, socket.MSG_PEEK)  # TlsSocket's own cannot peek
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _run_job(future: Future[Result], function: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # the waiter gets it
        future.set_exception(error)
    else:
        future.set_result(result)
