"""Whatever anybody does, dead or alive: no page is ever written by two, and what is readable is what its name says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.transfer.fenced_epochs import WorkerEpoch
from tests.unit.transfer.fenced_world import Copying, Held, World, greet, play_in
from twostroke.base.errors import PeerLost, StaleEpoch
from twostroke.base.ids import PageId
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.transfer.base import ReadOutcome
from twostroke.transfer.same_host import same_host_transport as same_host
from twostroke.transfer.sockets import handshake
from twostroke.worker.pulls import pull_client
from twostroke.worker.request_validator import RequestValidator

Spoil = Callable[[pytest.MonkeyPatch], None]
WORKERS = ("a", "b")
chains = st.lists(st.integers(0, 1), min_size=1, max_size=3)
picks = st.integers(0, 63)


def without_digests(patch: pytest.MonkeyPatch) -> None:
    commit = pull_client.PullClient._commit

    def commit_anything(client: Any, session: Any, announced: Any, _arrived: object) -> None:
        commit(client, session, announced, announced.digests)

    patch.setattr(pull_client.PullClient, "_commit", commit_anything)


def without_generations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(same_host, "refuse_changed", lambda *_, **__: None)


def without_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handshake.ReaderValidator, "_check", lambda *_: None)
    patch.setattr(handshake, "_compare", lambda *_: None)
    patch.setattr(RequestValidator, "check", lambda *_, **__: None)


def without_fences(patch: pytest.MonkeyPatch) -> None:
    async def no_fence(*_: Any) -> None:
        return None

    patch.setattr(pull_client, "fence_for_good", no_fence)


def without_quarantine(patch: pytest.MonkeyPatch) -> None:
    retire = BlockPool._retire

    def retire_at_once(pool: BlockPool, page: PageId) -> None:
        retire(pool, page)
        if pool.count(PageState.QUARANTINED):
            pool._forget(page)

    patch.setattr(BlockPool, "_retire", retire_at_once)


class Pages(RuleBasedStateMachine):
    """One worker pulls from the lives of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world = begin(self.patch)
        self.let_in: dict[tuple[WorkerEpoch, str], int] = {}
        """The latest incarnation of each worker that each owner has let in."""

    def teardown(self) -> None:
        try:
            self.world.finish()
        finally:
            self.world.close()
            self.patch.undo()

    def worker_epoch(self, pick: int) -> WorkerEpoch:
        return self.world.worker_epochs[pick % len(self.world.worker_epochs)]

    def copying(self, pick: int) -> Copying:
        transfers = [transfer for transfer in self.world.transport.transfers if not transfer.is_terminal]
        return transfers[pick % len(transfers)]

    @property
    def is_copying(self) -> bool:
        return any(not transfer.is_terminal for transfer in self.world.transport.transfers)

    # The worker that pulls

    @rule(tokens=chains, pick=picks, from_cache=st.booleans())
    def claim_and_pull(self, tokens: list[int], pick: int, from_cache: bool) -> None:
        held = self.world.claim(tokens)
        if held is not None:
            self.world.pull(held, self.worker_epoch(pick).source, from_cache=from_cache)

    @precondition(lambda self: self.world.held)
    @rule(pick=picks, source=picks, from_cache=st.booleans())
    def pull_again(self, pick: int, source: int, from_cache: bool) -> None:
        held = self.world.held[pick % len(self.world.held)]
        self.world.pull(held, self.worker_epoch(source).source, from_cache=from_cache)

    @precondition(lambda self: self.world.held)
    @rule(pick=picks)
    def compute(self, pick: int) -> None:
        self.world.begin_computing(self.world.held[pick % len(self.world.held)])

    @precondition(lambda self: self.world.computing)
    @rule(pick=picks, is_done=st.booleans())
    def stop_computing(self, pick: int, is_done: bool) -> None:
        self.world.end_computing(sorted(self.world.computing)[pick % len(self.world.computing)], is_done=is_done)

    @precondition(lambda self: self.world.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.world.release(self.world.held[pick % len(self.world.held)])

    @precondition(lambda self: self.world.client._sessions)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        sessions = [session.spec.session for session in self.world.client._sessions]
        self.world.client.stop_one(sessions[pick % len(sessions)])
        self.world.loop.synchronize()

    # The wire

    @precondition(lambda self: self.is_copying)
    @rule(pick=picks, halves=st.integers(1, 7))
    def copy(self, pick: int, halves: int) -> None:
        """Also where nobody waits for it any more."""
        transfer = self.copying(pick)
        for _ in range(halves):
            if not transfer.is_terminal:
                self.world.transport.advance(transfer)
        self.world.loop.synchronize()

    @precondition(lambda self: self.is_copying)
    @rule(pick=picks)
    def expire(self, pick: int) -> None:
        self.copying(pick).end(ReadOutcome.EXPIRED, is_terminal=False)
        self.world.loop.synchronize()

    @precondition(lambda self: any(t.is_fencing and not t.is_terminal for t in self.world.transport.transfers))
    @rule(pick=picks)
    def fence_stands(self, pick: int) -> None:
        fencing = [t for t in self.world.transport.transfers if t.is_fencing and not t.is_terminal]
        transfer = fencing[pick % len(fencing)]
        transfer.is_terminal = True
        transfer.fence.set()
        self.world.loop.synchronize()

    @rule(half=st.integers(0, 40))
    def damage(self, half: int) -> None:
        self.world.transport.flips.add(half)

    # Those that are pulled from

    @rule(pick=picks)
    def source_computes(self, pick: int) -> None:
        self.worker_epoch(pick).compute()
        self.world.loop.synchronize()

    @rule(pick=picks, tokens=chains)
    def source_is_used(self, pick: int, tokens: list[int]) -> None:
        self.worker_epoch(pick).use(block_hashes_of(tokens, 1))

    @precondition(lambda self: any(call.is_open for call in self.world.calls))
    @rule(pick=picks)
    def lease_is_dropped(self, pick: int) -> None:
        """The source takes the puller for dead; that one was only frozen."""
        open_calls = [call for call in self.world.calls if call.is_open]
        open_calls[pick % len(open_calls)].drop()
        self.world.loop.synchronize()

    @precondition(lambda self: any(call.is_open for call in self.world.calls))
    @rule(pick=picks)
    def source_dies(self, pick: int) -> None:
        open_calls = [call for call in self.world.calls if call.is_open]
        worker_epoch = open_calls[pick % len(open_calls)].worker_epoch
        for call in open_calls:
            if call.worker_epoch is worker_epoch:
                call.break_off()
        for ports in (self.world.rpc_ports, self.world.page_ports):
            if ports.get(worker_epoch.worker_id) is worker_epoch:
                del ports[worker_epoch.worker_id]
        self.world.loop.synchronize()

    @rule(pick=picks)
    def link_is_cut_or_heals(self, pick: int) -> None:
        worker_epoch = self.worker_epoch(pick)
        worker_epoch.is_cut = not worker_epoch.is_cut
        for call in self.world.calls:
            call.pass_on()
        self.world.loop.synchronize()

    @precondition(lambda self: len(self.world.worker_epochs) < 5)
    @rule(worker=st.sampled_from(WORKERS))
    def successor_begins(self, worker: str) -> None:
        """The supervisor took the one before it for dead; that one may have been frozen."""
        self.world.begin_epoch(worker)

    @rule(pick=picks, rpc=st.booleans(), pages=st.booleans())
    def port_is_anothers(self, pick: int, rpc: bool, pages: bool) -> None:
        """A network that heals, or a port number that is used again, leads to another epoch than was meant."""
        worker_epoch = self.worker_epoch(pick)
        for ports, is_meant in ((self.world.rpc_ports, rpc), (self.world.page_ports, pages)):
            if is_meant:
                ports[worker_epoch.worker_id] = worker_epoch

    @rule(reader=picks, owner=picks)
    def handshake_reaches_owner(self, reader: int, owner: int) -> None:
        """Any life, also one that has a successor, wants to read from any other."""
        mine, theirs = self.worker_epoch(reader), self.worker_epoch(owner)
        seen = (theirs, mine.worker_id)
        newest = self.let_in.get(seen, 0)
        try:
            greet(mine.identity, theirs, theirs.endpoint)
        except (StaleEpoch, PeerLost):
            assert mine.epoch.incarnation < newest
        else:
            assert mine.epoch.incarnation >= newest, "an earlier epoch was let in"
            self.let_in[seen] = mine.epoch.incarnation

    @rule(seconds=st.sampled_from([0.6, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.world.loop.pass_time(seconds)

    # What always holds

    @invariant()
    def pages_are_right(self) -> None:
        self.world.check()


TestFencedPages = Pages.TestCase
TestFencedPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# The proof is not vacuous: each of these histories goes well, and would not without one of the guards


def given_up(world: World) -> None:
    """A request ends while its page is being copied."""
    held = pulled(world, world.worker_epochs[0])
    world.release(held)


def damaged(world: World) -> None:
    """A byte is wrong on the wire."""
    world.transport.flips.add(1)
    pulled(world, world.worker_epochs[0])
    copy(world, halves=3)


def outlived(world: World) -> None:
    """The puller is frozen in the middle of a copy, taken for dead, and the page is used for something else."""
    source = world.worker_epochs[0]
    pulled(world, source)
    copy(world, halves=1)
    world.calls[0].drop()
    world.loop.synchronize()
    for tokens in ([1, 0, 0], [1, 1]):
        source.use(block_hashes_of(tokens, 1))
    assert source.memory.generation(PageId(0)) == 2
    copy(world, halves=2)


def misled(world: World) -> None:
    """A successor announces its pages; the address leads to the life before, which has something else there."""
    zombie, successor = world.worker_epochs[0], world.begin_epoch("a")
    zombie.use(block_hashes_of([1], 1))
    world.page_ports["a"] = zombie
    pulled(world, successor)
    copy(world, halves=3)


def pulled(world: World, source: WorkerEpoch) -> Held:
    held = world.claim([0])
    assert held is not None
    world.pull(held, source.source)
    source.compute()
    world.loop.synchronize()
    return held


def copy(world: World, *, halves: int) -> None:
    for transfer in world.transport.transfers:
        for _ in range(halves):
            if not transfer.is_terminal:
                world.transport.advance(transfer)
    world.loop.synchronize()


@pytest.mark.parametrize(
    ("history", "spoils", "words"),
    [
        (given_up, [without_fences], "given away while it is written"),
        (given_up, [without_quarantine], "given away while it is written"),
        (damaged, [without_digests], "a block that it is not"),
        (outlived, [without_digests, without_generations], "a block that it is not"),
        (misled, [without_digests, without_epochs], "a block that it is not"),
    ],
    ids=["fence", "quarantine", "digest", "generation", "epoch"],
)
def test_what_goes_well_is_noticed_to_go_wrong_without_a_guard(
    history: Callable[[World], None], spoils: list[Spoil], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = spoils[-1]
    world = begin(monkeypatch)
    for spoil in spoils[:-1]:  # two guards see this: one of them is enough
        spoil(monkeypatch)
    history(world)
    world.check()
    world.finish()
    world.close()
    needed(monkeypatch)
    world = begin(monkeypatch)
    history(world)
    with pytest.raises(AssertionError, match=words):
        world.check()
    with contextlib.suppress(AssertionError):
        world.finish()
    world.close()


def begin(patch: pytest.MonkeyPatch) -> World:
    world = World()
    play_in(world, patch)
    for worker in WORKERS:
        world.begin_epoch(worker)
    return world
