"""A file of packed weights. All workers of one user on a host map it, so that the weights are in memory once.

It gets its name when all of it is on the disk. So no process maps half a file, whichever process dies meanwhile.
Writers take turns by a lock that ends with its holder. Only files and folders are read that no other user can write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from twostroke.kernels.cpu.weights.packing import LARGE_PAGE_BYTES
from twostroke.security import trusted_paths

log = logging.getLogger(__name__)

WAIT_S: Final = 120.0
"""Seconds to wait for another process that writes the same file. After that, a worker packs its own weights."""
PAUSE_S: Final = 0.05
UNUSED_S: Final = 14 * 86400.0
"""Seconds since a file was last mapped after which it is removed, when another one is written."""
RECENT_S: Final = 600.0
"""Seconds since it was last mapped for which a file stays even on a full disk: other workers of the same start are
about to map it."""
LEAST_FREE_SHARE: Final = 0.1
"""Share of the disk that is kept free by removing files. Each model and each version of this program has its own file.
"""
LEAST_SHARE: Final = 0.5
"""Least share of a file in large pages. Below it, weights stream so slowly that each worker packs its own."""
SUFFIX: Final = ".weights"
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of Linux 5.14. Python lacks it."""


def mapped(path: Path, write: Callable[[BinaryIO], None]) -> mmap.mmap | None:
    """Returns the file as read-only memory. `write` makes its content if the file does not exist.

    Returns None where the file cannot be written or read, or is not in large pages: weights stream faster from private
    memory then.
    """
    try:
        trusted_paths.make_folder(path.parent.parent)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_owner(path.parent.lstat(), stat.S_ISDIR, path.parent)
        trusted_paths.check_cache(path.parent)
        if not path.exists():
            with _lock(path.with_suffix(".lock")):
                if not path.exists():
                    _write(path, write)
        return _map(path)
    except OSError as error:
        log.warning("weights are not shared with other workers: path=%s error=%s", path, error)
        return None


def _map(path: Path) -> mmap.mmap | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_owner(status, stat.S_ISREG, path)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # lasts until it is unmapped: a mapping has a copy of the descriptor
        if status.st_size == 0 or status.st_size % LARGE_PAGE_BYTES:
            raise OSError("the file has a size that nobody writes")
        region = _populated(descriptor, status.st_size)
        share = share_in_large_pages(region)
        if share < 1.0:  # it is cached in small pages, as after a copy: dropped from the cache, it is read again
            region.close()
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            region = _populated(descriptor, status.st_size)
            share = share_in_large_pages(region)
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.utime(path)
    log.info("packed weights mapped path=%s in_large_pages=%.2f", path, share)
    return region if share >= LEAST_SHARE else None


def _populated(descriptor: int, size: int) -> mmap.mmap:
    region = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    region.madvise(mmap.MADV_HUGEPAGE)
    region.madvise(_POPULATE_READ)
    return region


def share_in_large_pages(region: mmap.mmap) -> float:
    """Returns the share of a file's region that the kernel maps in large pages."""
    start = f"{np.frombuffer(region, np.uint8).ctypes.data:x}-"
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(start):
                facts = dict(line.split(":", 1) for line in _until_next(lines))
                return int(facts.get("FilePmdMapped", "0 kB").split()[0]) * 1024 / len(region)
    return 0.0


def mapped_bytes(folder: Path, pid: int) -> int:
    """Returns how many bytes of this folder's packed weights a process has in its memory now; 0 once it has ended."""
    total = 0
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/smaps", encoding="utf-8") as lines,
    ):
        for line in lines:
            if line.rstrip().endswith(SUFFIX) and f" {folder}{os.sep}" in line:
                facts = dict(line.split(":", 1) for line in _until_next(lines))
                total += int(facts["Rss"].split()[0]) * 1024
    return total


def _until_next(lines: Iterator[str]) -> Iterator[str]:
    """Yields the facts of one region. VmFlags is the last."""
    for line in lines:
        yield line
        if line.startswith("VmFlags"):
            return


def _write(path: Path, write: Callable[[BinaryIO], None]) -> None:
    _remove_unused(path.parent)
    started_s = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".packing-", delete=False) as file:
        try:
            write(file)  # type: ignore[arg-type]  # typeshed's wrapper of a BinaryIO is none itself
            file.flush()
            os.fsync(file.fileno())
            # The kernel uses large pages only for what it reads from the disk, so the written pages are dropped.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)
            raise
    log.info("weights packed path=%s bytes=%d seconds=%.1f", path, path.stat().st_size, time.monotonic() - started_s)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the lock of the file's writers. Raises TimeoutError when another writer takes too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until_s = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise TimeoutError("another process has been writing it for too long") from None
            time.sleep(PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def _check_owner(status: os.stat_result, is_kind: Callable[[int], bool], path: Path) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written to by other users")


def _remove_unused(folder: Path) -> None:
    """Removes files that were not used for long. On a full disk, it removes more of them, the oldest first.

    Files that a worker has mapped stay: removing them would free nothing.
    """
    used_s: dict[Path, float] = {}
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            used_s[file] = file.stat().st_mtime
    now_s = time.time()
    for file in sorted(used_s, key=lambda each: used_s[each]):
        age_s = now_s - used_s[file]
        if age_s > UNUSED_S or (age_s > RECENT_S and file.suffix == SUFFIX and _is_nearly_full(folder)):
            with contextlib.suppress(OSError), file.open("rb") as opened:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a BlockingIOError where a process has it mapped
                file.unlink()


def _is_nearly_full(folder: Path) -> bool:
    disk = shutil.disk_usage(folder)
    return disk.free < LEAST_FREE_SHARE * disk.total
