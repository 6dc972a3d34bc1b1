"""Processes of the product that are forked from one which has loaded their modules: a start loads nothing again.

There is one such server for each process of pytest, from its first start on. What is begun so has the server's command
line, and its sets have the server's order. Outside `preloading` every process loads its modules itself: programs that
measure get what users run.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import IO, Final

WORKER_MODULES: Final = ("prefill_worker.worker", "decode_worker.worker", "twostroke.worker.process")
ROUTER_MODULES: Final = ("router.server", "router.serving.dispatcher", "router.preparation.preparer")
MODEL_MODULES: Final = (
    "twostroke.engine.backends.cpu.runner",
    "twostroke.engine.backends.cpu.backend",
    "twostroke.engine.ranks.cpu",
)
"""The modules that load torch, and what a model on a processor needs beside it. Paced models do without."""
MOST_BYTES: Final = 1 << 20
"""Bytes of one message to the server."""


class ForkedProcess:
    """What tests use of asyncio's Process. Create it with `fork`."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: IO[bytes], end: IO[bytes]) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, asyncio.StreamReader()
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._end(stdout, end))

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _end(self, stdout: IO[bytes], end: IO[bytes]) -> int:
        told = asyncio.StreamReader()
        transports = [await _read_into(self.stdout, stdout), await _read_into(told, end)]
        self.returncode = int(await told.read())
        self.stdin.close()
        for transport in transports:
            transport.close()
        return self.returncode


class _Server:
    """The process that forks. It ends with this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.loads = False
        """Whether it loads modules before it forks."""
        self.also: tuple[str, ...] = ()
        """Modules that it loads beside those that are asked for."""
        self._socket = ours
        self._lock = threading.Lock()

    def ask(self, message: bytes, descriptors: Sequence[int]) -> int:
        """Returns the pid of the process that it has begun."""
        with self._lock:
            socket.send_fds(self._socket, [message], descriptors)
            return int(self._socket.recv(MOST_BYTES))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


@contextlib.contextmanager
def preloading(*also: str) -> Iterator[None]:
    """`also`: modules beside those which all processes of a kind have."""
    server = _server()
    server.loads, server.also = True, also
    yield
    server.loads, server.also = False, ()


async def fork(*command: str, loads: Sequence[str], stderr: IO[bytes]) -> ForkedProcess:
    """Runs a command. Where it begins with `python -m`, the server has loaded what it `loads` and need not start it."""
    server = _server()
    their_stdin, our_stdin = os.pipe()
    our_stdout, their_stdout = os.pipe()
    our_end, their_end = os.pipe()
    modules = (*loads, *server.also) if server.loads and command[:2] == (sys.executable, "-m") else ()
    asked = {"command": command, "modules": modules, "environment": dict(os.environ)}
    try:
        descriptors = (their_stdin, their_stdout, stderr.fileno(), their_end)
        pid = await asyncio.to_thread(server.ask, json.dumps(asked).encode(), descriptors)
    finally:
        for descriptor in (their_stdin, their_stdout, their_end):
            os.close(descriptor)
    stdin = await _writer(os.fdopen(our_stdin, "wb", 0))
    return ForkedProcess(pid, stdin, os.fdopen(our_stdout, "rb", 0), os.fdopen(our_end, "rb", 0))


def run(
    *command: str, loads: Sequence[str], environment: Mapping[str, str], given: str, patience_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, as `subprocess.run` does. `given` is its standard input."""
    server = _server()
    our_end, their_end = os.pipe()
    modules = loads if server.loads else ()
    asked = {"command": command, "modules": modules, "environment": dict(environment)}
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        stdin.write(given.encode())
        stdin.seek(0)
        with os.fdopen(our_end, "rb", 0) as end:
            try:
                descriptors = (stdin.fileno(), out.fileno(), error.fileno(), their_end)
                pid = server.ask(json.dumps(asked).encode(), descriptors)
            finally:
                os.close(their_end)
            if not select.select([end], [], [], patience_s)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, patience_s)
            status = int(end.read())
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(command, status, out.read().decode(), error.read().decode())


async def _read_into(reader: asyncio.StreamReader, pipe: IO[bytes]) -> asyncio.ReadTransport:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return transport


async def _writer(pipe: IO[bytes]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    return asyncio.StreamWriter(transport, protocol, None, loop)
