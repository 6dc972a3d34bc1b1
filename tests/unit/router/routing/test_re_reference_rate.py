"""What is evicted and asked for again is counted, and nothing else."""

from __future__ import annotations

from router.routing import learned
from router.routing.learned import ReReferenceRate
from twostroke.base.ids import BlockHash


def hashes(start: int, end: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in range(start, end)]


def test_nothing_evicted_is_nothing_counted() -> None:
    blocks = ReReferenceRate()
    blocks.asked(hashes(0, 10))
    assert blocks.rate == 0.0


def test_the_share_is_of_evictions_that_are_asked_for_again() -> None:
    blocks = ReReferenceRate()
    blocks.evicted(hashes(0, 100))
    blocks.asked(hashes(90, 120))
    assert blocks.rate == 0.1


def test_one_eviction_is_counted_once() -> None:
    blocks = ReReferenceRate()
    blocks.evicted(hashes(0, 10))
    blocks.asked(hashes(0, 1))
    blocks.asked(hashes(0, 1))
    assert blocks.rate == 0.1
    blocks.evicted(hashes(0, 1))
    blocks.asked(hashes(0, 1))
    assert blocks.rate == 2 / 11


def test_old_evictions_are_forgotten() -> None:
    blocks = ReReferenceRate()
    for start in range(0, learned.REMEMBERED_EVICTIONS + 1000, 1000):
        blocks.evicted(hashes(start, start + 1000))
    blocks.asked(hashes(0, 1000))
    assert blocks.rate == 0.0
    blocks.asked(hashes(learned.REMEMBERED_EVICTIONS, learned.REMEMBERED_EVICTIONS + 1000))
    assert blocks.rate > 0.0


def test_what_happens_now_outweighs_what_happened_long_ago() -> None:
    blocks = ReReferenceRate()
    for start in range(0, 2 * learned.HALVING_EVICTIONS, 1000):
        blocks.evicted(hashes(start, start + 1000))
        blocks.asked(hashes(start, start + 1000))
    assert blocks.rate > 0.95
    for start in range(2 * learned.HALVING_EVICTIONS, 6 * learned.HALVING_EVICTIONS, 1000):
        blocks.evicted(hashes(start, start + 1000))
    assert blocks.rate < 0.2
