"""A worker that pulls pages and the lives of those it pulls from, with nothing real between them but the protocol.

Pools, pull client, page service, gates and hellos are the real ones. Only the wire is played: calls deliver messages
within one event loop, whose clock stands still, and a transfer copies half a page when it is told to. So a history
says exactly who does what when, and whoever plays it can look at every page after each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.trials.chaos.fuzz.wire import Wire
from tests.unit.transfer.fenced_epochs import SOURCE_PAGES, Bytes, Call, StillLoop, WorkerEpoch, metrics
from twostroke.base.errors import PeerLost, ServeError, TransferFailed
from twostroke.base.ids import BlockHash, Epoch, PageId, RequestId, SessionId
from twostroke.config import Role
from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of, root_hash
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import (
    Identity,
    PageCopy,
    PageEndpoint,
    PageTransport,
    Peer,
    ReadOutcome,
    Transfer,
    TransferResult,
)
from twostroke.transfer.same_host import same_host_transport as same_host
from twostroke.transfer.sockets import handshake
from twostroke.transfer.sockets.frames import Deadline
from twostroke.worker.pull_ends import DirectLanding, PageDigests
from twostroke.worker.pulls import pull_client
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.supply.pull_spec import PullSpec

TARGET_PAGES = 5
HALF = HASH_BYTES // 2
SILENCE_S = 2.0


@dataclass(eq=False)
class Copying(Transfer):
    """A transfer; `is_terminal` once it can write no more."""

    memory: PageMemory
    copies: Sequence[PageCopy]
    sessions: list[SessionId | None]
    """The sessions that the pages belonged to when the read began."""
    steps: Iterator[None]
    ended: asyncio.Future[TransferResult]
    fence: asyncio.Event = field(default_factory=asyncio.Event)
    is_fencing: bool = False
    is_terminal: bool = False

    def end(self, outcome: ReadOutcome, *, is_terminal: bool) -> None:
        self.is_terminal = self.is_terminal or is_terminal
        if not self.ended.done():
            self.ended.set_result(TransferResult(outcome, 0, 0.0, "played"))


@dataclass(eq=False)
class _Peer(Peer):
    worker_epoch: WorkerEpoch


class PlayedTransport(PageTransport):
    """Copies half a page at a time, when told to. What was given up goes on writing until its fence stands."""

    name = "played"

    def __init__(self, world: World) -> None:
        self._world = world
        self.transfers: list[Copying] = []
        self.flips: set[int] = set()
        """Half pages, counted over all, that arrive damaged."""
        self._halves = itertools.count()
        self._peers: dict[tuple[str, Epoch], _Peer] = {}

    async def open(self, memory: Any, identity: Identity) -> PageEndpoint:
        raise NotImplementedError

    def read_into(self, memory: Any, identity: Identity) -> None:
        raise NotImplementedError

    def reaches(self, endpoint: PageEndpoint) -> bool:
        return True

    async def connect(self, endpoint: PageEndpoint, deadline_s: float) -> Peer:
        known = self._peers.get((endpoint.address, endpoint.epoch))
        if known is None:
            worker_epoch = self._world.page_ports.get(endpoint.address)
            if worker_epoch is None or worker_epoch.is_cut:
                raise PeerLost("nobody answers")
            greet(self._world.identity, worker_epoch, endpoint)
            known = self._peers[endpoint.address, endpoint.epoch] = _Peer(worker_epoch)
        return known

    def pull(self, peer: Peer, copies: Sequence[PageCopy], deadline_s: float) -> Transfer:
        assert isinstance(peer, _Peer)
        world = self._world
        transfer = Copying(
            world.memory,
            copies,
            [world.pool.writer(copy.local) for copy in copies],
            self._copy(peer.worker_epoch, copies),
            world.loop.create_future(),
        )
        self.transfers.append(transfer)
        return transfer

    async def wait(self, transfer: Transfer) -> TransferResult:
        assert isinstance(transfer, Copying)
        return await asyncio.shield(transfer.ended)

    async def fence(self, transfer: Transfer) -> None:
        assert isinstance(transfer, Copying)
        transfer.is_fencing = True
        if not transfer.is_terminal:
            await transfer.fence.wait()

    async def close(self) -> None:
        raise NotImplementedError

    def advance(self, transfer: Copying) -> None:
        try:
            next(transfer.steps)
        except StopIteration:
            transfer.end(ReadOutcome.DONE, is_terminal=True)
        except TransferFailed:
            transfer.end(ReadOutcome.FAILED, is_terminal=True)

    def _copy(self, worker_epoch: WorkerEpoch, copies: Sequence[PageCopy]) -> Iterator[None]:
        theirs, mine = worker_epoch.memory, self._world.memory
        for copy in copies:
            same_host.refuse_changed(copy, theirs.generation(PageId(copy.remote)))
            for part in (slice(0, HALF), slice(HALF, None)):
                mine.page(copy.local)[part] = theirs.page(copy.remote)[part]
                if next(self._halves) in self.flips:
                    mine.page(copy.local)[part][0] ^= 1
                yield
            same_host.refuse_changed(copy, theirs.generation(PageId(copy.remote)), after=True)


NONCE = bytes(16)


def _said_by(validator: handshake.ReaderValidator, owner: Wire) -> bytes:
    with contextlib.suppress(ServeError, EOFError), patch.object(handshake, "draw_nonce", lambda: NONCE):
        validator.admit(owner.sock, Deadline.after(9.0))
    return bytes(owner.sent)


def _greeting(validator: handshake.ReaderValidator) -> bytes:
    return _said_by(validator, Wire(b""))


class Line(Wire):
    """The owner draws NONCE, and answers when the reader has spoken and listens."""

    def __init__(self, validator: handshake.ReaderValidator) -> None:
        super().__init__(_greeting(validator))
        self._validator: handshake.ReaderValidator | None = validator

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, None]:
        if self._validator is not None and self.sent:
            owner, validator, self._validator = Wire(bytes(self.sent)), self._validator, None
            self._left = memoryview(_said_by(validator, owner)[len(_greeting(validator)) :])
        return super().recvmsg_into(buffers)


def greet(reader: Identity, owner: WorkerEpoch, endpoint: PageEndpoint) -> None:
    """The handshake of a page connection. Raises its refusal."""
    handshake.introduce(Line(owner.handshake).sock, reader, endpoint, Deadline.after(9.0))


@dataclass
class Held:
    """A sequence's pages."""

    tokens: list[int]
    block_hashes: list[BlockHash]
    pages: list[PageId]


class World(Bytes):
    """The worker that pulls."""

    def __init__(self) -> None:
        super().__init__(TARGET_PAGES)
        self.loop = StillLoop()
        self.identity = Identity("target", Epoch(1, 1), "f", "token")
        self.transport = PlayedTransport(self)
        self.worker_epochs: list[WorkerEpoch] = []
        self.calls: list[Call] = []
        self.rpc_ports: dict[str, WorkerEpoch] = {}
        self.page_ports: dict[str, WorkerEpoch] = {}
        """Ports are found by their address: whose they are may change at any time."""
        self.held: list[Held] = []
        self.computing: dict[PageId, SessionId] = {}
        self._sessions = itertools.count(1)
        self.client = PullClient(
            RequestValidator("target", Epoch(1, 1), "f", metrics(Role.DECODE)),
            self.pool,
            DirectLanding(PageDigests(self.memory), [self.transport], TARGET_PAGES),
            metrics(Role.DECODE),
            us=Membership("token"),
            limits=PullLimits(silence_s=SILENCE_S, copy_s=60.0),
            wake=lambda: None,
        )

    def channel_to(self, address: str, token: str) -> Any:
        """Stands in for a PeerChannel, and for the stub over it."""

        async def close() -> None:
            return None

        def ask(request: worker_pb2.PullRequest, **_options: Any) -> Call:
            return self._ask(address, request)

        return SimpleNamespace(channel=SimpleNamespace(Pull=ask), metadata=(), close=close)

    def _ask(self, address: str, request: worker_pb2.PullRequest) -> Call:
        worker_epoch = self.rpc_ports.get(address)
        if worker_epoch is None:
            raise PeerLost("nobody answers")
        self.calls.append(Call(self.loop, worker_epoch, request))
        return self.calls[-1]

    def begin_epoch(self, worker_id: str) -> WorkerEpoch:
        """It takes over its predecessor's ports; that one may live on."""
        worker_epoch = WorkerEpoch(worker_id, 1 + sum(other.worker_id == worker_id for other in self.worker_epochs))
        self.worker_epochs.append(worker_epoch)
        self.rpc_ports[worker_id] = self.page_ports[worker_id] = worker_epoch
        return worker_epoch

    def claim(self, tokens: list[int]) -> Held | None:
        names = block_hashes_of(tokens, 1)
        claim = self.pool.claim(names, root_hash(), 0)
        if claim is None:
            return None
        self.held.append(Held(tokens, names, claim.pages))
        return self.held[-1]

    def pull(self, held: Held, source: worker_pb2.PageSource, *, from_cache: bool = False) -> None:
        """Whatever of it nobody writes."""
        orphans = {b: p for b, p in enumerate(held.pages) if self.pool.is_arriving(p) and self.pool.writer(p) is None}
        if orphans:
            spec = PullSpec(
                RequestId("r"),
                SessionId(next(self._sessions)),
                source,
                held.tokens,
                held.block_hashes,
                {Part(block, GroupKind.FULL): page for block, page in orphans.items()},
                cached_within_s=5.0 if from_cache else None,
            )
            self.loop.call_soon(self.client.start, spec, self.loop)
            self.loop.synchronize()

    def begin_computing(self, held: Held) -> None:
        for page in held.pages:
            if self.pool.is_arriving(page) and self.pool.writer(page) is None:
                self.computing[page] = SessionId(next(self._sessions))
                self.pool.assign_writer(page, self.computing[page])
                return

    def end_computing(self, page: PageId, *, is_done: bool) -> None:
        del self.computing[page]
        name = next((name for name, other in self.pool._by_hash.items() if other == page), None)
        if is_done and name is not None and self.pool.is_arriving(page):
            self.write(page, name)
            self.pool.fill(page)
        else:
            self.pool.clear_writer(page)

    def release(self, held: Held) -> None:
        """Its request has ended, or was preempted."""
        self.held.remove(held)
        self.pool.release(held.pages)
        self.client.prune()
        self.loop.synchronize()

    def check(self) -> None:
        super().check()
        self._no_page_has_two_writers()
        if not self.client._sessions and not self.computing:
            assert not self.pool.count(PageState.QUARANTINED), "quarantined, though nobody can write to it"
        for worker_epoch in self.worker_epochs:
            worker_epoch.check()
            if not any(call.is_open and call.worker_epoch is worker_epoch for call in self.calls):
                assert worker_epoch.pool.available == SOURCE_PAGES, "pinned for nobody"

    def _no_page_has_two_writers(self) -> None:
        writers = Counter(self.computing.keys())
        for transfer in self.transport.transfers:
            if transfer.is_terminal:
                continue
            for copy, session in zip(transfer.copies, transfer.sessions, strict=True):
                writers[copy.local] += 1
                assert self.pool.writer(copy.local) == session, f"page {copy.local} was given away while it is written"
        assert not writers or max(writers.values()) == 1, "a page has two writers"

    def finish(self) -> None:
        """Everybody gives up, and every writer ends: nothing is left behind."""
        for held in list(self.held):
            self.release(held)
        for page in list(self.computing):
            self.end_computing(page, is_done=False)
        for worker_epoch in self.worker_epochs:
            worker_epoch.is_cut = False
        for _ in range(len(self.transport.transfers) + 2):
            for transfer in self.transport.transfers:
                transfer.end(ReadOutcome.EXPIRED, is_terminal=True)
                transfer.fence.set()
            for call in self.calls:
                call.pass_on()
            self.loop.synchronize()
        self.check()
        assert self.pool.available == TARGET_PAGES, "pages are lost"
        assert not self.client._sessions
        assert not any(call.is_open for call in self.calls)

    def close(self) -> None:
        self.loop.synchronize()
        self.loop.close()
        for each in (self, *self.worker_epochs):
            each.memory.close()


def play_in(world: World, patch: Any) -> None:
    """From here on the real client's calls go to this world."""
    patch.setattr(pull_client, "PeerChannel", world.channel_to)
    patch.setattr(pull_client.worker_pb2_grpc, "PagesStub", lambda channel: channel)
