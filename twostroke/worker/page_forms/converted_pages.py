"""Copies of a worker's pages in the page form of the workers that pull them. A thread makes a copy when it is wanted.

A page is converted once for all pulls. The result has the same page number in a separate memory. So a converted page
exists as long as its original is held, and no pull waits for a free page. A reader notices by the generation that a
page was reused, as with originals.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.base.ids import PageId
from twostroke.kv_cache.form import Conversion
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import PageAccess, PageMemory, Pages
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport, digest
from twostroke.worker.page_forms.page_converter import ConversionCost, PageConverter, convert, is_for_puller


@dataclass(frozen=True, slots=True)
class _Converted:
    original: int
    """Generation of the original page when it was converted."""
    result: asyncio.Future[tuple[int, bytes]]
    """Generation and digest of the converted page."""


class ConvertedPages:
    """Converts pages for one event loop. A worker whose peers all use its own page form has no such object."""

    def __init__(self, originals: Pages, conversion: Conversion, transports: Sequence[PageTransport]) -> None:
        """`transports` are not open yet, and serve nothing but the converted pages."""
        self.form = conversion.target
        self.endpoints: list[PageEndpoint] = []
        self.converter = PageConverter(conversion, originals)
        first, *further = (
            PageRegion(region.pages, each.page_bytes)
            for region, each in zip(originals.layout.regions, conversion.groups, strict=True)
        )
        self._memory = PageMemory(first.pages, first.page_bytes, *further)
        self.transports = transports
        self._served: Counter[int] = Counter()
        """Pages announced to pulls so far, by group. A page counts once for each announcement."""
        self._originals = originals
        self._known: dict[PageId, _Converted] = {}

    @property
    def served_bytes(self) -> tuple[int, int]:
        """Bytes of all pages announced to pulls, in the original form and in the form that was sent."""
        here, sent = (
            sum(count * memory.layout.page_sizes[group] for group, count in self._served.items())
            for memory in (self._originals, self._memory)
        )
        return here, sent

    async def open(self, identity: Identity) -> None:
        """Opens the transports. They serve the workers whose fingerprint is that of `identity`."""
        for transport in self.transports:
            self.endpoints.append(await transport.open(self._memory, identity))

    def conversion_cost(self, wanted: int, ready: Iterable[PageId]) -> ConversionCost:
        """Returns the cost of converting here for a pull of `wanted` pages, of which `ready` are filled now.

        If no page was converted for long, it also has the cost measured again, for later calls.
        """
        known = sum(self._current(page) is not None for page in ready)
        converter = self.converter
        converter.keep_measured()
        return ConversionCost(self._memory.page_bytes, converter.page_s, converter.wait_s, wanted - known)

    def is_for_puller(
        self, offer: worker_pb2.PullerConversion, own_bytes: int, wanted: int, ready: Iterable[PageId]
    ) -> bool:
        """Returns whether the puller should convert, at the cost that it offers. It gets pages of `own_bytes` then."""
        puller = ConversionCost(own_bytes, offer.page_s, offer.wait_s, wanted)
        return is_for_puller(self.conversion_cost(wanted, ready), puller, wanted, offer.bytes_per_s)

    async def of(self, pages: Sequence[PageId]) -> list[tuple[int, bytes]]:
        """Returns (generation, digest) of the converted pages; the originals are filled and held until this returns.

        A caller that is cancelled leaves the conversion to others that wait for it.
        """
        results = [self._converted(page) for page in pages]
        self._served.update(map(self._originals.layout.region_of, pages))
        return [await asyncio.shield(result) for result in results]

    async def close(self) -> None:
        """Closes the connections, finishes open conversions and ends the thread. Call it before the originals' memory
        is closed.
        """
        for transport in self.transports:
            await transport.close()
        await self.converter.close()
        self._memory.close()

    def _converted(self, page: PageId) -> asyncio.Future[tuple[int, bytes]]:
        known = self._current(page)
        if known is None:
            job = self.converter.submit(lambda access: self._convert(access, page))
            known = self._known[page] = _Converted(self._originals.generation(page), asyncio.wrap_future(job))
        return known.result

    def _current(self, page: PageId) -> _Converted | None:
        """Returns the conversion of what the page holds now, unless that failed."""
        known = self._known.get(page)
        if known is None or known.original != self._originals.generation(page) or _has_failed(known.result):
            return None
        return known

    def _convert(self, access: PageAccess, page: PageId) -> tuple[int, bytes]:
        self._memory.begin_new_generation(page)
        target = self._memory.page(page)
        (original,) = next(access.read([[page]]))
        convert(self.converter.conversion_of(page), np.frombuffer(original, np.uint8), target)
        return self._memory.generation(page), digest(target)


def _has_failed(result: asyncio.Future[tuple[int, bytes]]) -> bool:
    return result.done() and (result.cancelled() or result.exception() is not None)
