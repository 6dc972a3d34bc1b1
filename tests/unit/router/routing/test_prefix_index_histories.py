"""Workers' real logs over a wire that loses, repeats and reorders, with restarts on both ends, against brute force."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.prefix_index import Applied, PrefixIndex
from tests.trials.chaos.injection.event_faults import EventFaults, FaultRates
from tests.unit.router.index_blocks import hashes_of
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.kv_cache import events
from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of
from twostroke.kv_cache.events import EventBatch, EventLog, digest_term, parts_of
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.events import batch_from_message, batch_to_message
from twostroke.rpc.v1.control_pb2 import KvEventBatch

PATIENCE_BATCHES = 100
"""Heartbeats after which the index must equal the worker, though the wire stays as bad as it was."""

SWEEP_BLOCKS = 3
"""What a worker that is gone held is taken out in dozens of parts."""

PART_BLOCKS = 40
"""Snapshots and long batches come in up to five parts."""


def prompts() -> list[list[BlockHash]]:
    """A tree: eight prompts that part at different blocks."""
    return [block_hashes_of([0] * (4 * fork) + [1 + fork] * (4 * (12 - fork)), 4) for fork in range(6)] + [
        block_hashes_of([0] * 12 + [9] * 40 + [7] * tail, 4) for tail in (8, 20)
    ]


PROMPTS = prompts()
PARENT = {
    block_hash: (prompt[place - 1] if place else None) for prompt in PROMPTS for place, block_hash in enumerate(prompt)
}


class Worker:
    """Caches on three tiers, each closed under prefixes together with those above it, and their log."""

    def __init__(self, number: int, draws: random.Random) -> None:
        self.id = WorkerId(f"decode-{number}")
        self._draws = draws
        self._incarnation = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._incarnation += 1
        self.epoch = Epoch(self._incarnation, self._draws.getrandbits(63))
        self.log = EventLog(self.epoch)
        self.held: dict[Tier, set[BlockHash]] = {tier: set() for tier in Tier}
        self.parts: set[BlockHash] = set()
        """Blocks whose window parts are on the device."""

    def down_to(self, lowest: Tier) -> set[BlockHash]:
        return set().union(*(self.held[tier] for tier in Tier if tier <= lowest))

    @property
    def digest(self) -> bytes:
        xor = 0
        for tier, hashes in self.held.items():
            for block_hash in hashes:
                xor ^= digest_term(block_hash, tier)
        for block_hash in self.parts:
            xor ^= digest_term(block_hash, Tier.DEVICE, GroupKind.FURTHER)
        return xor.to_bytes(HASH_BYTES, "big")

    def change(self) -> None:
        kind = self._draws.choice(
            ["compute", "compute", "parts", "parts", "copy", "spill", "spill", "sink", "evict", "evict", "drop"]
        )
        if kind == "parts":
            self._change_parts(self._draws.choice(PROMPTS))
        elif kind == "compute":
            prompt = self._draws.choice(PROMPTS)
            for block_hash in prompt[: self._draws.randint(1, len(prompt))]:
                self._put(block_hash, Tier.DEVICE)
        elif kind == "drop" and self._draws.random() < 0.2:
            for tier in Tier:
                for block_hash in list(self.held[tier]):
                    self._take(block_hash, tier)
        else:
            self._move_a_leaf(kind)

    def _change_parts(self, prompt: list[BlockHash]) -> None:
        """Window parts come with some blocks that follow one another, and go one by one."""
        first = self._draws.randrange(len(prompt))
        for block_hash in prompt[first : first + self._draws.randint(1, 4)]:
            if block_hash not in self.parts:
                self.parts.add(block_hash)
                self.log.stored(block_hash, group=GroupKind.FURTHER)
        gone = self._draws.choice(sorted(self.parts))
        self.parts.remove(gone)
        self.log.removed(gone, group=GroupKind.FURTHER)

    def _move_a_leaf(self, kind: str) -> None:
        lowest = {"copy": Tier.DEVICE, "spill": Tier.DEVICE, "sink": Tier.HOST}.get(kind, Tier.DISK)
        hashes = self.down_to(lowest)
        leaves = sorted(hashes - {PARENT[block_hash] for block_hash in hashes})
        if not leaves:
            return
        block_hash = self._draws.choice(leaves)
        if kind == "copy":
            self._put(block_hash, Tier.HOST)
            return
        for tier in Tier:
            if tier <= lowest:
                self._take(block_hash, tier)
        if lowest is not Tier.DISK:
            self._put(block_hash, Tier(lowest + 1))

    def _put(self, block_hash: BlockHash, tier: Tier) -> None:
        if block_hash not in self.held[tier]:
            self.held[tier].add(block_hash)
            self.log.stored(block_hash, tier)

    def _take(self, block_hash: BlockHash, tier: Tier) -> None:
        if block_hash in self.held[tier]:
            self.held[tier].remove(block_hash)
            self.log.removed(block_hash, tier)


class Follower:
    """A router's stream of one worker's events: what `feed` does, with nobody's clock."""

    def __init__(self, worker: Worker, index: PrefixIndex, rates: FaultRates) -> None:
        self._worker, self._index = worker, index
        self._faults = EventFaults(rates, worker.id)
        self._coming: deque[EventBatch] = deque()
        self._snapshot: Iterator[EventBatch] = iter(())
        """Made part by part, while the log goes on."""
        self.ask_again()

    def ask_again(self) -> None:
        worker = self._worker
        following = self._index.next_sequence(worker.id, worker.epoch)
        replay = worker.log.since(following) if following is not None else None
        self._snapshot = iter(()) if replay is not None else self._begun_snapshot()
        self._coming = deque(part for batch in replay or () for part in parts_of(batch))

    def _begun_snapshot(self) -> Iterator[EventBatch]:
        if self._worker.log.has_changes:
            self._worker.log.publish()
        parts = self._worker.log.snapshot_parts()
        return itertools.chain([next(parts)], parts)

    def offer(self, batch: EventBatch) -> None:
        self._coming.extend(parts_of(batch))

    def read(self, most: int) -> None:
        while most and (part := self._next()) is not None:
            most -= 1
            for message in self._faults.deliver(batch_to_message(self._worker.id, self._worker.epoch, part)):
                if not self._apply(message):
                    self.ask_again()
                    break

    def _next(self) -> EventBatch | None:
        part = next(self._snapshot, None)
        return part if part is not None or not self._coming else self._coming.popleft()

    def _apply(self, message: KvEventBatch) -> bool:
        worker, index = self._worker, self._index
        verdict = index.apply(worker.id, Epoch.parse(message.epoch), batch_from_message(message))
        assert verdict is not Applied.DIVERGED, "nothing is wrong with the log: it only comes in badly"
        if verdict is Applied.APPLIED and message.sequence == worker.log.sequence and not worker.log.has_changes:
            assert equals(index, worker)
        return verdict is not Applied.GAP


def equals(index: PrefixIndex, worker: Worker) -> bool:
    shown = index.snapshot(worker.id)
    return (
        shown is not None
        and shown.digest == worker.digest
        and index.epoch_of(worker.id) == worker.epoch
        and all(hashes_of(index, worker.id, tier) == worker.held[tier] for tier in Tier)
        and hashes_of(index, worker.id, group=GroupKind.FURTHER) == worker.parts
    )


def scanned(
    workers: list[Worker], prompt: list[BlockHash], tail_blocks: int
) -> Iterator[tuple[WorkerId, tuple[int, ...]]]:
    """What `leading_blocks` should say, block by block."""
    for worker in workers:
        lowest = max((tier for tier in Tier if worker.held[tier]), default=Tier.DEVICE)
        unions = [worker.down_to(tier) for tier in Tier if tier <= lowest]
        depths = tuple(
            next((place for place, block_hash in enumerate(prompt) if block_hash not in union), len(prompt))
            for union in unions
        )
        if tail_blocks:
            depths = tuple(
                max(d for d in range(depth + 1) if worker.parts.issuperset(prompt[max(0, d - tail_blocks) : d]))
                for depth in depths
            )
        if depths[-1]:
            yield worker.id, depths


class Story:
    """Three workers and one router; what happens is drawn."""

    def __init__(self, seed: int, rates: FaultRates) -> None:
        self.draws = random.Random(seed)
        self.rates = rates
        self.workers = [Worker(number, self.draws) for number in range(3)]
        self.told: list[KvEventBatch] = []
        self.begin_router()

    def begin_router(self) -> None:
        self.index = PrefixIndex(sweep_blocks=SWEEP_BLOCKS)
        self.followers = {worker.id: Follower(worker, self.index, self.rates) for worker in self.workers}

    def go_on(self) -> None:
        worker = self.draws.choice(self.workers)
        self.index.sweep()
        match self.draws.choices(["change", "publish", "read", "restart", "router", "late"], [8, 5, 5, 0.3, 0.2, 1])[0]:
            case "change":
                worker.change()
            case "publish":
                self.publish(worker)
            case "read":
                self.followers[worker.id].read(self.draws.randint(1, 4))
            case "restart":
                worker.begin_epoch()
                self.followers[worker.id] = Follower(worker, self.index, self.rates)
            case "router":
                self.begin_router()
            case "late" if self.told:
                late = self.draws.choice(self.told)
                gone_by = Epoch.parse(late.epoch)
                if gone_by < (self.index.epoch_of(WorkerId(late.worker_id)) or gone_by):
                    verdict = self.index.apply(WorkerId(late.worker_id), gone_by, batch_from_message(late))
                    assert verdict is Applied.OLD

    def publish(self, worker: Worker) -> None:
        batch = worker.log.publish()
        self.told.append(batch_to_message(worker.id, worker.epoch, batch))
        self.followers[worker.id].offer(batch)

    def calm_down(self) -> None:
        """Nothing changes any more; heartbeats go on, and get lost as before."""
        for _ in range(PATIENCE_BATCHES):
            for worker in self.workers:
                self.publish(worker)
                self.followers[worker.id].read(PATIENCE_BATCHES)
            if all(equals(self.index, worker) for worker in self.workers):
                return
        raise AssertionError("the index never came to equal the workers")


RATES = st.sampled_from([0.0, 0.01, 0.05, 0.2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.builds(FaultRates, drop=RATES, duplicate=RATES, reorder=RATES, seed=st.integers(0, 9)))
def test_after_any_history_the_index_equals_every_worker_and_a_scan(seed: int, rates: FaultRates) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(events, "PART_BLOCKS", PART_BLOCKS)
        story = Story(seed, rates)
        for _ in range(300):
            story.go_on()
        story.calm_down()
    index = story.index
    while index.has_gone:
        index.sweep()
    pages = sum(len(set().union(*(worker.held[tier] for worker in story.workers))) for tier in Tier)
    assert len(index) == pages + len(set().union(*(worker.parts for worker in story.workers)))
    for prompt in PROMPTS:
        for tail_blocks in range(4):
            leading = index.leading_blocks(prompt, tail_blocks=tail_blocks)
            assert leading == dict(scanned(story.workers, prompt, tail_blocks))
            assert list(leading.values()) == sorted(leading.values(), key=itemgetter(-1))
