"""The host store and the small parts beside it."""

from __future__ import annotations

import random

from tests.unit.calls import calls_of
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tiers.byte_budget import SAVED_S, ByteBudget
from twostroke.kv_cache.tiers.host_store import HostEntry, HostStore
from twostroke.kv_cache.tiers.sightings import Sightings


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def put(store: HostStore, number: int) -> HostEntry | None:
    """Puts a block as a caller does: evict, take, put."""
    victim = store.victim()
    if victim is not None:
        store.remove(victim.block_hash)
    page = store.take()
    if page is None:
        return None
    entry = HostEntry(block(number), block(0), page, b"", 0.0)
    store.put(entry)
    return entry


def test_the_least_recently_used_goes_first() -> None:
    store = HostStore(2)
    put(store, 1)
    put(store, 2)
    store.touch(block(1))
    put(store, 3)
    assert list(store) == [block(1), block(3)]


def test_a_page_that_is_being_copied_from_is_not_given_away() -> None:
    store = HostStore(1)
    entry = put(store, 1)
    assert entry is not None
    store.hold(entry)
    assert put(store, 2) is None
    store.remove(block(1))
    assert store.take() is None
    store.release(entry)
    assert put(store, 2) is not None
    store.check_integrity()


def test_a_victim_is_found_without_a_look_at_those_that_are_held() -> None:
    def calls_with(held: int) -> int:
        store = HostStore(held)
        for number in range(held):
            entry = put(store, number)
            assert entry is not None
            store.hold(entry)
        assert store.victim() is None  # this one may tidy up what holding them has left
        return calls_of(store.victim)

    assert calls_with(1000) == calls_with(10)


def test_an_entry_that_is_not_held_any_more_goes_by_its_last_use() -> None:
    store = HostStore(3)
    entries = [put(store, number) for number in range(3)]
    assert entries[0] is not None
    store.hold(entries[0])
    assert store.victim() is entries[1]
    store.release(entries[0])
    assert store.victim() is entries[0]
    for number in range(3):
        store.touch(block(number))
    assert store.victim() is entries[0]


def test_random_histories_keep_every_page_in_one_place() -> None:
    store, random_ = HostStore(8), random.Random(3)
    held: list[HostEntry] = []
    for number in range(3000):
        action = random_.random()
        if action < 0.5 and block(number % 40) not in store:
            put(store, number % 40)
        elif action < 0.7 and len(store):
            entry = store.get(random_.choice(list(store)))
            assert entry is not None
            store.hold(entry)
            held.append(entry)
        elif action < 0.9 and held:
            store.release(held.pop(random_.randrange(len(held))))
        elif len(store):
            store.remove(random_.choice(list(store)))
        store.check_integrity()
    for entry in held:
        store.release(entry)
    assert len(store) + len(store._free) == 8


def test_sightings_forget_what_was_seen_once_and_keep_what_is_seen_often() -> None:
    sightings = Sightings(most_blocks=10)
    for number in range(100):
        sightings.saw(block(0))
        sightings.saw(block(number + 1))
        assert len(sightings._counts) <= 11
    assert sightings.count(block(0)) > 5
    assert sightings.count(block(1)) == 0


def test_a_budget_gives_its_rate_over_time_and_saves_up_for_a_burst() -> None:
    budget = ByteBudget(100.0, 10)
    burst = sum(budget.take(10, 50.0) for _ in range(100))
    assert burst == SAVED_S * 100 / 10
    later = sum(budget.take(10, 50.0 + tick / 10) for tick in range(1, 1001))
    assert 999 <= later <= 1000


def test_a_budget_can_be_kept_for_what_is_worth_more() -> None:
    budget = ByteBudget(100.0, 10)
    assert sum(budget.take(10, 0.0, keep=0.5) for _ in range(100)) == 20
    assert budget.take(10, 0.0)


def test_even_the_smallest_budget_writes_a_page_now_and_then() -> None:
    budget = ByteBudget(1.0, 1000)
    assert budget.take(1000, 0.0)
    assert not budget.take(1000, 999.0)
    assert budget.take(1000, 1000.0)
