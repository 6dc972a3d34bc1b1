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
"""A rank that loads is lost without a beat for this long: imported libraries hold its interpreter for seconds, and for
longer on a busy machine."""

LATE_S: Final = 60.0
"""A rank that still sends heartbeats is lost, too, where the first rank waits for it this long within a round: its
compute thread hangs. Between two rounds all ranks have about as much to do, and no weights to load."""

GRACE_S: Final = 2.0
"""How long ranks have to end on their own. They do nothing but exit; a frozen one is killed after it."""

STANDARD_ERROR: Final = 2
"""The descriptor of stderr."""

WHY_S: Final = 1.0
"""How long to wait for the watching thread to find out why waits were ended. The same event wakes that thread."""

BLAME_S: Final = 0.1
"""How long a first rank that fails waits for the watching thread to say that another one has died, which may be why."""


@dataclass(slots=True, eq=False)
class _RankProcess:
    """A further rank, as the watching thread knows it."""

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
    """Seconds for which that lasts, counted in the same way."""

    def ended(self) -> str:
        code = self.process.wait()
        return f"{self.name} died: " + (f"signal {-code}" if code < 0 else f"exit status {code}")


@dataclass(slots=True)
class _Fate:
    """What is known of all ranks together, guarded by its condition."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waited_for: int = 0
    """Ranks that have not loaded yet."""
    lost: ConfigError | RankLost | None = None

    def why(self) -> str:
        """Returns why waits were ended. The watching thread may be a moment from knowing it."""
        with self.changed:
            self.changed.wait_for(lambda: self.lost is not None, WHY_S)
            return "a rank of this worker is lost" if self.lost is None else self.lost.message

    def blamed(self) -> ConfigError | RankLost | None:
        """Returns what another rank has ended with, if one has: what fails in this one may be due to it."""
        with self.changed:
            self.changed.wait_for(lambda: self.lost is not None, BLAME_S)
            return self.lost


@dataclass(frozen=True, slots=True)
class RankCare:
    """How the first rank watches over the others."""

    frozen_s: float
    """A rank that has loaded is lost without a beat for this long."""
    worker: str = "worker"
    """The worker's name in their logs."""
    on_lost: Callable[[RankLost], None] = lambda error: None
    """Is called in a thread when ranks that have loaded are lost."""


class RankProcesses:
    """The first rank's hold on the others. One thread sends steps, and any thread may send work that runs
    beside them.
    """

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

        `most_bytes`: of the longest sum. `descriptors` are those that the job needs. Raises ConfigError where processes
        or memory cannot be had.
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
        """Raises ConfigError with what a rank cannot load, and RankLost where one has died meanwhile."""
        fate = self._fate
        with fate.changed:
            fate.changed.wait_for(lambda: fate.lost is not None or fate.waited_for == 0)
            if fate.lost is not None:
                raise fate.lost

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Loads within. Raises what another rank cannot load or has died of, where what fails here may be due to it."""
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
        """Computes a step within, as the other ranks do. Raises RankLost, also where only this rank fails: the others
        then wait for it.
        """
        self.send(batch)
        try:
            yield
            self.finish()
        except RankLost:
            raise
        except Exception as error:
            self._fate.blamed()  # waits: what another rank has said of its end comes first
            raise self.lose(f"the first rank failed with {type(error).__name__}: {error}") from error

    def send(self, batch: Any) -> None:
        """Begins a step on the other ranks. Raises RankLost."""
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
        """Lets each other rank do some work in a thread of its own, and returns when all have; steps run meanwhile.

        Any thread may call it. Raises ConfigError where one could not do it, once all have ended, and RankLost.
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
        """Yields how work aside has ended, until all ranks have said so. Raises RankLost."""
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
        """Ends all ranks because this one has failed. Returns the error of what was lost first."""
        return self._watcher.lose(RankLost(reason))

    def close(self) -> None:
        """Ends the ranks. No thread is in a step."""
        self._watcher.close()
        self.group.close()


class _Watcher:
    """A thread that is the ranks' parent, since a child's death signal is bound to the thread that made it."""

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
        """Returns the connection of each rank. Raises what making a process raises: OSError, as a rule."""
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
        """Ends all waits, so that no rank computes on. The first error stays."""
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
        """Returns when `close` is called."""
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
            for fd in seen & {rank.connection.fileno() for rank in self._ranks}:  # first: these say why a rank ended
                if not self._hear(by_fd[fd]):
                    events.unregister(fd)
            for fd in seen & {rank.pidfd for rank in self._ranks}:
                self.lose(RankLost(by_fd[fd].ended()))
                events.unregister(fd)
            now_s = time.monotonic()
            self._look_for_beats(min(now_s - looked_s, 2 * BEAT_S))
            looked_s = now_s

    def _hear(self, rank: _RankProcess) -> bool:
        """Returns whether there may be more to hear."""
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
        """Lets ranks end, and kills those that do not."""
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
            stdout=STANDARD_ERROR,  # standard output is where a worker says that it is ready
            pass_fds=(theirs.fileno(), *descriptors),
        )
        name = f"rank {start.rank} of {start.ranks} (pid {process.pid})"
        rank = _RankProcess(name, process, ours, os.pidfd_open(process.pid))
    with contextlib.suppress(OSError):  # it has died already, which its pidfd says
        ours.send_bytes(message)
    return rank


@contextlib.contextmanager
def _in_memory(work: Any) -> Iterator[int]:
    """Returns the descriptor of memory that has the work, pickled."""
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
    """Yields our end and the child's, which is closed here; both where the child cannot be made."""
    ours, theirs = Pipe()
    try:
        yield ours, theirs
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
