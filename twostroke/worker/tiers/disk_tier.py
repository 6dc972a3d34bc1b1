"""The disk tier: pages in segment files, written by a thread of its own.

The event loop owns the store: it reserves a place, lets the writer thread fill it, and makes the record findable once
it is written. What is written was copied before, so that a slow disk holds no page of the pool. An error of the disk is
told to the listener, who turns the tier off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tiers.byte_budget import WriteBudget
from twostroke.kv_cache.tiers.disk_store import (
    LEAST_RECORDS,
    DiskStore,
    ReclaimedRecord,
    RecordPlace,
    RecordReservation,
)
from twostroke.kv_cache.tiers.files import AlignedBuffer, SegmentFiles
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder
from twostroke.kv_cache.tiers.record import DEAD, HEADER_BYTES, SECTOR, RecordFormat, RecordHeader
from twostroke.transfer.base import digest
from twostroke.transfer.copy_threads import CopyThreads
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.tiers.reader import DamagedPage, MissingPage, PageRead

log = logging.getLogger(__name__)


class DiskListener(Protocol):
    """Called on the event loop."""

    def reclaimed(self, record: ReclaimedRecord) -> None:
        """Called with each block that has gone with its segment."""

    def written(self, block_hash: BlockHash) -> None:
        """Called with a block that can be loaded from now on."""

    def damaged(self, block_hash: BlockHash) -> None:
        """Called with a block whose bytes were not what they had been when its digest was made."""

    def failed(self, error: BaseException) -> None:
        """Called when the disk has failed."""


@dataclass(frozen=True, slots=True)
class OpenedDisk:
    """A tier's folder, locked and read, before any event loop has to do with it."""

    files: SegmentFiles
    form: RecordFormat
    own: SegmentFolder
    found: Sequence[ScannedSegment]
    """Segments of its folder, oldest first."""
    page_time: PageTime
    is_full: bool = False
    """The disk had no room for a record: the tier keeps to what its segments take."""

    def most_bytes(self, wanted_bytes: int) -> int:
        """Returns the bytes that the tier may take, if so many are wanted."""
        if not self.is_full:
            return wanted_bytes
        records = sum(len(segment.records) for segment in self.found)
        return min(wanted_bytes, max(records, LEAST_RECORDS) * self.form.record_bytes)


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A page to be written. Nobody changes its bytes until `done` is called."""

    block_hash: BlockHash
    parent: BlockHash
    data: memoryview
    digest: bytes
    done: Callable[[], None]


class DiskTier:
    def __init__(
        self, opened: OpenedDisk, listener: DiskListener, *, most_bytes: int, write_bytes_per_s: float
    ) -> None:
        self.files, self.form = opened.files, opened.form
        self.page_time = opened.page_time
        self._folders = [opened.own]
        self._listener = listener
        self._budget = WriteBudget(write_bytes_per_s, self.form.record_bytes)
        self.store = DiskStore(self.form, opened.most_bytes(most_bytes), opened.own.next_segment, listener.reclaimed)
        self._writing: dict[BlockHash, PageWrite] = {}
        """Pages on their way that are still wanted."""
        self.writes = 0
        """Pages on their way, wanted or not."""
        self._left: list[Path] = []
        """Files that are left to the next worker."""
        self._buffer = AlignedBuffer(self.form.record_bytes)
        self._writer = CopyThreads("tier-write", [self._buffer.view])
        self.adopt(opened.found)

    def adopt(self, found: Sequence[ScannedSegment], folder: SegmentFolder | None = None) -> list[BlockHash]:
        """Takes in segments, and their folder if it is a dead worker's; returns the blocks that are new here."""
        if folder is not None:
            self._folders.append(folder)
        blocks, useless = self.store.adopt(found, time.monotonic())
        self._remove(useless)
        return blocks

    @property
    def folder(self) -> Path:
        return self._folders[0].path

    def touch(self) -> None:
        """Says that the owner of these folders lives; on any thread. Raises OSError."""
        for folder in list(self._folders):
            folder.touch()

    def is_known(self, block_hash: BlockHash) -> bool:
        """Tells whether a block is on disk or on its way there."""
        return block_hash in self.store or block_hash in self._writing

    def is_within_budget(self, *, wanted_again: bool) -> bool:
        """Takes one page from the budget of written bytes, if it has room for such a page."""
        return self._budget.take_page(time.monotonic(), wanted_again=wanted_again)

    def write(self, page: PageWrite) -> None:
        """Lets the writer thread write a page that is not known yet, and for which the store has room."""
        reach(Point.TIER_WRITING)
        self._writing[page.block_hash] = page
        self.writes += 1
        reservation = self.store.reserve(time.monotonic())
        written: Future[None] = Future()
        loop = asyncio.get_running_loop()
        written.add_done_callback(lambda each: loop.call_soon_threadsafe(self._written, page, reservation.place, each))
        self._writer.submit(lambda record: self._write(record, page, reservation), written)

    def bury(self, block_hash: BlockHash) -> bool:
        """Forgets all records of a block for good, also over a restart; returns whether it was here."""
        self._writing.pop(block_hash, None)
        was_here = block_hash in self.store
        for place in self.store.drop(block_hash):
            self._bury_later(place)
        return was_here

    def forget_all(self) -> None:
        """Removes every record and every file, also those that were left."""
        self._writing.clear()
        self._remove([*self._left, *self.store.forget_all()])
        self._left.clear()

    def leave(self) -> None:
        """Forgets every record, and leaves the files to the next worker."""
        self._left += self.store.forget_all()

    async def wait_idle(self) -> None:
        """Waits for the writes under way."""
        idle: Future[None] = Future()
        self._writer.submit(lambda _: None, idle)
        await asyncio.wrap_future(idle)
        await asyncio.sleep(0)  # the last write's callback runs

    def close(self) -> None:
        """Ends the thread and leaves the folders to a successor; blocks until the writes under way have ended."""
        self._writer.close()
        self._buffer.close()
        for folder in self._folders:
            folder.close()

    # On the writer thread

    def _write(self, record: memoryview, page: PageWrite, reservation: RecordReservation) -> None:
        for path in reservation.reclaimed:
            self.files.remove(path)
        body, place = self.form.page_of(record), reservation.place
        body[:] = page.data
        is_intact = digest(body) == page.digest
        header = RecordHeader(page.block_hash, page.parent, page.digest) if is_intact else DEAD
        record[:HEADER_BYTES] = self.form.pack(header)
        with self.files.writing(place.path) as file:
            file.write(record, place.offset)
        if not is_intact:
            raise DamagedPage(f"block {page.block_hash.hex()} changed in memory")

    def _bury(self, record: memoryview, place: RecordPlace) -> None:
        """Marks a record as dead, unless its segment has gone: no file is made for it."""
        sector = record[:SECTOR]
        sector[:HEADER_BYTES] = self.form.pack(DEAD)
        with contextlib.suppress(FileNotFoundError), self.files.changing(place.path) as file:
            file.write(sector, place.offset)
            file.sync()

    # On the event loop

    def _written(self, page: PageWrite, place: RecordPlace, written: Future[None]) -> None:
        self.writes -= 1
        page.done()
        is_wanted, error = self._writing.get(page.block_hash) is page, written.exception()
        if is_wanted:
            del self._writing[page.block_hash]
        if error is not None:
            self.store.abandon(place)
            self._not_written(page, error)
        elif not is_wanted:
            if self.store.abandon(place):
                self._bury_later(place)
        elif self.store.commit(page.block_hash, place, time.monotonic()):
            reach(Point.TIER_WRITTEN)
            self._listener.written(page.block_hash)

    def _not_written(self, page: PageWrite, error: BaseException) -> None:
        if isinstance(error, DamagedPage):
            self._listener.damaged(page.block_hash)
        else:
            self._listener.failed(error)

    def _bury_later(self, place: RecordPlace) -> None:
        self._in_background(lambda record: self._bury(record, place))

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._in_background(lambda _, path=path: self.files.remove(path))  # type: ignore[misc]  # bound now

    def _in_background(self, job: Callable[[memoryview], None]) -> None:
        done: Future[None] = Future()
        done.add_done_callback(_log_failure)
        self._writer.submit(job, done)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.warning("disk tier cannot change a file error=%r", error)


class DiskFetcher:
    """Reads records into a buffer of its own and checks them there."""

    def __init__(self, disk: DiskTier) -> None:
        self._files, self._form = disk.files, disk.form
        self._buffer = AlignedBuffer(disk.form.record_bytes)

    def fetch(self, read: PageRead[RecordPlace]) -> memoryview:
        form, buffer = self._form, self._buffer.view
        try:
            with self._files.reading(read.place.path) as file:
                count = file.read(buffer, read.place.offset)
        except FileNotFoundError as error:
            raise MissingPage(f"block {read.block_hash.hex()} has gone with its segment") from error
        header = form.parse(buffer[:count])
        data = form.page_of(buffer)
        if count < form.record_bytes or header is None or header.block_hash != read.block_hash:
            raise DamagedPage(f"block {read.block_hash.hex()} has no whole record at its place")
        if digest(data) != header.page_digest:
            raise DamagedPage(f"block {read.block_hash.hex()} has other bytes than were written")
        return data

    def close(self) -> None:
        self._buffer.close()
