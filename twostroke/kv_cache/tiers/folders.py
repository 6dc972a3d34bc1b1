"""Folders of segments. A folder belongs to the worker that holds its lock, and once that is dead, to a successor.

    DIR/v<version>-<identity>/<worker>/lock            locked as long as the worker lives
    DIR/v<version>-<identity>/<worker>/probe           written and removed at start
    DIR/v<version>-<identity>/<worker>/00000001.pages  records, one after the other

The lock is the kernel's (flock): it ends with the process, however the process ends. The modification time of its file
is when the owner was last seen. Only folders unseen for some time are taken, so a worker that restarts keeps its own.

DIR may hold anything else besides. Only folders and files with the names above are read, and nothing else is ever
removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from twostroke.kv_cache.tiers.files import PROBE, AlignedBuffer, SegmentFiles
from twostroke.kv_cache.tiers.record import (
    DEAD,
    IDENTITY_BYTES,
    MOST_SEGMENT_BYTES,
    SECTOR,
    VERSION,
    RecordFormat,
    RecordHeader,
)
from twostroke.kv_cache.tiers.trust import FolderTrust
from twostroke.security import trusted_paths

log = logging.getLogger(__name__)

LOCK: Final = "lock"
SUFFIX: Final = ".pages"
MODEL_FOLDER: Final = re.compile(rf"v[0-9]+-[0-9a-f]{{{2 * IDENTITY_BYTES}}}")
"""Names that `model_folder` gives, also in other versions."""
WORKER_FOLDER: Final = re.compile(r"[A-Za-z0-9_.~%-]+")
"""Names that `claim_own` gives: worker ids, quoted so that each is a valid file name."""
SEGMENT: Final = re.compile(rf"[0-9]{{8,}}{re.escape(SUFFIX)}")
SCANNING_THREADS = 8
"""Threads that read headers: these are small reads far apart, and several at once take a fraction of the time."""


@dataclass(frozen=True, slots=True)
class ScannedSegment:
    """A segment as its headers describe it, its torn tail cut off."""

    path: Path
    records: tuple[RecordHeader, ...]
    """One for each place in the file; DEAD where the header is damaged or of another form."""


class SegmentFolder:
    """A folder that this process has locked until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.touch()
        names = (each.stem for each in path.iterdir() if SEGMENT.fullmatch(each.name))
        self._numbers = itertools.count(1 + max(map(int, names), default=0))

    @classmethod
    def claim(cls, path: Path) -> Self | None:
        """Locks a folder, which it creates if needed; returns None if a live process has it locked.

        Raises OSError, UntrustedPath where others may write to it, its lock or the folder of its model.
        """
        while True:
            make_private(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            trusted_paths.check(path.parent, path)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                trusted_paths.check_open(lock, path / LOCK)
                if _is_at(path / LOCK, lock):
                    return cls(path, lock)
            except BlockingIOError:
                os.close(lock)
                return None
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # another process removed the folder meanwhile

    def next_segment(self) -> Path:
        """Returns the path of the next new segment."""
        return self.path / f"{next(self._numbers):08d}{SUFFIX}"

    def scan(self, files: SegmentFiles, form: RecordFormat) -> list[ScannedSegment]:
        """Reads the headers of all segments, oldest first; cuts torn tails, and removes segments without records.

        A segment that cannot be read is left out, with a warning. Raises OSError if the folder cannot be listed.
        """
        with ThreadPoolExecutor(SCANNING_THREADS, thread_name_prefix="tier-scan") as threads:
            scanned = threads.map(lambda path: _try_scan(files, path, form), sorted(_segments_in(self.path)))
            return [segment for segment in scanned if segment is not None and segment.records]

    def has_segments(self) -> bool:
        """Returns whether there are segments, readable or not. Raises OSError."""
        return bool(_segments_in(self.path))

    def touch(self) -> None:
        """Records that the owner is alive now, as the lock file's time. Raises OSError."""
        os.utime(self._lock)

    def remove(self) -> None:
        """Removes our files, the lock last, and the folder if it is empty then; closes the lock. Raises OSError."""
        try:
            for path in (*_segments_in(self.path), self.path / PROBE, self.path / LOCK):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files that are not ours, or a worker that has just come
                self.path.rmdir()
        finally:
            self.close()

    def try_remove(self) -> bool:
        """Removes our files and the folder, and returns whether it could; logs a warning if not."""
        try:
            self.remove()
        except OSError as error:
            log.warning("folder of pages cannot be removed folder=%s error=%s", self.path, error)
            return False
        return True

    def close(self) -> None:
        """Releases the lock: another worker may take the folder."""
        os.close(self._lock)


def model_folder(root: Path, identity: bytes) -> Path:
    """Returns the folder of all workers with pages of this identity."""
    return root / f"v{VERSION}-{identity.hex()}"


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it, if it is not there: only our user may write to it. Raises OSError."""
    trusted_paths.make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def claim_own(root: Path, worker: str) -> SegmentFolder:
    """Claims the worker's own folder, or a numbered one while another process has that locked.

    It claims a numbered one, with a warning, also if other users may write to its own. Raises OSError.
    """
    make_private(root)
    trusted_paths.check(root)
    name = quote(worker, safe="")
    names: Iterator[str] = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(folder for name in names if (folder := _claim_if_trusted(root / name)) is not None)


def hold_own(root: Path, worker: str) -> list[SegmentFolder]:
    """Claims the folders that this worker's epochs have left below the root of all models, until they are closed.

    So no worker adopts or removes them while this one is asleep. A folder that cannot be claimed is skipped, with a
    warning.
    """
    name, held = quote(worker, safe=""), []
    own = re.compile(rf"{re.escape(name)}(\.[0-9]+)?")
    for model in _folders_in(root, MODEL_FOLDER) if root.is_dir() else ():
        for path in _folders_in(model, own):
            folder = _try_claim(path, time.time() + 1.0)
            if folder is not None:
                held.append(folder)
    return held


@dataclass(frozen=True, slots=True)
class LeftFolder:
    """A folder with a possibly dead owner. It is not claimed."""

    path: Path
    seen_s: float
    """When its owner was last seen, in Unix seconds."""
    size_bytes: int
    """Bytes of its segments."""


def claim_left(
    root: Path,
    *,
    unseen_s: float,
    wanted: Callable[[LeftFolder], bool] = lambda _: True,
    folder_trust: FolderTrust | None = None,
) -> Iterator[SegmentFolder]:
    """Claims the wanted folders under `root` one by one: those whose owner is dead and was last seen this long ago.

    One that cannot be claimed, or that others may write to, is left out, with a warning.
    """
    seen_by_s = time.time() - unseen_s
    for left in _left_in([root], seen_by_s, folder_trust or FolderTrust()):
        folder = _try_claim(left.path, seen_by_s) if wanted(left) else None
        if folder is not None:
            yield folder


def remove_unused(
    root: Path, *, kept: Collection[str], unseen_s: float, folder_trust: FolderTrust | None = None
) -> int:
    """Removes folders of pages that no model has used for this many seconds, except those under `kept`.

    Returns how many there were. One that cannot be removed is left, with a warning.
    """
    others, folder_trust = _other_models(root, kept), folder_trust or FolderTrust()
    left = (each for path in others for each in claim_left(path, unseen_s=unseen_s, folder_trust=folder_trust))
    removed = sum(folder.try_remove() for folder in left)
    _remove_empty(others)
    return removed


def remove_beyond(
    root: Path, *, kept: Collection[str], unseen_s: float, most_bytes: int, folder_trust: FolderTrust | None = None
) -> int:
    """Removes folders of other models than `kept` until those without an owner take at most this many bytes.

    The folder whose owner was seen the longest ago is removed first. Only folders that were not seen for `unseen_s`
    count. Returns how many were removed. One that cannot be removed is left, with a warning.
    """
    others, seen_by_s, removed = _other_models(root, kept), time.time() - unseen_s, 0
    left = sorted(_left_in(others, seen_by_s, folder_trust or FolderTrust()), key=lambda each: each.seen_s)
    held_bytes = sum(each.size_bytes for each in left)
    for each in left:
        if held_bytes <= most_bytes:
            break
        folder = _try_claim(each.path, seen_by_s)
        if folder is None or folder.try_remove():  # without a claim it has an owner after all
            removed += folder is not None
            held_bytes -= each.size_bytes
    _remove_empty(others)
    return removed


def scan_segment(files: SegmentFiles, path: Path, form: RecordFormat) -> ScannedSegment:
    """Returns the records of a segment, and cuts the file after the last whole one with a good header.

    A bad header before that one costs its own record only: all records have one size. A segment without any record is
    removed. Raises OSError, also for a file that is larger than any segment or that others may write to.
    """
    trusted_paths.check(path)
    size, records, bad = path.stat().st_size, list[RecordHeader](), 0
    if size > max(MOST_SEGMENT_BYTES, form.record_bytes):
        raise OSError(errno.EFBIG, f"{size} bytes are more than any segment has; remove it", str(path))
    buffer = AlignedBuffer(SECTOR)
    try:
        with files.reading(path) as file:
            for offset in range(0, size - form.record_bytes + 1, form.record_bytes):
                header = form.parse(buffer.view[: file.read(buffer.view, offset)])
                if header is None:
                    bad += 1
                    continue
                records += [*itertools.repeat(DEAD, offset // form.record_bytes - len(records)), header]
    finally:
        buffer.close()
    if bad:
        log.warning("segment has bad headers path=%s bad=%d records=%d", path, bad, len(records))
    if not records:
        files.remove(path)
    elif len(records) * form.record_bytes < size:
        os.truncate(path, len(records) * form.record_bytes)
    return ScannedSegment(path, tuple(records))


def _try_scan(files: SegmentFiles, path: Path, form: RecordFormat) -> ScannedSegment | None:
    try:
        return scan_segment(files, path, form)
    except OSError as error:
        log.warning("segment cannot be read path=%s error=%s", path, error)
        return None


def _claim_if_trusted(path: Path) -> SegmentFolder | None:
    try:
        return SegmentFolder.claim(path)
    except trusted_paths.UntrustedPath as error:
        log.warning("own folder of pages is not trusted, another one is used problem=%s", error.strerror)
        return None


def _try_claim(path: Path, seen_by_s: float) -> SegmentFolder | None:
    """Locks a folder if its owner is dead and was not seen after `seen_by_s`, else returns None; warns of errors."""
    try:
        return SegmentFolder.claim(path) if _was_seen_by(path / LOCK, seen_by_s) else None
    except OSError as error:
        log.warning("folder of pages cannot be claimed folder=%s error=%s", path, error)
        return None


def _other_models(root: Path, kept: Collection[str]) -> list[Path]:
    return [path for path in _folders_in(root, MODEL_FOLDER) if path.name not in kept]


def _remove_empty(models: Iterable[Path]) -> None:
    for path in models:
        with contextlib.suppress(OSError):  # workers of that model are using it
            path.rmdir()


def _left_in(models: Iterable[Path], seen_by_s: float, folder_trust: FolderTrust) -> Iterator[LeftFolder]:
    """Yields folders whose owner was not seen after `seen_by_s`. It claims none: that would count as seen."""
    for path in (folder for model in models for folder in _folders_in(model, WORKER_FOLDER)):
        try:
            if _was_seen_by(path / LOCK, seen_by_s) and folder_trust.allows(path.parent, path, path / LOCK):
                size_bytes = sum(segment.lstat().st_size for segment in _segments_in(path))
                yield LeftFolder(path, (path / LOCK).lstat().st_mtime, size_bytes)
        except OSError as error:
            log.warning("folder of pages cannot be looked at folder=%s error=%s", path, error)


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names the open file of a descriptor."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _folders_in(root: Path, name: re.Pattern[str]) -> list[Path]:
    """Returns the folders with such names, but no links. A `root` that cannot be read has none, with a warning."""
    try:
        with os.scandir(root) as entries:
            found = [each.path for each in entries if name.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    except OSError as error:
        log.warning("folders of pages cannot be listed folder=%s error=%s", root, error)
        return []
    return [Path(path) for path in sorted(found)]


def _was_seen_by(lock: Path, seen_by_s: float) -> bool:
    """Returns whether the lock file exists and was not touched after `seen_by_s`. Raises OSError."""
    try:
        status = lock.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime <= seen_by_s


def _segments_in(path: Path) -> list[Path]:
    """Returns the segments: regular files only, no links, folders or pipes with such names. Raises OSError."""
    with os.scandir(path) as entries:
        return [Path(e.path) for e in entries if SEGMENT.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
