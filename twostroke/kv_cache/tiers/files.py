"""Segment files: whole sectors at aligned offsets, with direct I/O where the file system allows it.

A `SegmentFiles` opens all files of one tier, so that a test can replace it by a disk that is full, slow or broken.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twostroke.kv_cache.tiers.record import SECTOR

PROBE: Final = "probe"
"""Name of the file that is written into a folder to find out what its disk can do."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""
_READ, _WRITE = os.O_RDONLY, os.O_WRONLY | os.O_CREAT


class AlignedBuffer:
    """Memory that begins at a page of the system, as direct I/O requires."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Frees the memory. Views that others still hold keep it alive until they go."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class SegmentFile:
    """One open file. Offsets and lengths are whole sectors; buffers are aligned."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fills the buffer from `offset`, and returns how many bytes there were. Raises OSError."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            done += count
            if not count or done % SECTOR:  # the file ends there
                break
        return done

    def write(self, buffer: memoryview, offset: int) -> None:
        """Writes the buffer at `offset`. Raises OSError, with ENOSPC for a partial write."""
        done = 0
        while done < len(buffer):
            count = os.pwrite(self._descriptor, buffer[done:], offset + done)
            done += count
            if not count or done % SECTOR:
                raise OSError(errno.ENOSPC, "the disk took only a part of a record")

    def sync(self) -> None:
        """Returns once what was written survives a loss of power. Raises OSError."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class SegmentFiles:
    """Opens the segment files of one tier."""

    def __init__(self) -> None:
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECT
        """Flags of every open: no link is followed, and no pipe waited for. A probe removes O_DIRECT if the file system
        does not support it."""

    @property
    def is_direct(self) -> bool:
        return bool(self._flags & os.O_DIRECT)

    def probe(self, folder: Path, size_bytes: int = SECTOR) -> float | None:
        """Finds out whether this file system takes direct I/O; returns the seconds of reading this many bytes there.

        Returns None where the disk is full. Raises OSError where nothing can be written at all.
        """
        path = folder / PROBE
        path.unlink(missing_ok=True)  # if it is a hard link, writing would change a file that is not ours
        buffer = AlignedBuffer(size_bytes)
        try:
            return self._probe(path, buffer.view)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return None
        finally:
            buffer.close()
            path.unlink(missing_ok=True)

    def _probe(self, path: Path, buffer: memoryview) -> float:
        try:
            return self._write_and_read(path, buffer)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not self.is_direct:
                raise
            self._flags &= ~os.O_DIRECT
            return self._write_and_read(path, buffer)

    def _write_and_read(self, path: Path, buffer: memoryview) -> float:
        with self.writing(path) as file:
            file.write(buffer, 0)
        return self._time_to_read(path, buffer)

    def time_to_read(self, path: Path, size_bytes: int) -> float:
        """Returns the seconds of reading this many bytes at the start of a file. Raises OSError."""
        buffer = AlignedBuffer(size_bytes)
        try:
            return self._time_to_read(path, buffer.view)
        finally:
            buffer.close()

    def _time_to_read(self, path: Path, buffer: memoryview) -> float:
        started_s = time.perf_counter()
        with self.reading(path) as file:
            file.read(buffer, 0)
        return time.perf_counter() - started_s

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[SegmentFile]:
        """Opens a segment for reading. Raises OSError, FileNotFoundError for one that has been reclaimed."""
        with contextlib.closing(self.open(path, _READ)) as file:
            yield file

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[SegmentFile]:
        with contextlib.closing(self.open(path, _WRITE)) as file:
            yield file

    @contextlib.contextmanager
    def changing(self, path: Path) -> Iterator[SegmentFile]:
        """Opens an existing segment for writing. Raises OSError, FileNotFoundError for one that has been reclaimed."""
        with contextlib.closing(self.open(path, os.O_WRONLY)) as file:
            yield file

    def open(self, path: Path, flags: int) -> SegmentFile:
        """Opens a regular file. Raises OSError, also for anything else."""
        descriptor = os.open(path, flags | self._flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, "it is not a regular file", str(path))
        return SegmentFile(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
