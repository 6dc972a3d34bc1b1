"""The suppliers of a sequence: who is asked for what, and what becomes of parts that a supplier does not bring."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.base.errors import PeerLost
from twostroke.base.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.kv_cache.block import root_hash
from twostroke.kv_cache.parts import Part, parts_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.scheduler.sequence import building
from twostroke.worker.supply.pull_spec import PullReport
from twostroke.worker.supply.supply import Behind, ExpectedPages, Supply, SupplyListener

BLOCKS = 6
HASHES = [BlockHash(bytes([number]) * 16) for number in range(1, BLOCKS + 1)]
FORECAST = ExpectedPages(blocks=4, cached_blocks=2, fetch_s=0.0, wait_s=1.0, compute_s=2.0, latency_s=0.0, page_s=0.5)


class Silent:
    """Listens to a pool, and does nothing."""

    def stored(self, names: Sequence[BlockHash]) -> None: ...
    def removed(self, names: Sequence[BlockHash]) -> None: ...
    def evicting(self, page: PageId, name: BlockHash, parent: BlockHash) -> None: ...
    def forgotten(self, name: BlockHash) -> None: ...
    def new_writers(self, pages: Sequence[PageId]) -> None: ...


@dataclass
class Scripted:
    """A supplier that takes the blocks of a set, as a pull or in another way."""

    takes: set[int]
    is_pull: bool = True
    expected: ExpectedPages | None = None
    depth: int = BLOCKS
    asked: list[list[int]] = field(default_factory=list)
    behind: Behind | None = None
    pull: asyncio.Future[PullReport] | None = None

    def begin(self, parts: Sequence[Part], behind: Behind) -> list[Part]:
        self.behind = behind
        self.asked.append([part.block for part in parts])
        taken = [part for part in parts if part.block in self.takes]
        if taken and self.is_pull:
            self.pull = asyncio.get_running_loop().create_future()
            behind.pulling(self.pull)
        return [part for part in parts if part.block not in self.takes]

    async def ends(self, failure: PeerLost | None = None) -> None:
        assert self.pull is not None
        self.pull.set_result(PullReport(failure=failure))
        await asyncio.sleep(0)


@dataclass
class Heard(SupplyListener):
    left_blocks: list[list[int]] = field(default_factory=list)
    reports: int = 0
    settles: int = 0

    def left(self, parts: Sequence[Part]) -> None:
        self.left_blocks.append([part.block for part in parts])

    def pulled(self, report: PullReport) -> None:
        self.reports += 1

    def settled(self) -> None:
        self.settles += 1


class Admitted:
    """A sequence that has its pages, all of which lack."""

    def __init__(self, here: Sequence[Scripted] = (), elsewhere: Sequence[Scripted] = ()) -> None:
        self.pool = BlockPool(BLOCKS, Silent())
        tokens = list(range(BLOCKS))
        self.sequence = building(RequestId("r"), SessionId(1), tokens, HASHES)
        claim = self.pool.claim(HASHES, root_hash(), 0)
        assert claim is not None
        self.sequence.pages = claim.pages
        self.heard = Heard()
        self.missing = parts_of(claim.missing)
        self.supply = Supply(self.sequence, self.pool, here, elsewhere, self.heard, self.pull_to)

    def pull_to(self, sequence: KnownSequence, depth: int) -> list[Part]:
        pages = enumerate(sequence.pages[:depth])
        return parts_of(block for block, page in pages if self.pool.is_unwritten(page))

    def begin(self) -> None:
        self.supply.begin(self.missing)


async def test_each_supplier_is_asked_for_what_those_before_it_do_not_take() -> None:
    first, second = Scripted({0, 1}, is_pull=False), Scripted({1, 2, 3})
    admitted = Admitted([first], [second])
    admitted.begin()
    assert (first.asked, second.asked) == ([[0, 1, 2, 3, 4, 5]], [[2, 3, 4, 5]])
    assert admitted.heard.left_blocks == [[2, 3, 4, 5]], "what this worker does not have itself"
    assert admitted.supply.is_pulling


async def test_a_sequence_without_suppliers_computes_all() -> None:
    admitted = Admitted()
    admitted.begin()
    assert admitted.heard.left_blocks == [[0, 1, 2, 3, 4, 5]]
    assert not admitted.supply.is_pulling


async def test_what_a_supplier_here_does_not_bring_after_all_goes_to_another_worker() -> None:
    here, source = Scripted({0, 1, 2}, is_pull=False), Scripted(set(range(BLOCKS)))
    admitted = Admitted([here], [source])
    admitted.begin()
    admitted.pool.assign_writer(admitted.sequence.pages[1], SessionId(7))
    assert here.behind is not None
    here.behind.take_over(parts_of([0, 1, 2]))
    assert source.asked[1:] == [[0, 2]], "somebody else writes block 1 by now"
    assert admitted.heard.left_blocks == [[3, 4, 5], [0, 2]]


async def test_what_a_lost_page_source_does_not_bring_goes_to_the_peer_and_then_to_nobody() -> None:
    source, peer = Scripted(set(range(BLOCKS))), Scripted({0, 1, 2}, depth=3)
    admitted = Admitted([], [source, peer])
    admitted.begin()
    assert peer.asked == [[]], "the source takes all"
    await source.ends(PeerLost("gone"))
    assert peer.asked[1:] == [[0, 1, 2]]
    assert admitted.heard.settles == 0
    await peer.ends(PeerLost("gone too"))
    assert (admitted.heard.reports, admitted.heard.settles) == (2, 1)
    assert not admitted.supply.is_pulling


async def test_a_pull_that_has_not_failed_is_not_repeated_elsewhere() -> None:
    source, peer = Scripted(set(range(BLOCKS))), Scripted(set(range(BLOCKS)))
    admitted = Admitted([], [source, peer])
    admitted.begin()
    await source.ends()
    assert peer.asked == [[]]
    assert (admitted.heard.reports, admitted.heard.settles) == (1, 1)


async def test_a_pull_that_is_cancelled_is_not_repeated_elsewhere() -> None:
    source, peer = Scripted(set(range(BLOCKS))), Scripted(set(range(BLOCKS)))
    admitted = Admitted([], [source, peer])
    admitted.begin()
    assert source.pull is not None
    source.pull.cancel()
    await asyncio.sleep(0)
    assert peer.asked == [[]]
    assert (admitted.heard.reports, admitted.heard.settles) == (0, 1)


async def test_nothing_is_handed_on_after_the_end_and_reports_are_still_heard() -> None:
    here, source, peer = Scripted({0}, is_pull=False), Scripted(set(range(BLOCKS))), Scripted({1})
    admitted = Admitted([here], [source, peer])
    admitted.begin()
    admitted.supply.end()
    assert here.behind is not None
    here.behind.take_over(parts_of([0]))
    await source.ends(PeerLost("gone"))
    assert (len(source.asked), len(peer.asked)) == (1, 1)
    assert (admitted.heard.reports, admitted.heard.settles) == (1, 0)


async def test_a_supplier_sees_the_forecast_of_the_next_one_only() -> None:
    first, second, third = Scripted(set()), Scripted(set(), expected=FORECAST), Scripted(set())
    Admitted([first], [second, third]).begin()
    assert first.behind is not None
    assert second.behind is not None
    assert first.behind.is_expected
    assert first.behind.arrival_s([0, 1]) == 1.0
    assert first.behind.arrival_s([4]) == math.inf
    assert first.behind.batches([1, 2, 3]) == [[1], [2, 3]]
    assert not second.behind.is_expected
    assert second.behind.arrival_s([0]) == math.inf
    assert second.behind.batches([1, 2]) == [[1, 2]]
