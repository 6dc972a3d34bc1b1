"""The disk store knows which block lies where on disk, and which segment is reclaimed when space is needed.

It does no I/O: a caller reserves a place, writes there on a thread of its own, and commits what it has written, or
abandons the place. A segment stays as long as a place in it is reserved. Records are only ever appended, so space comes
back segment by segment: the one with the least valuable live records first. A record's worth is hits per time
since it came (Blankstein et al., "Hyperbolic caching", USENIX ATC 2017).

One owner, one thread: the worker's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.pool_size import enough_pages
from twostroke.kv_cache.tiers.folders import ScannedSegment
from twostroke.kv_cache.tiers.record import DEAD, MOST_SEGMENT_BYTES, RecordFormat, record_bytes

SEGMENTS = 32
"""Number of segments that the store is divided into. It has more if these would exceed `MOST_SEGMENT_BYTES`."""
LEAST_RECORDS = 2
"""Fewest records of a disk tier: one in the segment that is written, and one in a segment that can be reclaimed."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class RecordReservation:
    """A place for one record, to be written and then committed or abandoned."""

    place: RecordPlace
    reclaimed: tuple[Path, ...]
    """Segments that made room for it: their files are to be removed first."""


@dataclass(frozen=True, slots=True)
class ReclaimedRecord:
    block_hash: BlockHash
    age_s: float
    """Seconds since it was written, or found on disk at the start."""


@dataclass(slots=True)
class _Record:
    offset: int
    since_s: float
    hits: int = 0


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    records: int
    """Records that lie in the file or are reserved there, live or not."""
    reserved: int = 0
    """Records that are being written: neither committed nor abandoned."""
    live: dict[BlockHash, _Record] = field(default_factory=dict)
    copies: list[tuple[BlockHash, int]] = field(default_factory=list)
    """Duplicate records in this file, with their offsets. The live record of each is here or in another segment."""

    def worth(self, now_s: float) -> float:
        return sum((1 + record.hits) / (1.0 + now_s - record.since_s) for record in self.live.values())


def disk_pages(most_bytes: int, page_bytes: int) -> int:
    """Returns how many pages a worker's disk space holds. Raises ConfigError if there is no room for two records."""
    return enough_pages(most_bytes, record_bytes(page_bytes), least=LEAST_RECORDS, flag="--disk-cache")


class DiskStore:
    def __init__(
        self,
        form: RecordFormat,
        most_bytes: int,
        next_segment: Callable[[], Path],
        reclaimed: Callable[[ReclaimedRecord], None],
    ) -> None:
        """`next_segment` returns the path of a new segment; `reclaimed` gets each live record of a reclaimed segment.
        Raises ConfigError if there is no room for two records.
        """
        self.form = form
        self._most_records = disk_pages(most_bytes, form.page_bytes)
        largest = max(1, MOST_SEGMENT_BYTES // form.record_bytes)
        self._segment_records = max(1, min(self._most_records // SEGMENTS, largest))
        self._next_segment = next_segment
        self._reclaimed = reclaimed
        self._segments: dict[Path, _Segment] = {}
        self._open: _Segment | None = None
        self._where: dict[BlockHash, _Segment] = {}
        self._copies: dict[BlockHash, set[RecordPlace]] = {}
        """Duplicate records of each block. They are never read, but a restart would find them."""
        self._records = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._where

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._where)

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, dead records included."""
        return self._records * self.form.record_bytes

    @property
    def most_bytes(self) -> int:
        return self._most_records * self.form.record_bytes

    def adopt(self, segments: Iterable[ScannedSegment], now_s: float) -> tuple[list[BlockHash], list[Path]]:
        """Takes in segments that were found on disk, oldest first.

        Returns the new blocks, and the paths of segments to remove: those without new blocks and those that do not
        fit.
        """
        found: list[BlockHash] = []
        useless: list[Path] = []
        for scanned in reversed(list(segments)):  # the newest first: of two equal records it is the likelier intact
            segment = _Segment(scanned.path, len(scanned.records))
            for index, header in enumerate(scanned.records):
                if header == DEAD:
                    continue
                offset = index * self.form.record_bytes
                if header.block_hash in self._where or header.block_hash in segment.live:
                    segment.copies.append((header.block_hash, offset))
                else:
                    segment.live[header.block_hash] = _Record(offset, now_s)
            if not segment.live or self._records + segment.records > self._most_records:
                useless.append(scanned.path)
                continue
            self._add(segment)
            self._where.update(dict.fromkeys(segment.live, segment))
            for block_hash, offset in segment.copies:
                self._copies.setdefault(block_hash, set()).add(RecordPlace(scanned.path, offset))
            found += segment.live
        return found, useless

    def find(self, block_hash: BlockHash) -> RecordPlace | None:
        segment = self._where.get(block_hash)
        return None if segment is None else RecordPlace(segment.path, segment.live[block_hash].offset)

    def hit(self, block_hash: BlockHash) -> None:
        """Counts a hit of a block; does nothing if it was reclaimed meanwhile."""
        segment = self._where.get(block_hash)
        if segment is not None:
            segment.live[block_hash].hits += 1

    def has_room(self) -> bool:
        """Returns whether a place can be reserved: not while too many segments have writes under way."""
        if self._has_open_place(self._open):
            return True
        return sum(each.records for each in self._segments.values() if each.reserved) <= self._most_before_new

    def reserve(self, now_s: float) -> RecordReservation:
        """Reserves the place of one record, and reclaims segments if needed. Call it only if `has_room`."""
        reclaimed: list[Path] = []
        if not self._has_open_place(self._open):
            while self._records > self._most_before_new:
                reclaimed.append(self._reclaim(now_s))
            self._open = _Segment(self._next_segment(), 0)
            self._add(self._open)
        place = RecordPlace(self._open.path, self._open.records * self.form.record_bytes)
        self._open.records += 1
        self._open.reserved += 1
        self._records += 1
        return RecordReservation(place, tuple(reclaimed))

    def commit(self, block_hash: BlockHash, place: RecordPlace, now_s: float) -> bool:
        """Makes a written record findable. Returns False if the store forgot all meanwhile, or has the block."""
        if not self.abandon(place):
            return False
        segment = self._segments[place.path]
        if block_hash in self._where:
            segment.copies.append((block_hash, place.offset))
            self._copies.setdefault(block_hash, set()).add(place)
            return False
        segment.live[block_hash] = _Record(place.offset, now_s)
        self._where[block_hash] = segment
        return True

    def abandon(self, place: RecordPlace) -> bool:
        """Gives up a reserved place for good; returns False if its segment was forgotten meanwhile."""
        segment = self._segments.get(place.path)
        if segment is not None:
            segment.reserved -= 1
        return segment is not None

    def drop(self, block_hash: BlockHash) -> list[RecordPlace]:
        """Forgets a block that is damaged or not wanted; returns the places of all its records."""
        places = list(self._copies.pop(block_hash, ()))
        segment = self._where.pop(block_hash, None)
        if segment is not None:
            places.append(RecordPlace(segment.path, segment.live.pop(block_hash).offset))
        return places

    def forget_all(self) -> list[Path]:
        """Forgets every record, and returns the paths of all segments."""
        paths = list(self._segments)
        self._segments.clear()
        self._where.clear()
        self._copies.clear()
        self._open, self._records = None, 0
        return paths

    @property
    def _most_before_new(self) -> int:
        """Most records that all other segments may have when a new one is begun."""
        return self._most_records - min(self._segment_records, self._most_records)

    def _has_open_place(self, segment: _Segment | None) -> TypeGuard[_Segment]:
        return segment is not None and segment.records < self._segment_records

    def _add(self, segment: _Segment) -> None:
        self._segments[segment.path] = segment
        self._records += segment.records

    def _reclaim(self, now_s: float) -> Path:
        """Forgets the segment that is worth least and has no writes under way, and returns its path."""
        written = [each for each in self._segments.values() if not each.reserved]
        assert written, "a place was reserved although there was no room"
        segment = min(written, key=lambda each: each.worth(now_s))
        del self._segments[segment.path]
        self._records -= segment.records
        for block_hash, offset in segment.copies:
            self._forget_copy(block_hash, RecordPlace(segment.path, offset))
        for block_hash, record in segment.live.items():
            del self._where[block_hash]
            self._reclaimed(ReclaimedRecord(block_hash, now_s - record.since_s))
        return segment.path

    def _forget_copy(self, block_hash: BlockHash, place: RecordPlace) -> None:
        places = self._copies.get(block_hash, set())
        places.discard(place)  # it may have been dropped before
        if not places:
            self._copies.pop(block_hash, None)

    def check_integrity(self) -> None:
        """Asserts that every record that is known lies in a segment that is here. O(records); for tests."""
        assert self._records == sum(each.records for each in self._segments.values())
        for block_hash, segment in self._where.items():
            assert self._segments[segment.path] is segment, f"block {block_hash.hex()} has gone with its segment"
            assert block_hash in segment.live, f"block {block_hash.hex()} is not in its segment"
        for block_hash, places in self._copies.items():
            assert places, f"block {block_hash.hex()} is said to have copies"
            assert all(place.path in self._segments for place in places), f"a copy of {block_hash.hex()} has gone"
