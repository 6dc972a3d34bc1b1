"""The common part of transports that copy on threads: the owner's listener, the peers, pulls and their fence."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from twostroke.base.errors import ConfigError
from twostroke.kv_cache.memory import Pages
from twostroke.transfer.base import (
    Identity,
    PageCopy,
    PageEndpoint,
    PageTransport,
    Peer,
    ReadOutcome,
    Transfer,
    TransferResult,
    host_id,
)
from twostroke.transfer.copy_threads import off_loop
from twostroke.transfer.peers import AnyPeer, CopyThreadPeer, Peers, refuse_other_layouts
from twostroke.transfer.pulls import Pull, check_copies
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import ReaderValidator
from twostroke.transfer.sockets.listener import Listener

BACKLOG = 128
"""Connections that may wait to be accepted."""
_GRACE_S = 0.02
"""Seconds that `wait` gives the copying thread to notice the deadline itself, because its reason is more precise."""

AnyPages = TypeVar("AnyPages", bound=Pages)


class CopyThreadTransport(PageTransport, abc.ABC, Generic[AnyPeer, AnyPages]):
    def __init__(self, moves: type[AnyPages]) -> None:
        self._moves = moves
        self._peers: Peers[AnyPeer] = Peers()
        self._listener: Listener | None = None
        self._validator: ReaderValidator | None = None
        self._memory: AnyPages | None = None
        self._identity: Identity | None = None

    @abc.abstractmethod
    async def listen(self, validator: ReaderValidator, memory: AnyPages) -> tuple[str, Listener]:
        """Listens for readers of `memory`; returns the address for peers and the listener."""

    @abc.abstractmethod
    async def reach(self, endpoint: PageEndpoint, identity: Identity, memory: AnyPages, deadline_s: float) -> AnyPeer:
        """Returns a peer that answers; its pages will be copied into `memory`."""

    async def open(self, memory: Pages, identity: Identity) -> PageEndpoint:
        moved = self._checked(memory)
        self._validator = ReaderValidator(identity, memory.layout)
        address, self._listener = await self.listen(self._validator, moved)
        self._memory, self._identity = moved, identity
        return PageEndpoint(self.name, address, host_id(), identity.epoch, identity.fingerprint, memory.layout)

    def read_into(self, memory: Pages, identity: Identity) -> None:
        self._memory, self._identity = self._checked(memory), identity

    @property
    def refused(self) -> Mapping[str, int]:
        return {} if self._validator is None else dict(self._validator.refused)

    async def connect(self, endpoint: PageEndpoint, deadline_s: float) -> Peer:
        assert self._memory is not None, "connect before open"
        assert self._identity is not None
        refuse_other_layouts(endpoint, self._identity, self._memory.layout.page_sizes)
        return await self.reach(endpoint, self._identity, self._memory, deadline_s)

    def pull(self, peer: Peer, copies: Sequence[PageCopy], deadline_s: float) -> Transfer:
        assert isinstance(peer, CopyThreadPeer)
        assert self._memory is not None, "pull before open"
        check_copies(copies, peer.endpoint, self._memory)
        return peer.start(tuple(copies), Deadline.after(deadline_s))

    async def wait(self, transfer: Transfer) -> TransferResult:
        assert isinstance(transfer, Pull)
        ended = asyncio.wrap_future(transfer.ended)
        left_s = transfer.deadline.at - time.monotonic()
        await asyncio.wait({ended}, timeout=max(0.0, left_s) + _GRACE_S)
        if ended.cancelled():
            return TransferResult(ReadOutcome.FAILED, 0, 0.0, "fenced while queued")
        if ended.done():
            try:
                return ended.result()
            except ConnectionAbortedError as error:
                return TransferResult(ReadOutcome.FAILED, 0, 0.0, str(error))
        transfer.unwanted = True
        why = "the deadline passed while the pull waited or a page was copied"
        return TransferResult(ReadOutcome.EXPIRED, 0, 0.0, why)

    async def fence(self, transfer: Transfer) -> None:
        assert isinstance(transfer, Pull)
        transfer.unwanted = True
        if not transfer.ended.cancel():
            transfer.interrupt(transfer)
            await asyncio.wait({asyncio.wrap_future(transfer.ended)})

    async def close(self) -> None:
        await self._peers.close()
        if self._listener is not None:
            await off_loop(self._listener.close)
            self._listener = None

    def _checked(self, memory: Pages) -> AnyPages:
        assert self._memory is None, "opened twice"
        if not isinstance(memory, self._moves):
            raise ConfigError(
                f"page transport {self.name} moves pages of a {self._moves.__name__}, "
                f"those of this worker are in a {type(memory).__name__}: leave it out of --transports",
                field="transports",
            )
        return memory
