"""Starts the process that has a router's gRPC port, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable

from router.child_environment import child_environment
from router.grpc_listener.connection_cost import REASONS, UNREACHED
from router.grpc_listener.listener import LEAVE, OWN, SEEN, SHARED, STOP_S
from twostroke.base.credentials import TlsConfig
from twostroke.security.trusted_paths import private_folder, remove_abandoned_sockets

log = logging.getLogger(__name__)

FOLDER, SUFFIX = "grpc", ".router"
LEAST_AGE_S = 60.0
"""Age in seconds below which a router's socket is kept: its process may be about to listen."""
END_S = STOP_S + 1.0
"""Seconds for the process to end after its router has."""
LOG_EVERY_S = 1.0
"""Seconds between two log lines about connections that were cut."""
AGAIN_S = 0.5
"""Seconds between two starts of a process that ends by itself."""


class ListenerProcess:
    """The process of the gRPC port. While none runs, clients wait in the queue of the listening socket."""

    def __init__(
        self,
        listening: socket.socket,
        most_connections: int,
        tls: TlsConfig | None,
        count_cut: Callable[[str], None],
        *,
        is_shared: bool = False,
    ) -> None:
        """`count_cut` is called for each connection that was cut, with the reason.

        is_shared: other processes hold the listening socket too.
        """
        folder = private_folder(FOLDER)
        remove_abandoned_sockets(folder, SUFFIX, LEAST_AGE_S)
        self.backend = str(folder / f"{secrets.token_hex(8)}{SUFFIX}")
        """Path of the Unix socket at which the router's gRPC server listens."""
        self.port = int(listening.getsockname()[1])
        self.most = most_connections
        self._listening = listening
        files = [] if tls is None else [tls.cert, tls.key, *([] if tls.ca is None else [tls.ca])]
        self._is_shared = is_shared
        queue = SHARED if is_shared else OWN
        self._arguments = [str(listening.fileno()), queue, self.backend, str(most_connections), *files]
        self._count_cut = count_cut
        self._control: int | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._logs_at_s = 0.0

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="grpc listener")

    def saw_call(self) -> None:
        """Tells the process that the router has seen one more call."""
        self._say(SEEN)

    def leave(self) -> None:
        """Accepts no more clients. The connected ones stay."""
        if not self._is_leaving:
            self._is_leaving = True
            self._say(LEAVE)
            self._listening.close()

    async def end(self) -> None:
        """Ends the process after its clients have taken the rest of their answers, or some seconds later."""
        self.leave()
        self._end_control()
        running, self._running = self._running, None
        if running is not None:
            await asyncio.wait([running], timeout=END_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.backend)

    async def _run(self) -> None:
        while not self._is_leaving:
            try:
                theirs, ours = os.pipe()
                os.set_blocking(ours, False)
                self._control = ours
                await self._serve(theirs)
            except OSError as error:
                log.error("no process for the gRPC port error=%s", error)
            finally:
                self._end_control()
            if not self._is_leaving:
                await asyncio.sleep(AGAIN_S)

    async def _serve(self, control: int) -> None:
        """Runs the process until it ends. `control` is the descriptor that it reads; this closes it here."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "router.grpc_listener.process", *self._arguments),
                stdin=control,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(self._listening.fileno(),),
                env=child_environment(),
            )
        finally:
            os.close(control)
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._hear(line.decode(errors="replace").strip())
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        if not self._is_leaving:
            log.error("the process of the gRPC port ended, its clients have to connect again status=%d", status)

    def _hear(self, line: str) -> None:
        """Counts a connection that was cut, and logs it if no other one was logged a moment ago."""
        what, _, detail = line.partition(" ")
        if what == UNREACHED:
            log.error("clients of the gRPC port are closed: the router's socket cannot be reached error=%s", detail)
        elif what in REASONS:
            self._count_cut(what)
            if time.monotonic() >= self._logs_at_s:
                self._logs_at_s = time.monotonic() + LOG_EVERY_S
                log.warning("a gRPC connection cost too much and was cut client=%s reason=%s", detail, what)

    def _say(self, what: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the pipe is full, or the process has ended
                os.write(self._control, what)

    def _end_control(self) -> None:
        if self._control is not None:
            os.close(self._control)
            self._control = None
