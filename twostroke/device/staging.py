"""Pages of devices to and from the host, through a ring of page-locked buffers.

While the host works on one batch in its buffer, the copy of the next one is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from twostroke.device.stream import CopyStream, Mark
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageAccess

BUFFERS = 2
"""Number of buffers: one is worked on while the other one is copied."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolPart:
    """One part of every page, on one device. It is the whole page where there is only one part."""

    memory: torch.Tensor
    """uint8 [bytes]: parts of pages, as `layout` says."""
    layout: PoolLayout
    stream: CopyStream
    """The stream of copies to and from this device."""
    index: int = 0
    """The part's position in the page. Parts of a page have the same size and lie side by side."""

    def within(self, page: int) -> slice:
        """Returns where the part lies in a page, in bytes."""
        size = self.layout.page_bytes_of(page)
        return slice(self.index * size, (self.index + 1) * size)


class StagedAccess(PageAccess):
    def __init__(self, parts: Sequence[PoolPart], layout: PoolLayout, batch_pages: int) -> None:
        """`layout` is that of whole pages. Where several parts have the same index, one is read and all are written."""
        self._parts = parts
        self._read_parts = list({part.index: part for part in parts}.values())
        self._layout = layout
        shape = (BUFFERS, batch_pages, max(layout.page_sizes))
        self._ring = torch.empty(shape, dtype=torch.uint8, pin_memory=any(part.memory.is_cuda for part in parts))
        self._views = [[page.data for page in buffer] for buffer in self._ring.numpy()]
        self._marks: list[list[Mark]] = [[] for _ in range(BUFFERS)]
        self._next = 0
        self._landing: Sequence[int] = ()

    def read(self, batches: Iterable[Sequence[int]]) -> Iterator[list[memoryview]]:
        ahead: tuple[int, Sequence[int]] | None = None
        for batch in batches:
            fetched = (self._fetch(batch), batch)
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = fetched
        if ahead is not None:
            yield self._arrived(*ahead)

    def landing(self, pages: Sequence[int]) -> list[memoryview]:
        assert not self._landing, "the last landing was not completed"
        self._wait(self._next)
        self._landing = pages
        return self._views_of(self._next, pages)

    def landed(self) -> None:
        buffer = self._take()
        for part in self._parts:
            for index, page in enumerate(self._landing):
                part.stream.copy(part.memory[part.layout.span(page)], self._ring[buffer, index, part.within(page)])
        self._landing = ()
        self._marks[buffer] = [part.stream.mark() for part in self._parts]

    def synchronize(self) -> None:
        self._landing = ()
        for part in self._parts:
            part.stream.synchronize()
        self._marks = [[] for _ in range(BUFFERS)]

    def close(self) -> None:
        self.synchronize()
        del self._parts, self._read_parts, self._views, self._ring

    def _fetch(self, pages: Sequence[int]) -> int:
        """Requests copies of the pages to the host. Returns the index of the buffer that they will be in."""
        buffer = self._take()
        self._wait(buffer)
        for part in self._read_parts:
            for index, page in enumerate(pages):
                part.stream.copy(self._ring[buffer, index, part.within(page)], part.memory[part.layout.span(page)])
        self._marks[buffer] = [part.stream.mark() for part in self._read_parts]
        return buffer

    def _arrived(self, buffer: int, pages: Sequence[int]) -> list[memoryview]:
        self._wait(buffer)
        return self._views_of(buffer, pages)

    def _views_of(self, buffer: int, pages: Sequence[int]) -> list[memoryview]:
        sizes = map(self._layout.page_bytes_of, pages)
        return [view[:size] for view, size in zip(self._views[buffer], sizes, strict=False)]

    def _take(self) -> int:
        buffer = self._next
        self._next = (buffer + 1) % BUFFERS
        return buffer

    def _wait(self, buffer: int) -> None:
        marks, self._marks[buffer] = self._marks[buffer], []
        for mark in marks:
            mark()
