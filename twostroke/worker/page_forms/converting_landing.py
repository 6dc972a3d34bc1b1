"""Pages of another form arrive in buffers, and are converted into the pages that were claimed.

A puller that converts reads the source's own pages into a few buffers. A pull takes one for each batch of pages. It
holds the buffer from before the copy until the pages are converted. While all buffers are taken, other pulls wait, and
new pulls ask the source to convert.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future

import numpy as np

from twostroke.base.ids import PageId
from twostroke.kv_cache.form import Conversion, page_form
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import PageAccess, PageMemory, Pages
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import Identity, PageTransport, digest, until_done
from twostroke.worker.page_forms.page_converter import PageConverter, convert
from twostroke.worker.pull_ends import Landed

BUFFERS = 4
"""Batches of pages that are copied or converted at once."""
BUFFER_BYTES = 4 << 20
"""Bytes of a batch, unless one page is larger."""


class ConvertingLanding:
    """Pages arrive in the form of the source, and are converted on a thread into the pages that were claimed."""

    def __init__(self, pages: Pages, conversion: Conversion, transports: Sequence[PageTransport]) -> None:
        """`transports` are not open yet, and read nothing but pages that are to be converted."""
        sizes = [page_form(each.source.format).page_bytes(each.shape) for each in conversion.groups]
        self.form = conversion.source
        self.transports = transports
        self.batch_pages = max(1, BUFFER_BYTES // sum(sizes))
        self.converter = PageConverter(conversion, pages)
        places, self._pages = BUFFERS * self.batch_pages, pages.layout
        self._memory = PageMemory(places, sizes[0], *(PageRegion(places, each) for each in sizes[1:]))
        self._free: asyncio.Queue[int] = asyncio.Queue(BUFFERS)
        for first in range(0, places, self.batch_pages):
            self._free.put_nowait(first)

    @property
    def has_room(self) -> bool:
        """Whether a pull that began now would get a buffer at once."""
        return not self._free.empty()

    def offer(self, bytes_per_s: float) -> worker_pb2.PullerConversion | None:
        """Returns what pages of the source's form would cost here; None where they cannot be converted now."""
        if not self.has_room or not bytes_per_s:
            return None
        self.converter.keep_measured()
        return worker_pb2.PullerConversion(
            page_s=self.converter.page_s, wait_s=self.converter.wait_s, bytes_per_s=bytes_per_s
        )

    async def open(self, identity: Identity) -> None:
        """Lets the transports read pages in the source's form, whose fingerprint is that of `identity`."""
        for transport in self.transports:
            transport.read_into(self._memory, identity)

    @contextlib.asynccontextmanager
    async def places(self, pages: Sequence[PageId]) -> AsyncGenerator[Sequence[PageId]]:
        first = await self._free.get()
        begin = self._memory.layout.first(self._pages.region_of(pages[0])) + first
        try:
            yield [PageId(begin + number) for number in range(len(pages))]
        finally:
            self._free.put_nowait(first)

    async def land(self, places: Sequence[PageId], pages: Sequence[PageId]) -> Landed:
        started_s = asyncio.get_running_loop().time()
        jobs = [
            self.converter.submit(functools.partial(self._convert, place, page))
            for place, page in zip(places, pages, strict=True)
        ]
        try:
            digests = list(await asyncio.gather(*map(asyncio.wrap_future, jobs)))
        finally:
            await _end(jobs)
        return Landed(digests, len(pages), asyncio.get_running_loop().time() - started_s)

    async def close(self) -> None:
        """Closes the connections and ends the thread. No pull may be open. Call it before the pages' memory
        is closed.
        """
        for transport in self.transports:
            await transport.close()
        await self.converter.close()
        self._memory.close()

    def _convert(self, place: PageId, page: PageId, access: PageAccess) -> bytes:
        original = self._memory.page(place)
        (target,) = access.landing([page])
        convert(self.converter.conversion_of(page), original, np.frombuffer(target, np.uint8))
        access.landed()
        access.synchronize()
        return digest(original)


async def _end(jobs: Sequence[Future[bytes]]) -> None:
    """Drops the jobs that have not begun, and waits for the one that has."""
    running = [asyncio.wrap_future(job) for job in jobs if not job.done() and not job.cancel()]
    if running:
        await until_done(asyncio.wait(running))
