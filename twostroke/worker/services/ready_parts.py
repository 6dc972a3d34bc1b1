"""The wanted parts of a pull that is served: which of them can be read now, and which are still to come.

The cost does not grow with the steps that a pull waits: changed pages notify their waiters, and only parts with a
change are checked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence

from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.kv_cache.groups.group_view import GroupView
from twostroke.kv_cache.parts import GroupKind, Part


class ReadyParts:
    """One owner, one thread: the event loop."""

    def __init__(
        self,
        pool: GroupView,
        wanted: Sequence[Part],
        page_of: Callable[[Part], PageId | None],
    ) -> None:
        """`page_of` returns the page of a part, filled or arriving; None while that is not known.

        It raises TransferFailed for a part that will never be readable.
        """
        self._pool = pool
        self._page_of = page_of
        self._pending = dict.fromkeys(wanted)
        """Parts that have not been taken, in order."""
        self._changed: dict[Part, None] = {}
        """Parts to check."""
        self._awaited: dict[Part, PageId] = {}
        """Pages of parts that notify of their change, or have done so."""
        self._has_changed = asyncio.Event()
        self._enough = sys.maxsize
        """Number of parts that are worth taking at once."""
        self._has_enough = asyncio.Event()
        """Set when this many parts may have come, or all that are left."""
        self.on_change: Callable[[], None] | None = None
        """Called when there is something to check; for an owner without a task that waits."""

    @property
    def is_empty(self) -> bool:
        """Whether all parts have been taken."""
        return not self._pending

    def change(self, parts: Iterable[Part] | None = None) -> None:
        """Notes that `page_of` may return another page for these parts; None: for all."""
        for part in self._pending if parts is None else parts:
            self._changed[part] = None
            page = self._awaited.pop(part, None)
            if page is not None:
                self._pool.stop_waiting(page, self)
        self._notify()

    def pages_changed(self, parts: Sequence[Part]) -> None:
        self._changed.update(dict.fromkeys(parts))
        self._notify()

    async def wait(self) -> None:
        """Waits until there is something to check."""
        await self._has_changed.wait()

    async def gather(self, seconds: float, enough: int) -> None:
        """Waits for `seconds`, or until `enough` parts, or all that are left, may have come."""
        self._enough = enough
        self._check_enough()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_enough.wait()

    def take(self) -> tuple[dict[Part, PageId], TransferFailed | None]:
        """Returns the parts that have become readable, and the error of the next one if all before it are taken.

        Parts after one that will never be readable stay pending.
        """
        looked = sorted(self._changed)
        self._changed = {}
        self._has_changed.clear()
        self._has_enough.clear()
        pages, failed = self._pages_of(looked)
        ready, awaited = self._pool.filled_or_awaited(pages, self)
        for part in ready:
            del self._pending[part]
            self._awaited.pop(part, None)
        for part in awaited:
            self._awaited[part] = pages[part]
        if failed is None or failed[0] != next(iter(self._pending)):
            return ready, None
        return ready, failed[1]

    def _pages_of(self, parts: Sequence[Part]) -> tuple[dict[Part, PageId], tuple[Part, TransferFailed] | None]:
        """Returns the pages of those parts that are pending, up to one that will never be readable, and its error."""
        pool, pending, awaited, pages = self._pool, self._pending, self._awaited, dict[Part, PageId]()
        for index, part in enumerate(parts):
            if part not in pending:
                continue
            page = awaited.get(part)
            # The owner calls `change` if a part of the first group gets another page. Other pages may be released.
            if page is None or part.group is not GroupKind.FULL or not pool.is_filled(page):
                try:
                    page = self._page_of(part)
                except TransferFailed as error:
                    self._changed.update(dict.fromkeys(parts[index:]))
                    return pages, (part, error)
            if page is not None:
                pages[part] = page
        return pages, None

    def _notify(self) -> None:
        if self.on_change is not None and not self._has_changed.is_set():
            self.on_change()
        self._has_changed.set()
        self._check_enough()

    def _check_enough(self) -> None:
        if len(self._changed) >= min(len(self._pending), self._enough):
            self._has_enough.set()

    def close(self) -> None:
        """Stops waiting for all pages, even if the owner has released them already."""
        for page in self._awaited.values():
            self._pool.stop_waiting(page, self)
        self._pending, self._changed, self._awaited = {}, {}, {}
