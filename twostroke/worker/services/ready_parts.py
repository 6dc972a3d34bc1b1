"""The wanted parts of a pull that is served: which of them can be read now, and which are still to come.

Nothing here grows with the steps that a pull waits: whoever fills a page tells those that wait for it, and only parts
with a change are looked at again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.kv_cache.groups.group_view import GroupView
from twostroke.kv_cache.parts import Part


class ReadyParts:
    """One owner, one thread: the event loop."""

    def __init__(self, pool: GroupView, wanted: Sequence[Part], page_of: Callable[[Part], PageId | None]) -> None:
        """`page_of` returns the page of a part, filled or arriving; None while that is not known.

        It raises TransferFailed for a part that will never be readable.
        """
        self._pool = pool
        self._page_of = page_of
        self._pending = dict.fromkeys(wanted)
        """Parts that have not been taken, in order."""
        self._changed: set[Part] = set()
        """Parts to look at."""
        self._has_changed = asyncio.Event()
        self.tell: Callable[[], None] | None = None
        """Called when there is something to look at again; for an owner without tasks."""
        self._has_all = asyncio.Event()
        """Set when every part that is left may have come."""

    @property
    def is_empty(self) -> bool:
        """Whether all parts have been taken."""
        return not self._pending

    def change(self, parts: Iterable[Part] | None = None) -> None:
        """Notes that the owner's answer for these parts has changed; None: for all."""
        self._changed.update(self._pending if parts is None else parts)
        self._tell()

    def page_changed(self, part: Part) -> None:
        self._changed.add(part)
        self._tell()

    async def wait(self) -> None:
        """Waits until there is something to look at."""
        await self._has_changed.wait()

    async def gather(self, seconds: float) -> None:
        """Waits for so long, or until there is no part left that may come meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_all.wait()

    def take(self) -> tuple[dict[Part, PageId], TransferFailed | None]:
        """Returns the parts that have become readable, and the error of the next one if all before it are taken.

        Parts behind one that will never be readable stay.
        """
        ready: dict[Part, PageId] = {}
        looked, self._changed = sorted(self._changed), set()
        self._has_changed.clear()
        self._has_all.clear()
        pool, pending = self._pool, self._pending
        for index, part in enumerate(looked):
            if part not in pending:
                continue
            try:
                page = self._page_of(part)
            except TransferFailed as error:
                self._changed.update(looked[index:])
                return ready, error if part == next(iter(pending)) else None
            if page is None:
                continue
            if pool.is_filled(page):
                ready[part] = page
                del pending[part]
            elif pool.is_arriving(page):
                pool.wait_for(page, self, part)
        return ready, None

    def _tell(self) -> None:
        if self.tell is not None and not self._has_changed.is_set():
            self.tell()
        self._has_changed.set()
        if len(self._changed) >= len(self._pending):
            self._has_all.set()

    def close(self, held: Callable[[Part], PageId | None]) -> None:
        """Waits for nothing any more. `held` returns the pages that the owner still holds."""
        for part in self._pending:
            page = held(part)
            if page is not None:
                self._pool.stop_waiting(page, self)
        self._pending, self._changed = {}, set()
