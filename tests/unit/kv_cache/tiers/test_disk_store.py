"""The disk store against an oracle that remembers everything: bounded bytes, no place twice, the cheapest goes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from twostroke.base.errors import ConfigError
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tiers.disk_store import DiskStore, ReclaimedRecord
from twostroke.kv_cache.tiers.folders import ScannedSegment
from twostroke.kv_cache.tiers.record import RecordFormat, RecordHeader, identity_of

FORM = RecordFormat(identity_of("m", "f"), 4000)
RECORD = FORM.record_bytes


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def store_of(records: int, reclaimed: list[ReclaimedRecord] | None = None) -> DiskStore:
    numbers, gone = itertools.count(1), reclaimed if reclaimed is not None else []
    return DiskStore(FORM, records * RECORD, lambda: Path(f"{next(numbers)}.pages"), gone.append)


def write(store: DiskStore, number: int, now_s: float) -> tuple[Path, ...]:
    reservation = store.reserve(now_s)
    assert store.commit(block(number), reservation.place, now_s)
    return reservation.reclaimed


def test_it_never_holds_more_bytes_than_it_may_and_no_place_twice() -> None:
    gone: list[ReclaimedRecord] = []
    store, random_ = store_of(100, gone), random.Random(1)
    expected: set[int] = set()
    for now_s in range(2000):
        number = random_.randrange(400)
        if number in expected:
            store.hit(block(number))
        elif random_.random() < 0.05 and expected:
            dropped = random_.choice(sorted(expected))
            assert store.drop(block(dropped))
            expected.discard(dropped)
        else:
            write(store, number, float(now_s))
            expected -= {int.from_bytes(each.block_hash, "big") for each in gone}
            expected.add(number)
            gone.clear()
        assert store.used_bytes <= store.most_bytes
        store.check_integrity()
        assert {int.from_bytes(each, "big") for each in store} == expected
    places = [store.find(each) for each in store]
    assert len(set(places)) == len(places) == len(expected)


def test_the_segment_whose_records_are_worth_least_goes_first() -> None:
    store = store_of(64)  # two records a segment
    for number in range(64):
        write(store, number, 0.0)
    for number in range(64):
        if number // 2 != 7:
            store.hit(block(number))
    assert write(store, 100, 10.0) == (Path("8.pages"),)
    assert store.find(block(14)) is None
    assert store.find(block(16)) is not None


def test_what_is_being_written_is_never_reclaimed() -> None:
    store = store_of(2)
    late = store.reserve(0.0)
    for number in range(1, 4):
        write(store, number, float(number))
    assert store.commit(block(9), late.place, 4.0)
    assert block(9) in store


def test_there_is_no_room_while_all_segments_are_being_written() -> None:
    store = store_of(64)  # two records a segment
    under_way = [store.reserve(0.0).place for _ in range(64)]
    assert not store.has_room()
    assert store.commit(block(1), under_way[0], 1.0)
    assert not store.has_room(), "the other record of that segment is being written"
    assert store.abandon(under_way[1])
    assert store.has_room()
    assert store.reserve(2.0).reclaimed == (under_way[0].path,)
    for number, place in enumerate(under_way[2:], 2):
        assert store.commit(block(number), place, 3.0)


def test_a_write_that_ends_after_all_was_forgotten_is_not_committed() -> None:
    store = store_of(2)
    late = store.reserve(0.0)
    store.forget_all()
    assert not store.commit(block(9), late.place, 1.0)
    assert block(9) not in store


def test_found_segments_are_taken_in_newest_first_and_only_as_many_as_fit() -> None:
    store = store_of(5)
    found = [
        ScannedSegment(Path(f"{name}.pages"), tuple(RecordHeader(block(number), block(0), b"") for number in numbers))
        for name, numbers in (("old", (1, 2)), ("equal", (4, 5)), ("middle", (2, 3)), ("new", (4, 5)))
    ]
    blocks, useless = store.adopt(found, 0.0)
    assert sorted(int.from_bytes(each, "big") for each in blocks) == [2, 3, 4, 5]
    assert set(useless) == {Path("equal.pages"), Path("old.pages")}
    place = store.find(block(4))
    assert place is not None
    assert place.path == Path("new.pages")


def test_a_dropped_block_is_dropped_in_all_its_places() -> None:
    store = store_of(64)
    write(store, 1, 0.0)
    late = store.reserve(0.0).place
    found = [
        ScannedSegment(Path(f"{name}.pages"), tuple(RecordHeader(block(number), block(0), b"") for number in numbers))
        for name, numbers in (("a", (1, 2, 7)), ("b", (3, 2, 3)), ("c", (1, 3)))
    ]
    assert store.adopt(found, 0.0)[1] == []
    assert not store.commit(block(2), late, 1.0), "it was adopted meanwhile"
    for number, places in ((1, 3), (2, 3), (3, 3)):
        dropped = store.drop(block(number))
        assert len(set(dropped)) == len(dropped) == places
        assert block(number) not in store
        assert store.drop(block(number)) == []


def test_copies_of_blocks_are_forgotten_with_their_segments() -> None:
    gone: list[ReclaimedRecord] = []
    store, known = store_of(64, gone), tuple(RecordHeader(block(number), block(0), b"") for number in (1, 2, 3))
    for day in range(40):
        found = [
            ScannedSegment(Path(f"of {day}, equal.pages"), known),
            ScannedSegment(Path(f"of {day}.pages"), (*known, RecordHeader(block(100 + day), block(0), b""))),
        ]
        store.adopt(found, float(day))
        store.check_integrity()
        if day % 7 == 0:
            assert len(store.drop(block(2))) <= store.used_bytes // RECORD
        if store.has_room():
            write(store, 1000 + day, float(day))
        store.check_integrity()
    assert gone, "segments with copies have gone"


def test_room_for_less_than_two_pages_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--disk-cache 4096 holds 1 pages of 4096 bytes; at least 2"):
        store_of(1)
