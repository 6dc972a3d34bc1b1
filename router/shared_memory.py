"""Memory of all router processes of one launcher: who is alive, and a lock that ends with its holder.

The launcher makes it, and each process takes a number in it. That number, and the lock, are locks of the kernel on
bytes of its file. The kernel takes them back when a process ends, however it ends. A router without others has memory
of its own, and needs no locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator

from twostroke.base.errors import ConfigError

MOST_PROCESSES = 32
"""Router processes at once. During a restart a router has two, and one that finishes its streams may stay a while."""
PROCESS_BYTES = 64
"""Bytes for what each process tells the others of itself: a line of the processor's cache."""
BYTES = 4 << 20
"""Bytes in all. Only what is written to takes memory."""
LOCK_WAIT_S = 0.05
"""Longest wait for the lock. Its holder has it for some microseconds, unless it was frozen within them, or another
process has its processor."""
LOCK_PAUSE_S = 50e-6
"""Pause between two tries: it leaves the processor to the holder."""
STUCK_S = 2.0
"""Time for which a process does not wait again for a frozen holder of the lock. Counts may then be off by a call's."""
ALIVE_S = 0.2
"""Time for which a process that was found alive is not looked for again."""

_LOCK = MOST_PROCESSES
"""The byte of the lock; the processes have those before it."""
_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`."""


def create_router_memory() -> int:
    """Returns a descriptor for `RouterMemory.inherited` in other processes."""
    descriptor = os.memfd_create("twostroke-routers")
    os.ftruncate(descriptor, BYTES)
    return descriptor


class RouterMemory:
    """The memory as one process has it. Bytes of a process begin at `PROCESS_BYTES` times its number."""

    def __init__(self, memory: mmap.mmap, file: int | None, number: int) -> None:
        """Use `alone` or `inherited`. `file`: this process's own description of the memory's file."""
        self.bytes = memory
        self.number = number
        self._file = file
        self._alive_s: dict[int, float] = {}
        """When other processes were last found alive."""
        self._stuck_until_s = 0.0

    @classmethod
    def of(cls, descriptor: int | None) -> RouterMemory:
        """Returns the launcher's, where there is one. Raises ConfigError."""
        return cls.alone() if descriptor is None else cls.inherited(descriptor)

    @classmethod
    def alone(cls) -> RouterMemory:
        return cls(mmap.mmap(-1, BYTES), None, 0)

    @classmethod
    def inherited(cls, descriptor: int) -> RouterMemory:
        """Takes a number in the launcher's memory. Raises ConfigError where none is left, or where it is no memory."""
        try:
            # Locks belong to an open file. The inherited one is that of all processes.
            file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            memory = mmap.mmap(file, BYTES)
        except (OSError, ValueError) as error:
            raise ConfigError(f"descriptor {descriptor} is no memory of routers: {error}", field="shared_fd") from error
        number = next((number for number in range(MOST_PROCESSES) if _try_lock(file, number)), None)
        if number is None:
            memory.close()
            os.close(file)
            raise ConfigError(
                f"{MOST_PROCESSES} router processes are here already, some of which only finish their streams; "
                "try again later",
                field="shared_fd",
            )
        taken = cls(memory, file, number)
        with taken.locked():  # whoever found that the number's last process has ended is done with it
            memory[PROCESS_BYTES * number : PROCESS_BYTES * (number + 1)] = bytes(PROCESS_BYTES)
        return taken

    @property
    def is_shared(self) -> bool:
        return self._file is not None

    @property
    def others(self) -> Iterator[int]:
        """Numbers that other processes may have."""
        return (number for number in range(MOST_PROCESSES if self.is_shared else 0) if number != self.number)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets no other process in meanwhile. It does not wait for one that is frozen."""
        if self._file is None:
            yield
            return
        has_lock = self._take_lock(self._file)
        try:
            yield
        finally:
            if has_lock:
                _unlock(self._file, _LOCK)

    def has_ended(self, number: int) -> bool:
        """Whether no process has this number. While the caller has the lock, none counts anything under it."""
        assert self._file is not None, "a router without others asks for one"
        now_s = time.monotonic()
        if now_s < self._alive_s.get(number, 0.0) + ALIVE_S:
            return False
        if _try_lock(self._file, number):
            _unlock(self._file, number)
            return True
        self._alive_s[number] = now_s
        return False

    def close(self) -> None:
        """Gives its number back."""
        self.bytes.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take_lock(self, file: int) -> bool:
        begun_s = time.monotonic()
        while not _try_lock(file, _LOCK):
            now_s = time.monotonic()
            if now_s < self._stuck_until_s or now_s > begun_s + LOCK_WAIT_S:
                self._stuck_until_s = max(self._stuck_until_s, now_s + STUCK_S)
                return False
            time.sleep(LOCK_PAUSE_S)
        self._stuck_until_s = 0.0
        return True


def _try_lock(file: int, byte: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def _unlock(file: int, byte: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
