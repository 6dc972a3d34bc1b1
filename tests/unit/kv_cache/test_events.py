"""The log: what is told, what is replayed, and when only a snapshot helps."""

from __future__ import annotations

from twostroke.ids import BlockHash, Epoch
from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of
from twostroke.kv_cache.events import RING_BATCHES, EventLog, TierChange, digest_term
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
    assert (batch.lower_tiers, batch.block_count, batch.digest) == ((), 1, C)
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
    assert batch.lower_tiers == (TierChange(Tier.HOST, (A, B), ()), TierChange(Tier.DISK, (C,), ()))
    held = [(A, Tier.DEVICE), (A, Tier.HOST), (B, Tier.HOST), (C, Tier.DISK)]
    digest = 0
    for block_hash, tier in held:
        digest ^= digest_term(block_hash, tier)
    assert batch.digest == digest.to_bytes(HASH_BYTES, "big")
    snapshot = log.snapshot()
    assert (set(snapshot.stored), snapshot.block_count, snapshot.digest) == ({A}, 4, batch.digest)
    assert {change.tier: set(change.stored) for change in snapshot.lower_tiers} == {Tier.HOST: {A, B}, Tier.DISK: {C}}


def test_a_block_that_moves_between_tiers_changes_the_digest_by_whole_turns_of_its_name() -> None:
    block_hash = BlockHash(bytes([0x80, *[0] * 14, 0x01]))
    assert digest_term(block_hash, Tier.DEVICE) == int.from_bytes(block_hash, "big")
    assert digest_term(block_hash, Tier.HOST) == 0b11
    assert digest_term(block_hash, Tier.DISK) == 0b110
