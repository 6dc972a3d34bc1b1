"""The log: what is told, what is replayed, and when only a snapshot helps."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from twostroke.base.ids import BlockHash, Epoch
from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of
from twostroke.kv_cache.events import PART_BLOCKS, RING_BATCHES, EventBatch, EventLog, TierChange, digest_term, parts_of
from twostroke.kv_cache.tier import Tier

A, B, C = block_hashes_of(range(3), 1)


def fresh_log(*stored: BlockHash) -> EventLog:
    log = EventLog(Epoch(1, 2))
    for block_hash in stored:
        log.stored(block_hash)
    return log


def test_a_batch_tells_what_changed_and_proves_the_whole_set() -> None:
    log = fresh_log(A, B)
    log.publish()
    log.removed(A)
    log.stored(C)
    batch = log.publish()
    assert (batch.sequence, batch.stored, batch.removed, batch.block_count) == (2, (C,), (A,), 2)
    assert batch.digest == bytes(b ^ c for b, c in zip(B, C, strict=True))


def test_an_empty_set_has_the_digest_zero() -> None:
    log = fresh_log(A)
    log.publish()
    log.removed(A)
    assert log.publish().digest == bytes(HASH_BYTES)


def test_what_came_and_went_between_two_batches_is_not_told() -> None:
    log = fresh_log(A)
    log.publish()
    log.stored(B)
    log.removed(B)
    log.removed(A)
    log.stored(A)
    assert not log.has_changes
    batch = log.publish()
    assert (batch.stored, batch.removed, batch.block_count) == ((), (), 1)


def test_a_snapshot_is_the_set_as_of_the_last_batch_whatever_is_pending() -> None:
    log = fresh_log(A, B)
    published = log.publish()
    log.removed(A)
    log.stored(C)
    snapshot = log.snapshot()
    assert snapshot.snapshot
    assert (snapshot.sequence, set(snapshot.stored), snapshot.digest) == (1, {A, B}, published.digest)


def test_a_snapshot_before_the_first_batch_is_empty() -> None:
    snapshot = fresh_log(A).snapshot()
    assert (snapshot.sequence, snapshot.stored, snapshot.block_count) == (0, (), 0)


def test_replay_begins_where_it_is_asked_to() -> None:
    log = fresh_log()
    batches = [log.publish() for _ in range(5)]
    assert log.since(1) == batches
    assert log.since(4) == batches[3:]
    assert log.since(6) == []


def test_there_is_no_replay_of_what_has_not_happened_or_never_will() -> None:
    log = fresh_log()
    assert log.since(0) is None
    assert log.since(2) is None
    log.publish()
    assert log.since(0) is None
    assert log.since(3) is None


def test_what_has_left_the_ring_needs_a_snapshot() -> None:
    log = fresh_log()
    for _ in range(RING_BATCHES + 1):
        log.publish()
    assert log.since(1) is None
    replayed = log.since(2)
    assert replayed is not None
    assert len(replayed) == RING_BATCHES


def test_a_cache_that_is_dropped_is_told_in_one_word_and_what_is_left() -> None:
    log = fresh_log(A, B, C)
    log.stored(A, Tier.HOST)
    log.publish()
    for block_hash in (A, B):
        log.removed(block_hash)
    log.removed(A, Tier.HOST)
    batch = log.publish()
    assert (batch.cleared, batch.snapshot, batch.stored, batch.removed) == (True, False, (C,), ())
    assert (batch.further, batch.block_count, batch.digest) == ((), 1, C)
    assert log.since(2) == [batch]


def test_a_lower_tier_is_told_and_proved_apart_from_the_device() -> None:
    log = fresh_log(A, B)
    log.publish()
    log.stored(A, Tier.HOST)
    log.stored(C, Tier.DISK)
    log.removed(B)
    log.stored(B, Tier.HOST)
    batch = log.publish()
    assert (batch.stored, batch.removed, batch.block_count) == ((), (B,), 4)
    assert batch.further == (TierChange(Tier.HOST, (A, B), ()), TierChange(Tier.DISK, (C,), ()))
    held = [(A, Tier.DEVICE), (A, Tier.HOST), (B, Tier.HOST), (C, Tier.DISK)]
    digest = 0
    for block_hash, tier in held:
        digest ^= digest_term(block_hash, tier)
    assert batch.digest == digest.to_bytes(HASH_BYTES, "big")
    snapshot = log.snapshot()
    assert (set(snapshot.stored), snapshot.block_count, snapshot.digest) == ({A}, 4, batch.digest)
    assert {change.tier: set(change.stored) for change in snapshot.further} == {Tier.HOST: {A, B}, Tier.DISK: {C}}


def test_a_block_that_moves_between_tiers_changes_the_digest_by_whole_turns_of_its_name() -> None:
    block_hash = BlockHash(bytes([0x80, *[0] * 14, 0x01]))
    assert digest_term(block_hash, Tier.DEVICE) == int.from_bytes(block_hash, "big")
    assert digest_term(block_hash, Tier.HOST) == 0b11
    assert digest_term(block_hash, Tier.DISK) == 0b110


def many_hashes(count: int, salt: int = 0) -> list[BlockHash]:
    return [BlockHash(hashlib.blake2b(f"{salt} {number}".encode(), digest_size=16).digest()) for number in range(count)]


def collected(parts: Iterable[EventBatch]) -> dict[Tier, set[BlockHash]]:
    held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}
    for part in parts:
        for change in part.changes:
            assert held[change.tier].isdisjoint(change.stored), "a block came twice"
            held[change.tier].update(change.stored)
    return held


def test_a_snapshot_of_many_blocks_comes_in_bounded_parts_that_only_the_last_one_ends() -> None:
    on_device, on_disk = many_hashes(1000), many_hashes(100_000, salt=1)
    log = fresh_log(*on_device)
    for block_hash in on_disk:
        log.stored(block_hash, Tier.DISK)
    batch = log.publish()
    parts = list(log.snapshot_parts())
    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(sum(len(change.stored) for change in part.changes) <= PART_BLOCKS for part in parts)
    assert {(part.sequence, part.block_count, part.digest, part.snapshot) for part in parts} == {
        (1, 101_000, batch.digest, True)
    }
    assert collected(parts) == {Tier.DEVICE: set(on_device), Tier.HOST: set(), Tier.DISK: set(on_disk)}


def test_a_snapshot_is_of_one_moment_whatever_changes_while_it_is_read() -> None:
    hashes, later = many_hashes(50_000), many_hashes(2000, salt=1)
    log = fresh_log(*hashes)
    log.publish()
    parts, draws, read = log.snapshot_parts(), random.Random(1), []
    others = [log.snapshot_parts() for _ in range(2)]
    for part in parts:
        read.append(part)
        for block_hash in draws.sample(hashes, 200):
            log.removed(block_hash)
            hashes.remove(block_hash)
        for _ in range(100):
            log.stored(later.pop())
        log.publish()
        next(others[0], None)  # another reader, which began later
    assert collected(read)[Tier.DEVICE] == set(many_hashes(50_000))
    assert {part.sequence for part in read} == {1}


def test_a_snapshot_that_nobody_reads_to_its_end_costs_later_changes_nothing() -> None:
    log = fresh_log(*many_hashes(20_000))
    log.publish()
    parts = log.snapshot_parts()
    assert next(parts).more
    assert any(tier_blocks.readers for tier_blocks in log._tiers.values())
    parts.close()
    assert not any(tier_blocks.readers for tier_blocks in log._tiers.values())


def test_a_long_batch_comes_in_parts_and_tells_what_was_stored_first() -> None:
    hashes = many_hashes(30_000)
    log = fresh_log(*hashes, *many_hashes(20_000, salt=1))
    log.publish()
    for block_hash in hashes[:20_000]:
        log.removed(block_hash)
        log.stored(block_hash, Tier.HOST)
    parts = list(parts_of(log.publish()))
    assert [part.more for part in parts] == [True] * 4 + [False]
    storing = [part.part for part in parts if any(change.stored for change in part.changes)]
    removing = [part.part for part in parts if part.removed]
    assert max(storing) <= min(removing)
    assert sum(len(part.removed) for part in parts) == 20_000
    assert collected(parts)[Tier.HOST] == set(hashes[:20_000])


def test_a_short_batch_is_its_only_part() -> None:
    batch = fresh_log(A, B).publish()
    assert list(parts_of(batch)) == [batch]
