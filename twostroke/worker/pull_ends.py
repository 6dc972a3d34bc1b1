"""The two ends of a pull: the pages that a worker serves, and the pages where they arrive. Both compute digests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from twostroke.base.ids import PageId
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.memory import PageAccess, PageMemory, Pages
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import PageEndpoint, PageTransport, digest
from twostroke.transfer.copy_threads import CopyThreads, off_loop

_AT_ONCE_BYTES = 256 << 10
"""Most bytes of host memory that are digested on the event loop: that is faster than waking a thread."""


class PageDigests:
    """Digests pages for one event loop. A worker with small pages never starts the thread."""

    def __init__(self, memory: Pages) -> None:
        self.seconds = 0.0
        """Time spent so far, copies of device pages to the host included."""
        self.bytes = 0
        self._memory = memory
        self._reading: tuple[PageAccess, CopyThreads[PageAccess]] | None = None

    async def of(self, pages: Sequence[PageId]) -> list[bytes]:
        """Returns the digests of pages. No writer may change them meanwhile."""
        memory = self._memory
        read_bytes = memory.layout.bytes_of(pages)
        self.bytes += read_bytes
        if isinstance(memory, PageMemory) and read_bytes <= _AT_ONCE_BYTES:
            started_s = time.perf_counter()
            digests_now = list(map(digest, memory.views(pages)))
            self.seconds += time.perf_counter() - started_s
            return digests_now
        if self._reading is None:
            access = memory.access(1)
            self._reading = access, CopyThreads("pages-digest", [access])
        digests: Future[tuple[list[bytes], float]] = Future()
        self._reading[1].submit(lambda access: _timed_digests(access, pages), digests)
        found, seconds = await asyncio.wrap_future(digests)
        self.seconds += seconds
        return found

    async def close(self) -> None:
        """Finishes open digests and ends the thread; call it before the memory is closed."""
        if self._reading is not None:
            access, threads = self._reading
            await off_loop(threads.close)
            access.close()


def _timed_digests(access: PageAccess, pages: Sequence[PageId]) -> tuple[list[bytes], float]:
    started_s = time.perf_counter()
    digests = [digest(views[0]) for views in access.read([page] for page in pages)]
    return digests, time.perf_counter() - started_s


class ServedPages(Protocol):
    """The pages of this worker in one form, as pullers read them."""

    form: KvForm

    @property
    def endpoints(self) -> Sequence[PageEndpoint]:
        """How to reach them, best first."""

    async def of(self, pages: Sequence[PageId]) -> list[tuple[int, bytes]]:
        """Returns (generation, digest) of pages that are filled and held until this returns."""


class OwnPages:
    """The pages in this worker's own form. A digest is computed once per generation of a page."""

    def __init__(self, form: KvForm, memory: Pages, digests: PageDigests, endpoints: Sequence[PageEndpoint]) -> None:
        self.form = form
        self.endpoints = endpoints
        self._memory = memory
        self._digests = digests
        self._known: dict[PageId, tuple[int, bytes]] = {}

    @property
    def page_bytes(self) -> int:
        return self._memory.page_bytes

    async def of(self, pages: Sequence[PageId]) -> list[tuple[int, bytes]]:
        """Returns (generation, digest) of pages that are filled and held until this returns."""
        generations, found = self._memory.generations_of(pages), map(self._known.get, pages)
        unknown = [
            (page, generation)
            for page, generation, known in zip(pages, generations, found, strict=True)
            if known is None or known[0] != generation
        ]
        if unknown:
            new_pages, new_generations = zip(*unknown, strict=True)
            digests = await self._digests.of(new_pages)
            self._known.update(zip(new_pages, zip(new_generations, digests, strict=True), strict=True))
        return list(map(self._known.__getitem__, pages))


@dataclass(frozen=True, slots=True)
class Landed:
    digests: list[bytes]
    """Digests of the bytes that were copied."""
    converted: int = 0
    """Pages that were converted."""
    converted_s: float = 0.0
    """Time of converting them, their wait for the thread included."""


class Landing(Protocol):
    """A landing is where the bytes of a pull arrive: in the claimed pages themselves, or elsewhere, to be converted
    into them."""

    @property
    def transports(self) -> Sequence[PageTransport]:
        """Transports whose copies arrive here, best first."""

    @property
    def batch_pages(self) -> int:
        """Most pages that are copied at once."""

    def places(self, pages: Sequence[PageId]) -> AbstractAsyncContextManager[Sequence[PageId]]:
        """Yields the pages that transports copy into, one for each of `pages`, which are of one group.

        Nobody else uses them meanwhile.
        """

    async def land(self, places: Sequence[PageId], pages: Sequence[PageId]) -> Landed:
        """Fills `pages` with what was copied into `places`. However this ends, no byte of `pages` changes
        afterwards."""


class DirectLanding:
    """Pages arrive in this worker's form, in the pages that were claimed for them."""

    def __init__(self, digests: PageDigests, transports: Sequence[PageTransport], pages: int) -> None:
        self.transports = transports
        self.batch_pages = pages
        self._digests = digests

    @contextlib.asynccontextmanager
    async def places(self, pages: Sequence[PageId]) -> AsyncGenerator[Sequence[PageId]]:
        yield pages

    async def land(self, places: Sequence[PageId], pages: Sequence[PageId]) -> Landed:
        return Landed(await self._digests.of(pages))


class ServedInOtherForm(ServedPages, Protocol):
    """The port of a branch that serves this worker's pages in the form of workers that pull them."""

    @property
    def transports(self) -> Sequence[PageTransport]: ...

    def is_for_puller(
        self, offer: worker_pb2.PullerConversion, own_bytes: int, wanted: int, ready: Iterable[PageId]
    ) -> bool:
        """Returns whether the puller should convert, at the cost that it offers. It gets pages of `own_bytes` then.

        The pull wants `wanted` pages, of which `ready` are filled now.
        """


class LandingInOtherForm(Landing, Protocol):
    """The port of a branch that lets pages arrive in the form of their source."""

    form: KvForm

    def offer(self, bytes_per_s: float) -> worker_pb2.PullerConversion | None:
        """Returns the cost of converting here after a link of this rate; None where there is no room now."""
