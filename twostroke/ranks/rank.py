"""A rank in a process of its own: it loads what its job says, and computes what the first rank sends.

`python -m twostroke.ranks PARENT_PID DESCRIPTOR` is started by `twostroke.ranks.processes`. The process ends at
once when its parent ends, whatever it does or waits for, even if a signal has stopped it.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from twostroke.base.errors import RankLost, ServeError
from twostroke.kernels.cpu.build import Kernels
from twostroke.observability.telemetry import configure_logging
from twostroke.ranks.group import RankGroup

log = logging.getLogger(__name__)

BEAT_S: Final = 0.1
"""Seconds between two signs of a rank that it is not frozen."""

READY: Final = b""
"""The message of a rank that has loaded. Any other message is the text of an error."""

MOST_PROBLEM_BYTES: Final = 2048
"""Most bytes of the error text of work beside steps. A pipe writes more than that atomically, so texts of several ranks
never mix."""

_PR_SET_PDEATHSIG: Final = 1
"""A constant of linux/prctl.h."""


class RankJob(abc.ABC):
    """What each further rank does. It is pickled, so it is a frozen dataclass of an importable module."""

    @abc.abstractmethod
    def load(self, group: RankGroup) -> Callable[[Any], None]:
        """Loads in a rank's process, and returns the function that handles each message of the first rank.

        Inherited descriptors have the same numbers here. Raises ConfigError for what cannot be loaded.
        """

    def end_waits(self) -> None:  # noqa: B027  # most jobs wait in the group alone
        """Ends waits of the first rank that `RankGroup.abort` does not reach. It is called in another thread when ranks
        are lost."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank."""

    worker: str
    """The name of the worker, for logs."""
    rank: int
    ranks: int
    slot_bytes: int
    memory_fd: int
    library: Path
    variant: str
    build: str
    """The build and the variant are those of `Kernels`: all ranks compute with the same library."""
    job: RankJob

    def join(self) -> RankGroup:
        kernels = Kernels(ctypes.CDLL(str(self.library)), self.variant, self.build)
        return RankGroup(kernels, self.memory_fd, self.rank, self.ranks, self.slot_bytes)


@dataclass(frozen=True, slots=True)
class AsideEnd:
    """How work beside steps has ended at one rank. A failure ends only the work, and no rank is lost."""

    problem: str = ""
    """Why the work failed; empty if it is done."""

    def write(self, pipe: int) -> None:
        data = self.problem.encode("utf-8", "replace")[:MOST_PROBLEM_BYTES]
        os.write(pipe, len(data).to_bytes(2, "big") + data)

    @classmethod
    def read(cls, data: bytearray) -> Iterator[AsideEnd]:
        """Removes all complete ends from `data`, and yields them."""
        while len(data) >= 2 and len(data) >= (end := 2 + int.from_bytes(data[:2], "big")):
            yield cls(data[2:end].decode("utf-8", "replace"))
            del data[:end]


@dataclass(frozen=True, slots=True)
class Aside:
    """The message that announces work for a separate thread of a rank while steps run. Ranks do not meet after it.

    Two descriptors follow it. One is of memory with the pickled work, which may be large and would delay steps on the
    connection. The other is of a pipe, into which the rank writes how the work has ended (see `AsideEnd`).
    """

    def begin(self, connection: Connection, work: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        """Receives the two descriptors, and starts the thread."""
        with socket.socket(fileno=os.dup(connection.fileno())) as way:
            _, descriptors, _, _ = socket.recv_fds(way, 1, 2)
        threading.Thread(target=self._do, args=(*descriptors, work, failed), name="aside", daemon=True).start()

    def _do(self, memory: int, done: int, work: Callable[[Any], None], failed: Callable[[Exception], None]) -> None:
        try:
            with mmap.mmap(memory, 0, access=mmap.ACCESS_READ) as pickled:
                found = pickle.loads(pickled)
            work(found)
            AsideEnd().write(done)
        except (RankLost, BrokenPipeError) as error:  # nobody waits for the work
            failed(error)
        except Exception as error:
            AsideEnd(_line_of(error)).write(done)
        finally:
            os.close(memory)
            os.close(done)


def main() -> None:
    parent_pid, fd = map(int, sys.argv[1:])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the first rank was gone before this process was bound to it")
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes; only the first rank handles them
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(fd)
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(connection)
    os._exit(0)  # threads of libraries need not be waited for: nothing here outlives the process


def _serve(connection: Connection) -> None:
    """Loads, then handles messages of the first rank. Raises EOFError or ConnectionError once the first rank has closed
    its end."""
    message = connection.recv_bytes()
    try:
        start: RankStart = pickle.loads(message)
        configure_logging(f"{start.worker} rank {start.rank}")
        group = start.join()
        threading.Thread(target=_beat, args=(group, connection.fileno()), name="beat", daemon=True).start()
        compute = start.job.load(group)
    except Exception as error:
        return connection.send_bytes(_line_of(error).encode())
    connection.send_bytes(READY)

    def failed(error: Exception) -> None:
        connection.send_bytes(_line_of(error).encode())
        group.abort()

    while True:
        message = pickle.loads(connection.recv_bytes())
        if isinstance(message, Aside):
            message.begin(connection, compute, failed)
            continue
        try:
            compute(message)
            group.meet()
        except RankLost:
            continue  # the first rank knows the cause, and ends this one
        except Exception as error:
            failed(error)


def _line_of(error: Exception) -> str:
    if isinstance(error, ServeError):
        return error.message
    log.error("a rank failed error=%s", error, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _beat(group: RankGroup, fd: int) -> None:
    """Shows that this process is not frozen, and ends it once the first rank has closed its end of `fd`."""
    closed = select.poll()
    closed.register(fd, select.POLLRDHUP)
    while not closed.poll(BEAT_S * 1e3):
        group.beat()
    os._exit(0)
