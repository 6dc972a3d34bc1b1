"""The peers of a transport: one per address and epoch, and only the latest epoch of each worker."""

from __future__ import annotations

import abc
import asyncio
import threading
from concurrent.futures import Future
from typing import Generic, TypeVar

from twostroke.base.errors import FingerprintMismatch, PeerLost, StaleEpoch
from twostroke.base.ids import Epoch
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint, Peer
from twostroke.transfer.copy_threads import off_loop
from twostroke.transfer.pulls import Pull
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import Welcome, mismatch

_GRACE_S = 0.02
"""Seconds past its deadline that a connect waits for the thread's own error."""


class CopyThreadPeer(Peer, abc.ABC):
    """A peer with its own copy threads."""

    def __init__(self, endpoint: PageEndpoint) -> None:
        self.endpoint = endpoint
        self.worker_id = ""
        """The peer's own worker id; known after the handshake."""
        self._close_lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Fails queued pulls, closes the connections and ends the threads. It blocks until that is done."""
        with self._close_lock:
            if not self._is_closed:
                self._is_closed = True
                self.end()

    @abc.abstractmethod
    def start_handshake(self, deadline: Deadline) -> Future[Welcome]:
        """Makes sure on the peer's thread that it answers; connects if no connection is alive."""

    @abc.abstractmethod
    def start(self, copies: tuple[PageCopy, ...], deadline: Deadline) -> Pull:
        """Queues a pull for the peer's threads."""

    @abc.abstractmethod
    def end(self) -> None:
        """Closes the connections and ends the threads. `close` calls it once."""


AnyPeer = TypeVar("AnyPeer", bound=CopyThreadPeer)


class Peers(Generic[AnyPeer]):
    """Peers by (address, epoch)."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, Epoch], AnyPeer] = {}
        self._arriving: set[AnyPeer] = set()
        """Peers with an unfinished handshake."""
        self._is_closed = False

    def find(self, endpoint: PageEndpoint) -> AnyPeer | None:
        return self._peers.get((endpoint.address, endpoint.epoch))

    async def reach(self, peer: AnyPeer, deadline_s: float) -> AnyPeer:
        """Shakes hands with a peer, keeps it and closes the one it replaces. Raises as `PageTransport.connect` does."""
        self._arriving.add(peer)
        try:
            peer.worker_id = (await _handshake(peer, deadline_s)).worker_id
            self._refuse_earlier_epoch(peer)
            if self._is_closed:
                raise PeerLost("the page transport was closed")
        except asyncio.CancelledError:
            if self.find(peer.endpoint) is not peer:  # a known peer serves other pulls, too
                await self._drop(peer)
            raise
        except Exception:
            await self._drop(peer)
            raise
        finally:
            self._arriving.discard(peer)
        return await self._remember(peer)

    async def close(self) -> None:
        self._is_closed = True
        ending = {*self._peers.values(), *self._arriving}
        self._peers.clear()
        for peer in ending:
            await off_loop(peer.close)

    async def _remember(self, peer: AnyPeer) -> AnyPeer:
        key = (peer.endpoint.address, peer.endpoint.epoch)
        rival = self._peers.get(key)
        if rival is not None and rival is not peer:
            await off_loop(peer.close)
            return rival
        outlived = [other for other in self._peers.values() if other.worker_id == peer.worker_id and other is not peer]
        self._peers[key] = peer
        for other in outlived:
            await self._drop(other)
        return peer

    def _refuse_earlier_epoch(self, peer: AnyPeer) -> None:
        for other in self._peers.values():
            if other.worker_id == peer.worker_id and other.endpoint.epoch.incarnation > peer.endpoint.epoch.incarnation:
                raise StaleEpoch(
                    f"epoch {peer.endpoint.epoch} of {peer.worker_id} answers, but epoch {other.endpoint.epoch} "
                    "was met already: this is an earlier epoch"
                )

    async def _drop(self, peer: AnyPeer) -> None:
        key = (peer.endpoint.address, peer.endpoint.epoch)
        if self._peers.get(key) is peer:
            del self._peers[key]
        await off_loop(peer.close)


def refuse_other_layouts(endpoint: PageEndpoint, identity: Identity, page_sizes: tuple[int, ...]) -> None:
    """Refuses an endpoint with another fingerprint or other `page_sizes` of groups. Raises FingerprintMismatch."""
    theirs, ours = (endpoint.fingerprint, endpoint.layout.page_sizes), (identity.fingerprint, page_sizes)
    if theirs != ours:
        raise FingerprintMismatch(mismatch(f"the worker at {endpoint.address}", theirs, identity.worker_id, ours))


async def _handshake(peer: CopyThreadPeer, deadline_s: float) -> Welcome:
    where = f"{peer.endpoint.transport} {peer.endpoint.address}"
    handshake = asyncio.wrap_future(peer.start_handshake(Deadline.after(deadline_s)))
    try:
        async with asyncio.timeout(deadline_s + _GRACE_S):
            return await handshake
    except TimeoutError as error:
        raise PeerLost(f"pages at {where}: no answer within {deadline_s:.3f} s") from error
    except (OSError, EOFError) as error:
        raise PeerLost(f"pages at {where}: {error}") from error
