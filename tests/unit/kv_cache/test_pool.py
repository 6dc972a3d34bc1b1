"""The pool, step by step: sharing, eviction, writers, local_prefill, quarantine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.kv_cache.block import block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool

ROOT = root_hash()
BLOCK = 2


class Witness:
    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def stored(self, block_hashes: Sequence[BlockHash]) -> None:
        self.told += [("stored", block_hash) for block_hash in block_hashes]

    def removed(self, block_hashes: Sequence[BlockHash]) -> None:
        self.told += [("removed", block_hash) for block_hash in block_hashes]

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None:
        self.told.append(("evicting", (page, block_hash, parent)))

    def forgotten(self, block_hash: BlockHash) -> None:
        self.told.append(("forgotten", block_hash))

    def new_writers(self, pages: Sequence[PageId]) -> None:
        self.told += [("new writer", page) for page in pages]

    def take(self, kind: str) -> list[object]:
        told = [fact for what, fact in self.told if what == kind]
        self.told = [entry for entry in self.told if entry[0] != kind]
        return told


def chain(*tokens: int) -> list[BlockHash]:
    """One block per token."""
    return block_hashes_of([token for token in tokens for _ in range(BLOCK)], BLOCK)


def pool_of(total: int) -> tuple[BlockPool, Witness]:
    witness = Witness()
    return BlockPool(total, witness), witness


def cache(pool: BlockPool, hashes: list[BlockHash]) -> list[PageId]:
    """Claims, fills and releases a chain."""
    claim = pool.claim(hashes, ROOT, 0)
    assert claim is not None
    for index in claim.missing:
        pool.fill(claim.pages[index])
    pool.release(claim.pages)
    pool.check_integrity()
    return claim.pages


def states(pool: BlockPool) -> dict[str, int]:
    pool.check_integrity()
    return {state.value: pool.count(state) for state in PageState if pool.count(state)}


def test_a_claim_names_what_is_missing_and_how_much_is_there() -> None:
    pool, _ = pool_of(8)
    cache(pool, chain(1, 2))
    claim = pool.claim(chain(1, 2, 3, 4), ROOT, 1)
    assert claim is not None
    assert (claim.hits, claim.missing, len(claim.pages)) == (2, [2, 3], 5)
    assert states(pool) == {"active": 3, "arriving": 2, "free": 3}


def test_a_claim_that_cannot_be_met_takes_nothing() -> None:
    pool, witness = pool_of(4)
    cache(pool, chain(1, 2))
    before = states(pool)
    witness.told.clear()
    assert pool.claim(chain(1, 2, 3, 4), ROOT, 1) is None
    assert states(pool) == before
    assert not witness.told


def test_pages_that_a_claim_shares_are_not_counted_as_room_for_it() -> None:
    pool, _ = pool_of(3)
    cache(pool, chain(1, 2))
    assert pool.claim(chain(1, 2), ROOT, 2) is None
    assert pool.claim(chain(1, 2), ROOT, 1) is not None


def test_an_arriving_block_is_shared_and_is_no_hit() -> None:
    pool, _ = pool_of(4)
    one = pool.claim(chain(1, 2), ROOT, 0)
    other = pool.claim(chain(1, 2), ROOT, 0)
    assert one is not None
    assert other is not None
    assert other.pages == one.pages
    assert (other.missing, other.hits) == ([], 0)
    assert pool.find(chain(1)[0]) is None


def test_a_filled_block_is_announced_once_and_removed_once() -> None:
    pool, witness = pool_of(1)
    cache(pool, chain(1))
    cache(pool, chain(1))
    assert witness.take("stored") == chain(1)
    cache(pool, chain(2))
    assert witness.take("removed") == chain(1)


def test_every_new_life_of_a_page_is_told_and_a_shared_one_is_not() -> None:
    pool, witness = pool_of(2)
    (page,) = cache(pool, chain(1))
    assert witness.take("new writer") == [page]
    cache(pool, chain(1))
    assert witness.take("new writer") == []
    assert pool.claim([], ROOT, 2) is not None
    assert sorted(witness.take("new writer")) == [0, 1]  # type: ignore[type-var]


def test_eviction_takes_the_leaf_before_its_parent() -> None:
    pool, witness = pool_of(3)
    hashes = chain(1, 2, 3)
    cache(pool, hashes)
    pool.claim([], ROOT, 1)
    assert witness.take("removed") == [hashes[2]]
    pool.claim([], ROOT, 2)
    assert witness.take("removed") == [hashes[1], hashes[0]]


def test_an_eviction_is_told_while_the_page_still_has_its_block_and_forgetting_is_told_as_that() -> None:
    pool, witness = pool_of(2)
    blocks = chain(1, 2)
    pages = cache(pool, blocks)
    witness.told.clear()
    assert pool.claim([], ROOT, 1) is not None
    told = [what for what, _ in witness.told]
    assert told == ["evicting", "removed", "new writer"]
    assert witness.told[0] == ("evicting", (pages[1], blocks[1], blocks[0]))
    witness.told.clear()
    assert pool.forget_cached() == 1
    assert witness.told == [("removed", blocks[0]), ("forgotten", blocks[0])]


def test_eviction_takes_what_was_used_longest_ago() -> None:
    pool, witness = pool_of(3)
    for token in (1, 2, 3):
        cache(pool, chain(token))
    cache(pool, chain(1))
    pool.claim([], ROOT, 2)
    assert witness.take("removed") == [*chain(2), *chain(3)]


def test_eviction_leaves_a_chain_at_a_block_that_was_used_after_the_leaves_of_others() -> None:
    pool, witness = pool_of(4)
    cache(pool, chain(1, 2))
    cache(pool, chain(7, 8))
    cache(pool, chain(1))
    witness.take("removed")
    assert pool.claim(chain(20, 21, 22), ROOT, 0) is not None
    assert witness.take("removed") == [chain(1, 2)[1], chain(7, 8)[1], chain(7)[0]]
    assert pool.find(chain(1)[0]) is not None


def test_a_block_is_as_fresh_as_the_end_of_its_last_use() -> None:
    pool, witness = pool_of(2)
    long_used = pool.claim(chain(1), ROOT, 0)
    assert long_used is not None
    pool.fill(long_used.pages[0])
    cache(pool, chain(2))
    pool.release(long_used.pages)
    pool.claim([], ROOT, 1)
    assert witness.take("removed") == chain(2)


def test_a_held_block_is_never_evicted() -> None:
    pool, _ = pool_of(2)
    cache(pool, chain(1))
    (pinned,) = pool.share_filled(dict(enumerate(chain(1)))).values()
    assert pool.claim([], ROOT, 2) is None
    pool.release([pinned])
    assert pool.claim([], ROOT, 2) is not None


def test_share_filled_holds_only_what_is_filled() -> None:
    pool, _ = pool_of(4)
    cache(pool, chain(1))
    pool.claim(chain(1, 2), ROOT, 0)
    assert list(pool.share_filled(dict(enumerate(chain(1, 2, 3))))) == [0]


def test_a_page_without_a_writer_is_free_as_soon_as_nobody_wants_it() -> None:
    pool, witness = pool_of(1)
    claim = pool.claim(chain(1), ROOT, 0)
    assert claim is not None
    pool.release(claim.pages)
    assert states(pool) == {"free": 1}
    assert witness.take("removed") == []


def test_an_unwanted_page_stays_quarantined_until_its_writer_is_known_to_be_finished() -> None:
    pool, _ = pool_of(1)
    claim = pool.claim(chain(1), ROOT, 0)
    assert claim is not None
    (page,) = claim.pages
    pool.assign_writer(page, SessionId(1))
    pool.release(claim.pages)
    assert states(pool) == {"quarantined": 1}
    assert not pool.is_wanted(page)
    assert pool.claim(chain(1), ROOT, 0) is None
    pool.clear_writer(page)
    assert states(pool) == {"free": 1}


def test_a_quarantined_block_can_be_claimed_anew_in_another_page() -> None:
    pool, _ = pool_of(2)
    first = pool.claim(chain(1), ROOT, 0)
    assert first is not None
    pool.assign_writer(first.pages[0], SessionId(1))
    pool.release(first.pages)
    second = pool.claim(chain(1), ROOT, 0)
    assert second is not None
    assert second.pages != first.pages
    assert second.missing == [0]
    pool.fill(second.pages[0])
    pool.clear_writer(first.pages[0])
    assert states(pool) == {"active": 1, "free": 1}
    assert pool.find(chain(1)[0]) == second.pages[0]


def test_the_next_waiter_takes_over_from_a_writer_that_gave_up() -> None:
    pool, _ = pool_of(1)
    claims = [pool.claim(chain(1), ROOT, 0) for _ in range(2)]
    assert claims[0] is not None
    (page,) = claims[0].pages
    pool.assign_writer(page, SessionId(1))
    pool.release([page])
    pool.clear_writer(page)
    assert states(pool) == {"arriving": 1}
    pool.assign_writer(page, SessionId(2))
    pool.fill(page)
    assert pool.writer(page) is None
    assert states(pool) == {"active": 1}


def test_a_page_has_at_most_one_writer() -> None:
    pool, _ = pool_of(1)
    claim = pool.claim(chain(1), ROOT, 0)
    assert claim is not None
    pool.assign_writer(claim.pages[0], SessionId(1))
    with pytest.raises(AssertionError, match="a writer already"):
        pool.assign_writer(claim.pages[0], SessionId(2))


def test_a_page_that_nobody_waits_for_can_not_be_filled() -> None:
    pool, _ = pool_of(1)
    claim = pool.claim(chain(1), ROOT, 0)
    assert claim is not None
    pool.assign_writer(claim.pages[0], SessionId(1))
    pool.release(claim.pages)
    with pytest.raises(AssertionError, match="QUARANTINED, not ARRIVING"):
        pool.fill(claim.pages[0])


def test_a_page_cannot_be_released_more_often_than_it_is_held() -> None:
    pool, _ = pool_of(1)
    (page,) = cache(pool, chain(1))
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([page])


def test_a_private_page_becomes_a_block_when_it_is_full() -> None:
    pool, witness = pool_of(2)
    claim = pool.claim([], ROOT, 1)
    assert claim is not None
    pool.register_private(claim.pages[0], chain(1)[0], ROOT)
    assert witness.take("stored") == chain(1)
    pool.release(claim.pages)
    assert pool.hits(chain(1)) == 1


def test_a_private_twin_of_a_block_stays_private() -> None:
    pool, witness = pool_of(2)
    twins = [pool.claim([], ROOT, 1) for _ in range(2)]
    for twin in twins:
        assert twin is not None
        pool.register_private(twin.pages[0], chain(1)[0], ROOT)
    assert witness.take("stored") == chain(1)
    for twin in twins:
        assert twin is not None
        pool.release(twin.pages)
    assert states(pool) == {"cached": 1, "free": 1}


def test_a_cached_parent_whose_child_is_held_through_a_twin_can_be_evicted() -> None:
    pool, witness = pool_of(3)
    hashes = chain(1, 2)
    twin = pool.claim([], ROOT, 2)
    cache(pool, hashes[:1])
    assert twin is not None
    pool.register_private(twin.pages[0], hashes[0], ROOT)
    pool.register_private(twin.pages[1], hashes[1], hashes[0])
    assert pool.claim([], ROOT, 1) is not None
    assert witness.take("removed") == hashes[:1]
    pool.release(twin.pages)
    assert states(pool) == {"active": 1, "cached": 1, "free": 1}


def test_a_child_that_lost_its_parent_is_no_hit_until_the_parent_is_back() -> None:
    pool, _ = pool_of(3)
    hashes = chain(1, 2)
    twin = pool.claim([], ROOT, 2)
    assert twin is not None
    pool.register_private(twin.pages[1], hashes[1], hashes[0])
    assert pool.hits(hashes) == 0
    claim = pool.claim(hashes, ROOT, 0)
    assert claim is not None
    assert (claim.missing, claim.hits) == ([0], 0)
    pool.fill(claim.pages[0])
    assert pool.hits(hashes) == 2


def test_thousands_of_uses_do_not_grow_the_list_of_leaves() -> None:
    pool, _ = pool_of(4)
    for _ in range(500):
        for token in range(3):
            cache(pool, chain(token))
    assert len(pool._leaves) <= 2 * pool.total + 1


def test_a_chain_that_is_forgotten_takes_along_nothing_that_others_have_built_on() -> None:
    pool, witness = pool_of(8)
    cache(pool, chain(1, 2, 3, 4))
    corrupt = cache(pool, chain(1, 2, 5, 6))
    witness.take("removed")
    pool.forget(corrupt)
    assert witness.take("removed") == list(reversed(chain(1, 2, 5, 6)[2:]))
    assert all(pool.find(block_hash) is not None for block_hash in chain(1, 2, 3, 4))
    assert states(pool) == {"free": 4, "cached": 4}
    pool.forget(cache(pool, chain(1, 2, 3, 4)))
    assert states(pool) == {"free": 8}


def test_a_pinned_block_is_not_evicted_and_is_no_room_for_a_claim() -> None:
    pool, witness = pool_of(4)
    cache(pool, chain(1, 2))
    pool.pin(chain(1, 2))
    assert states(pool) == {"pinned": 2, "free": 2}
    assert (pool.available, pool.unheld, pool.pinned_blocks) == (2, 4, 2)
    cache(pool, chain(7, 8))
    cache(pool, chain(9))
    assert len(witness.take("removed")) == 1
    assert pool.hits(chain(1, 2)) == 2
    assert pool.claim(chain(3, 4, 5), ROOT, 0) is None
    assert pool.forget_cached() == 2
    assert states(pool) == {"pinned": 2, "free": 2}


def test_a_pinned_block_is_used_as_any_other_and_is_pinned_again_afterwards() -> None:
    pool, _ = pool_of(4)
    pool.pin(chain(1, 2))  # before anything of it is here
    claim = pool.claim(chain(1, 2, 3), ROOT, 0)
    assert claim is not None
    assert states(pool) == {"arriving": 3, "free": 1}
    for page in claim.pages:
        pool.fill(page)
    assert states(pool) == {"active": 3, "free": 1}
    pool.release(claim.pages)
    assert states(pool) == {"pinned": 2, "cached": 1, "free": 1}


def test_pins_that_share_blocks_count_them_once_and_each_keeps_them() -> None:
    pool, _ = pool_of(4)
    cache(pool, chain(1, 2, 3))
    pool.pin(chain(1, 2))
    pool.pin(chain(1, 2, 3))
    assert pool.pinned_blocks == 3
    pool.unpin(chain(1, 2, 3))
    assert states(pool) == {"pinned": 2, "cached": 1, "free": 1}
    pool.unpin(chain(1, 2))
    assert states(pool) == {"cached": 3, "free": 1}
    with pytest.raises(AssertionError, match="more often than pinned"):
        pool.unpin(chain(1))


def test_unpinned_blocks_are_evicted_in_the_order_of_their_last_use() -> None:
    pool, witness = pool_of(3)
    cache(pool, chain(1))
    cache(pool, chain(2))
    pool.pin(chain(1))
    cache(pool, chain(3))
    pool.unpin(chain(1))
    witness.told.clear()
    cache(pool, chain(4))
    assert witness.take("removed") == chain(1)


def test_a_chain_whose_numbers_overflowed_goes_though_it_is_pinned() -> None:
    pool, _ = pool_of(3)
    pages = cache(pool, chain(1, 2))
    pool.pin(chain(1, 2))
    pool.forget(pages)
    assert states(pool) == {"free": 3}
    cache(pool, chain(1, 2))
    assert states(pool) == {"pinned": 2, "free": 1}
