"""What is kept of pulls, at both ends, is what a look at all of their blocks says, whatever happens to the pages.

The oracles are these looks: they cost the blocks of all pulls at every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest

from tests.unit.kv_cache.test_pool import BLOCK, ROOT, pool_of
from twostroke.base.errors import TransferFailed
from twostroke.base.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.parts import GroupKind, Part, parts_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.rpc.v1 import worker_pb2
from twostroke.worker.services.ready_parts import ReadyParts
from twostroke.worker.supply.open_pull import OpenPull
from twostroke.worker.supply.pull_spec import PullSpec

PageOf = Callable[[Part], PageId | None]


@dataclass(eq=False)
class Holder:
    """A sequence: it holds the pages of a chain."""

    hashes: list[BlockHash]
    pages: list[PageId]


@dataclass(eq=False)
class Served:
    """A pull that is served from the pages of a sequence, and what the oracle has left of it."""

    holder: Holder
    parts: ReadyParts
    page_of: PageOf
    pending: list[Part]
    has_failed: bool = False


def readable(
    pool: BlockPool, page_of: PageOf, parts: Sequence[Part]
) -> tuple[dict[Part, PageId], TransferFailed | None]:
    """Returns the parts that can be read now, and the error of the next one if all before it are readable."""
    ready: dict[Part, PageId] = {}
    for index, part in enumerate(parts):
        try:
            page = page_of(part)
        except TransferFailed as error:
            return ready, error if len(ready) == index else None
        if page is not None and pool.is_filled(page):
            ready[part] = page
    return ready, None


def derived(pull: OpenPull, pool: BlockPool) -> tuple[int, int, bool, bool]:
    """Returns the missing blocks, the first one, whether they may be computed here, and whether anybody wants them."""
    missing = sorted({part.block for part in pull.remaining})
    is_reached = not missing[0] or pool.find(pull.spec.block_hashes[missing[0] - 1]) is not None
    is_shared = any(pool._pages[page].refs > 1 for page in pull.remaining.values())
    is_abandoned = not any(pool.is_wanted(page) for page in pull.remaining.values())
    return len(missing), missing[0], is_reached and not is_shared, is_abandoned


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pool, _ = pool_of(40)
        self.holders: list[Holder] = []
        self.pulls: list[OpenPull] = []
        self.served: list[Served] = []
        self._sessions = iter(range(1, 10**6))

    def new_session(self) -> SessionId:
        return SessionId(next(self._sessions))

    def claim(self) -> None:
        """A sequence comes, whose prompt may begin like others', and pulls some of what it lacks."""
        length, shared = self.random.randrange(1, 12), self.random.randrange(0, 8)
        text = [1] * BLOCK * min(shared, length) + [self.random.randrange(2, 5)] * BLOCK * max(0, length - shared)
        hashes = block_hashes_of(text, BLOCK)
        claim = self.pool.claim(hashes, ROOT, 0)
        if claim is None:
            return
        self.holders.append(Holder(hashes, claim.pages))
        self.pull(self.holders[-1])

    def pull(self, holder: Holder) -> None:
        lacks = [block for block, page in enumerate(holder.pages) if self.pool.is_unwritten(page)]
        parts = {part: holder.pages[part.block] for part in parts_of(lacks[self.random.randrange(0, 3) :])}
        if not parts:
            return
        source = worker_pb2.PageSource(worker_id="source")
        spec = PullSpec(RequestId("r"), self.new_session(), source, (), holder.hashes, parts)
        for page in parts.values():
            self.pool.assign_writer(page, spec.session)
        self.pulls.append(OpenPull(spec, self.pool, 0.0))

    def serve(self) -> None:
        """Somebody pulls from here what a sequence holds; where it is not built, a page without a writer is lost."""
        if not self.holders:
            return
        holder, builds = self.random.choice(self.holders), self.random.random() < 0.5

        def page_of(part: Part) -> PageId | None:
            page = holder.pages[part.block]
            if not builds and not self.pool.is_filled(page) and self.pool.writer(page) is None:
                raise TransferFailed(f"block {part.block}")
            return page

        wanted = parts_of(self.random.sample(range(len(holder.pages)), self.random.randrange(1, len(holder.pages) + 1)))
        parts = ReadyParts(self.pool, wanted, page_of)
        parts.change()
        self.served.append(Served(holder, parts, page_of, wanted))

    def arrive(self) -> None:
        if self.pulls:
            pull = self.random.choice(self.pulls)
            (page,) = pull.came([self.random.choice(list(pull.remaining))])
            if self.pool.is_arriving(page):
                self.pool.fill(page)
            else:
                self.pool.clear_writer(page)
            if not pull.remaining:
                self.pulls.remove(pull)

    def compute(self) -> None:
        """A sequence computes a block that nobody writes."""
        unwritten = [page for holder in self.holders for page in holder.pages if self.pool.is_unwritten(page)]
        if unwritten:
            page, session = self.random.choice(unwritten), self.new_session()
            self.pool.assign_writer(page, session)
            if self.random.random() < 0.7:
                self.pool.fill(page)
            else:
                self.pool.clear_writer(page)

    def fail(self) -> None:
        """The source of a pull dies; others may pull what it leaves."""
        if self.pulls:
            pull = self.pulls.pop(self.random.randrange(len(self.pulls)))
            for page in pull.remaining.values():
                self.pool.clear_writer(page)
            if self.holders:
                self.pull(self.random.choice(self.holders))

    def end(self) -> None:
        if self.holders:
            holder = self.holders.pop(self.random.randrange(len(self.holders)))
            pages = holder.pages
            if self.random.random() < 0.5:  # what it was built for has failed
                self.pool.release(pages)
                holder.pages, pages = [], []
            for served in [each for each in self.served if each.holder is holder]:
                self.close(served)
            self.pool.release(pages)

    def hang_up(self) -> None:
        if self.served:
            self.close(self.random.choice(self.served))

    def close(self, served: Served) -> None:
        served.parts.close()
        self.served.remove(served)

    def check(self) -> None:
        self.pool.check_integrity()
        told = {waiter for record in self.pool._pages for waiter in record.waiters or ()}
        assert told <= {*self.pulls, *(served.parts for served in self.served)}, "an ended pull waits for a page"
        for pull in self.pulls:
            kept = pull.missing_blocks, pull.first_missing, pull.is_computable, pull.is_abandoned
            assert kept == derived(pull, self.pool)
        for served in self.served:
            if served.has_failed or self.random.random() < 0.5:
                continue
            ready, failure = readable(self.pool, served.page_of, served.pending)
            taken, error = served.parts.take()
            assert (list(taken.items()), str(error)) == (list(ready.items()), str(failure))
            served.pending = [part for part in served.pending if part not in ready]
            assert served.parts.is_empty == (not served.pending)
            served.has_failed = failure is not None


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_of_pulls_is_what_a_look_at_all_blocks_says(seed: int) -> None:
    world = World(seed)
    events = [world.claim, world.serve, world.arrive, world.arrive, world.compute, world.fail, world.end, world.hang_up]
    for _ in range(250):
        world.random.choice(events)()
        world.check()
    for holder in list(world.holders):
        world.holders = [holder]
        world.end()
    for pull in world.pulls:
        for page in pull.remaining.values():
            world.pool.clear_writer(page)
    world.pool.check_integrity()
    assert world.pool.available == world.pool.total


# What it costs


class Counting(list):  # type: ignore[type-arg]
    """Records of pages that count how often one is looked at."""

    looks = 0

    def __getitem__(self, page: object) -> object:
        self.looks += 1
        return list.__getitem__(self, page)  # type: ignore[index]


def looks(open_pulls: int, blocks: int) -> int:
    """Returns how many pages are looked at while the first block of one of so many pulls is computed and told."""
    pool, _ = pool_of(open_pulls * blocks)
    served: list[tuple[ReadyParts, list[PageId]]] = []

    def job(pages: Sequence[PageId]) -> ReadyParts:
        return ReadyParts(pool, parts_of(range(blocks)), lambda part: pages[part.block])

    for number in range(open_pulls):
        claim = pool.claim(block_hashes_of([number] * blocks * BLOCK, BLOCK), ROOT, 0)
        assert claim is not None
        served.append((job(claim.pages), claim.pages))
        served[-1][0].change()
        assert served[-1][0].take() == ({}, None)
    pool._pages = records = Counting(pool._pages)
    pool.fill(served[0][1][0])
    told = [taken for parts, _ in served if (taken := parts.take()[0])]
    assert told == [{Part(0, GroupKind.FULL): served[0][1][0]}]
    return records.looks


def test_a_filled_block_costs_as_many_looks_however_many_blocks_and_pulls_are_open() -> None:
    assert looks(1, 4) == looks(1, 400) == looks(50, 40)


def questions(blocks: int) -> int:
    """Returns how many pages are looked at for the state of a pull whose last block has come."""
    pool, _ = pool_of(blocks)
    claim = pool.claim(block_hashes_of([1] * blocks * BLOCK, BLOCK), ROOT, 0)
    assert claim is not None
    parts = dict(zip(parts_of(range(blocks)), claim.pages, strict=True))
    spec = PullSpec(RequestId("r"), SessionId(1), worker_pb2.PageSource(), (), (), parts)
    for page in claim.pages:
        pool.assign_writer(page, spec.session)
    pull = OpenPull(spec, pool, 0.0)
    pool.fill_all(pull.came([Part(blocks - 1, GroupKind.FULL)]))
    pool._pages = records = Counting(pool._pages)
    assert (pull.missing_blocks, pull.first_missing, pull.is_computable, pull.is_abandoned) == (
        blocks - 1,
        0,
        True,
        False,
    )
    return records.looks


def test_the_state_of_a_pull_costs_the_same_however_long_its_prompt_is() -> None:
    assert questions(4) == questions(400)


def test_two_pulls_of_the_same_blocks_are_both_told_and_one_that_hung_up_is_not() -> None:
    pool, _ = pool_of(4)
    claim = pool.claim(block_hashes_of([1] * BLOCK, BLOCK), ROOT, 0)
    assert claim is not None
    (page,) = claim.pages
    jobs = [ReadyParts(pool, parts_of([0]), lambda _: page) for _ in range(3)]
    told: list[int] = []
    for number, job in enumerate(jobs):
        job.change()
        job.take()
        job.on_change = functools.partial(told.append, number)
    jobs[1].close()
    pool.fill(page)
    assert told == [0, 2]


class Waiter:
    """Counts how often it is told, and of what."""

    def __init__(self) -> None:
        self.told: list[list[Part]] = []

    def pages_changed(self, parts: Sequence[Part]) -> None:
        self.told.append(list(parts))


@pytest.mark.parametrize("blocks", [1, 400])
def test_pages_that_are_filled_together_are_told_once_to_each_who_waits_and_once_to_the_listener(blocks: int) -> None:
    pool, witness = pool_of(blocks)
    hashes = block_hashes_of([1] * blocks * BLOCK, BLOCK)
    claim = pool.claim(hashes, ROOT, 0)
    assert claim is not None
    pages, waiters = dict(zip(parts_of(range(blocks)), claim.pages, strict=True)), [Waiter(), Waiter()]
    for waiter in waiters:
        assert pool.filled_or_awaited(pages, waiter) == ({}, list(pages))
    calls = []
    witness.stored = calls.append  # type: ignore[method-assign]
    pool.fill_all(claim.pages)
    assert calls == [hashes]
    assert [waiter.told for waiter in waiters] == [[list(pages)]] * 2
    pool.check_integrity()
