"""The states of a page of any group: every page is in one of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.base.ids import BlockHash, SessionId
from twostroke.kv_cache.parts import Part


class PageState(enum.StrEnum):
    FREE = "free"
    CACHED = "cached"
    PINNED = "pinned"
    ARRIVING = "arriving"
    ACTIVE = "active"
    QUARANTINED = "quarantined"

    __hash__ = object.__hash__  # Enum's own is written in Python, and pages are counted by their states


UNHELD_BLOCKS = frozenset({PageState.CACHED, PageState.PINNED})
"""States of readable blocks without holders."""


class PageWaiter(Protocol):
    """Waits for parts of blocks whose pages are arriving."""

    def pages_changed(self, parts: Sequence[Part]) -> None:
        """Notes that the pages of these parts were filled or lost their writer. It must not change the pool."""


@dataclass(slots=True)
class PageRecord:
    """What a group knows of one of its pages."""

    state: PageState = PageState.FREE
    hash: BlockHash | None = None
    parent: BlockHash | None = None
    """Parent of the block; None in groups that keep no chains."""
    filled: bool = False
    refs: int = 0
    """Number of holders."""
    writer: SessionId | None = None
    waiters: dict[PageWaiter, Part] | None = None
    """Sequences and pulls that wait for an arriving page, each with the part that the page is for it."""
    depth: int = 0
    """Index of the block in its chain."""
    last_used: int = 0
    """Logical time of the last release."""
    is_end: bool = False
    """Whether a prompt or a sequence ended with this block, or a sequence continued from it."""


def check_record(name: str, record: PageRecord) -> None:
    """Asserts that a record's holders, hash, bytes and writer fit its state."""
    is_hashed, is_written = record.hash is not None, record.writer is not None
    assert record.waiters is None or record.state is PageState.ARRIVING, f"{name} has waiters for nothing: {record}"
    match record.state:
        case PageState.FREE:
            consistent = not (record.refs or is_hashed or record.filled or is_written)
        case PageState.CACHED | PageState.PINNED:
            consistent = not record.refs and is_hashed and record.filled and not is_written
        case PageState.ARRIVING:
            consistent = record.refs > 0 and is_hashed and not record.filled
        case PageState.ACTIVE:
            consistent = record.refs > 0 and not is_written and is_hashed == record.filled
        case PageState.QUARANTINED:
            consistent = not record.refs and not is_hashed and is_written
    assert consistent, f"{name} is inconsistent: {record}"
