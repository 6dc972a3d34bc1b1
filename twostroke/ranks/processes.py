"""The further ranks of a worker, as child processes of the first one: started, given steps, watched, ended.

A worker is its ranks: when one dies, freezes or fails, all are lost. All waits then end with RankLost, also those
within a step, and the processes are killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from twostroke.base.errors import ConfigError, RankLost
from twostroke.kernels.cpu.build import Kernels
from twostroke.ranks.group import FIRST, RankGroup, create_memory
from twostroke.ranks.rank import BEAT_S, READY, Aside, AsideEnd, RankJob, RankStart

FROZEN_LOADING_S: Final = 60.0
"""Seconds without a heartbeat after which a rank that loads is lost. Imported libraries hold its interpreter for
seconds, and for longer on a busy machine."""

LATE_S: Final = 60.0
"""Seconds that the first rank waits for a rank within one round. After that the rank is lost although it sends
heartbeats, because its compute thread hangs. Between two rounds all ranks have about as much to do, and no weights to
load."""

GRACE_S: Final = 2.0
"""Seconds that ranks have to exit on their own. They do nothing but exit; one that has not by then is frozen, and is
killed."""

STANDARD_ERROR: Final = 2
"""The descriptor of stderr."""

WHY_S: Final = 1.0
"""Seconds to wait for the watching thread to find out why waits were ended. The same event wakes that thread."""

BLAME_S: Final = 0.1
"""Seconds that a first rank with an error waits for the watching thread to report the death of another rank, which may
be the cause."""


@dataclass(slots=True, eq=False)
class _RankProcess:
    """What the watching thread knows of a further rank."""

    name: str
    """For errors: "rank 2 of 4 (pid 123)"."""
    process: subprocess.Popen[bytes]
    connection: Connection
    pidfd: int
    is_ready: bool = False
    beats: int = 0
    silent_s: float = 0.0
    """Seconds without a beat. Time by which this process itself was late does not count."""
    awaited_round: int | None = None
    """The round in which the first rank waits for it, if it does."""
    late_s: float = 0.0
    """Seconds for which the first rank has waited in that round, counted as `silent_s` is."""

    def ended(self) -> str:
        code = self.process.wait()
        return f"{self.name} died: " + (f"signal {-code}" if code < 0 else f"exit status {code}")


@dataclass(slots=True)
class _Fate:
    """What is known of all ranks together, guarded by its condition."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waited_for: int = 0
    """Number of ranks that have not loaded yet."""
    lost: ConfigError | RankLost | None = None

    def why(self) -> str:
        """Returns why waits were ended, for which it may wait: the watching thread may be about to find out."""
        with self.changed:
            self.changed.wait_for(lambda: self.lost is not None, WHY_S)
            return "a rank of this worker is lost" if self.lost is None else self.lost.message

    def blamed(self) -> ConfigError | RankLost | None:
        """Returns the error that another rank has ended with, if one has: it may be the cause of an error in this
        one."""
        with self.changed:
            self.changed.wait_for(lambda: self.lost is not None, BLAME_S)
            return self.lost


@dataclass(frozen=True, slots=True)
class RankCare:
    """How the first rank watches over the others."""

    frozen_s: float
    """Seconds without a heartbeat after which a rank that has loaded is lost."""
    worker: str = "worker"
    """The worker's name in their logs."""
    on_lost: Callable[[RankLost], None] = lambda error: None
    """Is called in a thread when ranks that have loaded are lost."""


class RankProcesses:
    """Starts, commands and ends the ranks other than the first. One thread sends steps, and any thread may send work
    that runs beside them."""

    def __init__(
        self,
        kernels: Kernels,
        job: RankJob,
        ranks: int,
        most_bytes: int,
        care: RankCare,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Starts ranks 1 to `ranks` - 1, which load while the caller does the same.

        `most_bytes` are those of the longest sum. The ranks inherit `descriptors`, which the job needs. Raises
        ConfigError where processes cannot be started or memory is missing.
        """
        self._fate = _Fate(waited_for=ranks - 1)
        self._sending = threading.Lock()
        """Held while a message is sent to all ranks."""
        try:
            memory_fd, slot_bytes = create_memory(kernels, ranks, most_bytes)
        except OSError as error:
            raise ConfigError(f"no memory for sums over {ranks} ranks: {error}") from error
        self.group = RankGroup(kernels, memory_fd, FIRST, ranks, slot_bytes, self._fate.why)
        library = Path(kernels.library._name)
        of_all = slot_bytes, memory_fd, library, kernels.variant, kernels.build, job
        starts = [RankStart(care.worker, rank, ranks, *of_all) for rank in range(1, ranks)]
        self._watcher = _Watcher(self.group, self._fate, care.frozen_s, care.on_lost, job.end_waits)
        try:
            self._connections = self._watcher.start(starts, (memory_fd, *descriptors))
        except BaseException as error:
            self.group.close()
            if isinstance(error, OSError):
                raise ConfigError(f"the {ranks} ranks of a worker cannot be started: {error}") from error
            raise

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of the other ranks, in their order."""
        return self._watcher.pids

    def wait_until_ready(self) -> None:
        """Waits until all other ranks have loaded. Raises ConfigError with what a rank cannot load, and RankLost where
        one has died meanwhile."""
        fate = self._fate
        with fate.changed:
            fate.changed.wait_for(lambda: fate.lost is not None or fate.waited_for == 0)
            if fate.lost is not None:
                raise fate.lost

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Runs the loading of the first rank. Where it fails after another rank, it raises that rank's error, the
        likely cause."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            lost = self._fate.blamed()
            if lost is None:
                raise
            raise lost from error

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Returns a context in which this rank computes a step, while the others compute the same one.

        Raises RankLost, also where only this rank fails: the others then wait for it.
        """
        self.send(batch)
        try:
            yield
            self.finish()
        except RankLost:
            raise
        except Exception as error:
            self._fate.blamed()  # waits, because an error of another rank takes precedence
            raise self.lose(f"the first rank failed with {type(error).__name__}: {error}") from error

    def send(self, batch: Any) -> None:
        """Starts a step, or other work between steps, on the other ranks. Raises RankLost."""
        if self._fate.lost is not None:
            raise RankLost(self._fate.lost.message)
        message = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                for connection in self._connections:
                    connection.send_bytes(message)
        except OSError as error:
            raise RankLost(self._fate.why()) from error

    def aside(self, work: Any) -> None:
        """Has each other rank do some work in a separate thread while steps run, and returns when all have ended it.

        Any thread may call it. Raises RankLost, and ConfigError where a rank could not do the work.
        """
        with _in_memory(work) as memory, _byte_pipe() as (done, write_end):
            try:
                with write_end, self._sending:
                    for connection in self._connections:
                        connection.send_bytes(pickle.dumps(Aside()))
                        # descriptors follow their message over the same socket
                        with socket.socket(fileno=os.dup(connection.fileno())) as way:
                            socket.send_fds(way, [b"\0"], [memory, write_end.fileno()])
            except OSError as error:
                raise RankLost(self._fate.why()) from error
            problems = [end.problem for end in self._ends(done) if end.problem]
        if problems:
            raise ConfigError(f"{len(problems)} of the other ranks could not do it: {problems[0]}")

    def _ends(self, done: FileIO) -> Iterator[AsideEnd]:
        """Yields how the work has ended at each rank, as ranks report it. Raises RankLost."""
        left, came, ended = len(self._connections), bytearray(), select.poll()
        ended.register(done, select.POLLIN)
        while left:
            if ended.poll(BEAT_S * 1e3):
                read = done.read(select.PIPE_BUF)
                if not read:  # all ranks that had work left have ended
                    raise RankLost(self._fate.why())
                came += read
                for end in AsideEnd.read(came):
                    left -= 1
                    yield end
            elif self._fate.lost is not None:
                raise RankLost(self._fate.lost.message)

    def finish(self) -> None:
        """Waits until all ranks have computed the step that was sent. Raises RankLost."""
        self.group.meet()

    def lose(self, reason: str) -> RankLost:
        """Ends all ranks because this one has failed. Returns the error of the rank that was lost first."""
        return self._watcher.lose(RankLost(reason))

    def close(self) -> None:
        """Ends the ranks. No thread is in a step."""
        self._watcher.close()
        self.group.close()


class _Watcher:
    """Runs the thread that starts and watches the ranks. It lasts as long as they do, because a child's death signal is
    bound to the thread that started it."""

    def __init__(
        self,
        group: RankGroup,
        fate: _Fate,
        frozen_s: float,
        on_lost: Callable[[RankLost], None],
        end_waits: Callable[[], None],
    ) -> None:
        self._group, self._fate, self._frozen_s = group, fate, frozen_s
        self._on_lost, self._end_waits = on_lost, end_waits
        self._ranks: list[_RankProcess] = []
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()

    def start(self, starts: Sequence[RankStart], descriptors: Sequence[int]) -> list[Connection]:
        """Starts the ranks, and returns the connection of each. Raises what starting a process raises, which is mostly
        OSError."""
        begun, errors = threading.Event(), list[Exception]()

        def watch() -> None:
            try:
                for start in starts:
                    self._ranks.append(_start(start, descriptors))
            except Exception as error:
                errors.append(error)
            begun.set()
            if not errors:
                self._watch()
            self._end_all()

        self._thread = threading.Thread(target=watch, name="ranks", daemon=True)
        self._thread.start()
        begun.wait()
        if errors:
            self.close()
            raise errors[0]
        return [rank.connection for rank in self._ranks]

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def lose(self, error: ConfigError | RankLost) -> RankLost:
        """Ends all waits, and kills the other ranks. The first error is kept and returned."""
        with self._fate.changed:
            is_first = self._fate.lost is None
            lost = self._fate.lost = self._fate.lost or error
            has_loaded = self._fate.waited_for == 0
            self._fate.changed.notify_all()
        self._group.abort()
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        if is_first:
            self._end_waits()
        lost = lost if isinstance(lost, RankLost) else RankLost(lost.message)
        if is_first and has_loaded:
            self._on_lost(lost)
        return lost

    def close(self) -> None:
        if self._thread is None:
            return
        os.write(self._wake_write, b"\0")
        self._thread.join()
        self._thread = None
        for fd in (self._wake_read, self._wake_write, *(rank.pidfd for rank in self._ranks)):
            os.close(fd)

    def _watch(self) -> None:
        """Handles messages, deaths and missing heartbeats of ranks until `close` is called."""
        events, by_fd = select.poll(), dict[int, _RankProcess]()
        events.register(self._wake_read, select.POLLIN)
        for rank in self._ranks:
            for fd in (rank.connection.fileno(), rank.pidfd):
                events.register(fd, select.POLLIN)
                by_fd[fd] = rank
        looked_s = time.monotonic()
        while True:
            seen = {fd for fd, _ in events.poll(BEAT_S * 1e3)}
            if self._wake_read in seen:
                return
            for fd in seen & {rank.connection.fileno() for rank in self._ranks}:  # first: messages say why a rank ends
                if not self._hear(by_fd[fd]):
                    events.unregister(fd)
            for fd in seen & {rank.pidfd for rank in self._ranks}:
                self.lose(RankLost(by_fd[fd].ended()))
                events.unregister(fd)
            now_s = time.monotonic()
            self._look_for_beats(min(now_s - looked_s, 2 * BEAT_S))
            looked_s = now_s

    def _hear(self, rank: _RankProcess) -> bool:
        """Handles one message of a rank, and returns whether another may come."""
        try:
            message = rank.connection.recv_bytes()
        except (EOFError, OSError):
            return False
        if message == READY:
            with self._fate.changed:
                rank.is_ready, rank.silent_s = True, 0.0
                self._fate.waited_for -= 1
                self._fate.changed.notify_all()
        elif rank.is_ready:
            self.lose(RankLost(f"{rank.name} failed: {message.decode()}"))
        else:
            self.lose(ConfigError(f"{rank.name} cannot load: {message.decode()}"))
        return True

    def _look_for_beats(self, passed_s: float) -> None:
        """Looks for heartbeats. `passed_s`: seconds since the last look, or fewer where this process itself
        was late.
        """
        for number, rank in enumerate(self._ranks, 1):
            beats = self._group.beats(number)
            rank.silent_s = rank.silent_s + passed_s if beats == rank.beats else 0.0
            rank.beats = beats
            most_s = self._frozen_s if rank.is_ready else FROZEN_LOADING_S
            if rank.silent_s > most_s and self._fate.lost is None:
                self.lose(RankLost(f"{rank.name} is frozen: no sign of life for {most_s:g} s"))
            if rank.is_ready:  # until then ranks wait for each other's weights
                self._look_for_round(number, rank, passed_s)

    def _look_for_round(self, number: int, rank: _RankProcess, passed_s: float) -> None:
        """Gives up a rank with a hanging compute thread, although another thread of it still sends heartbeats."""
        awaited = self._group.awaited_round(number)
        is_same = awaited is not None and awaited == rank.awaited_round
        rank.late_s = rank.late_s + passed_s if is_same else 0.0
        rank.awaited_round = awaited
        if rank.late_s > LATE_S and self._fate.lost is None:
            self.lose(RankLost(f"{rank.name} hangs: the first rank has waited for it for {LATE_S:g} s"))

    def _end_all(self) -> None:
        """Closes the ranks' connections, so that they exit, and kills those that do not."""
        for rank in self._ranks:
            rank.connection.close()
        end_s = time.monotonic() + GRACE_S
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()


def _start(start: RankStart, descriptors: Sequence[int]) -> _RankProcess:
    message = pickle.dumps(start, pickle.HIGHEST_PROTOCOL)
    with _pipe() as (ours, theirs):
        process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.ranks", str(os.getpid()), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=STANDARD_ERROR,  # a worker reports on standard output that it is ready
            pass_fds=(theirs.fileno(), *descriptors),
        )
        name = f"rank {start.rank} of {start.ranks} (pid {process.pid})"
        rank = _RankProcess(name, process, ours, os.pidfd_open(process.pid))
    with contextlib.suppress(OSError):  # it has died already; the watching thread sees that by its pidfd
        ours.send_bytes(message)
    return rank


@contextlib.contextmanager
def _in_memory(work: Any) -> Iterator[int]:
    """Yields the descriptor of memory that holds the work, pickled."""
    with os.fdopen(os.memfd_create("twostroke-aside", os.MFD_CLOEXEC), "wb") as file:
        pickle.dump(work, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        yield file.fileno()


@contextlib.contextmanager
def _byte_pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Yields the end to read from, and that to write to, which may be closed within."""
    read_end, write_end = os.pipe()
    with FileIO(read_end) as reading, FileIO(write_end, "w") as writing:
        yield reading, writing


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[Connection, Connection]]:
    """Yields our end and the child's, which is closed afterwards. Where the child cannot be started, ours is closed,
    too."""
    ours, theirs = Pipe()
    try:
        yield ours, theirs
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
