"""The disk tier: pages in segment files, written by a thread of its own.

The event loop owns the store: it reserves a place, lets the writer thread fill it, and makes the record findable once
it is written. What is written was copied before, so that a slow disk holds no page of the pool.

Writing has a budget. A block that was wanted again may use all of it, one that was seen once has a quarter.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.byte_budget import WriteBudget
from twostroke.kv_cache.tiers.disk_store import DiskStore, ReclaimedRecord, RecordPlace
from twostroke.kv_cache.tiers.files import AlignedBuffer, SegmentFiles
from twostroke.kv_cache.tiers.folders import ScannedSegment, SegmentFolder
from twostroke.kv_cache.tiers.record import RecordFormat
from twostroke.kv_cache.tiers.sightings import Sightings
from twostroke.transfer.base import digest
from twostroke.worker.measured.page_time import PageTime
from twostroke.worker.tiers.copies.copy_target import CopyTarget
from twostroke.worker.tiers.disk_writer import DiskWriter, PageWrite
from twostroke.worker.tiers.metrics import TierChanges, TierUse
from twostroke.worker.tiers.reader import DamagedPage, MissingPage, PageRead, TierReaders

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Memory for pages that wait to be written to disk."""
MOST_STAGED = 64
"""Most pages that wait to be written, however small they are."""
WANTED_AGAIN_SIGHTINGS = 2
"""Sightings from which on a block has been wanted again."""


class DiskListener(Protocol):
    """Called on the event loop."""

    def damaged(self, block_hash: BlockHash) -> None:
        """Called with a block whose bytes were not what they had been when its digest was made."""

    def failed(self, tier: Tier, error: BaseException) -> None:
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
    most_bytes: int
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DiskParts:
    """What a disk tier is made of."""

    files: SegmentFiles
    store: DiskStore
    budget: WriteBudget
    writer: DiskWriter
    readers: TierReaders[RecordPlace]
    staging: PageMemory
    """Pages that wait to be written."""


class DiskTier:
    tier = Tier.DISK

    def __init__(self, parts: DiskParts, changes: TierChanges, clock: Callable[[], float] = time.monotonic) -> None:
        self.files, self.form = parts.files, parts.store.form
        self.readers, self.store = parts.readers, parts.store
        self._budget = parts.budget
        self._writer = parts.writer
        self._staging = parts.staging
        self._free_staging = [PageId(page) for page in range(parts.staging.pages)]
        """Pages of the staging memory that are free."""
        self._changes = changes
        self._clock = clock
        self._sightings = Sightings()
        self._listener: DiskListener | None = None
        self._folders: list[SegmentFolder] = []
        self._writing: dict[BlockHash, PageWrite] = {}
        """Pages on their way that are still wanted."""
        self.writes = 0
        """Pages on their way, wanted or not."""
        self._left: list[Path] = []
        """Files that are left to the next worker."""
        self._is_off = False

    @classmethod
    def of(cls, opened: OpenedDisk, pool_memory: Pages, changes: TierChanges) -> DiskTier:
        """Starts the threads of a disk that was opened, and takes in what was found there."""
        form, files = opened.form, opened.files

        def reclaimed(record: ReclaimedRecord) -> None:
            changes.aged(Tier.DISK, record.block_hash, record.age_s)

        parts = DiskParts(
            files,
            DiskStore(form, opened.most_bytes, opened.own.next_segment, reclaimed),
            WriteBudget(opened.write_bytes_per_s, form.record_bytes),
            DiskWriter(files, form),
            TierReaders.of("tier-disk", lambda: DiskFetcher(files, form), pool_memory, opened.page_time),
            PageMemory(staged_pages(form.page_bytes), form.page_bytes),
        )
        parts.staging.map_in()
        disk = cls(parts, changes)
        disk.adopt(opened.found, opened.own)
        return disk

    def report_to(self, listener: DiskListener) -> None:
        """Tells this listener of failures from now on."""
        self._listener = listener

    def adopt(self, found: Sequence[ScannedSegment], folder: SegmentFolder) -> list[BlockHash]:
        """Takes in segments and their folder, the own one first; returns the blocks that are new here."""
        self._folders.append(folder)
        blocks, useless = self.store.adopt(found, self._clock())
        self._writer.remove(useless)
        return blocks

    @property
    def folder(self) -> Path:
        return self._folders[0].path

    def touch(self) -> None:
        """Marks the folders as used by a running worker. Any thread may call it. Raises OSError."""
        for folder in list(self._folders):
            folder.touch()

    @property
    def room(self) -> int:
        """Number of blocks that it can take at once."""
        return len(self._free_staging)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self.store)

    def use(self) -> TierUse:
        store = self.store
        return TierUse(store.used_bytes, store.most_bytes, len(store), self.readers.page_time.seconds)

    def find(self, block_hash: BlockHash) -> RecordPlace | None:
        return self.store.find(block_hash)

    def keeps(self, block_hash: BlockHash) -> bool:
        """Returns whether a block is on disk or on its way there."""
        return block_hash in self.store or block_hash in self._writing

    def hit(self, block_hash: BlockHash) -> None:
        """Notes that a page that was loaded was used."""
        self.store.hit(block_hash)

    def hold(self, places: Sequence[RecordPlace]) -> Callable[[], None]:
        """Holds nothing: a record that goes while it is read is found missing."""
        return lambda: None

    # Writing

    def saw(self, block_hash: BlockHash) -> None:
        """Notes that a block was filled, or found by a request."""
        self._sightings.saw(block_hash)

    def admit(self, block_hash: BlockHash) -> bool:
        """Returns whether a page is to be written now; if so, takes its bytes from the budget."""
        if self._is_off or self.keeps(block_hash):
            return False
        if not self._free_staging or self.writes >= self._staging.pages or not self.store.has_room():
            self._changes.metrics.skipped(Tier.DISK, "busy")
            return False
        wanted_again = self._sightings.count(block_hash) >= WANTED_AGAIN_SIGHTINGS
        if not self._budget.take_page(self._clock(), wanted_again=wanted_again):
            self._changes.metrics.skipped(Tier.DISK, "budget")
            return False
        return True

    def target(self, block_hash: BlockHash, parent: BlockHash) -> CopyTarget | None:
        """Takes a staging page, from which the block is written; returns None if it is not to be written now."""
        if not self.admit(block_hash):
            return None
        own = self._free_staging.pop()
        page, done = self._staging.page(own), functools.partial(self._free_staging.append, own)

        def commit(known: bytes) -> None:
            if not self._is_off and not self.keeps(block_hash) and self.store.has_room():
                self.write(PageWrite(block_hash, parent, page.data, known, done))
            else:
                done()

        return CopyTarget(page, commit, done)

    def write(self, page: PageWrite) -> None:
        """Lets the writer thread write a page that `admit` has admitted."""
        reach(Point.TIER_WRITING)
        self._writing[page.block_hash] = page
        self.writes += 1
        reservation = self.store.reserve(self._clock())
        written: Future[None] = Future()
        loop = asyncio.get_running_loop()
        written.add_done_callback(lambda each: loop.call_soon_threadsafe(self._written, page, reservation.place, each))
        self._writer.write(page, reservation, written)

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
                self._writer.bury(place)
        elif self.store.commit(page.block_hash, place, self._clock()):
            reach(Point.TIER_WRITTEN)
            self._changes.wrote(Tier.DISK, page.block_hash, self.form.record_bytes)

    def _not_written(self, page: PageWrite, error: BaseException) -> None:
        assert self._listener is not None, "it belongs to a worker"
        if isinstance(error, DamagedPage):
            self._listener.damaged(page.block_hash)
        else:
            self._listener.failed(Tier.DISK, error)

    # Forgetting

    def drop(self, block_hash: BlockHash) -> bool:
        """Forgets all records of a block for good, also over a restart; returns whether it was here."""
        self._writing.pop(block_hash, None)
        was_here = block_hash in self.store
        for place in self.store.drop(block_hash):
            self._writer.bury(place)
        return was_here

    def forget_all(self) -> list[BlockHash]:
        """Removes every record and every file, also those that were left. The log tells of files that stay."""
        blocks = list(self.store)
        self._writing.clear()
        self._writer.remove([*self._left, *self.store.forget_all()])
        self._left.clear()
        return blocks

    def turn_off(self, reason: str) -> list[BlockHash]:
        """Forgets every record, and leaves the files to the next worker."""
        log.warning("disk tier turned off reason=%s folder=%s", reason, self.folder)
        blocks, self._is_off = list(self.store), True
        self._left += self.store.forget_all()
        return blocks

    async def wait_idle(self) -> None:
        await asyncio.wrap_future(self._writer.idle())
        await asyncio.sleep(0)  # the last write's callback runs

    def close(self) -> None:
        """Ends the threads and leaves the folders to a successor; blocks until the writes under way have ended."""
        self.readers.close()
        self._writer.close()
        for folder in self._folders:
            folder.close()
        self._staging.close()


def staged_pages(page_bytes: int) -> int:
    """Returns how many pages of this size may wait to be written."""
    return max(4, min(MOST_STAGED, STAGING_BYTES // page_bytes))


class DiskFetcher:
    """Reads records into a buffer of its own and checks them there."""

    def __init__(self, files: SegmentFiles, form: RecordFormat) -> None:
        self._files, self._form = files, form
        self._buffer = AlignedBuffer(form.record_bytes)

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
