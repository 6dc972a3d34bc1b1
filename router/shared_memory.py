"""Memory that the router processes of one launcher share: which of them run, and a lock that ends with its holder.

The launcher makes it, and each process takes a number in it. The numbers and the lock are kernel locks on bytes of the
memory's file. The kernel releases them when a process ends, however it ends. A router that is alone has memory of its
own, and needs no locks.
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
"""Router processes at once. During a restart a router has two, until the old one has finished its streams."""
PROCESS_BYTES = 64
"""Bytes that each process writes for the others: one cache line of the processor."""
BYTES = 4 << 20
"""Bytes in all. Only pages that are written to take memory."""
LOCK_WAIT_S = 0.05
"""Longest wait for the lock, in seconds. Its holder needs it for microseconds, unless it is frozen or has lost its
processor meanwhile."""
LOCK_PAUSE_S = 50e-6
"""Seconds between two tries, which leave the processor to the holder."""
STUCK_S = 2.0
"""Seconds for which a process does not wait again for a frozen holder. Without the lock, one call may be miscounted."""
ALIVE_S = 0.2
"""Seconds for which a process that was found running counts as running."""

_LOCK = MOST_PROCESSES
"""Index of the lock's byte. The bytes before it are those of the processes."""
_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`."""


def create_router_memory() -> int:
    """Makes the memory. Returns a descriptor for `RouterMemory.inherited` in other processes."""
    descriptor = os.memfd_create("twostroke-routers")
    os.ftruncate(descriptor, BYTES)
    return descriptor


class RouterMemory:
    """One process's view of the memory. The bytes of a process begin at `PROCESS_BYTES` times its number."""

    def __init__(self, memory: mmap.mmap, file: int | None, number: int) -> None:
        """Do not call this; use `of`. `file` is a descriptor that this process opened: locks belong to open files."""
        self.bytes = memory
        self.number = number
        self._file = file
        self._alive_s: dict[int, float] = {}
        """When other processes were last found running, in seconds, by their numbers."""
        self._stuck_until_s = 0.0

    @classmethod
    def of(cls, descriptor: int | None) -> RouterMemory:
        """Returns the launcher's memory, or memory of its own without a descriptor. Raises ConfigError."""
        return cls.alone() if descriptor is None else cls.inherited(descriptor)

    @classmethod
    def alone(cls) -> RouterMemory:
        return cls(mmap.mmap(-1, BYTES), None, 0)

    @classmethod
    def inherited(cls, descriptor: int) -> RouterMemory:
        """Takes a number in the launcher's memory. Raises ConfigError if none is left or the descriptor is wrong."""
        try:
            # Locks belong to an open file, and all processes share the inherited one. So each opens its own.
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
        with taken.locked():  # under the lock, no one still clears what the number's last process left
            memory[PROCESS_BYTES * number : PROCESS_BYTES * (number + 1)] = bytes(PROCESS_BYTES)
        return taken

    @property
    def is_shared(self) -> bool:
        return self._file is not None

    @property
    def others(self) -> Iterator[int]:
        """All numbers that other processes may have."""
        return (number for number in range(MOST_PROCESSES if self.is_shared else 0) if number != self.number)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock meanwhile. If its holder is frozen, it goes on without the lock."""
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
        """Returns whether no process has this number. If so, none writes to its bytes while the caller has the lock."""
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
