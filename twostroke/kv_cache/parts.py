"""The parts of blocks that one worker holds: a page, and where layers with a window keep theirs apart, a window part.

Pages and window parts have ids of one space, so that a transfer or a digest needs to know nothing of groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from twostroke.ids import PageId, SessionId
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Group


class Part(NamedTuple):
    """One part of a block of a prompt; parts in order are those of the first block first."""

    block: int
    """Index of the block in its prompt."""
    group: Group


class WritableParts(Protocol):
    """The pool of one group, as whoever writes its parts sees it."""

    def is_filled(self, page: PageId, /) -> bool: ...
    def is_arriving(self, page: PageId, /) -> bool: ...
    def is_wanted(self, page: PageId, /) -> bool: ...
    def writer(self, page: PageId, /) -> SessionId | None: ...
    def assign_writer(self, page: PageId, session: SessionId, /) -> None: ...
    def clear_writer(self, page: PageId, /) -> None: ...
    def fill(self, page: PageId, /) -> None: ...


def group_of(pool: BlockPool, page: PageId) -> WritableParts:
    """Return what knows the states of this page or window part."""
    return pool if pool.windows is None or page < pool.total else pool.windows


def parts_of(pages: Iterable[int], windows: Iterable[int]) -> list[Part]:
    """Return the parts of these blocks in order."""
    return sorted([*(Part(block, Group.FULL) for block in pages), *(Part(block, Group.WINDOW) for block in windows)])
