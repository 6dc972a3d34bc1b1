"""Folders of segments. A folder belongs to the worker that holds its lock, and to a successor once that has died.

    DIR/<identity>/<worker>/lock            locked as long as the worker lives
    DIR/<identity>/<worker>/00000001.pages  records, one after the other

The lock is the kernel's (flock): it ends with the process, however the process ends. The time of its file says when
the owner was last seen, so that nobody takes the folder of a worker that is just being started again.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from twostroke.kv_cache.tiers.files import AlignedBuffer, SegmentFiles
from twostroke.kv_cache.tiers.record import SECTOR, RecordFormat, RecordHeader

SUFFIX = ".pages"
SCANNING_THREADS = 8
"""Headers are small reads far apart: several at once take a fraction of the time."""


@dataclass(frozen=True, slots=True)
class ScannedSegment:
    """A segment as its headers describe it, its torn tail cut off."""

    path: Path
    records: tuple[RecordHeader, ...]


class SegmentFolder:
    """A folder whose lock is ours until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.touch()
        self._numbers = itertools.count(1 + max(map(_number_of, _segments_in(path)), default=0))

    @classmethod
    def claim(cls, path: Path) -> Self | None:
        """Lock a folder, made if it is not there; return None if a live process has it. Raises OSError."""
        while True:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path / "lock", lock):
                    return cls(path, lock)
            except BlockingIOError:
                os.close(lock)
                return None
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # somebody removed the folder meanwhile

    def next_segment(self) -> Path:
        """Return the path of the next new segment."""
        return self.path / f"{next(self._numbers):08d}{SUFFIX}"

    def scan(self, files: SegmentFiles, form: RecordFormat) -> list[ScannedSegment]:
        """Read the headers of all segments, oldest first; cut torn tails, and remove segments without records.

        Raises OSError.
        """
        with ThreadPoolExecutor(SCANNING_THREADS, thread_name_prefix="tier-scan") as threads:
            scanned = threads.map(lambda path: scan_segment(files, path, form), sorted(_segments_in(self.path)))
            return [segment for segment in scanned if segment.records]

    def touch(self) -> None:
        """Say that the owner lives. Raises OSError."""
        os.utime(self._lock)

    def remove(self) -> None:
        """Remove the folder and everything in it. Raises OSError."""
        shutil.rmtree(self.path)
        self.close()

    def close(self) -> None:
        """Leave the folder to a successor."""
        os.close(self._lock)


def claim_own(root: Path, worker: str) -> SegmentFolder:
    """Claim the worker's own folder, or one beside it while a successor of its last process has that.

    Raises OSError.
    """
    names: Iterator[str] = itertools.chain([worker], (f"{worker}.{number}" for number in itertools.count(2)))
    return next(folder for name in names if (folder := SegmentFolder.claim(root / name)) is not None)


def claim_left(root: Path, *, unseen_s: float) -> list[SegmentFolder]:
    """Claim the folders under `root` whose owner is dead and was last seen so many seconds ago. Raises OSError."""
    seen_by_s = time.time() - unseen_s
    locks = [path / "lock" for path in sorted(root.iterdir())]
    left = [lock.parent for lock in locks if lock.exists() and lock.stat().st_mtime <= seen_by_s]
    return [folder for path in left if (folder := SegmentFolder.claim(path)) is not None]


def remove_unused(root: Path, *, kept: str, unseen_s: float) -> int:
    """Remove folders of pages that no model has used for so many seconds, except those under `kept`.

    Returns how many there were. Raises OSError.
    """
    unused = [path for path in root.iterdir() if path.is_dir() and path.name != kept]
    left = [folder for path in unused for folder in claim_left(path, unseen_s=unseen_s)]
    for folder in left:
        folder.remove()
    for path in unused:
        with contextlib.suppress(OSError):  # workers of that model are using it
            path.rmdir()
    return len(left)


def scan_segment(files: SegmentFiles, path: Path, form: RecordFormat) -> ScannedSegment:
    """Return the records of a segment up to the first that is incomplete, foreign or damaged, and cut the file there.

    A segment without any record is removed. Raises OSError.
    """
    size, records = path.stat().st_size, list[RecordHeader]()
    buffer = AlignedBuffer(SECTOR)
    try:
        with files.reading(path) as file:
            for offset in range(0, size - form.record_bytes + 1, form.record_bytes):
                header = form.parse(buffer.view[: file.read(buffer.view, offset)])
                if header is None:
                    break
                records.append(header)
    finally:
        buffer.close()
    if not records:
        files.remove(path)
    elif len(records) * form.record_bytes < size:
        os.truncate(path, len(records) * form.record_bytes)
    return ScannedSegment(path, tuple(records))


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether a path still leads to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _segments_in(path: Path) -> list[Path]:
    return [each for each in path.glob(f"*{SUFFIX}") if each.stem.isdigit()]


def _number_of(segment: Path) -> int:
    return int(segment.stem)
