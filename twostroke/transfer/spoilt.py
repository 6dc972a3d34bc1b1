"""A transport whose copies can be spoilt on demand, where there is no wire to do it on (twostroke.faults)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.faults import links
from twostroke.faults.links import Links
from twostroke.ids import PageId
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import Endpoint, Identity, Outcome, PageCopy, PageTransport, Peer, Transfer, TransferResult
from twostroke.transfer.shm import ShmTransport


def spoilable(transports: list[PageTransport]) -> list[PageTransport]:
    """As they are, unless faults can be armed in this process."""
    mine = links()
    if mine is None:
        return transports
    return [SpoiltCopies(each, mine) if isinstance(each, ShmTransport) else each for each in transports]


class SpoiltCopies(PageTransport):
    """Behaves like the transport it wraps, except that a bit of a page that has just been copied may be wrong: what
    arrived is not what was sent."""

    def __init__(self, inner: PageTransport, links: Links) -> None:
        self.name = inner.name
        self._inner = inner
        self._links = links
        self._memory: PageMemory | None = None
        self._landing: dict[Transfer, PageId] = {}
        """A page of each pull that has not ended."""

    async def open(self, memory: Pages, identity: Identity) -> Endpoint:
        endpoint = await self._inner.open(memory, identity)
        assert isinstance(memory, PageMemory), "shared memory moves pages of no other kind"
        self._memory = memory
        return endpoint

    @property
    def refused(self) -> Mapping[str, int]:
        return self._inner.refused

    def reaches(self, endpoint: Endpoint) -> bool:
        return self._inner.reaches(endpoint)

    async def connect(self, endpoint: Endpoint, deadline_s: float) -> Peer:
        return await self._inner.connect(endpoint, deadline_s)

    def pull(self, peer: Peer, copies: Sequence[PageCopy], deadline_s: float) -> Transfer:
        transfer = self._inner.pull(peer, copies, deadline_s)
        if copies:
            self._landing[transfer] = copies[len(copies) // 2].local
        return transfer

    async def wait(self, transfer: Transfer) -> TransferResult:
        try:
            result = await self._inner.wait(transfer)
        finally:
            page = self._landing.pop(transfer, None)
        if page is not None and result.outcome is Outcome.DONE and self._links.take_corruption():
            assert self._memory is not None, "waited before open"
            damaged = self._memory.page(page)
            damaged[len(damaged) // 2] ^= 1
        return result

    async def fence(self, transfer: Transfer) -> None:
        await self._inner.fence(transfer)

    async def close(self) -> None:
        await self._inner.close()
