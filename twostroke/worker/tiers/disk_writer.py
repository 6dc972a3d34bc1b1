"""The thread that changes the segments of a disk tier, and the pages that it gets to write."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tiers.disk_store import RecordPlace, RecordReservation
from twostroke.kv_cache.tiers.files import AlignedBuffer, SegmentFiles
from twostroke.kv_cache.tiers.record import DEAD, HEADER_BYTES, SECTOR, RecordFormat, RecordHeader
from twostroke.transfer.base import digest
from twostroke.transfer.copy_threads import CopyThreads
from twostroke.worker.tiers.reader import DamagedPage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A page to be written. Nobody changes its bytes until `done` is called."""

    block_hash: BlockHash
    parent: BlockHash
    data: memoryview
    digest: bytes
    done: Callable[[], None]


class DiskWriter:
    """One thread, with a buffer of its own."""

    def __init__(self, files: SegmentFiles, form: RecordFormat) -> None:
        self._files = files
        self._form = form
        self._buffer = AlignedBuffer(form.record_bytes)
        self._thread = CopyThreads("tier-write", [self._buffer.view])

    def write(self, page: PageWrite, reservation: RecordReservation, written: Future[None]) -> None:
        """Writes a page at its place; `written` gets DamagedPage, or the error of the disk."""
        self._thread.submit(lambda record: self._write(record, page, reservation), written)

    def bury(self, place: RecordPlace) -> None:
        """Marks a record as dead."""
        self._in_background(lambda record: self._bury(record, place))

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._in_background(lambda _, path=path: self._files.remove(path))  # type: ignore[misc]  # bound now

    def idle(self) -> Future[None]:
        """Returns a future that is done after the queued jobs."""
        idle: Future[None] = Future()
        self._thread.submit(lambda _: None, idle)
        return idle

    def close(self) -> None:
        """Blocks until the queued jobs are done."""
        self._thread.close()
        self._buffer.close()

    def _in_background(self, job: Callable[[memoryview], None]) -> None:
        done: Future[None] = Future()
        done.add_done_callback(_log_failure)
        self._thread.submit(job, done)

    # On the thread

    def _write(self, record: memoryview, page: PageWrite, reservation: RecordReservation) -> None:
        for path in reservation.reclaimed:
            self._files.remove(path)
        body, place = self._form.page_of(record), reservation.place
        body[:] = page.data
        is_intact = digest(body) == page.digest
        header = RecordHeader(page.block_hash, page.parent, page.digest) if is_intact else DEAD
        record[:HEADER_BYTES] = self._form.pack(header)
        with self._files.writing(place.path) as file:
            file.write(record, place.offset)
        if not is_intact:
            raise DamagedPage(f"block {page.block_hash.hex()} changed in memory")

    def _bury(self, record: memoryview, place: RecordPlace) -> None:
        """Marks a record as dead, unless its segment has gone: no file is made for it."""
        sector = record[:SECTOR]
        sector[:HEADER_BYTES] = self._form.pack(DEAD)
        with contextlib.suppress(FileNotFoundError), self._files.changing(place.path) as file:
            file.write(sector, place.offset)
            file.sync()


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.warning("disk tier cannot change a file error=%r", error)
