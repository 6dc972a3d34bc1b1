"""Divides the cores of a host among the workers of one user. The workers agree by files, without a central process.

Each worker owns as many cores as it has threads. The owner of a core holds a lock on the core's file while its process
lives. So the cores of a dead worker are free at once. A worker may borrow idle cores of others. `kernels.cpu.team`
keeps the leases in the same folder. Each worker also writes there how many prompts wait for it. Others then leave their
cores idle between steps that are not urgent.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.scheduler.lateness import WaitingPrompts

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks for workers that have started or ended."""

PATIENCE_S = 2.0
"""Seconds to wait for a worker that holds the folder's lock. It is held for a millisecond, unless that worker is
stopped."""

TURN_S = 5.0
"""Seconds that a worker waits for its turn to measure. Each measurement takes about half a second."""

TURN_POLL_S = 0.02

STEP_PATIENCE_S = 0.02
"""Seconds that a step waits for a worker that holds the folder's lock."""

RETRY_S = 0.001
LOCK = "lock"
"""Name of the lock file. A worker locks it to read or change the other files."""

MOST_CORES = 4096
"""Number of cores for which the shared file has cells. Owners write there how many prompts wait."""

CELLS = 3
"""Numbers of the shared file for each core; the core's owner writes them."""

MOST_WAITING_MS = 2**32 - 1


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def check_threads(threads: int, flag: str = "--threads", processes: int = 1) -> None:
    """Raises ConfigError where the processes of a worker have more threads than there are cores."""
    cores = len(usable_cores())
    if threads * processes > cores:
        each = "" if processes == 1 else f" in each of {processes} processes"
        raise ConfigError(f"{flag} {threads}{each}: this machine lets us use {cores} cores", field=flag)


def cores_folder() -> Path:
    """Returns the folder that all workers of a user on this host share, in memory where the system offers that."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/none")
    if runtime.is_dir() and runtime.stat().st_uid == os.getuid():
        return runtime / "twostroke-cores"
    return Path("/tmp") / f"twostroke-cores-{os.getuid()}"


class Cores:
    """The cores that a worker may run on. `close` gives them back; so does the end of the process."""

    def __init__(self, home: tuple[int, ...], *, pin: bool = False) -> None:
        """Threads run on `home`, but own no core. `claim` makes an object that owns its cores."""
        self.home = home
        self.pin = pin
        self.folder: Path | None = None
        """The folder of the leases. None if there are none, and nothing is borrowed."""
        self._borrows = False
        self._owned: list[int] = []
        """Descriptors of the locked files of the cores that this worker owns."""
        self._others: tuple[int, ...] = ()
        """Cores that other workers owned at the last look."""
        self._prompts: memoryview | None = None
        """Three numbers for each owner's first core: prompts that wait, whether some would be late, and the
        milliseconds that they will wait in sum. They are shared with the other workers."""
        self._look_at_s = 0.0

    @classmethod
    def claim(cls, threads: int, *, pin: bool, borrow: bool, folder: Path | None = None) -> Cores:
        """Takes the first free cores. Where too few are free, it takes those of others too, without leases and with one
        warning.

        Raises ConfigError for more threads than there are cores.
        """
        check_threads(threads)
        folder = cores_folder() if folder is None else folder
        shared = cls(tuple(usable_cores()[:threads]))
        try:
            with _locked(folder, PATIENCE_S):
                owned = _own_free(folder, threads)
                prompts = _map_prompts(folder)
        except OSError as error:
            log.warning("cores are shared with whoever runs on them: %s cannot be used: %s", folder, error)
            return shared
        if len(owned) < threads:
            _close_all(owned.values())
            log.warning(
                "cores are shared with other workers: %d of %d are free and --threads asks for %d for each worker",
                len(owned), len(usable_cores()), threads,
            )  # fmt: skip
            return shared
        cores = cls(tuple(owned), pin=pin)
        cores.folder, cores._borrows, cores._owned = folder, borrow, list(owned.values())
        cores._prompts = prompts
        for core in owned:  # its previous owner may have been killed
            if core < MOST_CORES:
                prompts[CELLS * core : CELLS * (core + 1)] = memoryview(bytes(4 * CELLS)).cast("I")
        log.info("cores home=%s folder=%s", ",".join(map(str, cores.home)), folder)
        return cores

    def neighbours(self) -> tuple[int, ...]:
        """Looks up the cores that other living workers own. Returns those that may be borrowed while their owners are
        idle."""
        self._look_at_s = time.monotonic() + LOOK_S
        self._others = self._find_others()
        return self._others if self._borrows else ()

    @property
    def should_look(self) -> bool:
        """Whether the last look is LOOK_S old, so that other workers may have started or ended since."""
        return self.folder is not None and time.monotonic() >= self._look_at_s

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        """Tells the other workers which prompts would be computed sooner with their cores."""
        if self._prompts is not None and self.home[0] < MOST_CORES:
            told = prompts if self._borrows else WaitingPrompts()
            at, waiting_ms = CELLS * self.home[0], int(min(MOST_WAITING_MS, 1e3 * told.waiting_s))
            self._prompts[at], self._prompts[at + 1], self._prompts[at + 2] = told.count, told.has_late, waiting_ms

    def prompts_beside(self) -> WaitingPrompts:
        """Returns the prompts that wait at other workers, if these would borrow a core."""
        prompts = self._prompts
        if prompts is None:
            return WaitingPrompts()
        cells = (CELLS * core for core in self._others if core < MOST_CORES)
        return WaitingPrompts.all_of(
            WaitingPrompts(prompts[at], bool(prompts[at + 1]), prompts[at + 2] / 1e3) for at in cells
        )

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Waits until no other worker of this host measures, so that this one may find their cores idle.

        After TURN_S, and where the folder cannot be used, it measures at the same time.
        """
        file = self._wait_for_turn()
        try:
            yield
        finally:
            if file is not None:
                os.close(file)

    def _wait_for_turn(self) -> int | None:
        """Returns a file that is locked while this worker measures, or None if it does not wait for the others."""
        if self.folder is None:
            return None
        try:
            file = os.open(self.folder / "measuring", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            log.warning("costs are measured beside other workers: %s cannot be used: %s", self.folder, error)
            return None
        deadline_s = time.monotonic() + TURN_S
        while not _try_lock(file) and time.monotonic() < deadline_s:
            time.sleep(TURN_POLL_S)
        self._look_at_s = 0.0
        return file

    def close(self) -> None:
        """Gives the cores back. The last worker to end removes the folder, with what killed workers left in it."""
        if self.folder is None:
            return
        folder, self.folder = self.folder, None
        self.tell_prompts(WaitingPrompts())
        self._prompts = None
        _close_all(self._owned)
        with contextlib.suppress(OSError), _locked(folder, PATIENCE_S):
            if not any(map(_is_owned, folder.glob("owner-*"))):
                _remove(folder)

    def _find_others(self) -> tuple[int, ...]:
        if self.folder is None:
            return ()
        others = (core for core in usable_cores() if core not in self.home)
        with contextlib.suppress(OSError), _locked(self.folder, STEP_PATIENCE_S):
            return tuple(core for core in others if _is_owned(_owner_file(self.folder, core)))
        return ()


def _owner_file(folder: Path, core: int) -> Path:
    return folder / f"owner-{core}"


@contextlib.contextmanager
def _locked(folder: Path, patience_s: float) -> Iterator[None]:
    """Holds the lock of the folder, and creates the folder if need be.

    Raises OSError where other users may write to the folder, or where the lock stays taken.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        is_last = time.monotonic() > deadline_s  # read before the attempt: after a long wait it tries once more
        lock = _open_lock(folder)
        if _try_lock(lock) and _is_same_file(lock, folder / LOCK):  # else the holder of the lock removed the folder
            break
        os.close(lock)
        if is_last:
            raise TimeoutError(f"{folder / LOCK} has been held for {patience_s} s")
        time.sleep(RETRY_S)
    try:
        yield
    finally:
        os.close(lock)


def _open_lock(folder: Path) -> int:
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # removed at this moment
            _check_private(folder)
            return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)


def _remove(folder: Path) -> None:
    """Removes the folder. The caller holds its lock. Raises OSError where another worker has created a file meanwhile.

    The lock file is removed last. Once its name is free, another worker may create a new lock under that name and take
    a core. If core files were removed after that, two workers could own the same core.
    """
    for file in folder.iterdir():
        if file.name != LOCK:
            file.unlink()
    (folder / LOCK).unlink()
    folder.rmdir()


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user can write to")


def _is_same_file(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _map_prompts(folder: Path) -> memoryview:
    size = CELLS * 4 * MOST_CORES
    file = os.open(folder / "waiting-prompts", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        return memoryview(mmap.mmap(file, size)).cast("I")
    finally:
        os.close(file)


def _own_free(folder: Path, count: int) -> dict[int, int]:
    """Returns up to `count` cores without an owner, each with its locked file."""
    owned: dict[int, int] = {}
    try:
        for core in usable_cores():
            if len(owned) == count:
                break
            file = os.open(_owner_file(folder, core), os.O_RDWR | os.O_CREAT, 0o600)
            if _try_lock(file):
                owned[core] = file
            else:
                os.close(file)
    except OSError:
        _close_all(owned.values())
        raise
    return owned


def _is_owned(file: Path) -> bool:
    try:
        opened = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(opened)
    finally:
        os.close(opened)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_all(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
