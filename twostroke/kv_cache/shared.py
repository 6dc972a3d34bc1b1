"""A memfd that its owner writes and others read.

It has no name, so nothing is left behind when its owner dies. Another process on the same host can map it with its
descriptor. It carries file seals (F_ADD_SEALS of Linux): other processes can neither write to nor resize it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import ConfigError
from twostroke.kv_cache.layout import generation_bytes

_F_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE of Linux 5.1: mappings made before stay writable. Python's fcntl lacks it."""
_PROTECTION = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Shared memory of `size_bytes`: allocated at once, or given by its descriptor `fd`."""

    def __init__(self, size_bytes: int, *, fd: int | None = None, may_write: bool = True) -> None:
        if fd is None:
            fd = os.memfd_create("twostroke-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Allocates the memory now. Touching every page of a mapping would take three times as long.
            os.posix_fallocate(fd, 0, size_bytes)
        self.fd = fd
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if may_write else 0)
        self.map = mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)

    def protect(self) -> None:
        """Lets no process map it for writing, or resize it, from now on. The owner calls it before others get it."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _PROTECTION)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> SharedMemory:
        """Maps another process's memory read-only, by its descriptor, which this object closes.

        Raises ConfigError if it is not such a memory; the descriptor then stays the caller's.
        """
        actual = os.fstat(fd).st_size
        if actual != size_bytes:
            raise ConfigError(f"shared page memory is {actual} bytes, expected {size_bytes}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _PROTECTION != _PROTECTION:
            raise ConfigError("shared page memory is not sealed: its owner could shrink it under a reader")
        return cls(size_bytes, fd=fd, may_write=False)

    def close(self) -> None:
        """Closes the descriptor and unmaps the memory. Where views are still in use, the last of them unmaps it."""
        os.close(self.fd)
        try:
            self.map.close()
        except BufferError:
            del self.map  # the last view unmaps it


class GenerationTable:
    """The generations of pages whose bytes are elsewhere, such as on a GPU, in shared memory of their own."""

    def __init__(self, pages: int, *, fd: int | None = None) -> None:
        size_bytes = generation_bytes(pages)
        if fd is None:
            self._memory = SharedMemory(size_bytes)
            self._memory.protect()
        else:
            self._memory = SharedMemory.attach(fd, size_bytes)
        self.fd = self._memory.fd
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._memory.map, np.uint64, count=pages)

    @classmethod
    def attach(cls, fd: int, pages: int) -> GenerationTable:
        """Maps another process's table. Raises ConfigError if it is none; the descriptor then stays the caller's."""
        return cls(pages, fd=fd)

    def close(self) -> None:
        del self.generations  # first, so that a second close cannot close another owner's descriptor
        self._memory.close()
