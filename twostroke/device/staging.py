"""Pages of a device to and from the host, through a ring of pinned buffers.

While the host works on one batch in its buffer, the copy of the next one is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from twostroke.device.stream import CopyStream, Mark
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import Window

BUFFERS = 2
"""One is worked on, one is being copied."""


class StagedWindow(Window):
    def __init__(self, pool: torch.Tensor, layout: PoolLayout, batch_pages: int, stream: CopyStream) -> None:
        """`pool` is uint8 [bytes]: pages as `layout` says."""
        self._pool = pool
        self._layout = layout
        self._stream = stream
        shape = (BUFFERS, batch_pages, max(layout.page_sizes))
        self._ring = torch.empty(shape, dtype=torch.uint8, pin_memory=pool.is_cuda)
        self._views = [[page.data for page in buffer] for buffer in self._ring.numpy()]
        self._marks: list[Mark | None] = [None] * BUFFERS
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
        for index, page in enumerate(self._landing):
            self._stream.copy(self._pool[self._layout.span(page)], self._staged(buffer, index, page))
        self._landing = ()
        self._marks[buffer] = self._stream.mark()

    def synchronize(self) -> None:
        self._landing = ()
        self._stream.synchronize()
        self._marks = [None] * BUFFERS

    def close(self) -> None:
        self.synchronize()
        del self._pool, self._views, self._ring

    def _fetch(self, pages: Sequence[int]) -> int:
        """Ask for the pages' bytes; the buffer that they will be in."""
        buffer = self._take()
        self._wait(buffer)
        for index, page in enumerate(pages):
            self._stream.copy(self._staged(buffer, index, page), self._pool[self._layout.span(page)])
        self._marks[buffer] = self._stream.mark()
        return buffer

    def _arrived(self, buffer: int, pages: Sequence[int]) -> list[memoryview]:
        self._wait(buffer)
        return self._views_of(buffer, pages)

    def _views_of(self, buffer: int, pages: Sequence[int]) -> list[memoryview]:
        sizes = map(self._layout.page_bytes_of, pages)
        return [view[:size] for view, size in zip(self._views[buffer], sizes, strict=False)]

    def _staged(self, buffer: int, index: int, page: int) -> torch.Tensor:
        """The bytes of a page in a buffer."""
        return self._ring[buffer, index, : self._layout.page_bytes_of(page)]

    def _take(self) -> int:
        buffer = self._next
        self._next = (buffer + 1) % BUFFERS
        return buffer

    def _wait(self, buffer: int) -> None:
        mark, self._marks[buffer] = self._marks[buffer], None
        if mark is not None:
            mark()
